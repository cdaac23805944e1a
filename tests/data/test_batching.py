"""Batches by tokens: what every epoch must hold, how little padding there is, and padding itself."""

import itertools
import math
import random
import time

import numpy as np
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from conftest import error_of
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from vaswani_transformer.data.batching import IGNORE_INDEX, PackedCollator, PairCollator, TokenBatchSampler, packed_size
from vaswani_transformer.decoding.streaming import batches_by_length


@st.composite
def problems(draw, micro_batches):
    """Arguments of a sampler: one to 60 pairs, often tied or extreme, and a limit from the least allowed upwards."""
    number = draw(st.one_of(st.integers(1, 5), st.integers(1, 60)))
    longest = draw(st.sampled_from([1, 2, 3, 8, 40]))
    lengths = st.lists(st.integers(1, longest), min_size=number, max_size=number)
    sides = [draw(st.one_of(lengths, st.just([longest] * number))) for _ in range(2)]
    longest = max(map(max, sides))
    limit = longest * draw(st.sampled_from([1, 1, 2, 3, 7, 30])) + draw(st.integers(0, 5))
    parts = draw(micro_batches)
    if parts > 1:  # as many pairs in any batch as dealing out takes
        limit = max(limit, 4 * parts * longest)
        assume(number >= 4 * parts)
    options = {"max_tokens": limit, "micro_batches": parts, "seed": draw(st.integers(0, 2**31))}
    return {"source_lengths": sides[0], "target_lengths": sides[1], **options}


def joined(sampler):
    """Whole batches: `micro_batches` parts each."""
    parts = list(sampler)
    assert len(parts) % sampler.micro_batches == 0
    step = sampler.micro_batches
    return [[pair for part in parts[start : start + step] for pair in part] for start in range(0, len(parts), step)]


def check_epoch(sampler, problem):
    parts = list(sampler)
    assert len(parts) == len(sampler) and all(parts)
    assert sorted(pair for part in parts for pair in part) == list(range(len(problem["source_lengths"])))
    for side in ("source", "target"):
        lengths, limit = problem[f"{side}_lengths"], problem["max_tokens"]
        for batch in joined(sampler):
            assert sum(lengths[pair] for pair in batch) <= limit
            assert max(lengths[pair] for pair in batch) * len(batch) <= 1.5 * limit
        assert max(sum(lengths[pair] for pair in part) for part in parts) <= sampler.part_tokens


def lines(number, length, limit):
    """`number` pairs of one length."""
    lengths = [length] * number
    return {"source_lengths": lengths, "target_lengths": lengths, "max_tokens": limit, "micro_batches": 1, "seed": 0}


@settings(max_examples=150)
@given(problems(micro_batches=st.sampled_from([1, 1, 2, 3, 5])))
@example(lines(number=3, length=1, limit=3))  # one batch that may be cut short
@example(lines(number=2, length=3, limit=4))  # batches of one pair, which cannot be halved
@example(lines(number=1, length=5, limit=5))
def test_every_epoch_keeps_every_promise(problem):
    sampler = TokenBatchSampler(**problem)
    length = len(sampler)
    for epoch in [*range(10), 999_999]:
        sampler.set_epoch(epoch)
        check_epoch(sampler, problem)
        assert len(sampler) == length


@settings(max_examples=60)
@given(problems(micro_batches=st.sampled_from([2, 3, 4])), st.integers(0, 50))
def test_batches_do_not_depend_on_the_number_of_parts(problem, epoch):
    whole = TokenBatchSampler(**{**problem, "micro_batches": 1})
    dealt = TokenBatchSampler(**problem)
    whole.set_epoch(epoch)
    dealt.set_epoch(epoch)
    assert len(dealt) == problem["micro_batches"] * len(whole)
    assert [sorted(batch) for batch in joined(dealt)] == [sorted(batch) for batch in joined(whole)]
    parts, number = list(dealt), problem["micro_batches"]
    for lengths in ([1] * len(problem["source_lengths"]), problem["source_lengths"], problem["target_lengths"]):
        tokens = [sum(lengths[pair] for pair in part) for part in parts]
        for start in range(0, len(tokens), number):
            of_batch = tokens[start : start + number]
            assert max(of_batch) - min(of_batch) <= max(lengths)


def some_lengths(number=400, seed=0):
    """Lengths like those of sentences: log-normal, and target lengths close to source lengths."""
    generator = np.random.default_rng(seed)
    source = np.clip(generator.lognormal(2.7, 0.5, number), 3, 100).astype(int)
    target = np.clip(source * generator.lognormal(0.05, 0.2, number) + generator.integers(-1, 3, number), 3, 100)
    return source.tolist(), target.astype(int).tolist()


