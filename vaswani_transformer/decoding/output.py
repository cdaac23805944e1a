"""An output file that grows by whole records, and goes on after its last one when the program that wrote it died."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tqdm.auto import tqdm

from ..errors import UserError
from ..files import sync, write_text

_BLOCK = 1 << 20


@contextlib.contextmanager
def _not_interrupted() -> Iterator[None]:
    """Ctrl-C waits until the body has ended, so that no line is left half written."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def notes_path(path: Path) -> Path:
    """The file beside an unfinished output that says what it is being made of."""
    return path.with_name(path.name + ".unfinished.json")


class StreamOutput:
    """Standard output, a device or a pipe, or a file that is not gone on with.

    Args:
        target: a text stream, which stays open, or a path.

    Raises:
        UserError: for a file that a command may still go on with.
    """

    done = 0
    unfinished = None

    def __init__(self, target: TextIO | Path):
        self._own = isinstance(target, Path)
        if self._own and target.is_file() and notes_path(target).exists():
            raise UserError(
                f"{target} is unfinished: finish it with --resume and the command that began it, or delete it and"
                f" {notes_path(target).name}"
            )
        self.stream = target.open("w", encoding="utf-8") if isinstance(target, Path) else target

    def write(self, text: str) -> None:
        """Whole lines, which a reader sees at once."""
        # A progress bar on standard error may stand on the line of the terminal that is written to now.
        with _not_interrupted(), tqdm.external_write_mode(self.stream):
            self.stream.write(text)
            self.stream.flush()

    def finish(self) -> None:
        """All is written."""

    def close(self) -> None:
        """Nothing more will be written."""
        if self._own:
            self.stream.close()


class ResumableOutput:
    """A file of records of the same number of lines; beside it, until it is finished, a note of how they are made.

    Args:
        path: a regular file, or where there is none yet.
        settings: what the records depend on, as JSON; to go on, all of it has to be as it was.
        lines_per_record: lines that one record has.
        resume: whether to go on; without, a file that is finished is replaced.
        drawn: further settings, such as a random seed, that when going on are taken over from the beginning.

    Attributes:
        done: records that are there already.
        settings: all of them, as at the beginning.

    Raises:
        UserError: for an unfinished output that is not resumed, or one that cannot be.
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
        self.path, self._lines, self._notes, self.done = path, lines_per_record, notes_path(path), 0
        self.settings, drawn = json.loads(json.dumps(settings)), drawn or {}
        notes = self._read_notes()
        if resume and notes is not None:
            self._check(notes, drawn)
            self.settings = notes
            self._file = path.open("r+b", buffering=0)
            self.done = self._keep_whole_records()
            return
        if notes is not None:
            raise UserError(
                f"{path} is unfinished: give --resume to go on with it, or delete it and {self._notes.name} to begin"
                " anew"
            )
        if resume and path.exists() and path.stat().st_size:
            raise UserError(
                f"{path} cannot be resumed: it has no {self._notes.name} beside it, so it is finished or another"
                " program's; delete it, or give another --output"
            )
        self.settings |= drawn
        self._file = path.open("w+b", buffering=0)
        # In this order: with notes, what is in the file counts as made by them.
        write_text(self._notes, json.dumps(self.settings, indent=1) + "\n")

    def _read_notes(self) -> dict[str, Any] | None:
        if not self._notes.exists() or not self.path.exists():
            return None
        try:
            notes = json.loads(self._notes.read_text(encoding="utf-8"))
            if not isinstance(notes, dict):
                raise ValueError("no JSON object")
        except ValueError as error:
            raise UserError(f"{self._notes} is damaged ({error}): delete it and {self.path} to begin anew") from error
        return notes

    def _check(self, notes: dict[str, Any], drawn: dict[str, Any]) -> None:
        for name in [*self.settings, *(name for name in notes if name not in self.settings)]:
            before, now = notes.get(name), self.settings.get(name)
            if before != now and name not in drawn:
                # Sums of files say nothing to a reader.
                is_sum = isinstance(before, str) and len(before) == 64
                how = "is not what it was" if is_sum else f"was {_shown(before)} and is {_shown(now)} now"
                raise UserError(
                    f"{self.path} cannot be resumed: {name} {how}; give what it was begun with, or delete it and"
                    f" {self._notes.name} to begin anew"
                )

    def _keep_whole_records(self) -> int:
        """Cut off what is behind the last whole record; returns how many there are."""
        lines, end, read = 0, 0, 0
        self._file.seek(0)
        while block := self._file.read(_BLOCK):
            place = -1
            while (place := block.find(b"\n", place + 1)) >= 0:
                lines += 1
                if lines % self._lines == 0:
                    end = read + place + 1
            read += len(block)
        self._file.truncate(end)
        self._file.seek(end)
        return lines // self._lines

    def write(self, text: str) -> None:
        """Whole records, which a reader sees at once; if they cannot be written whole, no line is left half written."""
        begin = self._file.tell()
        rest = memoryview(text.encode("utf-8"))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException:
            with contextlib.suppress(OSError):
                self._cut_to_whole_line(begin)
            raise

    def _cut_to_whole_line(self, begin: int) -> None:
        self._file.seek(begin)
        written = b""
        while block := self._file.read(_BLOCK):
            written += block
        end = begin + written.rfind(b"\n") + 1
        self._file.truncate(end)
        self._file.seek(end)

    def finish(self) -> None:
        """All is written: the file is as any other now."""
        os.fsync(self._file.fileno())
        self._notes.unlink(missing_ok=True)
        sync(self.path.parent)

    @property
    def unfinished(self) -> Path:
        """The file, which waits for more."""
        return self.path

    def close(self) -> None:
        """Nothing more will be written by this program."""
        self._file.close()


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value)
