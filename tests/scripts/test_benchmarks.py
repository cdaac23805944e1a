"""The benchmarks of training and generation: their figures from made-up measurements, and every contestant briefly."""

import os
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT

SCRIPTS = ROOT / "scripts" / "benchmarks"

# 100 target tokens and 300 positions a step, twenty steps a second; the first second is ten times as slow.
TRAINING = """
    import json, sys, time
    time.sleep(0.3)
    for step in range(1000):
        with open(sys.argv[1], "a") as file:
            file.write(json.dumps({"source_tokens": 50, "target_tokens": 100, "padding": 0.5}) + "\\n")
        time.sleep(0.05 if step > 1 else 0.5)
"""


@pytest.fixture
def process_clock(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import process_clock

    return process_clock


def test_the_clock_counts_what_was_trained_after_the_warm_up(tmp_path, process_clock):
    log = tmp_path / "log.jsonl"
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(TRAINING), str(log)])
    watched = process_clock.watch(process, log, warm_up=1.0, seconds=1.0)
    assert process.poll() is not None
    assert watched.target_tokens % 100 == 0
    assert watched.target_tokens == 2 * watched.source_tokens
    rates = watched.rates()
    # Never faster than the sleeps allow; slower where other programs have a share of the machine.
    assert 300 < rates["target tokens/s"] < 2050
    assert rates["padding"] == pytest.approx(0.5)
    assert rates["positions/s"] == pytest.approx(3 * rates["target tokens/s"])


def test_a_training_that_ends_by_itself_is_an_error(tmp_path, process_clock):
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="status 3"):
        process_clock.watch(process, tmp_path / "log.jsonl", warm_up=1.0, seconds=1.0)


SMALL = "--d-model 32 --d-ff 64 --heads 2 --layers 1 --vocab-size 400 --batch-tokens 512 --rounds 1 --threads 1"


def rows_of(script: str, options: str, *words, **environment: str) -> list[list[str]]:
    """The rows of the table that a script prints."""
    command = [sys.executable, str(SCRIPTS / script), *options.split(), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]


@pytest.mark.slow
def test_every_contestant_trains_and_the_table_is_whole(tmp_path):
    options = f"{SMALL} --pairs 600 --warm-up 0.3 --seconds 0.5 --variant=--no-fused-loss --folder"
    rows = rows_of("training.py", options, tmp_path)
    assert {len(row) for row in rows} == {len(rows[0])}
    values = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}
    assert len(values) == 7
    assert values["Marian, Seq2SeqTrainer"]["times Marian"] == "1.00"
    for row in values.values():
        assert float(row["target tokens/s"].replace(",", "")) > 0
        assert float(row["padding"].rstrip("%")) < 60


@pytest.mark.slow
def test_ours_by_the_clock_of_the_device(tmp_path):
    options = f"{SMALL} --pairs 300 --by device --warm-up-steps 1 --steps 2 --profiled-steps 1 --pictures"
    names = ["padded, eager", "without padding, eager"]
    rows = {row[0]: row for row in rows_of("training.py", options, tmp_path, "--only", *names)}
    assert all(float(rows[name][1].replace(",", "")) > 0 for name in names)
    assert rows[names[1]][4] == "0.0%"
    assert {path.name for path in tmp_path.iterdir()} == {
        f"model-{name}-eager.{kind}" for name in ("padded", "without-padding") for kind in ("png", "json.gz")
    }


@pytest.mark.slow
def test_text_in_text_out(tmp_path):
    options = "student-6-2 --sentences 3 --beams 2 --rounds 1 --target-length 5 --threads 2"
    rows = rows_of("generation.py", options, XDG_CACHE_HOME=str(tmp_path))[1:]
    assert [row[1] for row in rows] == ["float32", "int8", "CTranslate2 alone, int8"]
    assert all(float(row[2].replace(",", "")) > 0 for row in rows)
