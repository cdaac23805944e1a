"""A file translated or scored in parts by workers, local or on Ray, each with the model loaded.

A part is some windows of lines, written whole, so that the same command does what is missing. Windows, and with them
batches and random numbers, are those of one process, and so is the output that the parts are joined to.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..data.text_files import Stamp, check_unchanged, read_lines
from ..data.workers import LOCAL, run_tasks
from ..files import remove_leftovers, written_whole
from ..output_folder import RECORD, OutputFolder
from .file_translator import FileTranslator
from .output import ResumableOutput
from .scoring import FileScorer
from .streaming import Remarks, in_windows

Worker = FileTranslator | FileScorer  # with the model loaded
MOST_PARTS = 1000  # of a long text they have several windows
_BLOCK = 10_000  # lines copied at once


@dataclass(frozen=True)
class Part:
    """Windows that follow each other, and where they begin."""

    window: int  # index of the first one
    first: int  # number of its first line, from 1
    starts: tuple[int, ...]  # its byte in each file, unpacked
    lines: int


def parts_folder(output: Path) -> Path:
    """Return the folder of the parts of an output, until they are joined."""
    return output.with_name(output.name + ".parts")


def _lined_up(lines: Sequence[Iterator[str]]) -> Iterator[Any]:
    return zip(*lines, strict=True) if len(lines) > 1 else lines[0]


class _Bytes:
    """Counts the bytes that are read, in place of a digest."""

    count = 0

    def update(self, data: bytes) -> None:
        self.count += len(data)


def cut(files: Sequence[tuple[Path, Stamp]], size: int) -> tuple[Part, ...]:
    """Return the parts of an input, or of an input and its prefixes, that is translated in windows of `size` lines.

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


class _PartWriter:
    """Writes parts by their number, with the model loaded once; the first line of a part is JSON about it."""

    def __init__(
        self, make: Callable[[], Worker], files: Sequence[tuple[Path, Stamp]], parts: Sequence[Part], paths: list[Path],
        key: str,
    ):  # fmt: skip
        self.worker, self.files, self.parts, self.paths, self.key = make(), files, parts, paths, key

    def __call__(self, number: int) -> None:
        part, path = self.parts[number], self.paths[number]
        sides = zip(self.files, part.starts, strict=True)
        lines = _lined_up([read_lines(path, None, stamp, start, part.first) for (path, stamp), start in sides])
        windows = in_windows(islice(lines, part.lines), self.worker.window, index=part.window, first=part.first)
        records: list[str] = []
        output = SimpleNamespace(write=records.append)
        remarks = self.worker.write(windows, output, SimpleNamespace(update=lambda sentences: None))
        if remarks.error is not None:
            raise remarks.error
        for file, stamp in self.files:
            check_unchanged(file, stamp)
        head = {"key": _part_key(self.key, part), "split": remarks.split, "cut": remarks.cut}
        with written_whole(path) as new, new.open("w", encoding="utf-8", newline="\n") as stream:
            stream.writelines([json.dumps(head) + "\n", *records])


def _part_key(key: str, part: Part) -> str:
    return hashlib.sha256(json.dumps([key, asdict(part)]).encode()).hexdigest()


def _head(path: Path) -> dict[str, Any]:
    """Return the first line of a part; nothing where there is none."""
    with contextlib.suppress(OSError, ValueError), path.open(encoding="utf-8") as stream:
        return json.loads(stream.readline())
    return {}


def write_in_parts(
    output: ResumableOutput,
    kind: type[Worker],
    make: Callable[[], Worker],
    files: tuple[tuple[Path, Stamp], ...],
    window: int,
    lines_per_record: int,
    workers: int,
    engine: str = LOCAL,
    progress: bool = True,
) -> None:
    """Translate or score a file into its output by workers, from where it ended.

    Args:
        output: where to write; its settings are all that is written depends on.
        kind: which of both.
        make: loads the model; a function that can be pickled.
        files: the input, and prefixes or targets if any, as they have been read through.
        window: lines that are sorted by length and written together.
        lines_per_record: lines of the output for each line of the input.
        workers: as of `run_tasks`, and so is `engine`.
        progress: whether to show a bar, on a terminal.

    Raises:
        UserError: for a mistake in a line, and as `run_tasks`; what is done by then stays.
    """
    parts, folder = cut(files, window), OutputFolder(parts_folder(output.path))
    folder.path.mkdir(exist_ok=True)
    folder.check_ours()
    names = [f"part-{number:05d}" for number in range(len(parts))]
    folder.note(names)
    paths, key = [folder.path / name for name in names], json.dumps(output.settings, sort_keys=True)
    left = [number for number, part in enumerate(parts) if part.first - 1 + part.lines > output.done]
    missing = [number for number in left if _head(paths[number]).get("key") != _part_key(key, parts[number])]
    task = functools.partial(_PartWriter, make, files, parts, paths, key)
    run_tasks(task, missing, workers, engine, kind.doing if progress else None)
    remarks = Remarks()
    for number in left:
        head, done = _head(paths[number]), max(0, output.done - parts[number].first + 1)
        remarks.split, remarks.cut = remarks.split + head["split"], remarks.cut + head["cut"]
        with paths[number].open(encoding="utf-8", newline="\n") as stream:
            lines = islice(stream, 1 + done * lines_per_record, None)
            while text := "".join(islice(lines, _BLOCK * lines_per_record)):
                output.write(text)
    output.sync()
    folder.remove(folder.names())  # before the output is finished, since nobody would afterwards
    remove_leftovers(folder.path)
    (folder.path / RECORD).unlink()
    with contextlib.suppress(OSError):  # something else is there
        folder.path.rmdir()
    remarks.report()
