"""What does the tasks of stages: processes of this machine, or those of a cluster by datatrove.

datatrove's executor for one machine is not used: it waits for ever for a worker that was killed.
"""

import functools
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .. import __version__
from ..errors import UserError, one_line
from ..files import is_local, write_text

logger = logging.getLogger(__name__)

Task = Callable[[int, Callable[[int], Any]], None]  # takes a number, and what is told of pairs that are done
LOCAL, SLURM, RAY = ENGINES = ("local", "slurm", "ray")
_NAMED = 5  # reasons in one line
_FAILED = "failed"  # the folder of what was wrong with tasks, in that of their stage
_STOPPED = -(2**62)  # instead of a number of pairs: all tasks end
_done: Any = None  # in a process of a pool: the pairs that all its processes have done


class Workers:
    """Processes of this machine that do the tasks of one stage after the other; they start when they are needed.

    Args:
        number: of processes; where one is enough it is this one.
    """

    def __init__(self, number: int):
        self.number, self._pool, self._done = number, None, None

    def __enter__(self):
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._pool is not None:
            if kind is not None and not issubclass(kind, UserError):  # Ctrl-C too
                self._done.value = _STOPPED
            self._pool.shutdown(cancel_futures=True)

    def run(
        self, task: Task, number: int, shown: str | None = None, unit: str = "pairs", total: int | None = None
    ) -> None:
        """Do the tasks 0 to `number` - 1; one that fails by `UserError` does not stop the others.

        Args:
            task: a function that can be pickled.
            number: of tasks.
            shown: what a bar on standard error says, on a terminal; None: no bar.
            unit: of what tasks say that is done.
            total: how many there are, if it is known.

        Raises:
            UserError: with what was wrong with those that failed; and if a process was killed.
        """
        disable = None if shown else True  # None: shown on a terminal only
        with tqdm(total=total, desc=shown, unit=f" {unit}", unit_scale=True, disable=disable, delay=1) as bar:
            one = min(self.number, number) == 1
            results = _one_by_one(task, number, bar) if one else self._pooled(task, number, bar)
            errors = [error for error in results if error is not None]
        if errors:
            raise _all_of(list(map(str, errors))) from errors[0]

    def _pooled(self, task: Task, number: int, bar: tqdm) -> Iterator[UserError | None]:
        if self._pool is None:
            # A server that forks would itself be lost where this process has forked.
            context = multiprocessing.get_context("spawn")
            self._done = context.Value("q", 0)
            self._pool = ProcessPoolExecutor(self.number, context, _start, (self._done,))
        self._done.value = 0
        try:
            # Ctrl-C, which a terminal sends to all processes, waits until those that are starting ignore it.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                waiting = [self._pool.submit(_run, task, one) for one in range(number)]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            pending = set(waiting)
            while pending:
                _, pending = wait(pending, 0.2, FIRST_COMPLETED)
                bar.update(self._done.value - bar.n)
            for future in waiting:
                yield future.exception() if isinstance(future.exception(), UserError) else future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process was killed, perhaps because the memory is full, or could not start, as in a script"
                ' that lacks `if __name__ == "__main__":`; the same again with fewer workers goes on where this ended'
            ) from error


def run_tasks(task: Task, number: int, workers: int = 1, **options: Any) -> None:
    """Do the tasks of one stage; arguments and errors are those of `Workers` and `Workers.run`."""
    with Workers(workers) as processes:
        processes.run(task, number, **options)


def _all_of(reasons: Sequence[str]) -> UserError:
    """What was wrong with tasks, in one line."""
    reasons = list(dict.fromkeys(reasons))
    more = f"; and {len(reasons) - _NAMED:,} more" if len(reasons) > _NAMED else ""
    return UserError("; ".join(reasons[:_NAMED]) + more)


def _one_by_one(task: Task, number: int, bar: tqdm) -> Iterator[UserError | None]:
    for one in range(number):
        try:
            task(one, bar.update)
            yield None
        except UserError as error:
            yield error


