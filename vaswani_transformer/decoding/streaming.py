"""How lines stream through a model, in constant memory: in windows, read ahead, over one or several processes.

The lines of a window are sorted by length and translated together, and written in their own order when all are done.
Several processes translate a window each, and one of them writes the same file as a single process would.
"""

import os
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch.distributed as distributed

from ..errors import UserError

WINDOW_LINES = 2000  # more lines need less padding, fewer lines are written sooner
WINDOW_CHARACTERS = 10_000_000  # a window of longer lines has fewer of them: its tokens need about 1 GB

Item = TypeVar("Item")


@dataclass
class Window:
    """Lines that follow each other."""

    index: int  # of the window, from 0
    first: int  # number of its first line, from 1
    lines: list[Any]
    error: Exception | None = None  # what ended the reading after these lines


@dataclass
class WindowRecords:
    """What is written for a window."""

    first: int  # number of its first line, from 1
    records: list[str]  # for each of its lines, line ends included
    split: list[int] = field(default_factory=list)  # numbers of the lines that were translated in parts
    cut: list[int] = field(default_factory=list)  # and of those whose translation repeated itself to its limit
    error: Exception | None = None  # what ends the work after these records


def in_windows(lines: Iterable[Any], size: int, done: int = 0) -> Iterator[Window]:
    """Lines in windows of `size`, or of fewer with `WINDOW_CHARACTERS`; an error while reading comes in the last one.

    The windows are those of all lines, but without the first ones that hold nothing beyond the `done` lines.
    """
    lines, first, is_last = iter(lines), 1, False
    for index in count():
        window, characters = Window(index, first, []), 0
        try:
            while len(window.lines) < size and characters < WINDOW_CHARACTERS:
                line = next(lines)
                window.lines.append(line)
                characters += len(line) if isinstance(line, str) else sum(map(len, line))
        except StopIteration:
            is_last = True
        except Exception as error:
            window.error, is_last = error, True
        first += len(window.lines)
        if window.error is not None or (window.lines and first - 1 > done):
            yield window
        if is_last:
            return


def read_ahead(items: Iterable[Item], number: int = 2) -> Iterator[Item]:
    """The same items, up to `number` of them made in a thread before they are asked for.

    An error of `items` is raised in its place. Close the generator to stop the thread after the item at hand. The
    thread is a daemon, unlike those of `concurrent.futures`: one that waits for input does not keep a program alive.
    """
    ready: queue.Queue = queue.Queue(maxsize=number)
    closed = threading.Event()

    def work() -> None:
        try:
            for item in items:
                ready.put((item, None))
                if closed.is_set():
                    return
            ready.put((None, StopIteration()))
        except BaseException as error:
            ready.put((None, error))

    threading.Thread(target=work, name="read-ahead", daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        closed.set()
        with suppress(queue.Empty):  # make room, in case the thread waits for it
            while True:
                ready.get_nowait()


def is_launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def initialise_processes() -> tuple[int, int]:
    """Connect the processes of `accelerate launch` or `torchrun`; returns this one's rank and their number.

    Raises:
        UserError: if the launcher has not set the address of process 0.
    """
    if not is_launched():
        return 0, 1
    if not distributed.is_initialized():
        try:
            # gloo notices the end of a process by its closed connection; a window may take any time.
            distributed.init_process_group("gloo", timeout=timedelta(days=1))
        except ValueError as error:
            raise UserError(f"the processes cannot connect ({error}): start them with accelerate launch") from error
    return distributed.get_rank(), distributed.get_world_size()


def broadcast(value: Any) -> Any:
    """The value that process 0 gives, in all processes."""
    values = [value]
    if distributed.is_initialized():
        distributed.broadcast_object_list(values)
    return values[0]


def over_processes(windows: Iterator[WindowRecords]) -> Iterator[WindowRecords]:
    """The windows of all processes in order, in each process, up to the first error.

    Of `n` processes, process `r` gives windows `r`, `r + n`, `r + 2n`, ...
    """
    while True:
        gathered: list[WindowRecords | None] = [None] * distributed.get_world_size()
        distributed.all_gather_object(gathered, next(windows, None))
        for window in gathered:
            if window is None:
                return
            yield window
            if window.error is not None:
                return
