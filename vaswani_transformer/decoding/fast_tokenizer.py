"""A saved fast tokenizer read by the library `tokenizers` alone: an exported model runs without transformers."""

from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..errors import reading
from ..json_and_yaml import read_json

_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")  # names of the same class of transformers
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class FastTokenizer:
    """The part of transformers' `PreTrainedTokenizerFast` that translating and scoring need, with the same results.

    Encoding and decoding change nothing in it, so that threads may share it.
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any]):
        path = Path(folder) / "tokenizer.json"
        with reading(path):
            self._backend = Tokenizer.from_file(str(path))
            self._backend.no_padding()
            self._backend.no_truncation()
            self._backend.encode_special_tokens = bool(settings.get("split_special_tokens", False))
            named = [settings.get(name) for name in _SPECIAL]
            texts = [name["content"] if isinstance(name, dict) else name for name in named if name]
            self.get_vocab, self.convert_ids_to_tokens = self._backend.get_vocab, self._backend.id_to_token
            self.decode = partial(self._backend.decode, skip_special_tokens=False)  # as in transformers by default
            self.batch_decode = partial(self._backend.decode_batch, skip_special_tokens=False)
            self.all_special_ids = [self._backend.token_to_id(text) for text in dict.fromkeys(texts)]

    def __deepcopy__(self, memo) -> "FastTokenizer":
        return self

    def __call__(self, text=None, *, text_target=None, add_special_tokens: bool = True) -> dict[str, list]:
        """Return `input_ids` of a text, or of each of several; sources and targets are encoded alike."""
        texts = text if text_target is None else text_target
        if isinstance(texts, str):
            return {"input_ids": self._backend.encode(texts, add_special_tokens=add_special_tokens).ids}
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in encodings]}


def open_tokenizer(folder: str | Path):
    """Return the tokenizer of a model folder: a `FastTokenizer` where that does the same, else transformers'."""
    folder = Path(folder)
    if (folder / "tokenizer_config.json").is_file() and (folder / "tokenizer.json").is_file():
        settings = read_json(folder / "tokenizer_config.json")
        is_plain = not settings.get("clean_up_tokenization_spaces") and not settings.get("added_tokens_decoder")
        if settings.get("tokenizer_class") in _CLASSES and is_plain:
            return FastTokenizer(folder, settings)
    with reading("tokenizers of imported models (pip install transformers)"):
        from ..data.tokenization import load_tokenizer

    return load_tokenizer(folder)