def epochs(sampler, numbers):
    result = []
    for epoch in numbers:
        sampler.set_epoch(epoch)
        result.append([sorted(batch) for batch in sampler])
    return result


def test_epochs_and_seeds_give_different_batches():
    first, second, third, again = epochs(TokenBatchSampler(*some_lengths(), 1000, seed=4), [0, 1, 2, 0])
    assert again == first
    for other in (second, third):
        assert other != first
        assert len({tuple(batch) for batch in first} & {tuple(batch) for batch in other}) < len(first) / 4
    assert epochs(TokenBatchSampler(*some_lengths(), 1000, seed=5), [0]) != [first]


@settings(max_examples=60)
@given(problems(micro_batches=st.sampled_from([1, 1, 2, 4])), st.integers(0, 9))
def test_statistics_equal_a_plain_count(problem, epoch):
    sampler = TokenBatchSampler(**problem)
    sampler.set_epoch(epoch)
    source, target = (sum(problem[f"{side}_lengths"]) for side in ("source", "target"))
    batches, words = len(list(sampler)) // problem["micro_batches"], sampler.statistics()
    assert words.startswith(f"{len(problem['source_lengths']):,} pairs in {batches:,} batches an epoch: ")
    assert f"{source / batches:,.0f} source and {target / batches:,.0f} target tokens a batch" in words


def padding_of(batches, lengths):
    return 1 - sum(lengths) / sum(max(lengths[pair] for pair in batch) * len(batch) for batch in batches)


def test_padding_is_a_fraction_of_that_of_random_batches():
    source, target = some_lengths(4000)
    batches = list(TokenBatchSampler(source, target, 2000))
    order = list(range(len(source)))
    random.Random(0).shuffle(order)
    random_batches = [order[start :: len(batches)] for start in range(len(batches))]
    for lengths in (source, target):
        ours = padding_of(batches, lengths)
        by_chance = padding_of(random_batches, lengths)
        assert by_chance > 0.4 and ours < by_chance / 3
    # The budget is used: batches are not small for the sake of little padding.
    assert len(batches) <= 1.25 * max(math.ceil(sum(lengths) / 2000) for lengths in (source, target)) + 2


def test_batches_are_full_on_both_sides():
    """Of the side with more tokens nothing is left but room for part of a sentence; the other grows alike."""
    lengths = np.array(some_lengths(20_000))
    lengths = np.concatenate([lengths, lengths[::-1]], axis=1)  # as many tokens on either side
    batches = list(TokenBatchSampler(*lengths, 4000))
    tokens = np.array([lengths[:, batch].sum(axis=1) for batch in batches])
    assert tokens.mean() > 0.98 * 4000
    assert np.quantile(tokens, 0.05) > 0.95 * 4000
    assert len(batches) <= math.ceil(lengths[0].sum() / 4000 * 1.02)


@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 60))
def test_batches_by_length_count_padding(lengths, tokens):
    batches = batches_by_length(lengths, tokens)
    in_order = [index for batch in batches for index in batch]
    assert in_order == sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for batch, following in itertools.pairwise([*batches, []]):
        assert lengths[batch[0]] * len(batch) <= tokens or len(batch) == 1
        assert not following or lengths[batch[0]] * (len(batch) + 1) > tokens


def test_the_second_half_of_a_million_pairs_begins_at_once():
    """accelerate skips a resumed epoch's batches by walking over indices; no pair may be read."""

    class Unread:
        def __len__(self):
            return number

        def __getitems__(self, indices):
            read.extend(indices)
            return indices

    number, read = 1_000_000, []
    sampler = TokenBatchSampler(*(np.resize(side, number).astype(np.uint16) for side in some_lengths()), 25_000)
    loader = Accelerator(cpu=True).prepare(DataLoader(Unread(), batch_sampler=sampler, collate_fn=torch.tensor))
    begin = time.process_time()
    batch = next(iter(skip_first_batches(loader, len(sampler) // 2)))
    assert time.process_time() - begin < 2
    batches = itertools.islice(iter(sampler), len(sampler) // 2, None)
    assert batch.tolist() == next(batches)
    assert len(read) <= 2 * max(map(len, batches)), "more than a batch and the one ahead of it"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3, 11], [3, 3], 10), "the source of sentence pair 1 has 11 tokens, more than the 10"),
        (([3, 3], [9, 3], 8), "the target of sentence pair 0 has 9 tokens, more than the 8"),
        (([1] * 9, [1] * 9, 10, 5), "raise tokens_per_batch"),
        (([1, 1], [1, 1], 10, 2), "fewer processes"),
    ],
)
def test_errors(arguments, message):
    assert message in error_of(TokenBatchSampler, *arguments)


