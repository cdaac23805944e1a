"""A file translated or scored by workers, local or on Ray, each with the model loaded.

A task is some windows of lines. Windows, and with them batches and random numbers, are those of one process, and so is
the output, to which the results are written in order.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import dropwhile, islice
from pathlib import Path
from types import SimpleNamespace

from tqdm.auto import tqdm

from ..data.text_files import Stamp, check_unchanged, read_lines
from ..data.workers import LOCAL, run_tasks
from .output import ResumableOutput
from .streaming import LineWorker, Remarks, Window, in_windows, report

MOST_TASKS = 1000  # of a long text they have several windows
Files = Sequence[tuple[Path, Stamp]]  # the input, and prefixes or targets if any


def _windows(files: Files, size: int, done: int = 0) -> Iterator[Window]:
    """Yield the windows of the lines of one file, or of the tuples of lines of several."""
    lines = [read_lines(path, stamp=stamp) for path, stamp in files]
    return in_windows(zip(*lines, strict=True) if len(lines) > 1 else lines[0], size, done)


def _task(make: Callable[[], LineWorker], files: Files, count: int, done: int) -> Callable[[int], tuple[str, Remarks]]:
    """Load the model, and return a function that does `count` windows from a number on: their text, and remarks.

    A worker gets ever higher numbers, nearly always, so that it reads through the files once.
    """
    worker, windows, reached = make(), iter(()), math.inf

    def write(number: int) -> tuple[str, Remarks]:
        nonlocal windows, reached
        if number < reached:
            windows = _windows(files, worker.window)
        records, remarks, reached = [], defaultdict(list), number + count
        some = islice(dropwhile(lambda window: window.index < number, windows), count)
        worker.write(some, SimpleNamespace(write=records.append), tqdm(disable=True), remarks, done)
        for path, stamp in files:
            check_unchanged(path, stamp)
        return "".join(records), remarks

    return write


def write_in_parts(
    output: ResumableOutput,
    doing: str | None,
    make: Callable[[], LineWorker],
    files: Files,
    window: int,
    workers: int,
    engine: str = LOCAL,
) -> None:
    """Translate or score a file into its output by workers, from where it ended.

    The `files` are the input, and prefixes or targets if any, as they have been read through; `make`, which can be
    pickled, loads the model; a `window` of lines is sorted by length and written together. All else is as in
    `run_tasks`, its errors too; `UserError` also for a mistake in a line. What is written by then stays.
    """
    numbers, remarks = [], defaultdict(list)
    for left in _windows(files, window, output.done):
        left.check()
        numbers.append(left.index)
    count = max(1, math.ceil(len(numbers) / MOST_TASKS))
    task = functools.partial(_task, make, files, count, output.done)
    for text, of_task in run_tasks(task, numbers[::count], workers, engine, doing):
        output.write(text)
        for remark, lines in of_task.items():
            remarks[remark] += lines
    report(remarks)
