"""A file translated or scored in parts by workers: processes of this machine or a cluster, each with the model loaded.

A part is some windows of lines, written whole and then noted as done, so that the same command does what is missing.
Windows, and with them batches and random numbers, are those of one process, and so is the output that parts are put
together to.
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..data.engines import LOCAL, SLURM, run_on_cluster, run_tasks
from ..data.text_files import Stamp, check_unchanged, read_lines
from ..errors import UserError
from ..files import free_name, remove_leftovers, write_text, written_whole
from ..hardware import share_processors
from ..json_and_yaml import read_json
from ..output_folder import is_empty
from .file_translator import FileTranslator
from .output import ResumableOutput, notes_path
from .scoring import FileScorer
from .streaming import Remarks, in_windows

Worker = FileTranslator | FileScorer  # with the model loaded

MOST_PARTS = 1000  # of a long text they have several windows
_MARK = ".vaswani_parts.json"  # its being there says that a folder is ours
_BLOCK = 10_000  # lines copied at once


@dataclass(frozen=True)
class Part:
    """Windows that follow each other, and where they begin."""

    window: int  # index of the first one
    first: int  # number of its first line, from 1
    starts: tuple[int, ...]  # its byte in each file, unpacked
    lines: int


class _Bytes:
    """Counts the bytes that were read, in the place of a digest."""

    count = 0

    def update(self, data: bytes) -> None:
        self.count += len(data)


def parts_folder(output: Path) -> Path:
    """The folder of the parts of an output, until they are put together."""
    return output.with_name(output.name + ".parts")


def _lined_up(lines: Sequence[Iterator[str]]) -> Iterator[Any]:
    return zip(*lines, strict=True) if len(lines) > 1 else lines[0]


def cut(files: Sequence[tuple[Path, Stamp]], size: int) -> tuple[Part, ...]:
    """The parts of an input, or of an input and its prefixes, of which windows of `size` lines are translated.

    Raises:
        UserError: as `read_lines`.
    """
    counts = [_Bytes() for _ in files]
    lines = [read_lines(path, count, stamp) for (path, stamp), count in zip(files, counts, strict=True)]
    ends = [(0, 1, tuple(0 for _ in files))]
    for window in in_windows(_lined_up(lines), size):
        if window.error is not None:
            raise window.error
        ends.append((window.index + 1, window.first + len(window.lines), tuple(count.count for count in counts)))
    bounds = [*ends[: -1 : -(-len(ends) // MOST_PARTS)], ends[-1]]
    return tuple(Part(*start, stop[1] - start[1]) for start, stop in pairwise(bounds))


@dataclass(frozen=True)
class FileInParts:
    """A file and its parts; it can be pickled, and they can be translated anywhere, in any order and more than once."""

    make: Callable[[], Worker]
    files: tuple[tuple[Path, Stamp], ...]  # the input, and prefixes if there are any
    parts: tuple[Part, ...]
    output: Path
    settings: dict[str, Any]  # of the output
    lines_per_record: int

    def missing(self, done: int) -> list[int]:
        """The numbers of the parts that are to be translated where the output has `done` lines' translations."""
        ends = enumerate(part.first - 1 + part.lines for part in self.parts)
        return [number for number, end in ends if end > done and "error" in self._note(number)]

    def work(
        self, numbers: Sequence[int], workers: int, is_here: bool, worker: int, advance: Callable[[int], Any]
    ) -> None:
        """What one of the workers does: every so many'th of these parts, with the model loaded once.

        A mistake in a line is noted, and raised when parts are put together.
        """
        share_processors(workers if is_here else 1)
        if is_here and workers > 1:
            os.environ["LOCAL_RANK"] = str(worker)  # for a GPU of its own
        files = None
        for number in numbers[worker::workers]:
            if "error" in self._note(number) and notes_path(self.output).exists():  # else all is put together
                files = files or self.make()
                self._write(number, files, advance)

    def _write(self, number: int, files: Worker, advance: Callable[[int], Any]) -> None:
        part, written = self.parts[number], self._path(number)
        sides = zip(self.files, part.starts, strict=True)
        lines = _lined_up([read_lines(path, None, stamp, start, part.first) for (path, stamp), start in sides])
        windows = in_windows(islice(lines, part.lines), files.window, index=part.window, first=part.first)
        try:
            with written_whole(written) as new, new.open("w", encoding="utf-8", newline="\n") as stream:
                remarks = files.write(windows, stream, SimpleNamespace(update=advance))
                if remarks.error is not None:
                    raise remarks.error
                for file, stamp in self.files:
                    check_unchanged(file, None, stamp)
            note = {"split": remarks.split, "cut": remarks.cut}
        except UserError as error:
            note = {"error": str(error)}
        write_text(written.with_suffix(".json"), json.dumps({"key": self._key(number), **note}))

    def finish(self, number: int = 0, advance: Callable[[int], Any] | None = None) -> None:
        """Put the parts together, unless it is done; for a job of its own. Raises as `put_together`."""
        if notes_path(self.output).exists():
            output = ResumableOutput(self.output, self.settings, self.lines_per_record, resume=True)
            with contextlib.closing(output):
                self.put_together(output)
                output.finish()

    def put_together(self, output: ResumableOutput) -> None:
        """Write the parts to the output, which is not finished yet, and remove them.

        Raises:
            UserError: if parts are missing, with what was wrong in the first of them.
        """
        if missing := self.missing(output.done):
            errors = [self._note(number)["error"] for number in missing]
            how = f"{len(missing):,} of {len(self.parts):,} parts of {self.output} are missing"
            raise UserError(f"{max(errors, key=bool)}{'; ' * any(errors)}{how}: the same command does them")
        remarks = Remarks()
        for number, part in enumerate(self.parts):
            done = output.done - part.first + 1
            if done < part.lines:
                note = self._note(number)
                remarks.split, remarks.cut = remarks.split + note["split"], remarks.cut + note["cut"]
                with self._path(number).open(encoding="utf-8", newline="\n") as stream:
                    lines = islice(stream, max(0, done) * self.lines_per_record, None)
                    while text := "".join(islice(lines, _BLOCK * self.lines_per_record)):
                        output.write(text)
        output.sync()
        self._remove()  # before the output is finished, since nobody would afterwards
        remarks.report()

    def start(self) -> None:
        """Make the folder of the parts.

        Raises:
            UserError: for a folder of this name that is not ours.
        """
        folder = parts_folder(self.output)
        if folder.is_dir() and not (folder / _MARK).is_file() and not is_empty(folder):
            raise UserError(
                f"{folder} is not empty and was not written by this program: move it, or give another --output"
            )
        folder.mkdir(exist_ok=True)
        write_text(folder / _MARK, json.dumps({"output": self.output.name}) + "\n")

    def _remove(self) -> None:
        folder = parts_folder(self.output)
        if (folder / _MARK).is_file():
            for path in (*folder.glob("part-*"), folder / _MARK):
                path.unlink()
            remove_leftovers(folder)
            with contextlib.suppress(OSError):  # something else is there
                folder.rmdir()

    def _path(self, number: int) -> Path:
        return parts_folder(self.output) / f"part-{number:05d}"

    def _key(self, number: int) -> str:
        """What shows that a part belongs to this output."""
        values = json.dumps([self.settings, asdict(self.parts[number])], sort_keys=True)
        return hashlib.sha256(values.encode()).hexdigest()

    def _note(self, number: int) -> dict[str, Any]:
        """What is noted of a part: the lines to name, or with `error`, which may be empty, that it is missing."""
        path = self._path(number)
        with contextlib.suppress(OSError, UserError):
            note = read_json(path.with_suffix(".json"), "remove it")
            if note.get("key") == self._key(number) and ("error" in note or path.is_file()):
                return note
        return {"error": ""}


