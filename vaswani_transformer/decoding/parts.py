"""A file translated or scored in parts by workers, local or on Ray, each with the model loaded.

A part is some windows of lines, written whole, so that the same command does what is missing. Windows, and with them
batches and random numbers, are those of one process, and so is the output that the parts are joined to.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from tqdm.auto import tqdm

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


class Part(NamedTuple):
    """Windows that follow each other, and where they begin."""

    window: int  # index of the first one
    first: int  # number of its first line, from 1
    starts: tuple[int, ...]  # its byte in each file, unpacked
    lines: int


def parts_folder(output: Path) -> Path:
    """Return the folder of the parts of an output, until they are joined."""
    return output.with_name(output.name + ".parts")


def _lined_up(lines: Sequence[Iterator[str]]) -> Iterator[Any]:
    """Return the lines of one file, or the tuples of the lines of several."""
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
        window.check()
        ends.append((window.index + 1, window.first + len(window.lines), tuple(count.count for count in counts)))
    bounds = [*ends[: -1 : -(-len(ends) // MOST_PARTS)], ends[-1]]
    return tuple(Part(*start, stop[1] - start[1]) for start, stop in pairwise(bounds))


def _part_writer(
    make: Callable[[], Worker], files: Sequence[tuple[Path, Stamp]], parts: Sequence[Part], paths: Sequence[Path]
) -> Callable[[int], None]:
    """Load the model, and return a function that writes a part by its number; its first line is JSON with remarks."""
    worker = make()

    def write(number: int) -> None:
        part, records, remarks = parts[number], [], Remarks()
        sides = zip(files, part.starts, strict=True)
        lines = _lined_up([read_lines(path, None, stamp, start, part.first) for (path, stamp), start in sides])
        windows = in_windows(islice(lines, part.lines), worker.window, index=part.window, first=part.first)
        worker.write(windows, SimpleNamespace(write=records.append), tqdm(disable=True), remarks)
        for path, stamp in files:
            check_unchanged(path, stamp)
        with written_whole(paths[number]) as new, new.open("w", encoding="utf-8", newline="\n") as stream:
            stream.writelines([json.dumps(vars(remarks)) + "\n", *records])

    return write


def write_in_parts(
    output: ResumableOutput,
    doing: str | None,
    make: Callable[[], Worker],
    files: tuple[tuple[Path, Stamp], ...],
    window: int,
    lines_per_record: int,
    workers: int,
    engine: str = LOCAL,
) -> None:
    """Translate or score a file into its output by workers, from where it ended.

    Args:
        output: where to write; its settings are all that is written depends on.
        doing: text of the progress bar on a terminal; None for no bar.
        make: loads the model; a function that can be pickled.
        files: the input, and prefixes or targets if any, as they have been read through.
        window: lines that are sorted by length and written together.
        lines_per_record: lines of the output for each line of the input.
        workers: as of `run_tasks`, and so is `engine`.

    Raises:
        UserError: for a mistake in a line, and as `run_tasks`; what is done by then stays.
    """
    parts, folder = cut(files, window), OutputFolder(parts_folder(output.path))
    folder.path.mkdir(exist_ok=True)
    folder.check_ours()
    key = hashlib.sha256(json.dumps([output.settings, parts], sort_keys=True).encode()).hexdigest()
    names = [f"part-{number:05d}-{key[:16]}" for number in range(len(parts))]
    folder.note(names)
    paths = [folder.path / name for name in names]
    left = [number for number, part in enumerate(parts) if part.first - 1 + part.lines > output.done]
    missing = [number for number in left if not paths[number].exists()]
    run_tasks(functools.partial(_part_writer, make, files, parts, paths), missing, workers, engine, doing)
    remarks = Remarks()
    for number in left:
        done = max(0, output.done - parts[number].first + 1)
        with paths[number].open(encoding="utf-8", newline="\n") as stream:
            for name, lines in json.loads(stream.readline()).items():
                getattr(remarks, name).extend(lines)
            lines = islice(stream, done * lines_per_record, None)
            while text := "".join(islice(lines, _BLOCK * lines_per_record)):
                output.write(text)
    output.sync()
    folder.remove(folder.names())  # before the output is finished, since nobody would afterwards
    remove_leftovers(folder.path)
    (folder.path / RECORD).unlink()
    with contextlib.suppress(OSError):  # something else is there
        folder.path.rmdir()
    remarks.report()
