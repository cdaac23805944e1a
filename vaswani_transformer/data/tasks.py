"""Tasks over the splits of a text, and the notes of what they have returned.

A task needs nothing but its number and what the stages before have left in the folder: tasks run in any order, on any
machine, and more than once. What a task returns is written last and says that it is done.
"""

import contextlib
import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import file_sha256, is_local, remove_leftovers, together, write_text
from ..hardware import MOST_WORKERS, own_processors
from ..json_and_yaml import read_json
from ..recipes.recipe import Recipe
from .engines import LOCAL, RAY, SLURM, Workers, run_on_cluster
from .prepared import TRAIN, VALIDATION
from .splits import SPLIT_BYTES, Place, RowSplit, Split
from .text_files import file_errors, file_stamp, store_errors

TASKS = ".tasks"  # the folder of what tasks have returned
COUNT, PLAN, SAMPLE, LEARN, WRITE, FINISH = "count", "plan", "sample", "learn", "write", "finish"
JUDGE = "judge"  # of a cleaning
SPLIT, LOGS = "split", "logs"  # what else is noted
PARTS = (TRAIN, VALIDATION)
_SHOWN = {COUNT: "counting pairs", SAMPLE: "drawing a sample", JUDGE: "judging", WRITE: "writing"}
OTHER = "give another --output, or --overwrite to start anew"


