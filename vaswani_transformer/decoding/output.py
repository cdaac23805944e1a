"""The output of translations: a stream, or a file that an interrupted program can resume."""

import contextlib
import json
import os
from pathlib import Path
from typing import TextIO

from filelock import lock_descriptor
from tqdm.auto import tqdm

from ..errors import UserError
from ..files import WINDOWS, sync, write_text
from ..json_and_yaml import read_json


def notes_path(path: Path) -> Path:
    """Return the file beside an unfinished output that holds the settings it depends on."""
    return path.with_name(path.name + ".unfinished.json")


def _check_finished(path: Path) -> None:
    if notes_path(path).exists():
        both = f"it and {notes_path(path).name}"
        raise UserError(f"{path} is unfinished: give --resume and the same options, or delete {both}")


class StreamOutput:
    """Standard output, which stays open, or the path of a device, a pipe or a file that cannot be resumed.

    Raises:
        UserError: for an unfinished file that can still be resumed.
    """

    done = 0  # lines that were written before
    unfinished = None  # path of a file that can be resumed

    def __init__(self, target: TextIO | Path):
        self._is_ours = isinstance(target, Path)
        if self._is_ours:
            _check_finished(target)
        self.stream = target.open("w", encoding="utf-8") if self._is_ours else target

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
        if self._is_ours:
            self.stream.close()


class ResumableOutput:
    """A file of records that have equally many lines; while it is unfinished, `notes_path` holds its settings.

    What is resumed is the count of whole records at the start of the file: a line that was cut short is written again.

    Args:
        path: a regular file, or a name that is free.
        settings: what the records depend on, as JSON; all of it has to be the same to resume.
        lines_per_record: lines of each record; the attribute `done` counts the records that are in the file already.
        resume: continue after the last whole record of an unfinished file; else an earlier file is replaced.

    Raises:
        UserError: for an unfinished output without `resume`, one that cannot be resumed, or one that another process
            writes; the system frees the lock of a dead one.
        OSError: if it cannot be written.
    """

    def __init__(self, path: Path, settings: dict, lines_per_record: int = 1, resume: bool = False):
        self.path = self.unfinished = path
        self._notes, self.done = notes_path(path), 0
        self.settings = json.loads(json.dumps(settings))
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._file.close)
            with contextlib.suppress(OSError):  # a file system without locks
                if not WINDOWS and not lock_descriptor(self._file.fileno(), blocking=False):
                    raise UserError(f"another process is writing {path}: wait, or give another --output")
            self._start(lines_per_record, resume)
            on_error.pop_all()

    def _start(self, lines_per_record: int, resume: bool) -> None:
        if not resume:
            _check_finished(self.path)
        if self._notes.exists():
            self._resume(lines_per_record)
            return
        if resume and self.path.stat().st_size:
            problem = f"it has no {self._notes.name} beside it, so it is finished or another program's"
            raise UserError(f"{self.path} cannot be resumed: {problem}; delete it, or give another --output")
        # The file is emptied before the notes are written: with notes, its content counts as made with these settings.
        self._file.truncate(0)
        write_text(self._notes, json.dumps(self.settings, indent=1) + "\n")

    def _resume(self, lines_per_record: int) -> None:
        """Find the end of the last whole record, after which the file is written on."""
        notes, now = read_json(self._notes), self.settings
        for name in dict.fromkeys([*now, *notes]):
            if notes.get(name) != now.get(name):
                change = f"{name} was {notes.get(name)!s:.20} and is {now.get(name)!s:.20} now"
                fix = f"give what it was started with, or delete it and {self._notes.name}"
                raise UserError(f"{self.path} cannot be resumed: {change}; {fix}")
        end = position = 0  # in bytes
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                position += len(line)
                if number % lines_per_record == 0 and line.endswith(b"\n"):
                    self.done, end = self.done + 1, position
        self._file.truncate(end)
        self._file.seek(end)

    def write(self, text: str) -> None:
        """Write whole records, which readers see at once."""
        rest = memoryview(text.encode("utf-8"))
        while rest:
            rest = rest[self._file.write(rest) :]

    def finish(self) -> None:
        """Make the file one as any other, once all is written."""
        os.fsync(self._file.fileno())
        self._notes.unlink(missing_ok=True)
        sync(self.path.parent)

    def close(self) -> None:
        """Close the file; unless it is finished, it can be resumed."""
        self._file.close()
