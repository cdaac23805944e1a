"""Whatever lies in a file that a command reads: one line or a result, soon, in bounded memory, and all else untouched.

Each case is a copy of a small world in which one file is damaged, and a command that reads it, in a process of its own
with limits. The fast tests take a few cases, always the same ones. The slow ones search on: HOSTILE_EXAMPLES is the
number of cases for each file.
"""

import contextlib
import ctypes
import faulthandler
import hashlib
import json
import os
import re
import resource
import shutil
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from children import Children, Done, limit_files, limit_memory
from hostile_content import damaged
from hostile_targets import TARGETS, Target
from hostile_world import build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vaswani_transformer.cli.main import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")

EXAMPLES = int(os.environ.get("HOSTILE_EXAMPLES", "20"))
LONGEST_LINE = 2000  # characters
SECONDS = 30  # of the processor
PATIENCE = int(os.environ.get("HOSTILE_PATIENCE", "60"))  # seconds by the clock, which goes on while others compute
#: Progress, and what commands report on their way.
REPORTS = re.compile(r"^$|\d+%\||/s\]|^exporting ")


def _snapshot(folder: Path) -> dict[str, tuple]:
    """What lies in a folder, by path: kind, permissions, content."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        mode, content = path.lstat().st_mode, None
        if stat.S_ISLNK(mode):
            content = str(path.readlink())
        elif stat.S_ISREG(mode) and os.access(path, os.R_OK):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        entries[str(path.relative_to(folder))] = (mode, content)
    return entries


def drop_the_rights_of_root() -> None:
    """Make this process obey permissions, as those of other users do; the libraries stay readable.

    The user stays root, since the interpreter may lie where others cannot read, but without capabilities.
    """
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset")


def limited(words: list[str], folder: Path, privileged: bool) -> int:
    """Run a command in a folder within limits; returns its status, or prints where it hangs."""
    os.chdir(folder)
    if not privileged:
        drop_the_rights_of_root()
    limit_memory(2 << 30)
    limit_files(64 << 20)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    faulthandler.enable()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    return main(words)


class World:
    """The world, and commands that run in copies of it."""

    def __init__(self, folder: Path, forked: Children):
        self.whole, self.case, self.temporary = (folder / name for name in ("world", "case", "temporary"))
        self.case.mkdir()  # made where it is used: prepared pairs name the files that they were made of
        self.forked = forked
        done = forked.run(lambda: build(self.case))
        assert done.status == 0, done.err
        self.case.rename(self.whole)

    def content(self, target: Target) -> bytes:
        """The target's file as it should be."""
        return (self.whole / target.file).read_bytes()

    def run(self, target: Target, damage: Callable[[Path], object], privileged: bool = True) -> Done:
        """Run a target's command where its file has been damaged, and check what must hold in any case."""
        for folder in (self.case, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.whole, self.case)
        self.temporary.mkdir()
        damage(self.case / target.file)
        before = _snapshot(self.case)
        work = partial(limited, target.command.split(), self.case, privileged)
        done = self.forked.run(work, TMPDIR=str(self.temporary))
        self._check(target, done, before, _snapshot(self.case))
        return done

    def _check(self, target: Target, done: Done, before: dict, after: dict) -> None:
        _check_end(done)
        changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        outside = {path for path in changed if path.partition("/")[0] not in target.writes}
        assert not outside, f"changed {sorted(outside)[:5]}, status {done.status}: {done.err[-300:]}"
        lost = before.keys() - after.keys()
        assert not (done.status and lost), f"lost {sorted(lost)[:5]}, status {done.status}: {done.err[-300:]}"
        left = [path.name for path in self.temporary.iterdir()]
        assert not left, f"left in the folder of temporary files: {left}"


def _check_end(done: Done) -> None:
    assert done.status in (0, 1, 2), f"status {done.status}: {done.err[-3000:]}"
    assert "Traceback" not in done.err and "Warning" not in done.err, done.err[-3000:]
    lines = [line for line in re.split(r"[\r\n]", done.err) if not REPORTS.search(line)]
    errors = [line for line in lines if line.startswith("error: ")]
    if not done.status:
        assert not errors, done.err[-3000:]
        return
    assert len(errors) == 1 and errors[0] == lines[-1], done.err[-3000:]
    assert errors[0].isprintable() and len(errors[0]) <= LONGEST_LINE, errors[0][:3000]


