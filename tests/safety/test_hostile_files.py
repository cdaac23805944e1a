"""Whatever lies in a file that a command reads: one line or a result, soon, in bounded memory, and all else untouched.

Each case is a copy of a small world in which one file is damaged, and a command that reads it, in a process of its own
with limits. The fast tests take a few cases of each file and are always the same ones; the slow test searches on, as
long as `HOSTILE_EXAMPLES` (a number of cases for each file) says.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import socket
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from conftest import TESTS
from forked_commands import Done, ForkedCommands
from hostile_content import damaged
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from limited_commands import CHANGES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")

_PACKAGE = "vaswani_transformer."
MODULES = [
    "attention.heads", "data.prepare", "decoding.streaming", "parsing.parser", "experiments.table4",
    "evaluation.metrics", "training.averaging", "export.exporting",
]  # fmt: skip
FORMATS = ("ctranslate2",) if importlib.util.find_spec("ctranslate2") else ()
EXAMPLES = int(os.environ.get("HOSTILE_EXAMPLES", "50"))
LONGEST_LINE = 2000
_PROGRESS = re.compile(r"^$|\d+%\||\d+\.?\d*( \w+)?/s\]|^exporting ")


@dataclass(frozen=True)
class Target:
    """A file and a command that reads it.

    `may_write` names what the command writes, `tolerant` says why a damaged file may end well, `until_fixed` what is
    known to fail today.
    """

    file: str
    form: str
    command: str
    may_write: tuple[str, ...] = ()
    tolerant: str = ""
    until_fixed: str = ""

    @property
    def words(self) -> list[str]:
        return self.command.split()

    def parts(self, world: Path) -> set[str]:
        """The files and folders of the world that take part."""
        parts = {word.partition("/")[0] for word in (self.file, *self.words)}
        if parts & {"recipe.yaml", "half", "stopped"}:
            parts |= {"text", "pairs"}
        if "out.txt" in parts:
            parts.add("out.txt.unfinished.json")
        return {part for part in parts if part and (world / part).exists()}


TRANSLATE, RESUME = "translate model words", "train recipe.yaml --output stopped --quiet"
IGNORED = "the command does not need what stands in it"
TEXT = "any text is one that may be meant"
STATE = "stopped/checkpoints/checkpoint-3"

TARGETS = [
    # A model.
    Target("model/config.json", "json", TRANSLATE),
    Target("model/config.json", "json", "push model me/it --dry-run"),
    Target("model/config.json", "json", "export model --output new", ("new",)),
    Target("model/generation_config.json", "json", TRANSLATE),
    Target("model/generation_config.json", "json", "push model me/it --dry-run"),
    Target("model/tokenizer.json", "json", TRANSLATE),
    Target("model/tokenizer_config.json", "json", TRANSLATE),
    Target("model/tokenizer_config.json", "json", "push model me/it --dry-run"),
    Target("model/model.safetensors", "safetensors", TRANSLATE),
    Target("model/model.safetensors", "safetensors", "evaluate model --source in.txt --reference reference.txt"),
    Target("shards/model.safetensors.index.json", "json", "translate shards words"),
    Target("shards/model.safetensors.index.json", "json", "average shards model --output new", ("new",)),
    Target("pickled/pytorch_model.bin", "bytes", "convert pickled", ("pickled",)),
    Target("model/recipe.yaml", "yaml", "push model me/it --dry-run", tolerant=IGNORED),
    Target("model/training_log.jsonl", "lines of json", "push model me/it --dry-run", tolerant=IGNORED),
    # What goes onto a card.
    Target("scores.json", "json", "push model me/it --dry-run --evaluation scores.json"),
    Target("card.md", "text", "push model me/it --dry-run --card card.md", tolerant=TEXT),
    # A recipe.
    Target("recipe.yaml", "yaml", "train recipe.yaml --output new --dry-run"),
    Target("recipe.yaml", "yaml", "prepare recipe.yaml --output new --quiet", ("new",)),
    # A run that is resumed.
    Target("stopped/recipe.yaml", "yaml", RESUME, ("stopped",), tolerant=IGNORED),
    Target("stopped/training_log.jsonl", "lines of json", RESUME, ("stopped",), tolerant="it is a record"),
    Target("stopped/checkpoints/contents.json", "json", RESUME, ("stopped",)),
    Target("stopped/checkpoints/tokenizer/tokenizer.json", "json", RESUME, ("stopped",), tolerant=IGNORED),
    *(
        Target(f"{STATE}/{name}", form, RESUME, ("stopped",), tolerant="an incomplete checkpoint is not resumed")
        for name, form in {
            "checkpoint.json": "json", "trainer_state.json": "json", "config.json": "json", "optimizer.pt": "bytes",
            "scheduler.pt": "bytes", "rng_state.pth": "bytes", "training_args.bin": "bytes",
            "model.safetensors": "safetensors",
        }.items()
    ),  # fmt: skip
    # Checkpoints that are averaged.
    Target("run/checkpoints/checkpoint-4/checkpoint.json", "json", "average run --output new --last 1", ("new",)),
    Target("run/checkpoints/checkpoint-4/trainer_state.json", "json", "average run --output new --best 1", ("new",)),
    Target("run/checkpoints/checkpoint-4/config.json", "json", "average run --output new --last 1", ("new",)),
    Target("run/checkpoints/checkpoint-4/model.safetensors", "safetensors", "average run --output new --last 1", ("new",)),
    # Prepared pairs.
    Target("prepared/manifest.json", "json", "prepare --check prepared"),
    Target("prepared/manifest.json", "json", "train recipe.yaml --prepared prepared --output new --dry-run"),
    Target("prepared/train-00000.arrow", "bytes", "prepare --check prepared"),
    Target("prepared/train-00000.arrow", "bytes", "train recipe.yaml --prepared prepared --output new --quiet", ("new",)),
    Target("prepared/train.lengths.npy", "bytes", "train recipe.yaml --prepared prepared --output new --quiet", ("new",)),
    Target("prepared/tokenizer/tokenizer.json", "json", "prepare --check prepared"),
    Target("half/preparation.json", "json", "prepare recipe.yaml --output half --quiet", ("half",)),
    Target("half/train-00000.part", "json", "prepare recipe.yaml --output half --quiet", ("half",), tolerant="made anew"),
    Target("half/tokenizer/tokenizer.json", "json", "prepare recipe.yaml --output half --quiet", ("half",)),
    # Text.
    Target("text/train.en", "text", "prepare recipe.yaml --output new --quiet", ("new",), tolerant=TEXT),
    *(
        Target(
            f"pairs/pairs.{ending}", form,
            f"prepare recipe.yaml --output new --quiet --train-data pairs/pairs.{ending} --train-source none"
            " --train-target none --data-dir none --validation-source none --validation-target none --validation-size 5",
            ("new",), tolerant=TEXT,
        )
        for ending, form in {"tsv": "text", "csv": "text", "jsonl": "lines of json", "parquet": "bytes"}.items()
    ),  # fmt: skip
    Target("in.txt", "text", "translate model --input in.txt --output new.txt", ("new.txt",), tolerant=TEXT),
    Target("in.txt.gz", "gzip", "translate model --input in.txt.gz --output new.txt", ("new.txt",), tolerant=TEXT),
    Target("prefix.txt", "text", "translate model --input in.txt --prefix prefix.txt", tolerant=TEXT),
    Target("in.txt", "text", "score model --source in.txt --target reference.txt", tolerant=TEXT),
    Target("reference.txt", "text", "evaluate model --source in.txt --reference reference.txt", tolerant=TEXT),
    Target("in.txt", "text", "tokenizer in.txt --vocab-size 300 --output new", ("new",), tolerant=TEXT),
    # An output that is continued.
    Target("out.txt.unfinished.json", "json", "translate model --input in.txt --output out.txt --resume", ("out.txt", "out.txt.unfinished.json")),
    Target("out.txt", "text", "translate model --input in.txt --output out.txt --resume", ("out.txt", "out.txt.unfinished.json"), tolerant=TEXT),
    # Attention.
    Target("alignments.txt", "text", "attention model --report in.txt --target reference.txt --alignments alignments.txt --output new", ("new",), tolerant=TEXT),
    # Trees.
    Target("gold.trees", "text", "parse evaluate --trees gold.trees --predicted predicted.trees", tolerant=TEXT),
    Target("predicted.trees", "text", "parse evaluate --trees gold.trees --predicted predicted.trees", tolerant=TEXT),
    Target("gold.trees", "text", "parse evaluate parser --trees gold.trees", tolerant=TEXT),
    Target("words.txt", "text", "parse predict parser --input words.txt", tolerant=TEXT),
    Target("parser/tokenizer.json", "json", "parse predict parser --input words.txt"),
    Target("parser/generation_config.json", "json", "parse predict parser --input words.txt"),
    # Experiments.
    Target("runs/table4/laptop/right-branching/result.json", "json", "experiment table4 --report --output runs", ("runs",)),
    Target("runs/table4/laptop/right-branching/recipe.yaml", "yaml", "experiment table4 --report --output runs", ("runs",), tolerant=IGNORED),
    # Exports.
    Target("exported/export.json", "json", "translate exported words"),
    Target("exported/config.json", "json", "translate exported words"),
    Target("exported/shared_vocabulary.json", "json", "translate exported words"),
    Target("exported/generation_config.json", "json", "translate exported words"),
    Target("exported/tokenizer.json", "json", "score exported --source in.txt --target reference.txt"),
    Target("exported/model.bin", "bytes", "translate exported words"),
]  # fmt: skip
TARGETS = [target for target in TARGETS if FORMATS or "exported" not in target.command]
COMMANDS = list({target.command: target for target in TARGETS}.values())


def _snapshot(folder: Path) -> dict[str, tuple]:
    """What lies in a folder, by path: kind, permissions, content."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        mode, content = path.lstat().st_mode, None
        if stat.S_ISREG(mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(mode):
            content = str(path.readlink())
        entries[str(path.relative_to(folder))] = (mode, content)
    return entries


class World:
    """The world, and commands that run in copies of it."""

    def __init__(self, folder: Path):
        self.folder, self.whole, self.case = folder, folder / "world", folder / "case"
        (folder / "home").mkdir()
        self.case.mkdir()  # made where it is used: prepared pairs name the files they are made of
        paths = [str(TESTS.parent), str(TESTS), str(TESTS / "helpers")]
        modules = [_PACKAGE + name for name in (*MODULES, *("export.ctranslate2_model" for _ in FORMATS))]
        self.client = ForkedCommands(folder / "home", modules, PYTHONPATH=os.pathsep.join(paths), HF_HUB_OFFLINE="1")
        done = self.client.python(f"import hostile_world; hostile_world.build({str(self.case)!r}, {FORMATS})")
        assert done.status == 0, done.err
        self.case.rename(self.whole)
        self.failures: list[str] = []

    def run(self, target: Target, damage: Callable[[Path], None] | None, **options) -> Done:
        """Run a target's command where its file has been damaged, and check all that must hold in any case."""
        shutil.rmtree(self.case, ignore_errors=True)
        self.case.mkdir()
        for part in target.parts(self.whole):
            source = self.whole / part
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, self.case / part)
        (self.folder / "temporary").mkdir(exist_ok=True)
        if damage is not None:
            damage(self.case / target.file)
        before = _snapshot(self.case)
        code = f"import limited_commands; limited_commands.run({target.words!r}, {str(self.case)!r}, **{options!r})"
        done = self.client.python(code, TMPDIR=str(self.folder / "temporary"))
        after = _snapshot(self.case)
        self._check_end(done)
        changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        if "change" in options:  # by the test itself
            changed -= {path for path in changed if path == target.file}
        outside = {path for path in changed if path.partition("/")[0] not in target.may_write}
        outside = {path for path in outside if not path.startswith(".")}
        assert not outside, f"touched {sorted(outside)[:5]}: status {done.status} {done.err[-300:]}"
        left = sorted(path.name for path in (self.folder / "temporary").iterdir())
        shutil.rmtree(self.folder / "temporary")
        assert not left, f"left in the folder of temporary files: {left}"
        return done

    def _check_end(self, done: Done) -> None:
        assert done.status in (0, 1, 2), f"status {done.status}: {done.err[-3000:]}"
        lines = [line for line in re.split(r"[\r\n]", done.err) if not _PROGRESS.search(line)]
        errors = [line for line in lines if line.startswith("error: ")]
        if done.status:
            assert len(errors) == 1 and errors[0] == lines[-1], done.err[-3000:]
            assert errors[0].isprintable() and len(errors[0]) <= LONGEST_LINE, errors[0][:3000]
        else:
            assert not errors, done.err[-3000:]
        assert "Traceback" not in done.err and "Warning" not in done.err, done.err[-3000:]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("hostile"))
    yield world
    world.client.close()


def _name(target: Target) -> str:
    return f"{target.file}: {' '.join(target.words[:2])}"


@pytest.mark.parametrize("target", COMMANDS, ids=lambda target: target.command)
def test_each_command_works_with_whole_files(world, target):
    assert world.run(target, None).status == 0


def _check_damage(world: World, target: Target, content: bytes) -> None:
    done = world.run(target, lambda path: path.write_bytes(content))
    is_value = target.form in ("json", "yaml") and _is_object(content)
    if not (target.tolerant or is_value or content == (world.whole / target.file).read_bytes()):
        assert done.status, f"succeeded with a {target.form} file that is none: {content[:200]}"


def _is_object(content: bytes) -> bool:
    with contextlib.suppress(ValueError, RecursionError, yaml.YAMLError):
        return isinstance(yaml.safe_load(content) if content[:1] != b"{" else json.loads(content), dict)
    return False


def _search(world: World, target: Target, examples: int, **options) -> None:
    content = (world.whole / target.file).read_bytes()
    quick = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

    @settings(max_examples=examples, **quick, **options)
    @given(damaged(target.form, content))
    def check(changed):
        _check_damage(world, target, changed)

    check()
