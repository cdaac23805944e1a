"""Ctrl-C while a command's libraries are imported: one line and exit status 130; other programs keep their own ways."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vaswani_transformer.starting import is_command

ROOT = Path(__file__).resolve().parents[1]
# Run by the interpreter before all else: sends Ctrl-C to its own process when a module is looked for, or at its end.
# The exception is lost, as it is where it comes while a library's object is deleted.
CUSTOMIZE = """
import atexit, os, signal, sys, time

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == os.environ["MOMENT"]:
            try:
                interrupt()
            except KeyboardInterrupt:
                print("lost", flush=True)
                os._exit(3)

sys.meta_path.insert(0, Finder)
if os.environ["MOMENT"] == "the end":
    atexit.register(interrupt)
"""
SCRIPT = "import sys\nfrom vaswani_transformer.cli.main import main\nsys.exit(main())\n"


@pytest.fixture
def interrupted(tmp_path):
    """Runs Python with Ctrl-C at a moment: the import of a module, or the end."""
    (tmp_path / "sitecustomize.py").write_text(CUSTOMIZE)

    def run(moment, *words, **environment):
        paths = os.pathsep.join([str(tmp_path), str(ROOT)])
        environment = os.environ | {"MOMENT": moment, "PYTHONPATH": paths, "PYTHONUNBUFFERED": ""} | environment
        # An ignored Ctrl-C, as of a job in the background, would be inherited.
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.run(
                [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=120, env=environment
            )
        finally:
            signal.signal(signal.SIGINT, previous)

    return run


@pytest.mark.parametrize(
    "words", [["-m", "vaswani_transformer"], ["-u", "-m", "vaswani_transformer.cli.main"], ["SCRIPT"]]
)
def test_an_interrupted_start_is_one_line(interrupted, tmp_path, words):
    (tmp_path / "vaswani").write_text(SCRIPT)
    words = [tmp_path / "vaswani" if word == "SCRIPT" else word for word in words]
    done = interrupted("transformers", *words, "train", "small")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_of_several_processes_one_says_so(interrupted):
    done = interrupted("transformers", "-m", "vaswani_transformer", "train", "small", RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stderr) == (130, "")


def test_the_commands_own_imports_count_as_its_start(interrupted):
    done = interrupted("vaswani_transformer.training.run", "-m", "vaswani_transformer", "train", "no-such-recipe")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_an_interrupted_end_shows_no_traceback(interrupted):
    done = interrupted("the end", "-m", "vaswani_transformer", "--version")
    assert done.returncode == -signal.SIGINT
    assert done.stdout.startswith("vaswani_transformer ") and done.stderr == ""


def test_other_programs_get_their_exception(interrupted):
    done = interrupted("transformers", "-c", "import vaswani_transformer")
    assert (done.returncode, done.stdout) == (3, "lost\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python -m vaswani_transformer train small", True),
        ("python -u -X importtime -W ignore -m vaswani_transformer", True),
        ("python /some/bin/vaswani translate m", True),
        ("python -m pytest vaswani_transformer", False),
        ("python -m vaswani_transformer.data.synthetic", False),
        ("python train.py -m vaswani_transformer", False),
        ("python -c spawn_main() vaswani", False),
        ("python", False),
    ],
)
def test_which_processes_are_the_command(line, expected):
    assert is_command(line.split()) is expected
