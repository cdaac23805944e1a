"""Batches of sentences of similar length that hold about a given number of tokens (Section 5.1), and their padding."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import UserError
from ..model.loss_vaswani import IGNORE_INDEX

ROOM = 1.15  # most tokens of a batch of changed pairs, as a share of the limit that it was made for
MOST_PADDED = 1.5  # most positions of a padded batch, as a share of its limit of tokens; 1.1 are usual
_GOLDEN = 0.6180339887498949  # its multiples, taken modulo 1, are spread evenly however many there are


class TokenBatchSampler:
    """Batches of sentence pairs by tokens instead of by number, shuffled in every epoch.

    How batches are formed. Tokens are counted without padding. Each pair takes a share of the budget, that of its
    longer side. Every epoch the pairs are ordered by that share, the largest first; pairs of one share are mixed such
    that source and target tokens grow alike, so that batches are full on both sides. The order is cut into batches,
    each as large as its limits allow, the first cut short at random: in every epoch elsewhere. Then they are shuffled.

    How they are mixed. Pairs of equal lengths are in random order and take evenly spread places among the pairs of
    their share. So every epoch has the same lengths in the same order, and what differs is which pairs have them.

    What holds for any shuffle: the limits are kept, every pair comes exactly once an epoch, and every epoch has the
    same number of batches, which a Trainer needs in order to resume at the right place. Padded to its longest sentence,
    a batch has at most 1.5 times its limit in positions, however far apart the lengths are.

    With `micro_batches` above 1 each batch is dealt out further in that many parts, which follow each other: one
    optimizer step's worth, for accumulation or for several processes. On either side the tokens of two parts differ by
    at most the longest sentence. The batches are the same for any number of parts.

    Where augmentation makes pairs longer, `changed_lengths` lets batches be of similar lengths after that. An epoch has
    as many of them as ever, each larger (up to `ROOM`); where that is not enough they are as without it, and in the
    first epoch, of which a short training may see little.

    Memory: ordering an epoch takes about 50 bytes a pair for a moment, its order then 4; changed lengths take more.

    Args:
        source_lengths, target_lengths: tokens of each source and target, `</s>` included.
        max_tokens: the most source, and target, tokens in a batch, padding not counted (paper: about 25,000).
        micro_batches: parts that each batch is dealt out in.
        seed: with the epoch, determines the shuffle.
        counts_from: the step from which pairs are numbered on from epoch to epoch, as `AugmentedPairs` takes them, with
            negative numbers before it; none: their indices.
        changed_lengths: takes an epoch, returns the tokens of each pair's sides after its changes, `(2, pairs)`.

    Raises:
        UserError: for a pair longer than the limit, or so many parts that one may have fewer than four pairs.
    """

    batch_size = None  # accelerate shards whole micro-batches over processes, without looking at their sizes
    drop_last = False

    def __init__(
        self,
        source_lengths: Sequence[int],
        target_lengths: Sequence[int],
        max_tokens: int,
        micro_batches: int = 1,
        seed: int = 0,
        counts_from: int | None = None,
        changed_lengths: Callable[[int], np.ndarray] | None = None,
    ):
        self.lengths = [np.asarray(side) for side in (source_lengths, target_lengths)]
        self._limit, self._pairs = max_tokens, len(self.lengths[0])
        self.micro_batches, self.seed, self.epoch = micro_batches, seed, 0
        self._counts_from, self._changed_lengths = counts_from, changed_lengths
        self._check()
        shares = np.maximum(*self.lengths)  # of the budget
        self._capacity = (MOST_PADDED * max_tokens / np.sort(shares)[::-1]).astype(np.int32)
        self._longest = int(shares.max())
        order = self._order()
        sums = self._sums(order)
        self._first = self._cut(sums)[1]  # the largest first batch
        # The shortest first batch makes the most batches; a longer one makes as many or one less.
        self._shortest = -(-self._first // 2) if self._first < self._pairs else self._first
        self._number = len(self._cut(sums, self._shortest)) - 1
        self._ordered = self._arranged(order, sums)

    def _check(self) -> None:
        for name, side in zip(("source", "target"), self.lengths, strict=True):
            if side.max() > self._limit:
                problem = f"{side.max()} tokens, more than the {self._limit} a batch may hold"
                fix = "raise tokens_per_batch or lower max_length"
                raise UserError(f"the {name} of sentence pair {side.argmax()} has {problem}: {fix}")
        # A batch can be halved twice: cut short as the first or shared with the last, and where one batch is missing.
        needed = 4 * self.micro_batches if self.micro_batches > 1 else 1
        smallest = min(self._limit // max(int(side.max()) for side in self.lengths), self._pairs)
        if smallest < needed:
            problem = f"{needed} are needed to deal it out in {self.micro_batches} parts"
            fix = "raise tokens_per_batch, or raise tokens_per_device, or use fewer processes"
            raise UserError(f"a batch of {self._limit} tokens a side may hold {smallest} pairs, and {problem}: {fix}")

    def _order(self) -> np.ndarray:
        """Return the indices of all pairs, uint32: by share, and within it those of equal lengths evenly spread."""
        bits = 64 - max(1, (self._pairs - 1).bit_length()) - sum(int(side.max()).bit_length() for side in self.lengths)
        random = np.random.default_rng((self.seed, self.epoch)).integers(2**bits, size=self._pairs, dtype=np.uint64)
        order = np.lexsort((random, *self.lengths[::-1]))
        source, target = (side[order] for side in self.lengths)
        is_first = np.append(True, (np.diff(source) != 0) | (np.diff(target) != 0))
        kinds = np.cumsum(is_first, dtype=np.int32) - 1  # of the same two lengths
        starts = np.flatnonzero(is_first)
        counts = np.diff(starts, append=self._pairs)
        offsets = np.arange(len(starts)) * _GOLDEN % 1
        places = (np.arange(self._pairs) - starts[kinds] + offsets[kinds]) / counts[kinds]
        return order[np.lexsort((kinds, places, -np.maximum(source, target).astype(np.int32)))].astype(np.uint32)

    def _sums(self, order: np.ndarray) -> np.ndarray:
        """Return the tokens before each place of an order and after the last, `(2, pairs + 1)`."""
        return np.stack([np.append(0, np.cumsum(side[order], dtype=np.int64)) for side in self.lengths])

    def _cut(self, sums: np.ndarray, first: int = 0) -> list[int]:
        """Return edges of batches as large as the limits allow; the first holds `first` pairs if that is not 0."""
        edges = [0, first] if first else [0]
        while (start := edges[-1]) < self._pairs:
            source, target = (int(side.searchsorted(side[start] + self._limit, "right")) - 1 for side in sums)
            edges.append(min(source, target, start + int(self._capacity[start])))
        return edges

    def _share_the_rest(self, sums: np.ndarray, edges: list[int]) -> None:
        """Let the last two batches share their pairs evenly, or as evenly as the limits allow."""
        if len(edges) > 2:
            start, edge, end = edges[-3:]
            places = np.arange(start + 1, end)
            fits = (sums[:, end:] - sums[:, places] <= self._limit).all(axis=0)
            fits &= end - places <= self._capacity[places]
            edges[-2] = min(edge, max((start + end + 1) // 2, int(places[fits.argmax()])))

    def _arranged(self, order: np.ndarray, sums: np.ndarray) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """Return the epoch, the order of its pairs, the edges of batches in it, and the sequence of the batches."""
        random = np.random.default_rng((self.seed, self.epoch, 1))
        edges = self._cut(sums, int(random.integers(self._shortest, self._first, endpoint=True)))
        self._share_the_rest(sums, edges)
        edges = np.array(edges)
        while len(edges) - 1 < self._number:
            largest = int(np.diff(edges).argmax())
            edges = np.insert(edges, largest + 1, (edges[largest] + edges[largest + 1] + 1) // 2)
        sequence = np.arange(len(edges) - 1)
        random.shuffle(sequence)
        return self.epoch, order, edges, sequence

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches the next iteration gives; the Trainer calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the micro-batches of an epoch, the same in every epoch."""
        return self.micro_batches * self._number

    @property
    def part_tokens(self) -> int:
        """Return the most tokens of a side that a micro-batch can have in any epoch."""
        # Parts hold the limit at most, and none has more than the longest sentence above another.
        return (self._limit + (self.micro_batches - 1) * self._longest) // self.micro_batches

    def _parts(self, batch: np.ndarray) -> list[np.ndarray]:
        """Deal a batch out in parts of about as many tokens on either side.

        Each part gets one of the longest sources, then one of the next longest and so on: sources differ by the longest
        at most, whoever gets which. Of those the part with the fewest target tokens gets the longest target: targets
        never differ by more than the longest either.
        """
        if self.micro_batches == 1:
            return [batch]
        source, target = (side[batch].astype(np.int64) for side in self.lengths)
        longest_first = np.argsort(-source, kind="stable")
        part_of, tokens = np.empty(len(batch), np.int64), np.zeros(self.micro_batches, np.int64)
        for start in range(0, len(batch), self.micro_batches):
            dealt = longest_first[start : start + self.micro_batches]
            dealt = dealt[np.argsort(-target[dealt], kind="stable")]
            parts = np.argsort(tokens, kind="stable")[: len(dealt)]
            part_of[dealt] = parts
            tokens[parts] += target[dealt]
        return [batch[part_of == part] for part in range(self.micro_batches)]

    def _grown(self) -> "TokenBatchSampler | None":
        """Return batches by tokens of changed pairs; None in the first epoch, without changes, or if they are more."""
        start = self._counts_from or 0
        if self._changed_lengths is None or not self.epoch or (self.epoch + 1) * self._number <= start:
            return None
        lengths = np.maximum(self.lengths, self._changed_lengths(self.epoch))  # some may stay as they are
        for share in np.arange(lengths.sum() / np.sum(self.lengths), ROOM, 0.01):
            sampler = TokenBatchSampler(*lengths, int(share * self._limit), self.micro_batches, self.seed, start)
            if sampler._number <= self._number:
                sampler.epoch, sampler._number, sampler._ordered = self.epoch, self._number, None
                return sampler
        return None

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of indices of pairs."""
        return (self._grown() or self)._batches()

    def _batches(self) -> Iterator[list[int]]:
        if self._ordered is None or self._ordered[0] != self.epoch:
            self._ordered = None  # two orders at once would be twice the memory
            order = self._order()
            self._ordered = self._arranged(order, self._sums(order))
        _, order, edges, sequence = self._ordered
        for step, number in enumerate(sequence, self.epoch * self._number):
            epoch = 0 if self._counts_from is None else self.epoch if step >= self._counts_from else -1
            for part in self._parts(order[edges[number] : edges[number + 1]]):
                yield (part + epoch * np.int64(self._pairs)).tolist()

    def statistics(self) -> str:
        """Describe the epoch's batches in words."""
        source, target = (side.sum(dtype=np.int64) / self._number for side in self.lengths)
        sizes = f"on average {source:,.0f} source and {target:,.0f} target tokens a batch, padding not counted"
        return f"{self._pairs:,} pairs in {self._number:,} batches an epoch: {sizes}"


