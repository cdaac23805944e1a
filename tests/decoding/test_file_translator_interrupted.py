"""`vaswani translate` on files: killed and resumed, interrupted, and on a full disk."""

import os
import random
import signal
import sys
import time

import pytest
import translating
from children import limit_files, run_in_child, wait_for
from translating import LINES, OPTIONS

from vaswani_transformer.cli.main import main
from vaswani_transformer.decoding.output import notes_path
from vaswani_transformer.decoding.translator import Translator

model, source, expected = translating.model, translating.source, translating.expected

DISK = 690  # bytes of a full one


@pytest.fixture(autouse=True)
def slow_windows(monkeypatch):
    """Every window takes a moment longer, so that there is time to kill."""
    translate = Translator.translate_prepared

    def wait(self, prepared, progress=None):
        time.sleep(0.03)
        return translate(self, prepared, progress)

    monkeypatch.setattr(Translator, "translate_prepared", wait)


@pytest.fixture
def command(model, source):
    return ["translate", model, "--input", source, *OPTIONS]


def lines_of(path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def started(forked, words, output, lines) -> int | None:
    """The process id of a command whose output has so many lines by now; None if it has ended before."""
    child = forked.start(*words)

    def has_ended():
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    wait_for(lambda: has_ended() or lines_of(output) >= lines)
    return None if has_ended() else child


def test_a_bad_line_of_standard_input_loses_nothing(forked, model, expected, tmp_path):
    (tmp_path / "in").write_bytes(b"\n".join(line.encode() for line in LINES[:10]) + b"\n\xff\nA dog.\n")

    def translate():
        with (tmp_path / "in").open() as sys.stdin:
            return main(["translate", str(model), *OPTIONS])

    done = forked.run(translate)
    assert done.status == 2 and "standard input, line 11" in done.err
    assert "Traceback" not in done.err and done.out.count("\n") == 10
    # The window that was cut short has batches of its own: whole windows are the same to the byte.
    assert done.out.split("\n")[:7] == expected.decode().split("\n")[:7]


def test_killed_at_any_moment_it_resumes_to_the_same_bytes(forked, command, expected, tmp_path):
    output, chance = tmp_path / "out", random.Random(0)
    command += ["--output", output, "--resume"]
    for target in (0, 30, 80):
        child = started(forked, command, output, target)
        assert child is not None
        time.sleep(chance.random() * 0.06)
        os.kill(child, signal.SIGKILL)
        forked.wait()
        assert lines_of(output) < len(LINES)
        if notes_path(output).exists():  # as a kill while writing would leave it
            with output.open("ab") as file:
                file.write("Ein hälf".encode()[:-2])
    done = forked.vaswani(*command)
    assert done.status == 0, done.err
    assert output.read_bytes() == expected and not notes_path(output).exists()


def test_ctrl_c_leaves_whole_lines_and_prints_how_to_resume(forked, command, expected, tmp_path):
    output = tmp_path / "out"
    os.kill(started(forked, [*command, "--output", output], output, 30), signal.SIGINT)
    done = forked.wait()
    assert done.status == 130 and "--resume" in done.err and "Traceback" not in done.err
    text = output.read_bytes()
    assert text.endswith(b"\n") and expected.startswith(text)
    assert forked.vaswani(*command, "--output", output, "--resume").status == 0
    assert output.read_bytes() == expected


def test_a_full_disk_costs_no_finished_line(forked, command, expected, tmp_path):
    output = tmp_path / "out"
    assert expected[DISK - 1 : DISK] != b"\n"  # it is full in the middle of a line
    status, error = run_in_child([*command, "--output", output], tmp_path, lambda: limit_files(DISK))
    assert status == 1 and "error: " in error
    text = output.read_bytes()
    assert 0 < len(text) <= DISK and expected.startswith(text)
    assert forked.vaswani(*command, "--output", output, "--resume").status == 0
    assert output.read_bytes() == expected
