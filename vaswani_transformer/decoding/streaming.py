"""Lines read so many at a time, so that files need not fit in memory, and what of them goes through a model at once."""

import json
import os
import queue
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch.distributed as distributed

from ..errors import UserError
from ..model.configuration_vaswani import VaswaniConfig

WINDOW_LINES = 2000  # more pads less, fewer come out sooner


@dataclass
class Window:
    """Lines that follow each other.

    Args:
        index: of the window, from 0.
        first: number of its first line, from 1.
        lines: what was read, of any kind.
        error: what ended the reading after these lines.
    """

    index: int
    first: int
    lines: list[Any]
    error: Exception | None = None


def in_windows(lines: Iterable[Any], size: int, start: int = 0) -> Iterator[Window]:
    """All lines from a window on; an error while reading comes with the lines before it, and ends the windows.

    Args:
        lines: any items.
        size: lines a window; the last may have less.
        start: windows to pass over.
    """
    lines = iter(lines)
    index = 0
    while True:
        window = Window(index, index * size + 1, [])
        try:
            if index < start:
                passed = sum(1 for _ in islice(lines, size))
            else:
                for line in islice(lines, size):  # not extend(): what came before an error has to stay
                    window.lines.append(line)
                passed = len(window.lines)
        except Exception as error:
            window.error = error
            yield window
            return
        if index >= start and window.lines:
            yield window
        if passed < size:
            return
        index += 1


def check_length(config: VaswaniConfig, number: int, tokens: int) -> None:
    """Refuse a sentence that a model with learned positions has none for.

    Raises:
        UserError: naming the line (counted from 1), its tokens and the limit.
    """
    if config.position_encoding == "learned" and tokens > config.max_position_embeddings:
        raise UserError(
            f"line {number} has {tokens} tokens and the model has {config.max_position_embeddings} positions:"
            " split the line into shorter sentences"
        )


Item = TypeVar("Item")
_STEP = 0.2  # seconds between two looks at whether anybody still wants the next item


@contextmanager
def read_ahead(items: Iterable[Item], number: int = 2) -> Iterator[Iterator[Item]]:
    """The same items in the same order, up to `number` of them made before they are asked for.

    An error of `items` is raised in its place. When the body ends, however it ends, nothing more is taken from `items`
    than what is under way; a thread that waits for input does not keep the program from ending.
    """
    made: queue.Queue = queue.Queue(maxsize=number)
    stopped = threading.Event()

    def put(entry: tuple) -> None:
        while not stopped.is_set():
            try:
                return made.put(entry, timeout=_STEP)
            except queue.Full:
                continue
        return None

    def work() -> None:
        try:
            for item in items:
                put((item, None))
                if stopped.is_set():
                    return
            put((None, StopIteration()))
        except BaseException as error:
            put((None, error))

    def take() -> Iterator[Item]:
        while True:
            item, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item

    threading.Thread(target=work, name="read-ahead", daemon=True).start()
    try:
        yield take()
    finally:
        stopped.set()


AHEAD = 4  # windows a process may be ahead of what is written, for each of the processes
_CHUNK = 1 << 21  # bytes of one message; stores take no more than some MB
_WAIT = 0.02  # seconds between two looks


@dataclass
class WindowRecords:
    """What one window has become.

    Args:
        index: of the window.
        records: text to write for each of its lines.
        split: numbers of the lines that were translated in parts.
        error: a mistake in the input, which ends the work after these records.
    """

    index: int
    records: list[str]
    split: list[int] = field(default_factory=list)
    error: str | None = None


class Turns:
    """This process' turns; of one process alone all are.

    Args:
        rank: of this process.
        world_size: number of processes.
        store: where they meet; needed for more than one.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, store: distributed.Store | None = None):
        self.rank, self.world_size, self._store = rank, world_size, store

    def is_mine(self, index: int) -> bool:
        """Whether this process works on the window."""
        return index % self.world_size == self.rank

    def give(self, window: WindowRecords) -> None:
        """Hand a window to process 0, as soon as that is not too far behind."""
        while window.index >= self._store.add("written", 0) + AHEAD * self.world_size:
            time.sleep(_WAIT)
        message = zlib.compress(json.dumps(asdict(window)).encode("utf-8"), 1)
        chunks = [message[start : start + _CHUNK] for start in range(0, len(message), _CHUNK)]
        for number, chunk in enumerate(chunks):
            self._store.set(f"{window.index}/{number}", chunk)
        self._store.set(str(window.index), str(len(chunks)))

    def take(self, index: int) -> WindowRecords:
        """Wait for another process' window."""
        while not self._store.check([str(index)]):
            time.sleep(_WAIT)
        names = [f"{index}/{number}" for number in range(int(self._store.get(str(index))))]
        message = b"".join(self._store.get(name) for name in names)
        for name in (*names, str(index)):
            self._store.delete_key(name)
        return WindowRecords(**json.loads(zlib.decompress(message)))

    def wrote(self, index: int) -> None:
        """Tell the others that all windows up to this one are written."""
        if self.world_size > 1:
            self._store.add("written", index + 1 - self._store.add("written", 0))


def is_launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def meet() -> Turns:
    """Turns of the processes that `accelerate launch` or `torchrun` started; call `watch_processes` after it.

    Raises:
        UserError: if the launcher has not said where they meet.
    """
    if not is_launched():
        return Turns()
    if not distributed.is_initialized():
        try:
            distributed.init_process_group("gloo")
        except ValueError as error:
            raise UserError(f"the processes cannot meet ({error}): start them by accelerate launch") from error
    store = distributed.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Turns(
        distributed.get_rank(), distributed.get_world_size(), distributed.PrefixStore(f"turns/{attempt}", store)
    )
