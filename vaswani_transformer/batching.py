"""Batches of sentences of similar length that hold about a given number of tokens (Section 5.1), and their padding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .errors import UserError

IGNORE_INDEX = -100
MIXING_TOKENS = 2  # more mixes batches better, less pads less


def _checked_lengths(source_lengths: Sequence[int], target_lengths: Sequence[int], limits: np.ndarray) -> np.ndarray:
    """Both sides' lengths as one array `(2, pairs)`; raises what `TokenBatchSampler` says of them."""
    if len(source_lengths) != len(target_lengths):
        raise UserError(f"{len(source_lengths)} source lengths for {len(target_lengths)} target lengths")
    if len(source_lengths) == 0:
        raise UserError("no sentence pairs to make batches of: the data is empty, or every pair was filtered out")
    if limits.min() < 1:
        raise UserError(f"a batch of {limits.min()} tokens holds nothing: give 1 or more")
    lengths = np.stack([np.asarray(source_lengths, np.int64), np.asarray(target_lengths, np.int64)])
    if lengths.min() < 1:
        raise UserError(f"sentence pair {lengths.min(axis=0).argmin()} has an empty side: filter such pairs out")
    for side, side_lengths, limit in zip(("source", "target"), lengths, limits, strict=True):
        if side_lengths.max() > limit:
            raise UserError(
                f"the {side} of sentence pair {side_lengths.argmax()} has {side_lengths.max()} tokens, more than the"
                f" {limit} a batch may hold: raise tokens_per_batch or lower max_length"
            )
    return lengths


