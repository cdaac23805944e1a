"""Parallel text as token ids: encoded once, filtered, and cached."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unicodedata import normalize

import datasets
import numpy as np

from ..errors import UserError
from .augmentation import source_parts
from .parallel_text import CACHE_VERSION, cache_file
from .tokenization import SIDES, encoder, tokenizer_sha256

TOKEN_FEATURES = datasets.Features(
    dict.fromkeys(("input_ids", "labels"), datasets.List(datasets.Value("int32")))
    | dict.fromkeys(("source_length", "target_length"), datasets.Value("int32"))
)
_FEATURES = datasets.Features(TOKEN_FEATURES | {"status": datasets.Value("int8")})
KEPT, EMPTY, TOO_LONG, RATIO = range(4)  # status of a pair


@dataclass(frozen=True)
class FilterCounts:
    """Pairs read, kept, and dropped for each reason; a dropped pair counts once, under the first reason that fits."""

    read: int
    kept: int
    empty: int  # a side is empty or blank
    too_long: int  # a side has more than max_length tokens
    ratio: int  # a side has more than max_length_ratio times the tokens and the characters of the other
    max_length: int  # tokens, </s> included
    max_length_ratio: float | None  # of tokens without </s>, and of characters; None or 0: no limit

    @classmethod
    def of(cls, doing: str, status: Sequence[int], *limits: int | float | None) -> "FilterCounts":
        """Return the counts of a filter from the number of pairs of each status; raise `UserError` if none is kept."""
        counts = cls(int(sum(status)), *map(int, status), *limits)
        if not counts.kept:
            raise UserError(f"{doing}: no pair is left after filtering ({counts}); check the files or raise the limits")
        return counts

    def __str__(self) -> str:
        limits = f"{self.too_long:,} longer than {self.max_length:,} tokens"
        if self.max_length_ratio:
            limits += f", {self.ratio:,} with a length ratio above {self.max_length_ratio}"
        limits += " (warning: max_length drops most)" if 2 * self.too_long > self.read else ""
        return f"{self.read:,} pairs read, {self.kept:,} kept; dropped: {self.empty:,} empty, {limits}"


def pair_status(
    texts: Iterable[Iterable[str]], lengths: np.ndarray, max_length: int, max_length_ratio: float | None
) -> np.ndarray:
    """Return the status of pairs, int8 `(pairs,)`: `KEPT`, or the first of the other three that fits.

    `texts` are sources and targets, `lengths` their tokens with `</s>`, `(2, pairs)`. A side is too long for the other
    by tokens and characters: a script that the vocabulary hardly knows has many tokens, and Chinese few characters.
    Characters are those of the texts alone: "<2fr> OK" and a source with its match are not too long for their targets.
    """
    characters = np.array([[len(normalize("NFC", source_parts(text)[1])) for text in side] for side in texts])
    ratios = np.stack([side / np.maximum(side[::-1], 1) for side in (lengths - 1, characters)])  # `(2, 2, pairs)`
    too_unequal = (ratios.min(axis=0) > (max_length_ratio or np.inf)).any(axis=0)
    is_empty = (np.minimum(characters, lengths - 1) == 0).any(axis=0)
    conditions = [is_empty, lengths.max(axis=0) > max_length, too_unequal]
    return np.select(conditions, [EMPTY, TOO_LONG, RATIO], KEPT).astype(np.int8)


def pair_encoder(
    tokenizer: Any, max_length: int, max_length_ratio: float | None
) -> Callable[[Mapping[str, Sequence[str]]], dict[str, Any]]:
    """Return the function by which all text becomes token ids: `encode(batch)`, as `datasets.Dataset.map` calls it.

    It takes the columns ``source`` and ``target`` and returns those of `tokenize_pairs` and ``status``, int8 as of
    `pair_status`. A pair that is dropped has no ids: a line of a million tokens is not stored.

    Raises:
        UserError: from `encode`, for a tokenizer that does not append its end token.
    """
    encoders = [encoder(tokenizer, side) for side in SIDES]

    def encode(batch: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        texts = [[text.strip() for text in batch[side]] for side in SIDES]  # as `Translator` does
        sides = [encode_side(side) for encode_side, side in zip(encoders, texts, strict=True)]
        if any(side[0][-1:] != [tokenizer.eos_token_id] for side in sides):
            fix = "name eos_token in tokenizer_config.json, and append it by a template"
            raise UserError(f"the tokenizer does not append its end token {tokenizer.eos_token!r} to a text: {fix}")
        lengths = np.array([[len(ids) for ids in side] for side in sides])
        status = pair_status(texts, lengths, max_length, max_length_ratio)
        ids = [[[] if code else row for row, code in zip(side, status, strict=True)] for side in sides]
        return dict(zip(_FEATURES, (*ids, *lengths, status), strict=True))

    return encode


def tokenize_pairs(
    pairs: datasets.Dataset,
    tokenizer: Any,
    *,
    max_length: int = 256,
    max_length_ratio: float | None = 3.0,
    description: str = "Tokenising",
) -> tuple[datasets.Dataset, FilterCounts]:
    """Tokenise pairs once, and drop those that are empty, too long or of too unequal length.

    A later call with the same pairs, tokenizer and limits, in any process, reads the result from the cache.

    Args:
        pairs: dataset with the string columns ``source`` and ``target``, as from `load_pairs`.
        tokenizer: transformers tokenizer that appends ``</s>`` to every text.
        max_length: most tokens of a side, ``</s>`` included; longer pairs are dropped, never truncated.
        max_length_ratio: most tokens, or characters, of a side per one of the other; None or 0: no limit.
        description: label of the progress bar, and of the error if no pair is left.

    Returns:
        The memory-mapped dataset with the columns ``input_ids`` and ``labels`` (lists of int32), ``source_length`` and
        ``target_length`` (int32, tokens, ``</s>`` included), and the counts of the filter in pairs.

    Raises:
        UserError: a tokenizer that does not append ``</s>``, or no pair left.
    """
    encode = pair_encoder(tokenizer, max_length, max_length_ratio)
    # Not the fingerprint of `datasets`, which changes with the padding that an earlier call has left in the tokenizer.
    key = [CACHE_VERSION, pairs._fingerprint, tokenizer_sha256(tokenizer), max_length, max_length_ratio or 0.0]
    key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    tokenized = pairs.map(
        encode, batched=True, features=_FEATURES, remove_columns=pairs.column_names, desc=description,
        new_fingerprint=key, cache_file_name=cache_file(key),
    )  # fmt: skip
    status = tokenized.data.column("status").to_numpy() if len(pairs) else np.zeros(0, np.int8)
    counts = FilterCounts.of(description, np.bincount(status, minlength=4), max_length, max_length_ratio)
    tokenized = tokenized.remove_columns("status")
    if counts.kept < counts.read:
        # Not by `select`, which makes a slice of rows that follow each other: `kept_rows` needs them.
        rows = np.flatnonzero(status == KEPT)
        tokenized = tokenized._select_with_indices_mapping(rows, new_fingerprint=f"{key}-kept")
    return tokenized, counts


def kept_rows(tokenized: datasets.Dataset) -> np.ndarray:
    """Return which of the pairs that were read `tokenize_pairs` has kept, in order."""
    rows = tokenized._indices
    return np.arange(len(tokenized)) if rows is None else rows.column(0).to_numpy().astype(np.int64)


def pair_lengths(tokenized: datasets.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return source and target lengths of all pairs of `tokenize_pairs`, int32 `(pairs,)` each.

    Not by the dataset's columns: once pairs are filtered, they take hundreds of times as long and 800 bytes a pair.
    """
    rows = kept_rows(tokenized)
    return tuple(tokenized.data.column(f"{side}_length").to_numpy()[rows] for side in SIDES)
