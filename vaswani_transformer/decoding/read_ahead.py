"""An iterator that works ahead in a thread of its own."""

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

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
