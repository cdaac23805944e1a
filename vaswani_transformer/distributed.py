"""Several processes that train together: who prepares first, who is lost, who says so.

A process that is killed closes its connections, which gloo notices; NCCL does not, and neither notices a process that
stands still or a machine that is gone. So each process gives signs of life through the store that the processes met at,
and ends itself when those of another one stop: none waits for ever in a sum that will not come.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed
import torch.distributed as distributed
from torch.distributed import ReduceOp
from transformers import TrainerCallback

logger = logging.getLogger(__name__)

BEAT_SECONDS = 2.0  # between two signs of life
LOST_SECONDS = 40.0  # without one, until a process counts as lost
BROKEN_SECONDS = 8.0  # the same once a connection broke, which already says that somebody is missing
CLOSED_SECONDS = 4.0  # with a closed connection to the store, until this is no ordinary end
GRACE_SECONDS = 10.0  # for the main thread to end by itself when another process has failed
# A counter holds a process' signs of life; one of these is added when it ends well, or with an error that it tells.
_FINISHED, _FAILED = 1 << 40, 1 << 50
RESUME = "the same command goes on from the last complete checkpoint"


class ProcessLostError(ConnectionError):
    """Another process of this training is gone; what it computed since the last checkpoint is lost."""


class ProcessWatch:
    """Gives signs of life, and ends this process when another one has stopped giving them.

    Two threads: one talks to the store, which may block; the other looks at the clock.

    Args:
        rank: of this process.
        world_size: number of processes.
        store: where they meet; not used by others, since a client that waits keeps all its callers waiting.
        by_launcher: whether the launcher keeps the store, and not process 0.
        beat: seconds between two signs of life.
        lost: seconds without one until a process counts as lost.
        resume: what somebody can do about a lost process.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: distributed.Store,
        by_launcher: bool,
        beat: float = BEAT_SECONDS,
        lost: float = LOST_SECONDS,
        resume: str = RESUME,
    ):
        self.rank, self.world_size, self.by_launcher = rank, world_size, by_launcher
        self.beat, self.limit, self.resume = beat, lost, resume
        self._store, self._voice = store, store.clone()
        self._others = [other for other in range(world_size) if other != rank]
        self._counts, self._hosts = {}, {}
        self._failed_since: float | None = None
        self._broken_since: float | None = None
        self._stop = threading.Event()
        self._forgive()

    def start(self) -> None:
        """Begin to give signs of life and to look for those of the others."""
        self._voice.set(f"host/{self.rank}", socket.gethostname())
        for work in (self._give_signs, self._look):
            threading.Thread(target=work, name=f"watch-{work.__name__}", daemon=True).start()

    def _forgive(self) -> None:
        """Count from now."""
        now = time.monotonic()
        self._answered = now
        self._seen = dict.fromkeys(self._others, now)

    def _give_signs(self) -> None:
        while not self._stop.is_set():
            try:
                self._store.add(f"beat/{self.rank}", 1)
                for other in self._others:
                    self._take(other, self._store.add(f"beat/{other}", 0))
                self._answered = time.monotonic()
            except RuntimeError:  # torch's DistError among them: who keeps the store is gone, or this training ends
                self._broken_since = time.monotonic()
                return
            self._stop.wait(self.beat)

    def _take(self, other: int, count: int) -> None:
        if count != self._counts.get(other):
            self._counts[other], self._seen[other] = count, time.monotonic()
        if count >= _FAILED:
            self._failed_since = self._failed_since or time.monotonic()
        if other not in self._hosts and self._store.check([f"host/{other}"]):
            self._hosts[other] = self._store.get(f"host/{other}").decode()

    def _look(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(min(1.0, self.beat)):
            now = time.monotonic()
            if now - last > max(5.0, 2 * self.beat):
                self._forgive()  # this process stood still itself: its clock says nothing about others
            last = now
            if self._failed_since is not None and now - self._failed_since > GRACE_SECONDS:
                self._leave(None)  # it has said why
            reason = self.lost(self.limit)
            if reason is not None:
                self._leave(reason)

    def _leave(self, reason: str | None) -> None:
        if self._stop.is_set():
            return
        if reason is not None and self.speaks_first():
            sys.stderr.write(f"error: {reason}\n")
        sys.stderr.flush()
        if self.rank == 0 and not self.by_launcher:
            time.sleep(3 * self.beat)  # the others ask here who speaks
        os._exit(1)  # the main thread may wait for ever for the process that is gone

    def lost(self, seconds: float) -> str | None:
        """One line about a process without signs of life for so long, or None."""
        now = time.monotonic()
        who = "the launcher" if self.by_launcher else f"process 0 of {self.world_size}"
        if self._broken_since is not None:
            broken = now - self._broken_since > min(seconds, CLOSED_SECONDS)
            return f"{who} was lost: its connection is closed; {self.resume}" if broken else None
        if now - self._answered > seconds:
            return f"{who} was lost: its connection does not answer; {self.resume}"
        if now - self._answered > 3 * self.beat:
            return None  # nothing is known about the others
        silent = [
            other
            for other in self._others
            if now - self._seen[other] > seconds and self._counts.get(other, 0) < _FINISHED
        ]
        if not silent:
            return None
        names = ", ".join(f"{other} ({self._hosts[other]})" if other in self._hosts else str(other) for other in silent)
        return (
            f"process {names} of {self.world_size} was lost: no sign of life for {now - self._seen[silent[0]]:.0f} s;"
            f" {self.resume}"
        )

    def name_lost(self) -> str:
        """After a broken connection: who is missing, as soon as that is known."""
        with contextlib.suppress(ValueError):  # outside the main thread signals are somebody else's
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher that has lost one ends all, at once
        limit, until = BROKEN_SECONDS, time.monotonic() + BROKEN_SECONDS + 3 * self.beat
        while time.monotonic() < until:
            if self._failed_since is not None:
                return f"another process failed; {self.resume}"
            reason = self.lost(limit)
            if reason is not None:
                return reason
            time.sleep(0.2)
        return f"the connection between the {self.world_size} processes broke; {self.resume}"

    def speaks_first(self) -> bool:
        """Whether nobody has told an error so far; then it is this process' part."""
        answers = []

        def ask():
            with contextlib.suppress(RuntimeError):
                answers.append(self._voice.add("told", 1) == 1)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(3.0)  # who keeps the store may be the one that is gone
        return answers[0] if answers else True

    def stop(self, failed: bool = False) -> None:
        """Give no more signs of life; the others know that this is meant.

        Args:
            failed: this process ends with an error that it tells, so that the others have to leave too.
        """
        self._stop.set()
        with contextlib.suppress(RuntimeError):
            self._voice.add(f"beat/{self.rank}", _FAILED if failed else _FINISHED)

    def wait_for_others(self, seconds: float) -> None:
        """Process 0 keeps the store where no launcher does: it stays until the others have read that it failed."""
        until = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while self.rank == 0 and not self.by_launcher and time.monotonic() < until:
                if all(self._voice.add(f"beat/{other}", 0) >= _FINISHED for other in self._others):
                    time.sleep(0.5)  # they ask here who speaks, right after
                    return
                time.sleep(0.2)

    @contextlib.contextmanager
    def first_process_first(self) -> Iterator[None]:
        """What is inside runs in process 0, then in the first process of each other machine, then in the rest.

        They wait at the store, however long it takes: a collective operation would run into its time limit.
        """
        local = int(os.environ.get("LOCAL_RANK", "0"))
        for other in {0, self.rank - local} - {self.rank} if self.rank else ():
            while not self._voice.check([f"ready/{other}"]):
                time.sleep(0.1)
        yield
        if local == 0 or self.rank == 0:
            self._voice.set(f"ready/{self.rank}", "1")

    def share(self, name: str, make: Callable[[], str]) -> str:
        """A text that process 0 makes and all get."""
        if self.rank == 0:
            text = make()
            self._voice.set(f"shared/{name}", text)
            return text
        while not self._voice.check([f"shared/{name}"]):
            time.sleep(0.1)
        return self._voice.get(f"shared/{name}").decode()


class Alone:
    """What `ProcessWatch` is for several processes, for one."""

    rank, world_size = 0, 1

    def share(self, name: str, make: Callable[[], str]) -> str:
        """The text."""
        return make()

    def first_process_first(self) -> contextlib.AbstractContextManager:
        """Nothing to wait for."""
        return contextlib.nullcontext()


_latest: ProcessWatch | None = None
_number = 0


@contextlib.contextmanager
def watch_processes(resume: str = RESUME) -> Iterator[ProcessWatch | Alone]:
    """Watch over the processes of torch's process group while the body runs.

    Args:
        resume: what somebody can do about a lost process.

    Raises:
        ProcessLostError: in place of an error that says no more than that a connection broke.
    """
    global _latest, _number
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        yield Alone()
        return
    _number += 1
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    meeting = distributed.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    # A launcher that starts the processes anew keeps its store.
    attempt = f"vaswani/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_number}"
    watch = _latest = ProcessWatch(
        distributed.get_rank(),
        distributed.get_world_size(),
        distributed.PrefixStore(attempt, meeting),
        by_launcher,
        resume=resume,
    )
    watch.start()
    failed = True
    try:
        yield watch
        failed = False
    except Exception as error:
        if not is_connection_error(error):
            raise
        raise ProcessLostError(watch.name_lost()) from error
    finally:
        watch.stop(failed)


def is_connection_error(error: BaseException) -> bool:
    """Whether an error comes from the connection to other processes and not from what this one does."""
    if isinstance(error, (distributed.DistBackendError, distributed.DistNetworkError, distributed.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL", "by peer"))


def speaks_first() -> bool:
    """Whether an error of this process is to be shown: one of several that fail together shows it."""
    if _latest is not None:
        return _latest.speaks_first()
    return os.environ.get("LOCAL_RANK", "0") == "0"  # they have not met: one on each machine


def wait_for_others(seconds: float = 3 * BEAT_SECONDS) -> None:
    """Let the others learn of this process' failure before it ends."""
    if _latest is not None:
        _latest.wait_for_others(seconds)


_groups: dict[int, tuple[object, object]] = {}  # of the default group's id: it, so that it stays, and ours beside it


def _host_group() -> object:
    """Group whose messages go between the processes' own memories; all processes ask for it at the same place.

    A number that is read from a device comes only after all the work that the device was given before.
    """
    world = torch.distributed.group.WORLD
    if id(world) not in _groups:
        on_host = "gloo" in torch.distributed.get_backend(world)
        _groups.clear()
        _groups[id(world)] = world, world if on_host else torch.distributed.new_group(backend="gloo")
    return _groups[id(world)][1]


def over_processes(args, numbers: Sequence[int], operation: ReduceOp = ReduceOp.SUM) -> list[int]:
    """Integers of all processes, summed or otherwise reduced one by one; the same result on all.

    Args:
        args: a trainer's settings.
        numbers: this process's, as many as on the others.
        operation: what to do with them.
    """
    if args.world_size == 1:
        return list(numbers)
    reduced = torch.tensor(numbers, dtype=torch.int64)
    torch.distributed.all_reduce(reduced, operation, group=_host_group())
    return reduced.tolist()


def on_any_process(args, *flags: bool) -> list[bool]:
    """Whether each flag is up on any process, the same on all: else one would stop while others wait for it."""
    return [bool(flag) for flag in over_processes(args, [int(flag) for flag in flags], ReduceOp.MAX)]


class AgreedCallback(TrainerCallback):
    """Does something at the end of a step, on all processes at once, when one of them wants to.

    Several of them share one message between the processes a step, once `agree_together` has seen them.
    """

    def __init__(self):
        self.group, self.agreed = [self], False

    def wants(self) -> bool:
        """Whether this process wants to."""
        raise NotImplementedError

    def act(self, control) -> None:
        """Do it."""
        raise NotImplementedError

    def on_step_end(self, args, state, control, **kwargs):
        """The first of the group asks for all of it."""
        if self.group[0] is self:
            for one, answer in zip(self.group, on_any_process(args, *(one.wants() for one in self.group)), strict=True):
                one.agreed = answer
        if self.agreed:
            self.act(control)
        return control


def agree_together(callbacks: Sequence[TrainerCallback]) -> None:
    """Let all `AgreedCallback` among a trainer's callbacks, in their order, ask with one message."""
    group = [callback for callback in callbacks if isinstance(callback, AgreedCallback)]
    for callback in group:
        callback.group = group
