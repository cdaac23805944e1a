"""Batches of sentences of similar length that hold about a given number of tokens (Section 5.1), and their padding."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from ..errors import UserError
from ..hardware import available_cpus
from ..model.loss_vaswani import IGNORE_INDEX

MOST_PADDED = 1.5  # most positions of a padded batch, as a share of its limit of tokens; 1.1 are usual
WINDOW = 3_000_000  # pairs that are shuffled and grouped by length together
_BLOCK = 1 << 17  # pairs that are processed together, so that temporary arrays stay small
_MEASURED_BATCHES = 2048  # batches of which padding is measured, where there are more
_GOLDEN = 0.6180339887498949  # its multiples, taken modulo 1, are spread evenly however many there are


def _check_lengths(sides: Sequence[np.ndarray], limit: int) -> None:
    if len(sides[0]) == 0:
        raise UserError("no sentence pairs to make batches of: the data is empty, or every pair was filtered out")
    for name, side in zip(("source", "target"), sides, strict=True):
        if side.max() > limit:
            raise UserError(
                f"the {name} of sentence pair {side.argmax()} has {side.max()} tokens, more than the"
                f" {limit} a batch may hold: raise tokens_per_batch or lower max_length"
            )


def describe_batches(sampler: "TokenBatchSampler | WindowedBatchSampler") -> str:
    """Describe an epoch's batches in words; padding is that of the first 2,048, which are in random order."""
    lengths, tokens, positions = sampler.lengths, np.zeros(2), np.zeros(2)
    for batch in filter(None, islice(sampler, _MEASURED_BATCHES)):
        sides = np.stack([side[batch] for side in lengths])
        tokens += sides.sum(axis=1, dtype=np.int64)
        positions += sides.max(axis=1).astype(np.int64) * len(batch)
    batches, padding = len(sampler) // sampler.micro_batches, 1 - tokens / positions
    source, target = sampler.tokens / batches
    return (
        f"{len(lengths[0]):,} pairs in {batches:,} batches an epoch: on average {source:,.0f} source and {target:,.0f}"
        f" target tokens a batch, padding not counted; padded, {padding[0]:.1%} of source and {padding[1]:.1%} of"
        " target positions are padding"
    )


