"""Cells of an experiment in processes side by side, each with its device and its share of the cores."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed
import yaml

from ..distributed import ProcessLostError
from ..errors import UserError
from ..files import write_text
from ..recipes.recipe import Recipe
from ..training.callbacks import read_training_log
from ..training.checkpoints import last_complete_checkpoint, step_of
from ..training.run_folder import CHECKPOINTS
from ..training.run_folder import LOG as TRAINING_LOG
from .base import LOG, locks

logger = logging.getLogger(__name__)

_LOOK = 0.2  # seconds between two looks at what has ended
EXIT_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)


@dataclass(frozen=True)
class Job:
    """One process.

    Args:
        name: for what is told of it.
        command: what to start.
        folder: `log.txt` in it takes what the process writes.
    """

    name: str
    command: Sequence[str]
    folder: Path


def device_environments(devices: Sequence[str], jobs: int, processes: int = 1) -> list[dict[str, str]]:
    """For each of the jobs that run side by side: what its processes see of the machine.

    Jobs take the devices in turn, as many at a time as they have processes. On CPUs they share the cores, unless
    `OMP_NUM_THREADS` is set already.

    Args:
        devices: `"cpu"` or `"cuda:N"`, N counting what this process sees; none: whatever there is.
        jobs: how many.
        processes: of each job.

    Raises:
        UserError: for another device, one that is not there, devices that jobs of so many processes cannot share, no
            jobs or no processes.
    """
    for option, value in (("--jobs", jobs), ("--processes", processes)):
        if value < 1:
            raise UserError(f"{option} is {value}: it must be 1 or more")
    groups = _groups(devices, processes)
    environments = []
    for place in range(jobs):
        found = {}
        if groups:
            found["CUDA_VISIBLE_DEVICES"] = groups[place % len(groups)]
        if "OMP_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            found["OMP_NUM_THREADS"] = str(max(1, cores // jobs))
        environments.append(found)
    return environments


def check_devices(devices: Sequence[str]) -> list[int | None]:
    """The number of each GPU that is named, None for CPUs.

    Raises:
        UserError: for a name of another form.
    """
    found = [(device, re.fullmatch(r"cpu|cuda:(\d{1,4})", device)) for device in devices]
    for device, match in found:
        if match is None:
            raise UserError(f"--devices {device!r} is not known: give cpu, or cuda:0, cuda:1, ...")
    return [None if match[1] is None else int(match[1]) for _, match in found]


def _groups(devices: Sequence[str], processes: int) -> list[str]:
    """For each job of `processes` processes that the devices have room for: `CUDA_VISIBLE_DEVICES`, empty for CPUs."""
    import torch

    here = torch.cuda.device_count()
    if not devices and processes > 1:  # or the processes of all jobs would take the first GPUs
        devices = [f"cuda:{number}" for number in range(here)]
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = seen.split(",") if seen else [str(number) for number in range(here)]
    shown = []
    for number in check_devices(devices):
        if number is not None and number >= here:
            raise UserError(f"--devices cuda:{number} is not there: this machine has {here} GPU(s)")
        shown.append("" if number is None else visible[number])
    if processes == 1 or not any(shown):
        return shown
    rule = f"--processes is {processes}: each takes a GPU of its own"
    if "" in shown or len(set(shown)) < len(shown):
        raise UserError(f"{rule}, name different ones in --devices")
    if len(shown) % processes:
        raise UserError(f"{rule}, give a multiple of {processes} in --devices and not {len(shown)}")
    return [",".join(shown[place : place + processes]) for place in range(0, len(shown), processes)]


class SideBySide:
    """Runs jobs, a few at a time; a signal to this process is passed on, and its jobs may end in peace.

    Args:
        jobs: in their order.
        environments: one for each that runs at a time: what is set over this process' own.
        grace: for jobs that work together, the seconds that the others have once one has failed; none where they go on.
    """

    def __init__(self, jobs: Sequence[Job], environments: Sequence[dict[str, str]], grace: float | None = None):
        self.waiting, self.environments, self.grace = list(jobs), list(environments), grace
        self.running: dict[int, tuple[Job, subprocess.Popen]] = {}
        self.failed: list[Job] = []
        self.statuses: dict[str, int] = {}  # of jobs that have ended, by name
        self.received: int | None = None
        self._failed_at: float | None = None

    def _pass_on(self, number: int, frame: object) -> None:
        self.received = number
        for _, process in self.running.values():
            process.send_signal(number)

    def run(self) -> list[Job]:
        """Run them all; returns those that failed, having let the others go on or, of jobs that work together, end.

        Raises:
            KeyboardInterrupt: after a signal, once all that ran have ended.
        """
        kept = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self.running or (self.waiting and self.received is None):
                self._start()
                time.sleep(_LOOK)
                self._look()
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)
            for _, process in self.running.values():
                process.terminate()
        if self.received is not None:
            raise KeyboardInterrupt
        return self.failed

    def _start(self) -> None:
        free = [place for place in range(len(self.environments)) if place not in self.running]
        for place in free if self.received is None else ():
            if not self.waiting:
                return
            job = self.waiting.pop(0)
            job.folder.mkdir(parents=True, exist_ok=True)
            with (job.folder / LOG).open("ab") as log:
                process = subprocess.Popen(
                    list(job.command),
                    env=os.environ | self.environments[place],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C reaches it through us, once
                    pass_fds=tuple(locks),
                )
            self.running[place] = job, process
            if self.received is not None:  # while it was being started
                process.send_signal(self.received)
            device = self.environments[place].get("CUDA_VISIBLE_DEVICES")
            logger.info("%s: started%s", job.name, f" on GPU {device}" if device else "")

    def _look(self) -> None:
        for place, (job, process) in list(self.running.items()):
            status = process.poll()
            if status is None:
                continue
            del self.running[place]
            self.statuses[job.name] = status
            if status == 0:
                logger.info("%s: finished", job.name)
            elif self.received is not None and status in EXIT_INTERRUPTED:
                logger.info("%s: stopped, goes on with the next call", job.name)
            else:
                if self.grace is None:  # else one of them has told it, and who started us tells it again
                    logger.warning("%s: failed (%s): %s", job.name, status, last_line(job.folder / LOG))
                self.failed.append(job)
                self._failed_at = self._failed_at or time.monotonic()
        if None not in (self.grace, self._failed_at) and time.monotonic() - self._failed_at > self.grace:
            for _, process in self.running.values():
                process.kill()


def last_line(path: Path) -> str:
    """The last line of a log that says something; its name where there is none."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    told = [line for line in lines if line.strip()]
    return told[-1].removeprefix("error: ") if told else f"see {path}"