class TokenBatchSampler:
    """Batches of sentence pairs by tokens instead of by number, shuffled anew every epoch.

    How batches are formed. Each pair takes a share of the budget, that of its longer side. Every epoch the pairs are
    ordered by that share, and among equals by the difference between source and target length, blurred by
    `MIXING_TOKENS`, so that both sides of a batch are of similar length while its company changes. The order is cut
    from the longest pair down, each batch as large as its first pair allows; the first batch is cut short at random, so
    that the cuts fall elsewhere in every epoch. Then the batches are shuffled.

    What holds for any shuffle: the limits are kept, every pair comes exactly once an epoch, and every epoch has the
    same number of batches, which a Trainer needs in order to resume at the right place. (Cutting the first batch short
    adds one batch at most, because a batch that starts later in the order never ends earlier. Where it adds none, the
    batch of most pairs is halved.)

    With `micro_batches` above 1 each batch is dealt out further in that many parts, which follow each other: one
    optimizer step's worth, for accumulation or for several processes. The batches are the same for any number of parts.

    It has no `batch_size`, so accelerate shards whole micro-batches over processes without looking at their sizes.

    Args:
        source_lengths: tokens of each source, `</s>` included.
        target_lengths: tokens of each target, `</s>` included.
        max_source_tokens: at most so many source tokens in a batch, padding counted (the paper: about 25,000).
        max_target_tokens: at most so many target tokens in a batch; the same as for sources when not given.
        micro_batches: parts that each batch is dealt out in.
        shuffle: `False` gives the same batches in every epoch, longest first.
        seed: with the epoch, determines the shuffle.

    Raises:
        UserError: for no pairs, lengths of different number or below 1, a limit below 1, a pair that is longer than the
            limit, or parts so many that a batch may hold fewer than four pairs for each of them.
    """

    batch_size = None  # accelerate's sign for batches of varying size
    drop_last = False

    def __init__(
        self,
        source_lengths: Sequence[int],
        target_lengths: Sequence[int],
        max_source_tokens: int,
        max_target_tokens: int | None = None,
        micro_batches: int = 1,
        shuffle: bool = True,
        seed: int = 0,
    ):
        max_target_tokens = max_source_tokens if max_target_tokens is None else max_target_tokens
        limits = np.array([max_source_tokens, max_target_tokens], np.int64)
        self._lengths = _checked_lengths(source_lengths, target_lengths, limits)
        if micro_batches < 1:
            raise UserError(f"micro_batches is {micro_batches}: it must be 1 or more")
        self.micro_batches, self.shuffle, self.seed, self.epoch = micro_batches, shuffle, seed, 0
        shares = self._lengths / limits[:, None]
        self._share = shares.max(axis=0)
        self._difference = shares[0] - shares[1]
        self._blur = MIXING_TOKENS / limits.max()
        # How many pairs a batch may hold whose longest pair has this rank, longest first.
        longest_first = np.argsort(-self._share, kind="stable")
        self._capacity = (limits[:, None] // self._lengths).min(axis=0)[longest_first]
        # A batch can be halved twice: cut short as the first, and shared with the last.
        needed = 4 * micro_batches if micro_batches > 1 else 1
        smallest = min(self._capacity.min(), len(self._capacity))
        if smallest < needed:
            raise UserError(
                f"a batch of {limits[0]} source and {limits[1]} target tokens may hold as few as {smallest} pairs, and"
                f" {needed} are needed to deal it out in {micro_batches} parts: raise tokens_per_batch, or raise"
                " tokens_per_device, or use fewer processes"
            )
        # The shortest first batch makes the most batches; a longer one makes as many or one less.
        largest = int(self._capacity[0])
        self._number = len(self._cut(-(-largest // 2) if shuffle else largest))

    def _cut(self, first: int) -> list[int]:
        """Ends of batches in the order, the first batch holding `first` pairs or all there are."""
        ends = [min(int(first), len(self._capacity))]
        while ends[-1] < len(self._capacity):
            ends.append(min(ends[-1] + int(self._capacity[ends[-1]]), len(self._capacity)))
        if len(ends) > 1:  # the last two batches share what is left for them
            start = ends[-3] if len(ends) > 2 else 0
            ends[-2] = max(start + 1, min(ends[-2], start + (ends[-1] - start + 1) // 2))
        return ends

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose shuffle the next iteration gives; the Trainer calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Micro-batches an epoch, the same in every epoch."""
        return self.micro_batches * self._number

    def _batches(self) -> list[np.ndarray]:
        """The batches of the current epoch, as arrays of indices of pairs."""
        if not self.shuffle:
            order = np.lexsort((self._difference, -self._share))
            return np.split(order, self._cut(self._capacity[0])[:-1])
        random = np.random.default_rng((self.seed, self.epoch))
        blur = random.uniform(-self._blur, self._blur, len(self._share))
        order = np.lexsort((self._difference + blur, -self._share))
        largest = int(self._capacity[0])
        batches = np.split(order, self._cut(random.integers(-(-largest // 2), largest, endpoint=True))[:-1])
        if len(batches) < self._number:
            index = max(range(len(batches)), key=lambda index: len(batches[index]))
            batches.extend(np.array_split(batches.pop(index), 2))
        random.shuffle(batches)
        return batches

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of indices of pairs."""
        for batch in self._batches():
            if self.micro_batches == 1:
                yield batch.tolist()
                continue
            by_length = batch[np.argsort(self._share[batch], kind="stable")]
            for part in np.array_split(by_length, self.micro_batches):
                yield part.tolist()

    def statistics(self) -> "BatchStatistics":
        """Sizes and padding of the current epoch's batches; goes through the whole epoch."""
        tokens, padded, number = np.zeros(2, np.int64), np.zeros(2, np.int64), 0
        for part in self:
            lengths = self._lengths[:, part]
            tokens += lengths.sum(axis=1)
            padded += lengths.max(axis=1) * len(part)
            number += 1
        return BatchStatistics(
            pairs=self._lengths.shape[1],
            batches=number // self.micro_batches,
            source_tokens=int(tokens[0]),
            target_tokens=int(tokens[1]),
            source_padding=float(1 - tokens[0] / padded[0]),
            target_padding=float(1 - tokens[1] / padded[1]),
        )


@dataclass(frozen=True)
class BatchStatistics:
    """What an epoch of batches holds; tokens without padding, padding as the share of all positions."""

    pairs: int
    batches: int
    source_tokens: int
    target_tokens: int
    source_padding: float
    target_padding: float

    def __str__(self) -> str:
        return (
            f"{self.pairs:,} pairs in {self.batches:,} batches an epoch: on average"
            f" {self.source_tokens / self.batches:,.0f} source and {self.target_tokens / self.batches:,.0f} target"
            f" tokens a batch, padding {self.source_padding:.1%} of source and {self.target_padding:.1%} of target"
            " positions"
        )


@dataclass
class PairCollator:
    """Pads pairs to the longest of their batch: `input_ids`, `attention_mask`, `labels`, all `(batch_size, length)`.

    Args:
        pad_token_id: fills `input_ids`; labels are filled with -100.
    """

    pad_token_id: int

    def __call__(self, pairs: Sequence[dict]) -> dict[str, torch.Tensor]:
        """Pairs with lists `input_ids` and `labels` to int64 tensors."""
        input_ids = self._pad([pair["input_ids"] for pair in pairs], self.pad_token_id)
        lengths = torch.tensor([len(pair["input_ids"]) for pair in pairs])
        return {
            "input_ids": input_ids,
            "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
            "labels": self._pad([pair["labels"] for pair in pairs], IGNORE_INDEX),
        }

    @staticmethod
    def _pad(rows: list[Sequence[int]], fill: int) -> torch.Tensor:
        padded = torch.full((len(rows), max(map(len, rows))), fill, dtype=torch.long)
        for index, row in enumerate(rows):
            padded[index, : len(row)] = torch.as_tensor(row)
        return padded