def _start(done: Any) -> None:
    """Prepare a process of the pool: it ends with its parent, and is interrupted only within a task."""
    global _done
    _done = done
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _run(task: Task, number: int) -> None:
    task(number, _advance)


def _advance(pairs: int) -> None:
    with _done.get_lock():
        if _done.value < 0:
            raise KeyboardInterrupt
        _done.value += pairs


# Clusters


def check_engine(engine: str) -> None:
    """Refuse an engine that is unknown or not installed, before anything is begun.

    Raises:
        UserError: naming what is missing.
    """
    if engine not in ENGINES:
        raise UserError(f"engine {engine!r} is unknown: give one of {', '.join(ENGINES)}")
    if engine != LOCAL:
        _executor(engine)


def _executor(engine: str) -> Any:
    """datatrove's executor for an engine."""
    try:
        if engine == SLURM:
            from datatrove.executor.slurm import SlurmPipelineExecutor

            return SlurmPipelineExecutor
        import ray  # noqa: F401 - its absence is noticed here
        from datatrove.executor.ray import RayPipelineExecutor

        return RayPipelineExecutor
    except ModuleNotFoundError as error:
        raise UserError(f"engine {engine} needs {error.name}: pip install 'vaswani_transformer[cluster]'") from error


def run_on_cluster(
    engine: str, stages: Sequence[tuple[str, Task, int]], folder: Path, options: Mapping[str, Any]
) -> None:
    """Have the tasks of stages, each with a name and a number of tasks, done by Slurm or Ray.

    Slurm gets an array of jobs for each stage, each of which waits for the one before; Ray, which takes one stage, has
    done all in the end, but for what failed and what was lost with a machine. What a task writes to standard error lies
    below the folder, a note that it is done, and what was wrong: this is told where the same is begun again.

    Raises:
        UserError: where datatrove or the engine is not installed, for options that its executor does not take, where
            jobs are refused, and with what was wrong with tasks that failed on Ray.
    """
    executor = _executor(engine)
    for reason in _take_failures(stages, folder):
        logger.warning("failed before, and is done again: %s", reason)
    last = None
    for name, task, number in stages:
        named = {"job_name": f"vaswani-{name}"} if engine == SLURM else {}
        try:
            last = executor(
                [functools.partial(_step, task, __version__, folder / name / _FAILED)], number, depends=last,
                logging_dir=str(folder / name), **{**named, **options},
            )  # fmt: skip
        except TypeError as error:
            reason = one_line(error).partition("() ")[2] or one_line(error)
            raise UserError(f"engine {engine}: {reason}; see {executor.__name__} of datatrove") from error
    try:
        last.run()
    except FileNotFoundError as error:
        if error.filename != "sbatch":
            raise
        raise UserError("there is no command sbatch: start this on a machine from which jobs are submitted") from error
    except subprocess.CalledProcessError as error:
        raise UserError(
            f"sbatch refused the jobs (status {error.returncode}, what it said stands above): correct the"
            " --engine-option that it names, and give the same command again"
        ) from error
    if engine == RAY and (reasons := _take_failures(stages, folder)):
        raise _all_of(reasons)


def _take_failures(stages: Sequence[tuple[str, Task, int]], folder: Path) -> list[str]:
    """What was wrong with tasks, as far as it was not taken before."""
    reasons = []
    for name, _, _ in stages:
        for path in sorted((folder / name / _FAILED).glob("*")):
            reasons.append(path.read_text(encoding="utf-8"))
            path.unlink(missing_ok=True)
    return reasons


def _step(task: Task, version: str, failed: Path, data: Any, rank: int, world_size: int) -> None:
    """A task as a pipeline of datatrove."""
    try:
        if version != __version__:
            what = f"{socket.gethostname()} has version {__version__} of the package"
            raise UserError(f"{what}, this was begun with {version}: install that one there")
        task(rank, lambda pairs: None)
    except UserError as error:
        if is_local(failed):
            failed.mkdir(parents=True, exist_ok=True)
        write_text(failed / f"{rank:05d}", str(error))
        raise
