"""A fast tokenizer with a vocabulary and a segmentation for sources and others for targets."""

import copy
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from .language_codes_vaswani import LanguageCodes
from .sentencepiece_vaswani import SentencePieceText

_TARGET_FILE = "target_tokenizer.json"


class MosesText:
    """Moses' rules for words, as the package sacremoses has them: a text is rewritten before the backend reads it.

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


class TwoSidedCall:
    """A tokenizer with `side` encodes targets by it."""

    def __call__(self, text=None, text_pair=None, text_target=None, text_pair_target=None, *args, **kwargs):
        """Encode as tokenizers do: sources as `text`, targets as `text_target`, both together with ``labels``."""
        if text_target is None:
            return super().__call__(text, text_pair, None, None, *args, **kwargs)
        # Not by switching this object to its other side: pipelines share one tokenizer between threads.
        longest = kwargs.pop("max_target_length", None)
        limits = {} if longest is None else {"max_length": longest}
        labels = self.side("target")(text_target, text_pair_target, None, None, *args, **{**kwargs, **limits})
        if text is None:
            return labels
        encoded = super().__call__(text, text_pair, None, None, *args, **kwargs)
        encoded["labels"] = labels["input_ids"]
        return encoded


class VaswaniTokenizer(TwoSidedCall, PreTrainedTokenizerFast):
    """A fast tokenizer that encodes sources by one backend and targets by another.

    ``tokenizer(texts)`` encodes sources and ``tokenizer(text_target=texts)`` targets; `decode`, `batch_decode` and
    `convert_ids_to_tokens` read ids of targets. `get_vocab` is the target's, too; `len`, `vocab_size`, `tokenize` and
    `convert_tokens_to_ids` are the source's. For all of one side there is `side`: for ``stop_strings``, give
    `generate()` ``tokenizer=tokenizer.side("target")``. No call changes what another thread's call does, but for
    padding and truncation, which fast tokenizers keep from their last call.

    Args:
        tokenizer_object: backend of the source.
        target_tokenizer_object: backend of the target; none: that of the source.
        known_tokens: for source and target, the number of ids that the model has. Ids from there on, pieces that the
            segmentation makes but the vocabulary lacks, become the unknown token's. None: all ids are known.
        moses: how Moses' tokenizer cuts texts before the backend does: `languages` of source and target, and further
            arguments of `MosesText`. None: it does not. It needs the package sacremoses.
        tokenizer_file, target_tokenizer_file: files of the backends, for `from_pretrained`.
        **kwargs: as in `PreTrainedTokenizerFast`: ``eos_token=``, ``pad_token=``, ``unk_token=``, ...

    Raises:
        ValueError: a special token of the model (beginning, padding, end) has another id in the target's vocabulary.
    """

    vocab_files_names = {"tokenizer_file": "tokenizer.json", "target_tokenizer_file": _TARGET_FILE}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        *args,
        target_tokenizer_object: Tokenizer | None = None,
        target_tokenizer_file: str | None = None,
        known_tokens: tuple[int, int] | None = None,
        moses: dict | None = None,
        **kwargs,
    ):
        self.known_tokens, self._target_backend, self.moses = known_tokens, None, moses
        self._is_side, self._which, self._rewriters = False, 0, {}  # of a view that `side` gives
        if target_tokenizer_object is not None:
            self._target_backend = copy.deepcopy(target_tokenizer_object)
        elif target_tokenizer_file is not None:
            self._target_backend = Tokenizer.from_file(str(target_tokenizer_file))
        kwargs.setdefault("split_special_tokens", True)  # "</s>" in a text is text
        super().__init__(*args, known_tokens=known_tokens, moses=moses, **kwargs)
        if self._target_backend is not None:
            self._target_backend.encode_special_tokens = self.split_special_tokens
            named = [getattr(self, name) for name in self.SPECIAL_TOKENS_ATTRIBUTES]
            self._target_backend.add_special_tokens([AddedToken(str(name), normalized=False) for name in named if name])
        target = self.side("target")
        for name in ("bos_token", "pad_token", "eos_token"):
            ids = [getattr(side, f"{name}_id") for side in (self, target)]
            if ids[0] != ids[1]:
                there = f"is number {ids[0]} of the source's vocabulary and {ids[1]} of the target's"
                raise ValueError(f"{name} {getattr(self, name)!r} {there}: a model has one number for it")

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs):
        """Return the files as they are, which transformers would take apart for a class with its own `__init__`."""
        return kwargs

    def side(self, name: str) -> "VaswaniTokenizer":
        """Return a tokenizer for ``"source"`` or ``"target"`` alone; it shares the backend of this one."""
        view = copy.copy(self)
        view._rewriters = self._rewriters
        if not self._is_side:
            view._is_side, view._which = True, int(name == "target")
            view.known_tokens = None if self.known_tokens is None else (self.known_tokens[view._which],) * 2
            view.init_kwargs = {**self.init_kwargs, "known_tokens": view.known_tokens}
            if view._which and self._target_backend is not None:
                view._tokenizer = self._target_backend
            view._target_backend = None
        return view

    def __len__(self) -> int:
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size if self.known_tokens is None else min(size, self.known_tokens[0])

    @property
    def vocab_size(self) -> int:
        """Return the number of the source's tokens, without those that were added."""
        size = self._tokenizer.get_vocab_size(with_added_tokens=False)
        return size if self.known_tokens is None else min(size, self.known_tokens[0])

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of the target's tokens."""
        target = self.side("target")
        vocabulary = super(VaswaniTokenizer, target).get_vocab()
        if target.known_tokens is None:
            return vocabulary
        return {token: number for token, number in vocabulary.items() if number < target.known_tokens[0]}

    @property
    def supported_language_codes(self) -> list[str]:
        """Return the codes of target languages, which sources begin with, as `MarianTokenizer` calls them."""
        return list(LanguageCodes(self).known.values())

    def rewritten(self, text):
        """Return a text, or texts in lists, as the backend of this side must get them: by Moses, by SentencePiece."""
        rewriters = self._rewriters_of_side()
        if not rewriters or text is None:
            return text
        if not isinstance(text, str):
            return [self.rewritten(part) for part in text]
        for rewriter in rewriters:
            text = rewriter(text)
        return text

    def _rewriters_of_side(self) -> list:
        if self._which not in self._rewriters:
            rewriter = SentencePieceText.for_backend(self._tokenizer)
            rewriters = [] if rewriter is None else [rewriter]
            if self.moses is not None:
                settings = {name: value for name, value in self.moses.items() if name != "languages"}
                rewriters.insert(0, MosesText(self.moses["languages"][self._which], **settings))
            self._rewriters[self._which] = rewriters
        return self._rewriters[self._which]

    def known_ids(self, ids: list[int]) -> list[int]:
        """Return ids of the backend of this side, with the unknown token's for those that the model lacks."""
        if self.known_tokens is None or not ids or max(ids) < self.known_tokens[0]:
            return ids
        # `unk_token_id` would ask this in its turn.
        unknown = None if self.unk_token is None else self._tokenizer.token_to_id(str(self.unk_token))
        return [number if number < self.known_tokens[0] else unknown for number in ids]

    def _encode_plus(self, text, text_pair=None, **kwargs):
        return super()._encode_plus(text=self.rewritten(text), text_pair=self.rewritten(text_pair), **kwargs)

    def _convert_encoding(self, *args, **kwargs):
        values, encodings = super()._convert_encoding(*args, **kwargs)
        values["input_ids"] = [self.known_ids(ids) for ids in values["input_ids"]]
        return values, encodings

    def _convert_token_to_id_with_added_voc(self, token: str) -> int:
        number = super()._convert_token_to_id_with_added_voc(token)
        return number if number is None else self.known_ids([number])[0]

    def convert_ids_to_tokens(self, ids, skip_special_tokens: bool = False):
        """Return the target's tokens for ids."""
        return super(VaswaniTokenizer, self.side("target")).convert_ids_to_tokens(ids, skip_special_tokens)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the text of tokens of the target."""
        return super(VaswaniTokenizer, self.side("target")).convert_tokens_to_string(tokens)

    def _decode(self, *args, **kwargs) -> str:
        target = self.side("target")
        text = super(VaswaniTokenizer, target)._decode(*args, **kwargs)
        return text if self.moses is None else target._rewriters_of_side()[0].back(text)

    def _add_tokens(self, new_tokens, special_tokens: bool = False) -> int:
        if self.known_tokens is not None:
            lacking = [str(token) for token in new_tokens if self._tokenizer.token_to_id(str(token)) is None]
            if lacking:
                raise ValueError(f"{', '.join(lacking)} cannot be added: the ids above the vocabulary stand for <unk>")
        if self._target_backend is not None:
            add = self._target_backend.add_special_tokens if special_tokens else self._target_backend.add_tokens
            add(new_tokens)
        return super()._add_tokens(new_tokens, special_tokens)

    def _save_pretrained(self, save_directory, file_names, legacy_format=None, filename_prefix=None):
        names = super()._save_pretrained(save_directory, file_names, legacy_format, filename_prefix)
        path = Path(save_directory) / (f"{filename_prefix}-{_TARGET_FILE}" if filename_prefix else _TARGET_FILE)
        if self._target_backend is None:
            path.unlink(missing_ok=True)  # that of an earlier tokenizer would be read beside this one's
            return names
        self._target_backend.save(str(path))
        return (*names, str(path))

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_rewriters": {}}  # made again where it is needed