@pytest.fixture(scope="module")
def world(tmp_path_factory, forked):
    return World(tmp_path_factory.mktemp("hostile"), forked)


def check_content(world: World, target: Target, content: bytes) -> None:
    """The command with this content: what is no JSON or YAML object, or no weights, must be refused."""
    done = world.run(target, lambda path: path.write_bytes(content))
    if not (target.tolerant or _may_be_meant(target.form, content, world.content(target))):
        assert done.status, f"took a {target.form} file that is none: {content[:200]!r}"


def _may_be_meant(form: str, content: bytes, whole: bytes) -> bool:
    """Whether a content is the whole file's, or of its form and so maybe harmless."""
    if form in ("json", "yaml"):
        read = json.loads if form == "json" else yaml.safe_load
        with contextlib.suppress(ValueError, RecursionError, yaml.YAMLError):
            value = read(content)
            return type(value) is type(read(whole)) or (form == "yaml" and value is None)  # empty: defaults
        return False
    if form == "safetensors":
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            if _tensors(content) == _tensors(whole):
                return True
    return content == whole or (len(content) == len(whole) and form != "text")  # a bit of a weight may be any


def _tensors(content: bytes) -> tuple[dict, int]:
    """Tensors by name, and the bytes behind them: metadata and the values of weights may be any."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header.pop("__metadata__", None)
    return header, len(content) - end


_HYPOTHESIS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=4, derandomize=True, **_HYPOTHESIS)
@given(data=st.data())
def test_random_content(world, data):
    target = data.draw(st.sampled_from(TARGETS))
    check_content(world, target, data.draw(damaged(target.form, world.content(target))))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_much_random_content(world, target):
    @settings(max_examples=EXAMPLES, **_HYPOTHESIS)
    @given(damaged(target.form, world.content(target)))
    def search(content):
        check_content(world, target, content)

    search()


@pytest.mark.slow
@pytest.mark.parametrize("target", {target.command: target for target in TARGETS}.values(), ids=str)
def test_the_commands_succeed_with_whole_files(world, target):
    assert world.run(target, Path.exists).status == 0


def _replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


#: What may lie in the place of a file.
PLACES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
    "folder": _replace(Path.mkdir),
    "pipe": _replace(os.mkfifo),
    "socket": _replace(lambda path: os.mknod(path, stat.S_IFSOCK | 0o600)),
    "link to nothing": _replace(lambda path: path.symlink_to("nothing")),
    "link to itself": _replace(lambda path: path.symlink_to(path)),
    "endless": _replace(lambda path: path.symlink_to("/dev/zero")),
    "unreadable": lambda path: path.chmod(0),
}


@pytest.mark.parametrize(
    ("target", "place"),
    [
        pytest.param(target, place, marks=() if number == 12 * at else pytest.mark.slow)
        for number, target in enumerate(TARGETS)
        for at, place in enumerate(PLACES)
    ],
    ids=str,
)
def test_something_else_in_the_place_of_a_file(world, target, place):
    if place == "pipe" and target.form in ("text", "gzip") and target.file in target.command.split():
        pytest.skip("text may come from a pipe, and is waited for")
    done = world.run(target, PLACES[place], privileged=place != "unreadable")
    is_default = target.form == "yaml" and place == "empty"  # a recipe of nothing but default values
    if not (target.tolerant or is_default) and place not in ("missing", "link to nothing"):
        assert done.status, f"took {place} in the place of {target.file}"


@pytest.mark.parametrize("name", ["\x1b[2J\x07", "a\nerror: b", "\u202egpj", "\udcff", "x" * 100_000])
def test_an_error_line_is_for_reading_only(capsys, name):
    assert main(["translate", f"no folder {name}", "words"]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.endswith("\n") and error[:-1].isprintable()
    assert len(error) <= LONGEST_LINE
