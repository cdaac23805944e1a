"""The stress test, of a translator whose answers are known."""

from types import SimpleNamespace

import pytest
from sacrebleu.metrics import CHRF

from vaswani_transformer.data.augmentation import CHANGES
from vaswani_transformer.decoding.stress import stress
from vaswani_transformer.decoding.translator import Hypothesis

PAIRS = [("The dog sees a cat, twice.", "Der Hund sieht eine Katze, zweimal."), ("Yes!", "Ja!"), ("Berlin", "Berlin")]
KNOWN = dict(PAIRS)


def answer(source):
    """Copies what is in capitals, loses emoji, keeps numbers and what is said twice, takes a word for a sentence."""
    half = source[: len(source) // 2]
    if source.isupper():
        return source
    if f"{half} {half}" == source:
        return f"{answer(half)} {answer(half)}"
    words = source.split()
    for number in filter(str.isdigit, (words[0], words[-1])):
        rest = source.replace(number, "").strip()
        return source.replace(rest, answer(rest))
    rest = source.encode("ascii", "ignore").decode().strip()
    return KNOWN.get(rest, "" if rest == "Yes" else "Das ist ein langer Satz über gar nichts, und noch einer dazu.")


@pytest.fixture(scope="module")
def rows():
    counted = []

    def hypotheses(sources, progress):
        progress.update(len(sources))
        return ([Hypothesis(answer(source))] for source in sources)

    clean, bar = [Hypothesis(answer(source)) for source, _ in PAIRS], SimpleNamespace(update=counted.append)
    found = dict(stress(SimpleNamespace(hypotheses=hypotheses), PAIRS, clean, bar))
    assert sum(counted) == len(PAIRS) * len(CHANGES)  # a bar of so many comes to its end
    return found


def test_every_change_that_a_pair_has_a_place_for_is_a_row(rows):
    assert list(rows) == ["clean", *CHANGES]
    counts = {kind: row["sentences"] for kind, row in rows.items()}
    assert counts == dict.fromkeys(rows, 3) | {"title": 1, "punctuation": 2, "typos": 2, "fragments": 1}


def test_scores_are_of_the_changed_sentences_against_references_that_are_changed_alike(rows):
    assert rows["clean"]["chrf"] == rows["clean"]["chrf_kept"] == pytest.approx(100)
    copied, references = ([side[at].upper() for side in PAIRS] for at in (0, 1))
    assert rows["upper"]["chrf"] == pytest.approx(CHRF().corpus_score(copied, [references]).score)
    assert rows["numbers"]["chrf"] == rows["repeat"]["chrf"] == pytest.approx(100)
    assert rows["word"]["chrf"] is rows["word"]["chrf_kept"] is None


def test_outputs_that_copy_run_on_or_are_empty_and_what_is_returned(rows):
    # "BERLIN" is no copy: its reference is the same. One word of three is Berlin, the others are "Yes" and another.
    assert [rows["upper"][name] for name in ("copies", "runs_on", "empty")] == [2, 0, 0]
    assert [rows["word"][name] for name in ("copies", "runs_on", "empty")] == [1, 1, 1]
    assert [rows["punctuation"][name] for name in ("copies", "empty")] == [0, 1]
    returned = {kind: row["returned"] for kind, row in rows.items() if row["returned"] is not None}
    assert returned == {"emoji": 0, "numbers": 100, "repeat": 100}


def test_what_is_returned_of_text_without_spaces_and_behind_a_language_code():
    def hypotheses(sources, progress):
        assert all(map(str.strip, sources))  # no fragment is nothing
        return ([Hypothesis("你好。" * text.count("Hi") + "".join(filter(str.isdigit, text)))] for text in sources)

    clean = [Hypothesis("你好。")] * 4
    pairs = [("Hi", "你好。"), (">>zho<< Hi", "你好。"), ("5", "5"), (". Hi", ". 你好")]
    rows = dict(stress(SimpleNamespace(hypotheses=hypotheses), pairs, clean))
    assert rows["repeat"]["returned"] == rows["numbers"]["returned"] == 100
    assert next(stress(None, [("<2fr> A b.", "C.")], [Hypothesis("a b.")]))[1]["copies"] == 1
    digits = " ".join(map(str, range(100)))
    same = SimpleNamespace(hypotheses=lambda sources, progress: ([Hypothesis(digits)] for _ in sources))
    assert dict(stress(same, [(digits, digits)] * 9, [Hypothesis(digits)] * 9))["numbers"]["returned"] == 0


@pytest.mark.parametrize(
    ("output", "runs_on"),
    [
        (Hypothesis("ein Hund", repeats=True), 1),
        (Hypothesis("ein Hund und ein Hund und ein Hund und ein Hund und ein Hund"), 1),
        (Hypothesis("sehr, sehr, sehr, sehr gut"), 1),
        (Hypothesis("sehr sehr sehr gut"), 0),
    ],
)
def test_loops(output, runs_on):
    pairs = [("A dog that runs behind another dog", "Ein Hund")]
    [(_, row)] = [next(stress(None, pairs, [output]))]
    assert row["runs_on"] == runs_on


def test_a_reference_of_many_bytes_does_not_run_on():
    text = "".join(map(chr, range(0x1000, 0x1030)))  # Burmese
    assert next(stress(None, [("A long dog", text)], [Hypothesis(text)]))[1]["runs_on"] == 0