@dataclass(frozen=True)
class Tasks(ABC):
    """The tasks of a work on a text; it can be pickled, and they can be done anywhere.

    A stage NAME is a method `_NAME`, which is given a task's number and what to tell of pairs that are done.
    """

    recipe: Recipe
    folder: Path
    splits: tuple[Split, ...]  # of the training text, then of the validation text
    train_splits: int
    settings: dict  # what decides the content; `files` has size and time of each file that is read

    @property
    @abstractmethod
    def stages(self) -> list[str]:
        """The stages, in their order."""

    @abstractmethod
    def tasks(self, stage: str) -> int:
        """The number of a stage's tasks."""

    def run_stages(self, workers: int | None, progress: bool, engine: str, options: Mapping[str, Any]) -> bool:
        """Do all tasks; False where Slurm has got the jobs that will.

        Raises:
            UserError: as `Workers.run` and `run_on_cluster`.
        """
        stages = [(name, functools.partial(self.run, name), self.tasks(name)) for name in self.stages]
        logs = self.folder / TASKS / LOGS
        if engine == LOCAL:
            for path in self.written_folders if is_local(self.folder) else ():
                remove_leftovers(path)
        else:
            self._unmark_what_is_lost()
        if engine == SLURM:
            run_on_cluster(engine, stages, logs, options)
            return False
        with Workers(workers or self.useful_workers()) as processes:
            for name, task, number in stages:
                if engine == RAY:
                    run_on_cluster(engine, [(name, task, number)], logs, options)
                # After Ray what was lost with a machine.
                processes.run(task, number, _SHOWN.get(name) if progress else None)
        return True

    def _unmark_what_is_lost(self) -> None:
        """Remove datatrove's marks of tasks that have to be done again: it would leave them out."""
        for stage in self.stages:
            for mark in (self.folder / TASKS / LOGS / stage / "completions").glob("*"):
                if self._done(stage, int(mark.name)) is None:
                    mark.unlink()

    @property
    def written_folders(self) -> tuple[Path, ...]:
        """Where tasks write; what they leave when they are cut off is removed there."""
        return self.folder, self.folder / TASKS

    def useful_workers(self) -> int:
        """A process for each processor, as far as there is text for each: one takes seconds to start."""
        size = sum(size or 0 for size, _ in self.settings["files"].values())
        pieces = size // SPLIT_BYTES + sum(isinstance(split, RowSplit) for split in self.splits)
        return max(1, min(len(own_processors()), MOST_WORKERS, pieces))

    def files_of(self, stage: str, number: int) -> Sequence[Path]:
        """The files of the text that a task reads."""
        return self.splits[number].files if stage in (COUNT, SAMPLE, WRITE) else ()

    def run(self, stage: str, number: int, advance: Callable[[int], Any] = lambda pairs: None) -> None:
        """Do a task, unless it is done; `advance` is told of pairs that are done.

        Raises:
            UserError: for text that cannot be read, or has changed since the work began.
        """
        with store_errors(self.folder):
            done = self._done(stage, number)
            if done is None:
                self._check_unchanged(stage, number)
                getattr(self, f"_{stage}")(number, advance)
                self._check_unchanged(stage, number)
            elif "counts" in done:
                advance(sum(done["counts"]))

    def _check_unchanged(self, stage: str, number: int) -> None:
        """Refuse text that has changed since the work began: what is known of it would be of another text."""
        for path in self.files_of(stage, number):
            with file_errors(path):
                stamp = file_stamp(path)
            if list(stamp) != self.settings["files"][str(path)]:
                raise UserError(f"{path} is not as it was when the work in {self.folder} started: {OTHER}")

    # What tasks have returned

    def _path(self, name: str, number: int = 0) -> Path:
        return self.folder / TASKS / f"{name}-{number:05d}.json"

    def _note(self, name: str, result: Any, number: int = 0) -> None:
        write_json(self._path(name, number), {"result": result, "sha256": _sha256_of(result)})

    def _result(self, name: str, number: int = 0) -> Any:
        path = self._path(name, number)
        note = read_json(path, OTHER)
        if note.get("sha256") != _sha256_of(note.get("result")):
            raise UserError(f"{path} is damaged: {OTHER}")
        return note["result"]

    def _results(self, stage: str, part: str = TRAIN) -> Iterator[Any]:
        first, stop = {TRAIN: (0, self.train_splits), VALIDATION: (self.train_splits, len(self.splits))}[part]
        return iter(together(functools.partial(self._result, stage), range(first, stop)))

    def _facts(self, path: Path) -> dict:
        """The facts of a finished file, by which a later run knows it."""
        name = path.relative_to(self.folder).as_posix()
        return {"file": name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}

    def _done(self, stage: str, number: int) -> Any | None:
        """What a task has returned; None if it is to be done, also if what it has written is not there any more."""
        try:
            done = self._result(stage, number)
        except (OSError, UserError):
            return None
        return done if all(map(self._is_whole, (*done.get("shards", ()), *done.get("files", ())))) else None

    def _is_whole(self, facts: dict) -> bool:
        path = self.folder / facts["file"]
        if not is_local(path):  # what a store has it has whole: the size tells it from another
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_size == facts["bytes"]
            return False
        return path.is_file() and path.stat().st_size == facts["bytes"] and file_sha256(path) == facts["sha256"]

    # What each work on a text begins with

    def _count(self, number: int, advance: Callable[[int], Any]) -> None:
        """Count the pairs of a split."""
        self._note(COUNT, self.splits[number].count(), number)

    def _pairs(self, number: int, plan: dict) -> Iterator[tuple[int, tuple[str, str]]]:
        """The pairs of a split with their rows in it."""
        place, row = Place(**plan["place"]), -1
        for row, pair in enumerate(self.splits[number].pairs(place)):
            yield row, pair
        if row + 1 != place.pairs:
            raise UserError(f"{row + 1:,} pairs were read, not the {place.pairs:,} counted before: {OTHER}")


def as_json(value: dict) -> str:
    """A note as it is written."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def write_json(path: Path, value: dict) -> None:
    """Write a note, whole or not at all, and make its folder."""
    if is_local(path):
        path.parent.mkdir(exist_ok=True)
    write_text(path, as_json(value))


def _sha256_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def task_notes(folder: Path) -> list[Path]:
    """What tasks have returned in a folder."""
    return sorted((folder / TASKS).glob("[a-z]*-?????*.json*"))
