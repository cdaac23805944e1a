"""Changes to text, compared with OpusTrainer's modifiers, and the pairs of tokens that are changed as they are read."""

import math
import pickle
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vaswani_transformer import train_tokenizer
from vaswani_transformer.data.augmentation import CHANGES, AugmentedPairs, changed, choose_change
from vaswani_transformer.data.batching import MOST_PADDED, ROOM, TokenBatchSampler
from vaswani_transformer.data.synthetic import generate_corpus
from vaswani_transformer.data.tokenized_pairs import pair_encoder

PAIRS = generate_corpus(300, 10, 10).train
NEEDED = "an independent reference: pip install opustrainer"


def change(kind, source, target="", seed=0):
    return changed(kind, source, target, random.Random(seed), to_train=True)


@pytest.mark.parametrize(
    ("kind", "pair", "expected"),
    [
        ("upper", ("It's 3rd.", "die Straße"), ("IT'S 3RD.", "DIE STRASSE")),
        ("upper", (">>deu<< a b", "c"), (">>deu<< A B", "C")),  # the code of a language stays
        ("upper", ("c", "<2fr> a b"), ("C", "<2fr> A B")),  # of a model of the reverse direction
        ("title", ("the dog's  (old) 3rd McX.", "ein über-Hund"), ("The Dog's  (Old) 3rd McX.", "Ein Über-Hund")),
        ("upper", ("天气很好", "Nice weather"), ("天气很好", "Nice weather")),  # nothing to see in the source
        ("upper", ("我昨天买了iPhone。", "An iPhone."), ("我昨天买了iPhone。", "An iPhone.")),  # a name says nothing
        ("title", ("我昨天买了 iPhone。", "An iPhone."), ("我昨天买了 iPhone。", "An iPhone.")),
        ("upper", ("my iPhone 天", "c"), ("MY IPHONE 天", "C")),
        ("lower", ("The EU", "Die EU"), ("the eu", "Die EU")),
        ("lower", (">>deu<< <BT> A b", "C"), (">>deu<< <BT> a b", "C")),
        ("punctuation", ("Who?", "谁？"), ("Who", "谁")),
        ("punctuation", ("He left .", "Er ging!"), ("He left", "Er ging")),
        ("punctuation", ("Well...", "Nun."), ("Well...", "Nun.")),
        ("punctuation", ("No, etc", "Nein."), ("No, etc", "Nein.")),
        ("fragments", ("A man, old", "Ein Mann, alt"), ("A man", "Ein Mann")),
        ("fragments", ("A man, so old", "Ein alter Mann, ja"), ("A man, so old", "Ein alter Mann, ja")),
        ("fragments", ("1,000 men", "1.000 Männer"), ("1,000 men", "1.000 Männer")),
        ("typos", (text := "a bc 123 {User_name} 我们今天不去。 https://debian.org", "x"), (text, "x")),
        ("lower", ("Hi {Name}.", "Hej {Name}."), ("Hi {Name}.", "Hej {Name}.")),
        ("title", ("it is nice.", "ılık iyi."), ("it is nice.", "ılık iyi.")),  # whose capitals are its own
        ("repeat", ("A b.", "C."), ("A b. A b.", "C. C.")),
    ],
)
def test_worked_cases(kind, pair, expected):
    assert change(kind, *pair) == expected


@given(st.text(st.characters(codec="utf-8")), st.text(), st.sampled_from(sorted(CHANGES)), st.integers(0, 9))
def test_any_text_can_be_changed_always_in_the_same_way(source, target, kind, seed):
    assert change(kind, source, target, seed) == change(kind, source, target, seed)


@given(st.sampled_from(PAIRS), st.integers(0, 1000))
def test_a_typing_error_is_one_edit_of_letters_and_insertions_are_the_same_on_both_sides(pair, seed):
    source, target = change("typos", *pair, seed)
    same = len([*zip(*(reversed(text) for text in (source, pair[0])), strict=False)])
    prefix = next((at for at in range(same) if source[at] != pair[0][at]), same)
    suffix = next((at for at in range(same - prefix) if source[-1 - at] != pair[0][-1 - at]), same - prefix)
    assert target == pair[1] and 0 < len(source) - prefix - suffix + 1 <= 3 and abs(len(source) - len(pair[0])) <= 1
    for kind in ("emoji", "numbers"):
        added = [new.replace(old, "") for new, old in zip(change(kind, *pair, seed), pair, strict=True)]
        assert added[0] == added[1] and added[0].strip() and not added[0].strip().isalpha()


@pytest.mark.parametrize(("name", "kind"), [("surface.UpperCase", "upper"), ("surface.TitleCase", "title"),
                                            ("punctuation.RemoveEndPunctuation", "punctuation")])  # fmt: skip
