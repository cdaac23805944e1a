"""Run numbered tasks in processes of this machine, or on a cluster by Ray Data.

A task needs its number alone: it reads its share of the text itself, and returns its result or writes its part whole.
So tasks run in any order and anywhere, and may be repeated where a worker is lost.
"""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tqdm import tqdm

from ..errors import UserError, reading
from ..hardware import available_cpus

Task = Callable[[int], Any]  # from its number to a result that can be pickled
LOCAL, RAY = "local", "ray"
_RESUME = "run the same command again to resume"
_task: Task | None = None  # of a worker process


def run_tasks(
    make: Callable[[], Task], numbers: Sequence[int], workers: int, engine: str = LOCAL, shown: str | None = None
) -> Iterator[Any]:
    """Do numbered tasks in workers; the first that fails ends the others.

    Args:
        make: makes the function that does a task; called once in each worker, so it has to be picklable.
        numbers: of the tasks.
        workers: processes of this machine, or actors of Ray, each on a GPU of its own if there are any; one local
            worker is this process. A script that asks for several needs `if __name__ == "__main__":`.
        engine: `local`, or `ray` for the cluster that `RAY_ADDRESS` names or this machine belongs to.
        shown: text of the progress bar on standard error, on a terminal; None for no bar.

    Yields the tasks' results, in the order of `numbers`, each as soon as those before it are ready. `UserError` of a
    task, for an engine that is not installed, and for workers that were lost.
    """
    workers = max(1, min(workers, len(numbers)))
    disable = None if shown else True  # None: shown on a terminal only
    if engine == LOCAL and workers == 1:
        results = map(make(), numbers) if numbers else ()
    else:
        results = (_in_processes if engine == LOCAL else _on_ray)(make, numbers, workers)
    yield from tqdm(results, shown, len(numbers), disable=disable, unit=" parts", delay=1)


def default_workers(parts: int) -> int:
    """Return a worker for each CPU, but no more than there are parts: a worker takes seconds to start."""
    return max(1, min(available_cpus(), parts))


def _in_processes(make: Callable[[], Task], numbers: Sequence[int], workers: int) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")  # a fork would inherit the locks of torch's and Rust's threads
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers, context, _start, (context.Value("i", 0), workers)) as pool:
        # Workers inherit the mask: a terminal sends Ctrl-C to all processes, and this one ends the others.
        has_masks = hasattr(signal, "pthread_sigmask")  # Windows has none
        mask = has_masks and signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = {number: pool.submit(_run, make, number) for number in numbers}
        finally:
            if has_masks:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            yield from (futures.pop(number).result() for number in numbers)
        except BrokenProcessPool as error:
            problem = 'perhaps as the memory is full, or a script lacks `if __name__ == "__main__":`'
            raise UserError(f"a worker process was killed, {problem}: {_RESUME}, with fewer workers") from error
        finally:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
                process.join()
            pool.shutdown(cancel_futures=True)  # ends its thread, which Python's exit could meet as it closes pipes


def _start(started: Any, workers: int) -> None:
    """Give a worker process its share of the machine, and end it with its parent."""
    tqdm.set_lock(threading.RLock())  # its own has a semaphore, of which a process that is ended leaves a warning
    with started.get_lock():
        os.environ["LOCAL_RANK"] = str(started.value)  # by which it takes a GPU
        started.value += 1
    for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ.setdefault(name, str(max(1, available_cpus() // workers)))
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _run(make: Callable[[], Task], number: int) -> Any:
    global _task
    _task = _task or make()
    return _task(number)


def _on_ray(make: Callable[[], Task], numbers: Sequence[int], workers: int) -> Iterator[Any]:
    with reading("engine ray (pip install 'vaswani_transformer[cluster]')"):
        import ray.data

    class Worker:
        task = None

        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            try:
                self.task = self.task or make()
                result = self.task(row["item"])
            except UserError as error:  # which Ray would wrap in pages of its own
                result = error
            return {"result": pickle.dumps(result)}

    with reading(f"Ray ({_RESUME})"):
        ray.init(ignore_reinit_error=True)
        ray.data.DataContext.get_current().execution_options.preserve_order = True
        gpus = min(1, ray.cluster_resources().get("GPU", 0))
        tasks = ray.data.from_items(list(numbers), override_num_blocks=len(numbers) or 1)
        actors = ray.data.ActorPoolStrategy(min_size=1, max_size=workers)
        for row in tasks.map(Worker, compute=actors, num_gpus=gpus).iter_rows():
            result = pickle.loads(row["result"])
            if isinstance(result, UserError):
                raise result
            yield result
