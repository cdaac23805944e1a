"""Tokenizers of MarianMT and FSMT folders of transformers: fast ones with the same ids where they exist."""

import warnings
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..data.slow_tokenizers import load_slow_tokenizer
from ..errors import UserError, reading
from ..json_and_yaml import read_json
from ..model.tokenization_vaswani import VaswaniTokenizer
from .sentencepiece import Unsupported, backend

_MOST_BYTES = 1 << 25  # of a vocabulary; one of 256,000 entries takes 16 MB at most
# Entries of tokenizer_config.json that are kept.
_KEPT = ("model_max_length", "source_lang", "target_lang")
_MARIAN_TOKENS = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def marian_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a MarianMT folder: source.spm, target.spm, vocab.json, perhaps target_vocab.json.

    Its ids are those of `MarianTokenizer`, but that "</s>" in a text is text, and so is a prefix such as ``>>Oh<<``
    for models without language codes, as for Marian itself. Where two ways to cut a text have the same score, the other
    one may be taken: SentencePiece adds scores in float32 and `tokenizers` in float64.

    Returns:
        A `VaswaniTokenizer`; `MarianTokenizer` for SentencePiece models that `tokenizers` cannot follow.

    Raises:
        UserError: a file is missing or damaged, tokens were added to the vocabulary, the special tokens have different
            ids in the two vocabularies, or `MarianTokenizer` is needed and sentencepiece is not installed.
    """
    settings = _settings(folder)
    names = ("vocab.json", "target_vocab.json" if settings.get("separate_vocabs") else "vocab.json")
    vocabularies = [_vocabulary(folder / name) for name in names]
    tokens = {name: _text(settings.get(name)) or default for name, default in _MARIAN_TOKENS.items()}
    if added := sorted(_added_tokens(folder, settings) - vocabularies[0].keys()):
        raise UserError(
            f"{folder} has tokens that were added to its tokenizer ({', '.join(added)[:200]}), which are not kept: add"
            " them to vocab.json and to the SentencePiece models, or import the model without them"
        )
    with reading(folder):
        try:
            backends = []
            for file, ids in zip(("source.spm", "target.spm"), vocabularies, strict=True):
                codes = [token for token in ids if token.startswith(">>") and token.endswith("<<")]
                eos, unk, pad = tokens.values()
                special = {"eos_token": eos, "unk_token": unk, "special_tokens": [pad]}
                backends.append(backend(folder / file, ids, codes=codes, **special))
        except Unsupported:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it recommends sacremoses, which it does not use
                return load_slow_tokenizer(folder, "MarianTokenizer")
        return VaswaniTokenizer(
            tokenizer_object=backends[0],
            target_tokenizer_object=backends[1],
            known_tokens=tuple(1 + max(vocabulary.values()) for vocabulary in vocabularies),
            **tokens,
            **{name: settings[name] for name in _KEPT if settings.get(name) is not None},
        )


def fsmt_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of an FSMT folder: vocab-src.json, vocab-tgt.json, merges.txt.

    It is transformers' own, since Moses' rules have no counterpart in `tokenizers`.

    Raises:
        UserError: a file is missing or damaged, or sacremoses is not installed.
    """
    for name in ("vocab-src.json", "vocab-tgt.json"):
        _vocabulary(folder / name)
    with reading(folder):
        return load_slow_tokenizer(folder, "FSMTTokenizer")  # which needs the two languages as langs


def _settings(folder: Path) -> dict:
    path = folder / "tokenizer_config.json"
    return read_json(path, most_bytes=_MOST_BYTES) if path.exists() else {}


def _added_tokens(folder: Path, settings: dict) -> set[str]:
    """Return the texts of tokens that were added to a tokenizer after its training."""
    path = folder / "added_tokens.json"
    added = read_json(path, most_bytes=_MOST_BYTES) if path.exists() else {}
    listed = settings.get("added_tokens_decoder")
    return {str(token) for token in (*added, *map(_text, listed.values() if isinstance(listed, dict) else ()))}


def _vocabulary(path: Path) -> dict[str, int]:
    vocabulary = read_json(path, most_bytes=_MOST_BYTES)
    numbers = set(vocabulary.values())
    # Numbers far apart would make a table of as many names.
    is_whole = all(type(number) is int and 0 <= number < 2 * len(numbers) + 100 for number in numbers)
    if not is_whole or not 0 < len(vocabulary) == len(numbers):
        raise UserError(
            f"{path} is not a vocabulary, tokens with numbers of their own from 0 on: copy the folder again"
        )
    return vocabulary


def _text(token) -> str | None:
    return token.get("content") if isinstance(token, dict) else token
