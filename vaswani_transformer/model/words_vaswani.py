"""Moses' rules for words, which no backend of `tokenizers` has: a text is rewritten before the backend reads it."""


class MosesText:
    """Moses' tokenizer for a language, as the package sacremoses has it, and the way back.

    Args:
        language: an ISO 639-1 code; for one that it does not know, sacremoses takes the rules of English.
        aggressive_dash_splits: write `a-b` as `a @-@ b`.
        escape: write `'` as `&apos;` and so on.

    Raises:
        ImportError: sacremoses is not installed.
    """

    def __init__(self, language: str, aggressive_dash_splits: bool = False, escape: bool = True):
        try:
            from sacremoses import MosesDetokenizer, MosesTokenizer
        except ImportError as error:
            raise ImportError("this model's texts are tokenised by Moses' rules: pip install sacremoses") from error
        self._tokenizer, self._detokenizer = MosesTokenizer(lang=language), MosesDetokenizer(lang=language)
        self._settings = {"aggressive_dash_splits": aggressive_dash_splits, "escape": escape, "return_str": True}

    def __call__(self, text: str) -> str:
        """Return the tokens of a text with spaces between them."""
        return self._tokenizer.tokenize(text, **self._settings)

    def back(self, text: str) -> str:
        """Return the text of tokens with spaces between them."""
        return self._detokenizer.detokenize(text.split())
