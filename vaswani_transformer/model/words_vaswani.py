"""Treatments of words that no backend of `tokenizers` has: Moses' rules, and pieces that are cut again.

Texts are rewritten before the backend reads them, as in `sentencepiece_vaswani.py`.
"""

import json
import re
import unicodedata
from functools import lru_cache

_MOST_CACHED = 1 << 16
# Characters of the supplementary private use areas, one for each number of a piece; as a word it is that piece.
_FIRST, _PER_AREA = 0xF0000, 0xFFFE
MOST_PIECES = 2 * _PER_AREA
_END = "</w>"  # ends the last piece of a word
_STRANGER = "\ufff1"  # in place of such characters in a text: as unknown as those


def letter_of(number: int) -> str:
    """Return the character that stands for the piece of a number below `MOST_PIECES`."""
    return chr(_FIRST + number if number < _PER_AREA else _FIRST + 0x10000 + number - _PER_AREA)


def number_of(token: str | None) -> int | None:
    """Return the number of the piece that a backend's token stands for; None for the name of a piece itself."""
    place = ord(token[0]) - _FIRST if token else -1
    return None if place < 0 else place if place < _PER_AREA else place - 0x10000 + _PER_AREA


class SubwordText:
    """Has pieces of subword-nmt that the vocabulary lacks cut again, as its option `--vocabulary` does.

    A piece is cut into the two that were merged into it, until the vocabulary has them or they are characters.
    """

    def __init__(self, backend):
        state = json.loads(backend.to_str())["model"]
        self._backend, self._vocabulary = backend, state["vocab"]
        self._rewritten = lru_cache(_MOST_CACHED)(self._rewrite)  # of words
        self._known = sum(number_of(token) is not None for token in self._vocabulary)
        self._unknown = self._vocabulary[state["unk_token"]]
        # Where several pairs make the same piece, the first one counts.
        self._parts = {"".join(pair): pair for pair in reversed(state["merges"]) if all(pair)}

    @classmethod
    def for_backend(cls, backend) -> "SubwordText | None":
        """Return the rewriter that a backend needs: None if its vocabulary has no characters for pieces."""
        return None if backend.token_to_id(letter_of(0) + _END) is None else cls(backend)

    def __call__(self, text: str) -> str:
        """Return the text as the backend must get it; the same object where there is nothing to change."""
        text = re.sub(r"[\U000F0000-\U0010FFFF]", _STRANGER, text)
        normalizer = self._backend.normalizer
        words = (normalizer.normalize_str(text) if normalizer is not None else text).split()
        rewritten = [self._rewritten(word) for word in words]
        return text if rewritten == words else " ".join(rewritten)

    def _rewrite(self, word: str) -> str:
        encoding = self._backend.encode(word, add_special_tokens=False)
        if all(number < self._known for number in encoding.ids):
            return word
        return " ".join(letter_of(number) for token in encoding.tokens for number in self._cut(token))

    def _cut(self, token: str) -> list[int]:
        numbers, rest = [], [token]
        while rest:
            token = rest.pop()
            number = self._vocabulary.get(token, self._unknown)
            if number < self._known or token not in self._parts:
                numbers.append(number if number < self._known else self._unknown)
            else:
                rest += reversed(self._parts[token])
        return numbers


class MosesText:
    """Moses' tokenizer for a language, as the package sacremoses has it, and the way back.

    Args:
        language: an ISO 639-1 code; for one that it does not know, sacremoses takes the rules of English.
        aggressive_dash_splits: write `a-b` as `a @-@ b`.
        escape: write `'` as `&apos;` and so on.
        normalize: replace Unicode's variants of letters and punctuation first, and spaces before punctuation, as
            JoeyNMT does.

    Raises:
        ImportError: sacremoses is not installed.
    """

    def __init__(
        self, language: str, aggressive_dash_splits: bool = False, escape: bool = True, normalize: bool = False
    ):
        try:
            from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer
        except ImportError as error:
            raise ImportError("this model's texts are tokenised by Moses' rules: pip install sacremoses") from error
        self._tokenizer, self._detokenizer = MosesTokenizer(lang=language), MosesDetokenizer(lang=language)
        self._punctuation = MosesPunctNormalizer() if normalize else None
        self._settings = {"aggressive_dash_splits": aggressive_dash_splits, "escape": escape, "return_str": True}

    def __call__(self, text: str) -> str:
        """Return the tokens of a text with spaces between them."""
        if self._punctuation is not None:
            text = unicodedata.normalize("NFKC", text).translate({0x2019: "'", 0x201C: '"', 0x201D: '"'})
            text = self._punctuation.normalize(_without_extra_spaces(text))
        return self._tokenizer.tokenize(text, **self._settings)

    def back(self, text: str) -> str:
        """Return the text of tokens with spaces between them."""
        text = self._detokenizer.detokenize(text.split())
        return text if self._punctuation is None else _without_extra_spaces(text)


def _without_extra_spaces(text: str) -> str:
    text = re.sub("[ \u3000]+", " ", text.replace("\u200b", ""))
    return re.sub(" ([?!,.:])", r"\1", text).strip()