def own_command(words: Sequence[str]) -> list[str]:
    """This program with other words, as a command to start."""
    return [sys.executable, "-m", "vaswani_transformer", *words]


GRACE_SECONDS = 30.0  # once a process has failed, until the others, which notice that by themselves, are killed
SESSIONS = "sessions.json"  # how many processes took part from which second of the training on


def train_in_processes(recipe: Recipe, processes: int) -> None:
    """Train, or go on, as `vaswani train` does under a launcher; returns once the model is written.

    What the processes tell goes to `log.txt` in the recipe's output folder. No launcher of torch's or accelerate's is
    between: those kill 30 seconds after a signal, in the midst of a checkpoint, and tell a page of their own. As under
    `torchrun` the store that the processes meet at is kept here, so that they end when this process is killed.

    Args:
        recipe: all settings.
        processes: how many; of GPUs each takes the one of its number, of the cores its share.

    Raises:
        UserError: for mistakes in the recipe or its data, as `train`.
        ProcessLostError: if a process failed otherwise, with the last line of the log.
        KeyboardInterrupt: after a signal, which is passed on: they have written a checkpoint.
    """
    folder = Path(recipe.output)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "recipe.yaml"
        path.write_text(yaml.safe_dump(dataclasses.asdict(recipe), allow_unicode=True), encoding="utf-8")
        command = own_command(["train", str(path), "--quiet"])
        jobs = [Job(f"process {rank} of {processes}", command, folder) for rank in range(processes)]
        side_by_side = SideBySide(jobs, rank_environments(processes, store.port), GRACE_SECONDS)
        failed = side_by_side.run()
    if failed:
        reason, statuses = last_line(folder / LOG), {side_by_side.statuses[job.name] for job in failed}
        if 2 in statuses:
            raise UserError(reason)
        killed = "" if 1 in statuses else f"a process ended with status {min(statuses)}: "
        raise ProcessLostError(f"{killed}{reason}")


def rank_environments(processes: int, port: int) -> list[dict[str, str]]:
    """What each of the processes that train together is told, as `torchrun` tells it, and its share of the threads."""
    threads = max(1, torch.get_num_threads() // processes)
    common = {
        "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": str(threads),
    }  # fmt: skip
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def note_session(folder: Path, processes: int) -> None:
    """Note how many processes take part from here on in a training that starts or goes on, for `device_seconds`.

    Args:
        folder: of the training.
        processes: from now on.
    """
    checkpoint = last_complete_checkpoint(folder / CHECKPOINTS)
    seconds = 0.0
    if checkpoint is not None and (folder / TRAINING_LOG).is_file():
        entries = read_training_log(folder / TRAINING_LOG)
        seconds = max((entry["seconds"] for entry in entries if entry["step"] <= step_of(checkpoint)), default=0.0)
    # What an earlier session did after its last checkpoint is lost.
    sessions = [session for session in read_sessions(folder) if session[0] < seconds]
    if processes > 1 or sessions:
        write_text(folder / SESSIONS, json.dumps([*sessions, (seconds, processes)]) + "\n")


def read_sessions(folder: Path) -> list[tuple[float, int]]:
    """`(seconds of training so far, processes from then on)` of each session that was noted, in their order."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        found = json.loads((folder / SESSIONS).read_text(encoding="utf-8"))
        return [(float(seconds), int(processes)) for seconds, processes in found]
    return []


def device_seconds(seconds: float, sessions: Sequence[tuple[float, int]]) -> float:
    """Seconds of training times the processes that took part in them.

    Args:
        seconds: of the whole training.
        sessions: of `read_sessions`; before the first it was one process.
    """
    counts = [1, *(processes for _, processes in sessions)]
    bounds = [0.0, *(start for start, _ in sessions), seconds]
    return sum(max(0.0, end - start) * count for start, end, count in zip(bounds, bounds[1:], counts, strict=False))