def test_as_opustrainer_does(name, kind):
    """Ours also begins words behind brackets and quotes with a capital, keeps spaces, and leaves commas at an end.

    Its noise is whole lines without the sentence, emoji or words of another script, the same on both sides.
    """
    module, _, modifier = name.partition(".")
    modifiers = pytest.importorskip(f"opustrainer.modifiers.{module}", reason=NEEDED)
    more = "Well...\tNun.|Nun ….\tSo.|is it?\tist es?|a b\tc d.|a  .\tb .|gut!?\tgut!|(A) “B”.\t(A) „B“."
    lines = [*map("\t".join, PAIRS), *more.split("|")]
    theirs = list(getattr(modifiers, f"{modifier}Modifier")(1.0)(lines))
    ours = ["\t".join(change(kind, *line.split("\t"))) for line in lines]
    differing = [line for line, one, other in zip(lines, ours, theirs, strict=True) if one.split() != other.split()]
    assert differing == []


def test_typing_errors_are_some_of_opustrainers():
    """Which makes up to nine in a sentence, of any character, spaces among them, and of keys above and below."""
    modifiers = pytest.importorskip("opustrainer.modifiers.typos", reason=NEEDED)
    random.seed(1)
    kinds = ("char_swap", "missing_char", "repeated_char", "nearby_char")
    theirs = [set(modifiers.TypoModifier(1.0, **{kind: 1.0})(["house\tHaus"] * 1000)) for kind in kinds]
    ours = {"\t".join(change("typos", "house", "Haus", seed)) for seed in range(300)}
    assert ours <= set().union(*theirs) and all(lines & ours for lines in theirs)


@pytest.fixture(scope="module")
def tokens():
    tokenizer = train_tokenizer((side for pair in PAIRS for side in pair), vocab_size=500)
    batch = dict(zip(("source", "target"), map(list, zip(*PAIRS, strict=True)), strict=True))
    columns = pair_encoder(tokenizer, 100, None)(batch)
    pairs = zip(columns["input_ids"], columns["labels"], strict=True)
    return tokenizer, [{"input_ids": source, "labels": target} for source, target in pairs]


def texts_of(tokenizer, rows):
    sides = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    return list(zip(*(tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in sides), strict=True))


def test_pairs_are_changed_by_their_number_alone(tokens):
    """So by seed, epoch and pair: in any batch, process and worker, and again on a resume."""
    tokenizer, rows = tokens
    shares = {"upper": 0.2, "typos": 0.3}
    pairs = AugmentedPairs(rows, tokenizer, shares, seed=4)
    numbers = list(range(2 * len(rows)))
    texts = texts_of(tokenizer, pairs.__getitems__(numbers))
    for number, text in zip(numbers, texts, strict=True):
        assert text == (choose_change(shares, 4, number) or (lambda *pair: pair))(*PAIRS[number % len(PAIRS)])
    epochs = texts[: len(rows)], texts[len(rows) :]
    counts = [sum(text != pair for text, pair in zip(epoch, PAIRS, strict=True)) for epoch in epochs]
    assert texts_of(tokenizer, pairs.__getitems__(range(-len(rows), 0))) == PAIRS  # before the changes start
    assert epochs[0] != epochs[1] and all(100 < count < 200 for count in counts)  # 150 of 300, in three deviations
    arrays = [{name: np.array(ids, np.uint16) for name, ids in row.items()} for row in rows]  # as of prepared data
    copy = pickle.loads(pickle.dumps(AugmentedPairs(arrays, tokenizer, shares, seed=4)))
    assert texts_of(tokenizer, copy.__getitems__(numbers[::-7])) == texts[::-7]


def test_a_batch_keeps_its_limits_and_what_is_not_text_stays(tokens):
    tokenizer, rows = tokens
    pairs = AugmentedPairs(rows, tokenizer, {"repeat": 1.0})
    longest = max(len(ids) for row in rows for ids in row.values())
    tokens = sum(len(row["labels"]) for row in rows[:50]) + 40
    for limits in ((longest, 10**6, 10**6), (100, tokens, 10**6), (100, 10**6, 50 * (longest + 3))):
        pairs.limits = limits
        batch = pairs.__getitems__(range(50))
        lengths = np.array([[len(ids) for ids in row.values()] for row in batch])
        sizes = lengths.max(), lengths.sum(axis=0).max(), 50 * lengths.max()
        assert all(np.array(sizes) <= limits) and 0 < sum(a != b for a, b in zip(batch, rows, strict=False)) < 50
    split = [{"input_ids": [5, 2, 5, 2], "labels": [5, 2]}]  # no text is encoded so
    assert AugmentedPairs(split, tokenizer, {"upper": 1.0}).__getitems__([0]) == split


