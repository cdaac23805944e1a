"""The filter of token counts: drop pairs that are empty, too long or of too unequal length, and count them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import UserError

KEPT, EMPTY, TOO_LONG, RATIO = range(4)  # status of a pair


@dataclass(frozen=True)
class FilterCounts:
    """Pairs read, kept, and dropped for each reason; a dropped pair counts once, under the first reason that fits."""

    read: int
    kept: int
    empty: int  # a side is empty or blank
    too_long: int  # a side has more than max_length tokens
    ratio: int  # a side has more than max_length_ratio times the tokens of the other
    max_length: int  # tokens, </s> included
    max_length_ratio: float | None  # of token counts without </s>; None or 0: no limit

    @classmethod
    def of(cls, status: Sequence[int], max_length: int, max_length_ratio: float | None) -> "FilterCounts":
        """Return the counts of a filter from the number of pairs of each status; raise `UserError` if none is kept."""
        counts = cls(int(sum(status)), *map(int, status), max_length, max_length_ratio)
        if not counts.kept:
            raise UserError(f"no pair is left after filtering ({counts}); check the files or raise the limits")
        return counts

    def __str__(self) -> str:
        limits = f"{self.too_long:,} longer than {self.max_length:,} tokens"
        if self.max_length_ratio:
            limits += f", {self.ratio:,} with a length ratio above {self.max_length_ratio}"
        return f"{self.read:,} pairs read, {self.kept:,} kept; dropped: {self.empty:,} empty, {limits}"


def pair_status(
    texts: Iterable[Iterable[str]], lengths: np.ndarray, max_length: int, max_length_ratio: float | None
) -> np.ndarray:
    """Return the status of pairs, int8 `(pairs,)`: `KEPT`, or the first of the other three that fits.

    `texts` are sources and targets, `lengths` their tokens with `</s>`, `(2, pairs)`.
    """
    blank = np.array([not (source.strip() and target.strip()) for source, target in zip(*texts, strict=True)], bool)
    shorter, longer = np.sort(lengths - 1, axis=0)
    too_unequal = longer / np.maximum(shorter, 1) > (max_length_ratio or np.inf)
    conditions = [blank | (shorter == 0), longer >= max_length, too_unequal]
    return np.select(conditions, [EMPTY, TOO_LONG, RATIO], KEPT).astype(np.int8)


def count_status(status: np.ndarray) -> list[int]:
    """Return how many pairs have each status, `KEPT` first."""
    return np.bincount(status, minlength=4).tolist()
