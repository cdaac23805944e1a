"""Where translations are written: a stream, or a file that an interrupted program can resume."""

import json
import os
from pathlib import Path
from typing import Any, TextIO

from tqdm.auto import tqdm

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

from ..errors import UserError, reading
from ..files import sync, write_text
from ..json_and_yaml import read_json


def notes_path(path: Path) -> Path:
    """The file beside an unfinished output that holds the settings it depends on."""
    return path.with_name(path.name + ".unfinished.json")


def _open_alone(path: Path) -> int:
    """A descriptor of a file, new or as it is, which no other process writes; the system frees the lock of a dead one.

    Raises:
        UserError: for a file that another process writes.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise UserError(f"another process is writing {path}: wait, or give another --output") from error
        except OSError:  # a file system without locks
            pass
    return descriptor


class StreamOutput:
    """Standard output, which stays open, or the path of a device, a pipe or a file that cannot be resumed.

    Raises:
        UserError: for an unfinished file that can still be resumed.
    """

    done = 0  # lines that were written before
    unfinished = None  # path of a file that can be resumed

    def __init__(self, target: TextIO | Path):
        self._path = target if isinstance(target, Path) else None
        if self._path is None:
            self.stream = target
        elif target.is_file() or not target.exists():
            if notes_path(target).exists():
                raise UserError(
                    f"{target} is unfinished: finish it with --resume and the command that started it, or delete it and"
                    f" {notes_path(target).name}"
                )
            self.stream = os.fdopen(_open_alone(target), "w", encoding="utf-8")
            self.stream.truncate(0)
        else:
            self.stream = target.open("w", encoding="utf-8")

    def write(self, text: str) -> None:
        """Write whole lines, which readers see at once."""
        # A progress bar on standard error may be on the line of the terminal that is written to now.
        with tqdm.external_write_mode(self.stream):
            self.stream.write(text)
            self.stream.flush()

    def finish(self) -> None:
        """Do nothing: all is written."""

    def close(self) -> None:
        """Close it, if it was opened here."""
        if self._path is not None:
            self.stream.close()


class ResumableOutput:
    """A file of records that have equally many lines; while it is unfinished, `notes_path` holds its settings.

    What is resumed is the count of whole records at the start of the file: a line that an end cut short is written
    again.

    Args:
        path: a regular file, or a name that is free.
        settings: what the records depend on, as JSON; all of it has to be the same to resume. The attribute `settings`
            has those of the first start, `drawn` ones included.
        lines_per_record: lines of each record; the attribute `done` counts the records that are in the file already.
        resume: continue after the last whole record of an unfinished file; else an earlier file is replaced.
        drawn: further settings that were chosen at random, such as a seed; resuming takes those of the first start.

    Raises:
        UserError: for an unfinished output without `resume`, or one that cannot be resumed.
        OSError: if it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        lines_per_record: int = 1,
        resume: bool = False,
        drawn: dict[str, Any] | None = None,
    ):
        self.path = self.unfinished = path
        self._notes, self.done = notes_path(path), 0
        self.settings = json.loads(json.dumps(settings))
        is_new = not path.exists()
        self._file = os.fdopen(_open_alone(path), "r+b", buffering=0)
        try:
            self._start(lines_per_record, resume, drawn or {}, is_new)
        except BaseException:
            self._file.close()
            raise

    def _start(self, lines_per_record: int, resume: bool, drawn: dict[str, Any], is_new: bool) -> None:
        if not is_new and self._notes.exists():
            if not resume:
                raise UserError(
                    f"{self.path} is unfinished: give --resume to continue it, or delete it and {self._notes.name} to"
                    " start again"
                )
            self._resume(lines_per_record, drawn)
            return
        if resume and self.path.stat().st_size:
            raise UserError(
                f"{self.path} cannot be resumed: it has no {self._notes.name} beside it, so it is finished or another"
                " program's; delete it, or give another --output"
            )
        self.settings |= drawn
        # The file is emptied before the notes are written: with notes, its content counts as made with these settings.
        self._file.truncate(0)
        write_text(self._notes, json.dumps(self.settings, indent=1) + "\n")

    def _resume(self, lines_per_record: int, drawn: dict[str, Any]) -> None:
        notes = read_json(self._notes, f"delete it and {self.path} to start again")
        with reading(self._notes):
            drawn = {name: type(value)(notes[name]) for name, value in drawn.items()}
        for name in dict.fromkeys([*self.settings, *notes]):
            before, now = notes.get(name), self.settings.get(name)
            if before != now and name not in drawn:
                is_checksum = isinstance(before, str) and len(before) == 64  # which says nothing to a reader
                before, now = ("not given" if value is None else f"{value!s:.100}" for value in (before, now))
                change = "has changed" if is_checksum else f"was {before} and is {now} now"
                raise UserError(
                    f"{self.path} cannot be resumed: {name} {change}; give what it was started with, or delete it and"
                    f" {self._notes.name} to start again"
                )
        self.settings = notes | drawn
        self.done, end = _whole_records(self.path, lines_per_record)
        self._file.truncate(end)
        self._file.seek(end)

    def write(self, text: str) -> None:
        """Write whole records, which readers see at once."""
        rest = memoryview(text.encode("utf-8"))
        while rest:
            rest = rest[self._file.write(rest) :]

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Make the file one as any other, once all is written."""
        self.sync()
        self._notes.unlink(missing_ok=True)
        sync(self.path.parent)

    def close(self) -> None:
        """Close the file; unless it is finished, it can be resumed."""
        self._file.close()


def _whole_records(path: Path, lines_per_record: int) -> tuple[int, int]:
    """The number of whole records that a file starts with, and their bytes."""
    records, end, position = 0, 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            position += len(line)
            if number % lines_per_record == 0 and line.endswith(b"\n"):
                records, end = records + 1, position
    return records, end