class TokenBatchSampler:
    """Batches of sentence pairs by tokens instead of by number, shuffled in every epoch.

    How batches are formed. Tokens are counted without padding. Each pair takes a share of the budget, that of its
    longer side. Every epoch the pairs are ordered by that share, the largest first; pairs of one share are mixed such
    that source and target tokens grow alike, so that batches are full on both sides. The order is cut into batches,
    each as large as its limits allow; the first is cut short at random, so that the cuts fall elsewhere in every epoch.
    Then the batches are shuffled.

    How they are mixed. Pairs of equal lengths are in random order and take evenly spread places among the pairs of
    their share. So every epoch has the same lengths in the same order, and what differs is which pairs have them.

    What holds for any shuffle: the limits are kept, every pair comes exactly once an epoch, and every epoch has the
    same number of batches, which a Trainer needs in order to resume at the right place. (Lengths come in the same order
    in every epoch, and a batch that starts later in an order never ends earlier; so cutting the first batch short adds
    one batch at most. Where it adds none, the batch of most pairs is halved.) Padded to its longest sentence, a batch
    has at most 1.5 times its limit in positions, however far apart the lengths are.

    With `micro_batches` above 1 each batch is dealt out further in that many parts, which follow each other: one
    optimizer step's worth, for accumulation or for several processes. On either side the tokens of two parts differ by
    at most the longest sentence. The batches are the same for any number of parts.

    Memory: ordering an epoch takes about 60 bytes a pair for a second or two of three million, its order then 4.

    It has no `batch_size`, so accelerate shards whole micro-batches over processes without looking at their sizes.

    Args:
        source_lengths: tokens of each source, `</s>` included.
        target_lengths: tokens of each target, `</s>` included.
        max_tokens: at most so many source tokens in a batch, and as many target tokens, padding not counted (the
            paper: about 25,000).
        micro_batches: parts that each batch is dealt out in.
        seed: with the epoch, determines the shuffle.

    Raises:
        UserError: for no pairs, lengths of different number or below 1, a pair that is longer than the limit, or parts
            so many that a batch may hold fewer than four pairs for each of them.
    """

    batch_size = None  # accelerate's sign for batches of varying size
    drop_last = False
    skipped = 0  # of `WindowedBatchSampler`; here it makes no difference

    def __init__(
        self,
        source_lengths: Sequence[int],
        target_lengths: Sequence[int],
        max_tokens: int,
        micro_batches: int = 1,
        seed: int = 0,
    ):
        sides = [np.asarray(side) for side in (source_lengths, target_lengths)]
        self.lengths = [side if side.dtype.kind in "iu" else side.astype(np.int64) for side in sides]
        _check_lengths(self.lengths, max_tokens)
        self.tokens = np.array([side.sum(dtype=np.int64) for side in self.lengths])
        self.micro_batches, self.seed, self.epoch = micro_batches, seed, 0
        self._limit, self._pairs = max_tokens, len(self.lengths[0])
        self._longest = [int(side.max()) for side in self.lengths]
        # A batch can be halved twice: cut short as the first or shared with the last, and where one batch is missing.
        needed = 4 * micro_batches if micro_batches > 1 else 1
        smallest = min(max_tokens // max(self._longest), self._pairs)
        if smallest < needed:
            raise UserError(
                f"a batch of {max_tokens} tokens a side may hold as few as {smallest} pairs, and {needed} are"
                f" needed to deal it out in {micro_batches} parts: raise tokens_per_batch, or raise tokens_per_device,"
                " or use fewer processes"
            )
        self._count_kinds()
        order = self._order()
        self._first = self._cut(order)[1]  # the largest first batch
        # The shortest first batch makes the most batches; a longer one makes as many or one less.
        self._shortest = -(-self._first // 2) if self._first < self._pairs else self._first
        self._number = len(self._cut(order, self._shortest)) - 1
        self._ordered = self._batches_of(order)

    def _codes(self) -> np.ndarray:
        """Return both lengths of each pair as one number, uint64."""
        source, target = (side.astype(np.uint64) for side in self.lengths)
        return source << np.uint64(self._longest[1].bit_length()) | target

    def _count_kinds(self) -> None:
        """Count the pairs of each kind, which is the two lengths; rank kinds by share, the largest first."""
        codes, self._counts = np.unique(self._codes(), return_counts=True)
        bits = self._longest[1].bit_length()
        longer = np.maximum(codes >> np.uint64(bits), codes & np.uint64(2**bits - 1)).astype(np.int64)
        _, ranks = np.unique(-longer, return_inverse=True)
        order = np.argsort(ranks, kind="stable")
        ordinals = np.empty(len(ranks), np.int64)  # within the rank
        ordinals[order] = np.arange(len(ranks)) - np.searchsorted(ranks[order], ranks[order])
        self._ranks, self._ordinals = ranks, ordinals
        # How many pairs a batch may hold, padded, whose longest pair comes at a place of the order before this end.
        self._capacity = np.zeros(ranks.max() + 1, np.int64)
        self._capacity[ranks] = (MOST_PADDED * self._limit / longer).astype(np.int64)
        self._capacity_ends = np.cumsum(np.bincount(ranks, self._counts)).astype(np.int64)

    def _order(self) -> np.ndarray:
        """Return the indices of all pairs, uint32: by rank, and in a rank each kind's pairs evenly spread over it.

        Two sorts of 64-bit keys with the index in their last bits, which are five times as fast as `np.lexsort`: by
        (kind, random number), which numbers the pairs of a kind, then by (rank, place in the rank, kind).
        """
        index_bits = max(1, (self._pairs - 1).bit_length())
        random_bits = 64 - index_bits - sum(longest.bit_length() for longest in self._longest)
        kind_bits = int(self._ordinals.max()).bit_length()
        place_bits = min(32, 64 - index_bits - kind_bits - int(self._ranks.max()).bit_length())
        random = np.random.default_rng((self.seed, self.epoch))
        keys = self._codes() << np.uint64(random_bits)
        keys |= random.integers(2**random_bits, size=self._pairs, dtype=np.uint64)
        keys = keys << np.uint64(index_bits) | np.arange(self._pairs, dtype=np.uint64)
        keys.sort()
        kinds = np.repeat(np.arange(len(self._counts)), self._counts)
        starts, offsets = np.cumsum(self._counts) - self._counts, np.arange(len(self._counts)) * _GOLDEN % 1
        places = (np.arange(self._pairs) - starts[kinds] + offsets[kinds]) / self._counts[kinds]
        ranked = self._ranks[kinds] << place_bits | (places * 2**place_bits).astype(np.int64)
        ranked = (ranked << kind_bits | self._ordinals[kinds]).astype(np.uint64) << np.uint64(index_bits)
        keys = ranked | keys & np.uint64(2**index_bits - 1)
        keys.sort()
        return (keys & np.uint64(2**index_bits - 1)).astype(np.uint32)

    def _sums(self, pairs: np.ndarray) -> np.ndarray:
        """Return the tokens of these pairs up to each of them, `(2, len(pairs))`."""
        return np.stack([side[pairs].cumsum(dtype=np.int64) for side in self.lengths])

    def _capacity_at(self, place: np.ndarray | int) -> np.ndarray | int:
        return self._capacity[np.searchsorted(self._capacity_ends, place, side="right")]

    def _cut(self, order: np.ndarray, first: int = 0) -> list[int]:
        """Return edges of batches as large as the limits allow; the first holds `first` pairs if that is not 0."""
        edges, window = [0, first] if first else [0], _BLOCK
        while edges[-1] < self._pairs:
            start, begin = edges[-1], 0
            sums = self._sums(order[start : start + window])
            size, before = sums.shape[1], np.zeros(2, np.int64)
            while begin < size:
                source, target = before + self._limit
                end = min(sums[0].searchsorted(source, "right"), sums[1].searchsorted(target, "right"))
                end = min(int(end), begin + int(self._capacity_at(start + begin)))
                if end >= size and start + size < self._pairs:  # it may end behind the window
                    break
                edges.append(start + end)
                begin, before = end, sums[:, end - 1]
            if edges[-1] == start:
                window *= 2
        return edges

    def _share_the_rest(self, order: np.ndarray, edges: list[int]) -> None:
        """Let the last two batches share their pairs evenly, or as evenly as the limits allow."""
        if len(edges) > 2:
            start, edge, end = edges[-3:]
            sums = self._sums(order[start:end])
            places = np.arange(start + 1, end)
            fits = (sums[:, -1:] - sums[:, :-1] <= self._limit).all(axis=0)
            fits &= end - places <= self._capacity_at(places)
            edges[-2] = min(edge, max((start + end + 1) // 2, int(places[fits.argmax()])))

    def _batches_of(self, order: np.ndarray) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """Return the epoch, the order of its pairs, the edges of batches in it, and the sequence of the batches."""
        random = np.random.default_rng((self.seed, self.epoch, 1))
        edges = self._cut(order, int(random.integers(self._shortest, self._first, endpoint=True)))
        self._share_the_rest(order, edges)
        edges = np.array(edges)
        if len(edges) - 1 < self._number:
            largest = int(np.diff(edges).argmax())
            edges = np.insert(edges, largest + 1, (edges[largest] + edges[largest + 1] + 1) // 2)
        sequence = np.arange(len(edges) - 1)
        random.shuffle(sequence)
        return self.epoch, order, edges, sequence

    def _batches(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self._ordered is None or self._ordered[0] != self.epoch:
            self._ordered = None  # two orders at once would be twice the memory
            self._ordered = self._batches_of(self._order())
        return self._ordered[1:]

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
        parts = self.micro_batches
        return (self._limit + (parts - 1) * max(self._longest)) // parts

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

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of indices of pairs."""
        order, edges, sequence = self._batches()
        for number in sequence:
            for part in self._parts(order[edges[number] : edges[number + 1]]):
                yield part.tolist()

    statistics = describe_batches


class WindowedBatchSampler:
    """Batches of `TokenBatchSampler` from one window after the other, for text that is too large to jump about in.

    A window is a number of shards, drawn at random once; every epoch has the windows in another order and batches each
    anew. So what is read at a time is the shards of a window, and memory is that of a window, for any number of pairs.
    What `TokenBatchSampler` promises holds within each window, and so for the whole. `skipped` says how many
    micro-batches of the next iteration will not be looked at, as in a training that is resumed.

    Args:
        lengths: tokens of each source and of each target, `(2, pairs)`, memory-mapped or not.
        max_tokens: of a batch, on either side.
        starts: the first pair of each shard in order, and the number of all pairs.
        micro_batches, seed: as of `TokenBatchSampler`.
        window: pairs of a window, about; with no more in all it is one `TokenBatchSampler`.

    Raises:
        UserError: as `TokenBatchSampler`.
    """

    batch_size = None
    drop_last = False

    def __init__(
        self,
        lengths: np.ndarray,
        max_tokens: int,
        starts: Sequence[int],
        micro_batches: int = 1,
        seed: int = 0,
        window: int = WINDOW,
    ):
        self.micro_batches, self.seed, self.epoch, self.skipped = micro_batches, seed, 0, 0
        self.lengths, self._max_tokens, self._starts = lengths, max_tokens, np.asarray(starts)
        pairs, shards = int(self._starts[-1]), np.arange(len(starts) - 1)
        if pairs > window:
            np.random.default_rng((seed, 2)).shuffle(shards)
        ends = np.cumsum(np.diff(self._starts)[shards])
        number = min(len(shards), -(-pairs // window))
        places = np.searchsorted(ends, np.arange(1, number) * pairs / number) + 1
        self._windows = [part for part in np.split(shards, np.unique(places)) if len(part)]
        # Sorting needs no lock of Python's; a window that is sorted takes memory, so that no more are begun than help.
        with ThreadPoolExecutor(min(8, len(available_cpus()))) as executor:
            samplers = executor.map(lambda window: self._sampler(window)[0], range(len(self._windows)))
            facts = [(len(sampler), sampler.part_tokens, sampler.tokens) for sampler in samplers]
        self._numbers = [number for number, _, _ in facts]
        self.part_tokens = max(tokens for _, tokens, _ in facts)
        self.tokens = sum(tokens for _, _, tokens in facts)

    def _sampler(self, window: int) -> tuple[TokenBatchSampler, np.ndarray]:
        """Return the batches of a window, of numbers within it, and its pairs."""
        pairs = [np.arange(*self._starts[shard : shard + 2]) for shard in np.sort(self._windows[window])]
        pairs = np.concatenate(pairs)
        sides = [side[pairs] for side in self.lengths]
        return TokenBatchSampler(*sides, self._max_tokens, micro_batches=self.micro_batches, seed=self.seed), pairs

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the Trainer calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the micro-batches of an epoch, the same in every epoch."""
        return sum(self._numbers)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of indices of pairs; of those that are skipped, those of whole windows are empty."""
        order, done = np.arange(len(self._windows)), 0
        np.random.default_rng((self.seed, self.epoch, 3)).shuffle(order)
        for window in order:
            if done + self._numbers[window] <= self.skipped:  # a resumed training: nothing is read or sorted for it
                yield from ([] for _ in range(self._numbers[window]))
            else:
                sampler, pairs = self._sampler(window)
                sampler.set_epoch(self.epoch)
                yield from (pairs[part].tolist() for part in sampler)
            done += self._numbers[window]

    statistics = describe_batches


@dataclass
class PairCollator:
    """Pads pairs to the longest of their batch: `input_ids`, `attention_mask`, `labels`, all `(batch_size, length)`."""

    pad_token_id: int  # fills `input_ids`; labels are filled with -100

    def __call__(self, pairs: Sequence[dict]) -> dict[str, torch.Tensor]:
        """Make int64 tensors of pairs with `input_ids` and `labels`, lists or arrays."""
        input_ids, attention_mask = _padded([pair["input_ids"] for pair in pairs], self.pad_token_id)
        labels, _ = _padded([pair["labels"] for pair in pairs], IGNORE_INDEX)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def _padded(rows: list[Sequence[int]], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows, and which of their positions are not filled up, int64 `(batch_size, length)`."""
    lengths = np.array([len(row) for row in rows])
    is_token = np.arange(lengths.max()) < lengths[:, None]
    padded = np.full(is_token.shape, fill, np.int64)
    padded[is_token] = np.concatenate(rows)
    return torch.from_numpy(padded), torch.from_numpy(is_token.astype(np.int64))


def packed_size(tokens: int, max_length: int) -> int:
    """Return the size for both sides of a [`PackedCollator`] that holds any batch of at most `tokens` tokens a side.

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
        """Make a batch of pairs with `input_ids` and `labels`, lists or arrays."""
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
        """Return the ends of sentences that fill `room` tokens of either side, `(2, sentences)`, evenly long."""
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
    """Return all rows one after the other, filled up, int64 `(1, size)`."""
    packed = np.full((1, size), fill, np.int64)
    np.concatenate(rows, out=packed[0, :tokens])
    return torch.from_numpy(packed)