@dataclass
class PairCollator:
    """Pads pairs to the longest of their batch: `input_ids`, `attention_mask`, `labels`, all `(batch_size, length)`."""

    pad_token_id: int  # fills `input_ids`; labels are filled with -100

    def __call__(self, pairs: Sequence[dict]) -> dict[str, torch.Tensor]:
        """Make int64 tensors of pairs with `input_ids` and `labels`, lists or arrays; sources alone have none."""
        input_ids, attention_mask = _padded([pair["input_ids"] for pair in pairs], self.pad_token_id)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask}
        if "labels" in pairs[0]:
            batch["labels"], _ = _padded([pair["labels"] for pair in pairs], IGNORE_INDEX)
        return batch


def _padded(rows: list[Sequence[int]], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows, and which of their positions are not filled up, int64 `(batch_size, length)`."""
    lengths = np.array([len(row) for row in rows])
    is_token = np.arange(lengths.max()) < lengths[:, None]
    padded = np.full(is_token.shape, fill, np.int64)
    padded[is_token] = np.concatenate(rows)
    return torch.from_numpy(padded), torch.from_numpy(is_token.astype(np.int64))


def packed_size(tokens: int, max_length: int) -> int:
    """Return the size for both sides of a `PackedCollator` that holds any batch of at most `tokens` tokens a side.

    A multiple of 64 with room for filling: a side with a single token needs `size / max_length` sentences of filling,
    each of which takes a token of a side that is full. Sentences have `max_length` tokens at most, 2 or more.
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
    a power of two. Sizes of `packed_size(tokens, max_length)` always have room for them.

    Raises:
        UserError: for a longer sentence, or where tokens and their filling are more than the size.
    """

    pad_token_id: int  # fills `input_ids`; labels are filled with -100
    max_length: int  # most tokens that a sentence of any batch may have
    source_size: int | None = None  # of every batch, in tokens with filling; if none, a batch has its own without
    target_size: int | None = None  # the same of the target side; given if `source_size` is

    def __call__(self, pairs: Sequence[dict]) -> dict[str, torch.Tensor | int]:
        """Make a batch of pairs with `input_ids` and `labels`, lists or arrays."""
        sides = [[pair[name] for pair in pairs] for name in ("input_ids", "labels")]
        lengths = np.array([[len(row) for row in rows] for rows in sides])
        tokens = lengths.sum(axis=1)
        sizes = tokens if self.source_size is None else np.array([self.source_size, self.target_size])
        room = sizes - tokens
        number = -(-int(room.max()) // self.max_length)  # sentences of filling
        if lengths.max() > self.max_length or room.min() < number:
            held = f"{tokens.tolist()} tokens, {number} sentences of filling and sentences of {lengths.max()} tokens"
            raise UserError(f"{held} do not fit sizes {sizes.tolist()} and max_length {self.max_length}")
        filling = np.arange(1, number + 1) * room[:, None] // max(number, 1)  # ends of sentences, evenly long
        ends = np.hstack((lengths.cumsum(axis=1), tokens[:, None] + filling)).astype(np.int32)
        empty = 0 if self.source_size is None else (1 << (ends.shape[1] - 1).bit_length()) - ends.shape[1]
        offsets = np.pad(np.pad(ends, ((0, 0), (0, empty)), "edge"), ((0, 0), (1, 0)))
        return {
            "input_ids": _packed(sides[0], sizes[0], self.pad_token_id),
            "labels": _packed(sides[1], sizes[1], IGNORE_INDEX),
            "source_offsets": torch.from_numpy(offsets[0]),
            "target_offsets": torch.from_numpy(offsets[1]),
            "source_tokens": torch.tensor(tokens[0]),
            "max_length": self.max_length,
        }


def _packed(rows: list[Sequence[int]], size: int, fill: int) -> torch.Tensor:
    """Return all rows one after the other, filled up, int64 `(1, size)`."""
    ids = np.concatenate(rows, dtype=np.int64)
    return torch.from_numpy(np.pad(ids, (0, size - len(ids)), constant_values=fill))[None]
