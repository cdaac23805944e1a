"""`vaswani translate` on files: killed and resumed, and on a full disk."""

import json
import os
import subprocess
import sys

import forked_translations
import pytest
import translating
from conftest import ROOT
from forked_translations import DISK
from translating import LINES

from vaswani_transformer.decoding.output import notes_path

model = translating.model
source = translating.source
expected = translating.expected


@pytest.fixture(scope="module")
def forked(model, source, tmp_path_factory, expected):
    """What a script saw that forked the command many times."""
    folder = tmp_path_factory.mktemp("forked")
    done = subprocess.run(
        [sys.executable, forked_translations.__file__, str(folder), str(model), str(source)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
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