def write_in_parts(
    output: ResumableOutput,
    kind: type[Worker],
    make: Callable[[], Worker],
    files: tuple[tuple[Path, Stamp], ...],
    window: int,
    lines_per_record: int,
    workers: int,
    engine: str = LOCAL,
    engine_options: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> bool:
    """Translate or score a file into its output by workers, from where it ended.

    Args:
        output: where to write; its settings are all that is written depends on.
        kind: which of both.
        make: loads the model; a function that can be pickled.
        files: the input, and prefixes or targets if there are any, as they have been read through.
        window: lines that are sorted by length and written together.
        lines_per_record: lines of the output for each line of the input.
        workers: processes that do parts.
        engine: who starts them, as of `prepare`.
        engine_options: as of `prepare`.
        progress: whether to show a bar, on a terminal, for workers of this machine.

    Returns:
        Whether all is written and the output can be finished; with Slurm the last job finishes it.

    Raises:
        UserError: for a mistake in a line or in the options; all parts without one are done then.
    """
    parts = cut(files, window)
    job = FileInParts(make, files, parts, output.path.absolute(), output.settings, lines_per_record)
    job.start()
    if missing := job.missing(output.done):
        workers = min(workers, len(missing))
        task = functools.partial(job.work, missing, workers, engine == LOCAL)
        if engine == LOCAL:
            total = sum(parts[number].lines for number in missing)
            run_tasks(task, workers, workers, shown=kind.doing if progress else None, unit=kind.unit, total=total)
        else:
            stages = [(kind.doing, task, workers), ("finish", job.finish, 1)]
            logs = free_name(output.path.absolute().with_name(output.path.name + ".logs"))
            run_on_cluster(engine, stages if engine == SLURM else stages[:1], logs, engine_options or {})
            if engine == SLURM:
                return False
    job.put_together(output)
    return True
