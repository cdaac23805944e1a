"""Several processes that take windows of lines in turn, and the first one that puts the results in order.

They talk through the store that they met at, not through their devices; a lost process is noticed by `watch`.
"""

import json
import os
import time
import zlib
from dataclasses import asdict, dataclass, field

import torch.distributed as distributed

from ..errors import UserError

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