def test_collator():
    pairs = [
        {"input_ids": [5, 6, 7, 2], "labels": [9, 2], "source_length": 4},
        {"input_ids": [8, 2], "labels": [4, 4, 2]},
        {"input_ids": np.array([2]), "labels": torch.tensor([2])},
    ]
    batch = PairCollator(pad_token_id=1)(pairs)
    expected = {
        "input_ids": [[5, 6, 7, 2], [8, 2, 1, 1], [2, 1, 1, 1]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]],
        "labels": [[9, 2, -100], [4, 4, 2], [2, -100, -100]],
    }
    assert batch.keys() == expected.keys()
    for name, rows in expected.items():
        assert batch[name].dtype == torch.int64 and batch[name].tolist() == rows
    assert IGNORE_INDEX == -100


def ids(longest):
    return st.lists(st.integers(0, 99), min_size=1, max_size=longest)


@st.composite
def packings(draw):
    """Pairs of at most `max_length` tokens a side, and sizes with just enough room, or none."""
    longest = draw(st.sampled_from([2, 3, 10, 60]))
    side = ids(longest) if draw(st.booleans()) else ids(1)  # a single token opposite many takes the most filling
    pairs = draw(st.lists(st.fixed_dictionaries({"input_ids": side, "labels": ids(longest)}), min_size=1, max_size=20))
    tokens = [sum(len(pair[name]) for pair in pairs) for name in ("input_ids", "labels")]
    size = packed_size(max(tokens) + draw(st.sampled_from([0, 1, 500])), longest) if draw(st.booleans()) else None
    return pairs, tokens, longest, size


@settings(max_examples=100)
@given(packings())
def test_a_packed_batch_unpacks_into_its_pairs_and_filling(packing):
    pairs, tokens, longest, size = packing
    batch = PackedCollator(1, longest, size, size)(pairs)
    assert batch["max_length"] == longest
    assert batch["source_tokens"].tolist() == tokens[0] and batch["source_tokens"].dtype == torch.int64
    sentences = {}
    for name, offsets, fill in (("input_ids", "source_offsets", 1), ("labels", "target_offsets", IGNORE_INDEX)):
        assert batch[name].dtype == torch.int64 and batch[offsets].dtype == torch.int32
        assert batch[name].shape == (1, size or sum(len(pair[name]) for pair in pairs))
        assert batch[offsets][0] == 0 and batch[offsets][-1] == batch[name].shape[1]
        lengths = batch[offsets].diff().tolist()
        assert min(lengths) >= 0 and max(lengths) <= longest
        parts = [part.tolist() for part in batch[name][0].split(lengths)]
        assert parts[: len(pairs)] == [pair[name] for pair in pairs]
        sentences[name] = parts[len(pairs) :]
        assert all(token == fill for part in sentences[name] for token in part)
    filling = list(zip(*sentences.values(), strict=True))
    filled = [bool(source) for source, _ in filling]
    assert filled == [bool(target) for _, target in filling] == sorted(filled, reverse=True)
    if size is None:
        assert not filling
    else:
        assert math.log2(len(pairs) + len(filling)).is_integer()


@pytest.mark.parametrize("longest", [2, 3, 100, 256])
def test_the_packed_size_is_enough_for_any_batch_and_no_larger_than_needed(longest):
    for tokens in (longest, 64, 1000, 25_000):
        size = packed_size(tokens, longest)
        assert size % 64 == 0
        # One side full and the other almost empty: each of its sentences of filling takes one of this side's tokens.
        assert size - tokens >= math.ceil((size - 1) / longest)
        smaller = size - 64
        assert smaller - tokens < math.ceil(smaller / longest)


@pytest.mark.parametrize("sizes", [(None, None), (3, 99), (4, 99), (15, 99), (99, 4)])
def test_errors_of_packing(sizes):
    length = 9 if sizes == (None, None) else 4
    pairs = [{"input_ids": [3] * length, "labels": [3] * 4}]
    assert "do not fit sizes" in error_of(PackedCollator(0, 8, *sizes), pairs)