def test_numbers_of_pairs_count_on_from_epoch_to_epoch():
    lengths = [list(range(2, 30))] * 2
    plain, counting = (TokenBatchSampler(*lengths, 60, counts_from=step) for step in (None, 0))
    later = TokenBatchSampler(*lengths, 60, counts_from=3 * len(plain) + 2)
    for epoch in (0, 3):
        for sampler in (plain, counting, later):
            sampler.set_epoch(epoch)
        assert [[28 * epoch + index for index in batch] for batch in plain] == list(counting)
        start = len(plain) if epoch == 0 else 2  # batches before it have negative numbers, by which no pair is changed
        assert [[index - 28 for index in batch] for batch in plain][:start] == list(later)[:start]
        assert list(counting)[start:] == list(later)[start:]
    assert later.statistics() == counting.statistics() == plain.statistics()


@given(st.integers(8, 300), st.integers(0, 9), st.sampled_from([1, 2]), st.floats(0, 0.3), st.booleans())
def test_batches_of_changed_pairs_are_whole_and_within_their_limits(pairs, seed, parts, share, is_in_mid_epoch):
    random = np.random.default_rng(seed)
    lengths = random.integers(5, 60, (2, pairs))
    changed = [lengths * np.where((random.random(pairs) < share) & (lengths < 30).all(axis=0), 2, 1) for _ in range(3)]
    plain = TokenBatchSampler(*lengths, 500, parts, seed, 0)
    start = len(plain) // parts + is_in_mid_epoch
    sampler = TokenBatchSampler(*lengths, 500, parts, seed, start, changed.__getitem__)
    for epoch in range(3):
        plain.set_epoch(epoch)
        sampler.set_epoch(epoch)
        batches, usual = list(sampler), list(plain)
        assert len(batches) == len(sampler) == len(usual) and all(batches)
        numbers = [
            number + pairs * (epoch + 1 if epoch * len(plain) + place < start * parts else 0)
            for place, batch in enumerate(batches)
            for number in batch
        ]
        assert sorted(numbers) == [*range(epoch * pairs, (epoch + 1) * pairs)]
        most = max(changed[epoch][:, np.array(batch) % pairs].sum(axis=1).max() for batch in batches)
        is_usual = [[number % pairs for number in batch] for batch in batches + usual]
        is_usual = is_usual[: len(usual)] == is_usual[len(usual) :]
        assert is_usual or most <= (ROOM * 500 + (parts - 1) * lengths.max()) / parts


def test_pairs_that_a_change_makes_longer_are_in_batches_of_their_new_length():
    """So that none is kept from its change by the limits of a batch, and little is padded."""
    texts, shares = generate_corpus(4000, 10, 10).train, {"upper": 0.07, "repeat": 0.02, "emoji": 0.05}
    changes = [choose_change(shares, 3, number) for number in range(len(texts))]
    told = [change(*pair) if change else pair for change, pair in zip(changes, texts, strict=True)]
    tokenizer = train_tokenizer((side for pair in told for side in pair), vocab_size=1000)
    batch = dict(zip(("source", "target"), map(list, zip(*texts, strict=True)), strict=True))
    columns = {name: pair_encoder(tokenizer, 100, None)(batch)[name] for name in ("input_ids", "labels")}
    rows = [dict(zip(columns, sides, strict=True)) for sides in zip(*columns.values(), strict=True)]
    lengths = [np.array([*map(len, column)]) for column in columns.values()]
    pairs, longest = AugmentedPairs(rows, tokenizer, shares, 3), max(map(max, lengths))
    kept, padding = [], []
    for changed_lengths in (None, pairs.changed_lengths):
        sampler = TokenBatchSampler(*lengths, 1000, 1, 0, 0, changed_lengths)
        sampler.set_epoch(1)
        for limits in ((longest, math.inf, math.inf), (longest, ROOM * 1000, MOST_PADDED * ROOM * 1000)):
            pairs.limits = limits
            batches = [(numbers, pairs.__getitems__(numbers)) for numbers in sampler]
            same = [one == rows[number % 4000] for ids, new in batches for number, one in zip(ids, new, strict=True)]
            kept.append(4000 - sum(same))
        sizes = [[len(row["labels"]) for row in new] for _, new in batches]
        padding.append(1 - sum(map(sum, sizes)) / sum(max(size) * len(size) for size in sizes))
    assert kept[1] < 0.5 * kept[0] and kept[3] == kept[2]
    assert padding[1] < 0.4 * padding[0]
