"""Batches of sentences of similar length that hold about a given number of tokens (Section 5.1), and their padding."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import UserError
from ..model.loss_vaswani import IGNORE_INDEX

MIXING_TOKENS = 2  # more mixes batches better, less pads less
_BLOCK = 1 << 17  # pairs that are processed together, so that temporary arrays stay small
_SAMPLED_BATCHES = 2048  # batches of which padding is measured, where there are more


def _blocks(number: int) -> Iterator[slice]:
    for start in range(0, number, _BLOCK):
        yield slice(start, min(start + _BLOCK, number))


def _check_lengths(sides: Sequence[np.ndarray], limits: np.ndarray) -> np.ndarray:
    """Sums of source and of target tokens, `(2,)`."""
    if len(sides[0]) != len(sides[1]):
        raise UserError(f"{len(sides[0])} source lengths for {len(sides[1])} target lengths")
    if len(sides[0]) == 0:
        raise UserError("no sentence pairs to make batches of: the data is empty, or every pair was filtered out")
    if len(sides[0]) > 2**32:
        raise UserError(f"{len(sides[0]):,} sentence pairs are more than the {2**32:,} that can be ordered: split them")
    if limits.min() < 1:
        raise UserError(f"a batch of {limits.min()} tokens holds nothing: give 1 or more")
    if min(side.min() for side in sides) < 1:
        raise UserError(f"sentence pair {np.minimum(*sides).argmin()} has an empty side: filter such pairs out")
    for name, side, limit in zip(("source", "target"), sides, limits, strict=True):
        if side.max() > limit:
            raise UserError(
                f"the {name} of sentence pair {side.argmax()} has {side.max()} tokens, more than the"
                f" {limit} a batch may hold: raise tokens_per_batch or lower max_length"
            )
    return np.array([side.sum(dtype=np.int64) for side in sides])


class TokenBatchSampler:
    """Batches of sentence pairs by tokens instead of by number, shuffled anew every epoch.

    How batches are formed. Each pair takes a share of the budget, that of its longer side. Every epoch the pairs are
    ordered by that share, and among equals by the difference between source and target length, blurred by
    `MIXING_TOKENS`, so that both sides of a batch are of similar length while its pairs change. The order is cut
    from the longest pair down, each batch as large as its first pair allows; the first batch is cut short at random, so
    that the cuts fall elsewhere in every epoch. Then the batches are shuffled.

    What holds for any shuffle: the limits are kept, every pair comes exactly once an epoch, and every epoch has the
    same number of batches, which a Trainer needs in order to resume at the right place. (Cutting the first batch short
    adds one batch at most, because a batch that starts later in the order never ends earlier. Where it adds none, the
    batch of most pairs is halved.)

    With `micro_batches` above 1 each batch is dealt out further in that many parts, which follow each other: one
    optimizer step's worth, for accumulation or for several processes. The batches are the same for any number of parts.

    Memory: arrays of lengths, memory-mapped or not, are not copied. Ordering an epoch takes 8 bytes a pair, its order
    then 4.

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
        sides = [np.asarray(side) for side in (source_lengths, target_lengths)]
        self._lengths = [side if side.dtype.kind in "iu" else side.astype(np.int64) for side in sides]
        self._tokens = _check_lengths(self._lengths, limits)
        if micro_batches < 1:
            raise UserError(f"micro_batches is {micro_batches}: it must be 1 or more")
        self.micro_batches, self.shuffle, self.seed, self.epoch = micro_batches, shuffle, seed, 0
        self._limits, self._pairs = limits, len(self._lengths[0])
        self._ordered = None  # epoch, order, edges of batches in it, sequence of batches
        self._rank_shares()
        # A batch can be halved twice: cut short as the first, and shared with the last.
        needed = 4 * micro_batches if micro_batches > 1 else 1
        smallest = min(self._capacity[0], self._pairs)
        if smallest < needed:
            raise UserError(
                f"a batch of {limits[0]} source and {limits[1]} target tokens may hold as few as {smallest} pairs, and"
                f" {needed} are needed to deal it out in {micro_batches} parts: raise tokens_per_batch, or raise"
                " tokens_per_device, or use fewer processes"
            )
        # The shortest first batch makes the most batches; a longer one makes as many or one less.
        largest = self._capacity[0]
        self._number = len(self._cut(-(-largest // 2) if shuffle else largest))

    def _rank_shares(self) -> None:
        """Rank the shares that lengths of either side can take, the largest first, and count the pairs of each."""
        tokens = [np.arange(1, int(side.max()) + 1) for side in self._lengths]
        shares = [numbers / limit for numbers, limit in zip(tokens, self._limits, strict=True)]
        distinct = np.unique(np.concatenate(shares))
        ranks = [len(distinct) - 1 - np.searchsorted(distinct, side).astype(np.uint32) for side in shares]
        capacity = np.full(len(distinct), np.iinfo(np.int64).max)
        for rank, numbers, limit in zip(ranks, tokens, self._limits, strict=True):
            np.minimum.at(capacity, rank, limit // numbers)
        self._distinct = len(distinct)
        self._rank_of = [np.concatenate([[0], rank]).astype(np.uint32) for rank in ranks]  # by number of tokens
        counts = np.zeros(len(distinct), np.int64)
        for block in _blocks(self._pairs):
            counts += np.bincount(self._ranks(block), minlength=len(distinct))
        # How many pairs a batch may hold whose longest pair comes at a place of the order before this end.
        self._capacity = capacity[counts > 0].tolist()
        self._capacity_ends = np.cumsum(counts[counts > 0]).tolist()

    def _ranks(self, block: slice | np.ndarray) -> np.ndarray:
        """Ranks of pairs by share of the budget, 0 for the largest."""
        return np.minimum(*(rank[side[block]] for rank, side in zip(self._rank_of, self._lengths, strict=True)))

    def _cut(self, first: int) -> list[int]:
        """Ends of the batches in the order of pairs; the first batch holds `first` pairs, or all if they are fewer."""
        ends = [min(int(first), self._pairs)]
        while ends[-1] < self._pairs:
            capacity = self._capacity[bisect_right(self._capacity_ends, ends[-1])]
            ends.append(min(ends[-1] + capacity, self._pairs))
        if len(ends) > 1:  # the last two batches share what is left for them
            start = ends[-3] if len(ends) > 2 else 0
            ends[-2] = max(start + 1, min(ends[-2], start + (ends[-1] - start + 1) // 2))
        return ends

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches the next iteration gives; the Trainer calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Micro-batches an epoch, the same in every epoch."""
        return self.micro_batches * self._number

    def _order(self, random: np.random.Generator | None) -> np.ndarray:
        """Indices of all pairs, uint32: by rank, then by difference, blurred where there is a generator, then by index.

        The three go into one number of 64 bits, which is sorted in place and then cut down in place to the index.
        """
        index_bits = max(1, (self._pairs - 1).bit_length())
        difference_bits = min(32, 64 - index_bits - self._distinct.bit_length())
        scale = self._limits.max() / self._limits  # differences in tokens of the larger limit
        blur = 0 if random is None else MIXING_TOKENS
        lowest = -scale[1] * len(self._rank_of[1]) - blur
        unit = (2**difference_bits - 1) / (scale[0] * len(self._rank_of[0]) + blur - lowest)
        keys = np.empty(self._pairs, np.uint64)
        for block in _blocks(self._pairs):
            difference = self._lengths[0][block] * scale[0] - self._lengths[1][block] * scale[1] - lowest
            if random is not None:
                difference += random.uniform(-blur, blur, len(difference))
            key = self._ranks(block).astype(np.uint64) << np.uint64(difference_bits)
            key |= (difference * unit).astype(np.uint64)
            key <<= np.uint64(index_bits)
            key |= np.arange(block.start, block.stop, dtype=np.uint64)
            keys[block] = key
        keys.sort()
        halves = keys.view(np.uint32)
        for block in _blocks(self._pairs):
            halves[block] = keys[block] & np.uint64(2**index_bits - 1)  # never ahead of what is still to be read
        del halves
        keys.resize((self._pairs + 1) // 2, refcheck=False)
        return keys.view(np.uint32)[: self._pairs]

    def _batches(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The current epoch: the order of the pairs, the edges of batches in it, and the sequence of the batches."""
        if self._ordered is None or (self.shuffle and self._ordered[0] != self.epoch):
            self._ordered = None  # two orders at once would be twice the memory
            random = np.random.default_rng((self.seed, self.epoch)) if self.shuffle else None
            order, first = self._order(random), self._capacity[0]
            if random is not None:
                first = random.integers(-(-first // 2), first, endpoint=True)
            edges = np.array([0, *self._cut(first)])
            if len(edges) - 1 < self._number:
                largest = int(np.diff(edges).argmax())
                edges = np.insert(edges, largest + 1, (edges[largest] + edges[largest + 1] + 1) // 2)
            sequence = np.arange(len(edges) - 1)
            if random is not None:
                random.shuffle(sequence)
            self._ordered = self.epoch, order, edges, sequence
        return self._ordered[1:]

    def _parts(self, batch: np.ndarray) -> list[np.ndarray]:
        """A batch dealt out in parts, that of the shortest pairs first."""
        if self.micro_batches == 1:
            return [batch]
        shortest_first = np.argsort(self._distinct - self._ranks(batch), kind="stable")
        return np.array_split(batch[shortest_first], self.micro_batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of indices of pairs."""
        order, edges, sequence = self._batches()
        for number in sequence:
            for part in self._parts(order[edges[number] : edges[number + 1]]):
                yield part.tolist()

    def statistics(self) -> "BatchStatistics":
        """Sizes and padding of the current epoch's batches; padding is that of 2,048 of them where there are more."""
        order, edges, _ = self._batches()
        tokens, padded = np.zeros(2, np.int64), np.zeros(2, np.int64)
        for number in np.unique(np.linspace(0, self._number - 1, min(self._number, _SAMPLED_BATCHES)).astype(int)):
            for part in self._parts(order[edges[number] : edges[number + 1]]):
                lengths = np.stack([side[part] for side in self._lengths])
                tokens += lengths.sum(axis=1, dtype=np.int64)
                padded += lengths.max(axis=1).astype(np.int64) * len(part)
        return BatchStatistics(
            pairs=self._pairs,
            batches=self._number,
            source_tokens=int(self._tokens[0]),
            target_tokens=int(self._tokens[1]),
            source_padding=float(1 - tokens[0] / padded[0]),
            target_padding=float(1 - tokens[1] / padded[1]),
        )


def batches_by_length(lengths: list[int], tokens: int) -> list[list[int]]:
    """Indices in batches of at most `tokens` tokens, padding counted, longest first; one that is longer alone."""
    return list(TokenBatchSampler(lengths, lengths, max(tokens, max(lengths)), shuffle=False)) if lengths else []


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
    """Pads pairs to the longest of their batch: `input_ids`, `attention_mask`, `labels`, all `(batch_size, length)`."""

    pad_token_id: int  # fills `input_ids`; labels are filled with -100

    def __call__(self, pairs: Sequence[dict]) -> dict[str, torch.Tensor]:
        """Pairs with `input_ids` and `labels`, lists or arrays, to int64 tensors."""
        input_ids, attention_mask = _padded([pair["input_ids"] for pair in pairs], self.pad_token_id)
        labels, _ = _padded([pair["labels"] for pair in pairs], IGNORE_INDEX)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def _padded(rows: list[Sequence[int]], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and which of their positions are not filled up, int64 `(batch_size, length)`."""
    lengths = np.array([len(row) for row in rows])
    is_token = np.arange(lengths.max()) < lengths[:, None]
    padded = np.full(is_token.shape, fill, np.int64)
    padded[is_token] = np.concatenate(rows)
    return torch.from_numpy(padded), torch.from_numpy(is_token.astype(np.int64))


def packed_size(tokens: int, max_length: int) -> int:
    """Size for both sides of a [`PackedCollator`] that holds any batch of at most so many tokens a side.

    A multiple of 64 with room for filling: a side with a single token needs `size / max_length` sentences of filling,
    each of which takes a token of a side that is full.

    Args:
        tokens: most source tokens and most target tokens of a batch.
        max_length: most tokens of a sentence, 2 or more.
    """
    return -(-tokens * max_length // ((max_length - 1) * 64)) * 64


@dataclass
class PackedCollator:
    """Puts pairs one after the other, without padding between them.

    A batch has `input_ids` `(1, source_size)` and `labels` `(1, target_size)`, int64; `source_offsets` and
    `target_offsets`, int32 `(sentences + 1,)`, where sentences start, and the end; `source_tokens`, an int64 scalar,
    filling not counted (real targets are the labels that are not -100); and `max_length`, as given.

    With sizes every batch has them, so that shapes are a handful in a whole training. The sides are filled up by
    further sentences, as few as can be, each of 1 to `max_length` tokens on both sides, so that attention is never over
    nothing and the last offset is the size. Empty sentences after them, repeated offsets, make the number of sentences
    a power of two. Filling `r` tokens of one side takes `r / max_length` sentences, rounded up, and so as many tokens
    of the other: sizes of `packed_size(tokens, max_length)` always have them.

    Args:
        pad_token_id: fills `input_ids`; labels are filled with -100.
        max_length: most tokens that a sentence of any batch may have.
        source_size: tokens of every batch with filling; if none, a batch has its own tokens and no filling.
        target_size: the same of the target side; given if `source_size` is.

    Raises:
        UserError: for a longer sentence, or where tokens and their filling are more than the size.
    """

    pad_token_id: int
    max_length: int
    source_size: int | None = None
    target_size: int | None = None

    def __call__(self, pairs: Sequence[dict]) -> dict[str, torch.Tensor | int]:
        """Pairs with `input_ids` and `labels`, lists or arrays, to a batch."""
        sides = [[pair[name] for pair in pairs] for name in ("input_ids", "labels")]
        lengths = np.array([[len(row) for row in rows] for rows in sides])
        if lengths.max() > self.max_length:
            raise UserError(f"a sentence of {lengths.max()} tokens is longer than max_length {self.max_length}")
        tokens = lengths.sum(axis=1)
        sizes = tokens if self.source_size is None else np.array([self.source_size, self.target_size])
        filling = self._filling_ends(sizes - tokens)
        sentences = len(pairs) + filling.shape[1]
        if self.source_size is not None:
            sentences = 1 << (sentences - 1).bit_length()
        offsets = np.empty((2, sentences + 1), np.int32)
        offsets[:] = sizes[:, None]
        offsets[:, 0] = 0
        offsets[:, 1 : len(pairs) + 1] = lengths.cumsum(axis=1)
        offsets[:, len(pairs) + 1 : len(pairs) + 1 + filling.shape[1]] = tokens[:, None] + filling
        return {
            "input_ids": _packed(sides[0], tokens[0], sizes[0], self.pad_token_id),
            "labels": _packed(sides[1], tokens[1], sizes[1], IGNORE_INDEX),
            "source_offsets": torch.from_numpy(offsets[0]),
            "target_offsets": torch.from_numpy(offsets[1]),
            "source_tokens": torch.tensor(tokens[0]),
            "max_length": self.max_length,
        }

    def _filling_ends(self, room: np.ndarray) -> np.ndarray:
        """Where sentences end that fill `room` tokens of either side, `(2, sentences)`, evenly long."""
        number = -(-int(room.max()) // self.max_length)
        if room.min() < number or room.min() < 0:
            side = int(room.argmin())
            name, size = ("source", "target")[side], (self.source_size, self.target_size)[side]
            raise UserError(
                f"a batch of {size - room[side]} {name} tokens and {number} of filling is more than {name}_size {size}:"
                f" make it packed_size(tokens, {self.max_length}) of the most tokens that a batch has"
            )
        return np.arange(1, number + 1) * room[:, None] // max(number, 1)


def _packed(rows: list[Sequence[int]], tokens: int, size: int, fill: int) -> torch.Tensor:
    """All rows one after the other, filled up, int64 `(1, size)`."""
    packed = np.full((1, size), fill, np.int64)
    np.concatenate(rows, out=packed[0, :tokens])
    return torch.from_numpy(packed)
