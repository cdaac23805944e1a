"""The processes of one launch: which of them prepares first, what they agree on, and which one reports an error.

When a process dies, `accelerate launch` and `torchrun` name it and end the others; another program that starts
processes has to do the same. Here one of the others prints how to resume. torch is imported where it is used.
"""

import contextlib
import os
import pickle
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .errors import one_line

RESUME = "the same command resumes from the last complete checkpoint"
_FAILED = "failed"  # the store's count of processes that have asked whether to report an error


def is_launched() -> bool:
    """Return whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first_process() -> bool:
    """Return whether this is the only process or the first of those launched together: the one that writes."""
    return os.environ.get("RANK", "0") == "0"  # set by accelerate launch and torchrun


class ProcessLostError(ConnectionError):
    """Another process of this launch is gone; what they computed since the last checkpoint is lost."""


class Processes:
    """This process among those that it was launched with.

    They wait for each other by asking a store (None for one process alone), however long it takes: a collective
    operation ends with an error after `ddp_timeout`, and preparing a large corpus takes longer.
    """

    def __init__(self, rank: int = 0, store: "torch.distributed.Store | None" = None):  # noqa: F821
        self.rank, self._store = rank, store

    @property
    def is_first_of_machine(self) -> bool:
        """Return whether this process reads or writes what the others of its machine then find done."""
        return self.rank == 0 or os.environ.get("LOCAL_RANK", "0") == "0"

    @contextlib.contextmanager
    def first_process_first(self) -> Iterator[None]:
        """Run the body in process 0, then in the first process of each other machine, then in the rest."""
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        for earlier in {0, self.rank - local_rank} - {self.rank} if self.rank else ():
            self._wait_for(f"ready/{earlier}")
        yield
        if self._store is not None and self.is_first_of_machine:
            self._store.set(f"ready/{self.rank}", "")

    def share(self, name: str, make: Callable[[], Any]) -> Any:
        """Return to all processes an object that process 0 makes, pickled as by `broadcast_object_list`."""
        if self.rank != 0:
            self._wait_for(f"shared/{name}")
            return pickle.loads(self._store.get(f"shared/{name}"))
        made = make()
        if self._store is not None:
            self._store.set(f"shared/{name}", pickle.dumps(made))
        return made

    def reports_error(self) -> bool:
        """Return whether this process is the first to fail, and so the one that reports it."""
        try:
            return self._store.add(_FAILED, 1) == 1
        except RuntimeError:  # process 0 kept the store and is gone
            return True

    def _wait_for(self, key: str) -> None:
        """Wait until a key is set; raises `ProcessLostError` if another process fails meanwhile."""
        while not self._store.check([key]):  # `wait` would not let Ctrl-C through
            if self._store.check([_FAILED]):
                raise ProcessLostError("another process failed")
            time.sleep(0.1)


_processes: Processes | None = None


@contextlib.contextmanager
def joined_processes() -> Iterator[Processes]:
    """Yield the processes of torch's process group; SIGTERM, by which launchers end them, is a Ctrl-C meanwhile.

    `ProcessLostError`, with how to resume, replaces an error that reports no more than a broken connection.
    """
    from torch import distributed

    global _processes
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        yield Processes()
        return
    # A launcher that restarts the processes may keep its store, and on each machine it counts restarts for itself.
    name = [secrets.token_hex(8)]
    distributed.broadcast_object_list(name, src=0)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = distributed.TCPStore(*address, is_master=False, wait_for_workers=False)
    _processes = Processes(distributed.get_rank(), distributed.PrefixStore(f"vaswani/{name[0]}", store))
    earlier_handler = _on_sigterm(signal.default_int_handler)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_end_with_launcher, args=[os.getppid()], daemon=True).start()
    try:
        yield _processes
    except Exception as error:
        # Of the connection to other processes, not of this one's own work.
        is_named = isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL", "by peer"))
        if not (is_named or isinstance(error, distributed.DistError)):
            raise
        earlier_handler = signal.SIG_IGN  # the launcher is about to send it
        lost = f"one of the {distributed.get_world_size()} processes was lost or cannot be reached"
        raise ProcessLostError(f"{lost}: {one_line(error, 200)}; {RESUME}") from error
    finally:
        _on_sigterm(earlier_handler)


def _end_with_launcher(launcher: int) -> None:
    """Send this process SIGTERM once its launcher, its parent, has been killed and can no longer stop the processes."""
    while os.getppid() == launcher:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def _on_sigterm(handler):
    """Set the handler of SIGTERM; returns the earlier one."""
    with contextlib.suppress(ValueError, TypeError):  # not the main thread's, or not set by Python
        return signal.signal(signal.SIGTERM, handler)


def reports_error() -> bool:
    """Return whether this process reports its error: of several that fail together one does."""
    if _processes is not None:
        return _processes.reports_error()
    return os.environ.get("LOCAL_RANK", "0") == "0"  # they have not joined yet: one on each machine


_groups = (None, None)  # the default group that `over_processes` last saw, and the group that it used


def over_processes(args, numbers: Sequence[int], operation: str = "SUM") -> list[int]:
    """Return integers of all processes, summed or otherwise reduced one by one; `args` are a trainer's settings.

    The messages go between the processes' own memories: a number that is read from a device comes only after all the
    work that the device was given before.
    """
    global _groups
    if args.world_size == 1:
        return list(numbers)
    import torch
    from torch import distributed

    world = distributed.group.WORLD
    if _groups[0] is not world:
        on_host = "gloo" in distributed.get_backend(world)
        _groups = world, world if on_host else distributed.new_group(backend="gloo", timeout=args.ddp_timeout_delta)
    reduced = torch.tensor(numbers, dtype=torch.int64)
    distributed.all_reduce(reduced, getattr(distributed.ReduceOp, operation), group=_groups[1])
    return reduced.tolist()
