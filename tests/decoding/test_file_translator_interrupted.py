"""`vaswani translate` on files: killed and resumed, on a full disk, and by several processes."""

import json
import os
import subprocess
import sys

import forked_translations
import pytest
import translating
from conftest import ROOT
from forked_translations import DISK
from translating import LINES, OPTIONS

from vaswani_transformer.decoding.output import notes_path

model = translating.model
source = translating.source
expected = translating.expected


@pytest.fixture(scope="module")
def forked(model, source, tmp_path_factory, expected):
    """What a script saw that forked the command many times."""
    folder = tmp_path_factory.mktemp("forked")
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, forked_translations.__file__, str(folder), str(model), str(source)],
        env=environment | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True, text=True, timeout=240, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "seen.json").read_text())


def test_a_bad_line_of_standard_input_loses_nothing(forked, expected):
    _, seen = forked
    assert seen["standard input"]["status"] == 2 and "standard input, line 11" in seen["standard input"]["error"]
    assert "Traceback" not in seen["standard input"]["error"] and seen["standard input"]["text"].count("\n") == 10
    # The window that was cut short has batches of its own: whole windows are the same to the byte.
    assert seen["standard input"]["text"].split("\n")[:7] == expected.decode().split("\n")[:7]


# Killed, interrupted, out of space; and resumed.


def test_killed_at_any_moment_it_resumes_to_the_same_bytes(forked, expected):
    folder, seen = forked
    assert len(seen["killed"]) >= 3 and all(lines < len(LINES) for lines in seen["killed"])
    assert (folder / "killed").read_bytes() == expected and not notes_path(folder / "killed").exists()


def test_killed_samples_resume_to_the_same_bytes(forked):
    """Without a seed one is drawn, and kept in the notes for the next time."""
    folder, seen = forked
    assert seen["killed sample"]
    assert (folder / "sample").read_bytes() == (folder / "whole sample").read_bytes()


def test_ctrl_c_leaves_whole_lines_and_prints_how_to_resume(forked, expected):
    folder, seen = forked
    assert seen["interrupted"]["status"] == 130 and seen["interrupted"]["text"].endswith("\n")
    assert expected.decode().startswith(seen["interrupted"]["text"])
    assert "--resume" in seen["interrupted"]["error"] and "Traceback" not in seen["interrupted"]["error"]
    assert (folder / "interrupted").read_bytes() == expected


def test_a_full_disk_leaves_whole_lines(forked, expected):
    folder, seen = forked
    assert expected[DISK - 1 : DISK] != b"\n"  # it is full in the middle of a line
    status, text, error = (seen["full"][name] for name in ("status", "text", "error"))
    assert status == 1 and text.endswith("\n") and 0 < len(text.encode()) < DISK
    assert expected.decode().startswith(text) and "error: " in error
    assert (folder / "full").read_bytes() == expected


# Several processes.


def test_several_processes_write_what_one_writes(forked, expected):
    folder, seen = forked
    assert seen["several"]["statuses"] == [0, 0, 0], seen
    assert (folder / "several").read_bytes() == expected and not notes_path(folder / "several").exists()
    shares = seen["several"]["windows"]
    assert sum(shares) == -(-len(LINES) // 7) and max(shares) - min(shares) <= 1


def test_a_process_that_dies_ends_the_others(forked, expected):
    folder, seen = forked
    assert seen["lost"]["statuses"][0] not in (0, None) and seen["lost"]["seconds"] < 30
    assert "unfinished: the same command with --resume" in seen["lost"]["error"]
    assert (folder / "lost").read_bytes() == expected  # resumed, by one process


def test_a_mistake_that_another_process_finds_is_reported_once(forked):
    folder, seen = forked
    assert seen["mistake"]["statuses"][0] == 2
    assert seen["mistake"]["error"].count("error: ") == 1 and "line 10" in seen["mistake"]["error"]
    assert (folder / "mistake").read_text().count("\n") == 9


@pytest.mark.slow
def test_launched_by_accelerate(model, source, expected, tmp_path):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "scripts/accelerate/cpu.yaml"]
    command = ["-m", "vaswani_transformer", "translate", model, "--input", source, "--output", tmp_path / "out"]
    command += OPTIONS
    done = subprocess.run([*launcher, *map(str, command)], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").read_bytes() == expected
