"""`vaswani translate` on files: killed and resumed, and on a full disk."""

import json

import pytest
import translating
from forked_translations import DISK
from translating import LINES

from vaswani_transformer.decoding.output import notes_path

model = translating.model
source = translating.source
expected = translating.expected


@pytest.fixture(scope="module")
def left(model, source, tmp_path_factory, expected, forked):
    """What is left of the command, which was started many times: a folder, and what a script saw."""
    folder = tmp_path_factory.mktemp("forked")
    arguments = f"script.Path({str(folder)!r}), {str(model)!r}, {str(source)!r}"
    code = f"import forked_translations as script; script.fork_all({arguments})"
    done = forked.python(code, TOKENIZERS_PARALLELISM="false")
    assert done.status == 0, done.err
    return folder, json.loads((folder / "seen.json").read_text())


def test_a_bad_line_of_standard_input_loses_nothing(left, expected):
    _, seen = left
    assert seen["standard input"]["status"] == 2 and "standard input, line 11" in seen["standard input"]["error"]
    assert "Traceback" not in seen["standard input"]["error"] and seen["standard input"]["text"].count("\n") == 10
    # The window that was cut short has batches of its own: whole windows are the same to the byte.
    assert seen["standard input"]["text"].split("\n")[:7] == expected.decode().split("\n")[:7]


# Killed, interrupted, out of space; and resumed.


def test_killed_at_any_moment_it_resumes_to_the_same_bytes(left, expected):
    folder, seen = left
    assert len(seen["killed"]) >= 3 and all(lines < len(LINES) for lines in seen["killed"])
    assert (folder / "killed").read_bytes() == expected and not notes_path(folder / "killed").exists()


def test_killed_samples_resume_to_the_same_bytes(left):
    """Without a seed one is drawn, and kept in the notes for the next time."""
    folder, seen = left
    assert seen["killed sample"]
    assert (folder / "sample").read_bytes() == (folder / "whole sample").read_bytes()


def test_ctrl_c_leaves_whole_lines_and_prints_how_to_resume(left, expected):
    folder, seen = left
    assert seen["interrupted"]["status"] == 130 and seen["interrupted"]["text"].endswith("\n")
    assert expected.decode().startswith(seen["interrupted"]["text"])
    assert "--resume" in seen["interrupted"]["error"] and "Traceback" not in seen["interrupted"]["error"]
    assert (folder / "interrupted").read_bytes() == expected


def test_a_full_disk_costs_no_finished_line(left, expected):
    folder, seen = left
    assert expected[DISK - 1 : DISK] != b"\n"  # it is full in the middle of a line
    status, text, error = (seen["full"][name] for name in ("status", "text", "error"))
    assert status == 1 and 0 < len(text.encode()) <= DISK
    assert expected.decode().startswith(text) and "error: " in error
    assert (folder / "full").read_bytes() == expected
