"""Cells of an experiment in processes side by side, each with its device and its share of the cores."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import UserError
from .experiments import LOG

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


def device_environments(devices: Sequence[str], jobs: int) -> list[dict[str, str]]:
    """For each of the jobs that run side by side: what its process sees of the machine.

    Jobs take the devices in turn. On CPUs they share the cores, unless `OMP_NUM_THREADS` is set already.

    Args:
        devices: `"cpu"` or `"cuda:N"`, N counting what this process sees; none: whatever there is.
        jobs: how many.

    Raises:
        UserError: for another device, one that is not there, or no jobs.
    """
    if jobs < 1:
        raise UserError(f"--jobs is {jobs}: it must be 1 or more")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = seen.split(",") if seen else None
    environments = []
    for place in range(jobs):
        device = devices[place % len(devices)] if devices else ""
        match = re.fullmatch(r"cpu|cuda:(\d{1,4})|", device)
        if match is None:
            raise UserError(f"--devices {device!r} is not known: give cpu, or cuda:0, cuda:1, ...")
        found = {}
        if device == "cpu":
            found["CUDA_VISIBLE_DEVICES"] = ""
        elif device:
            number = int(match[1])
            import torch

            if number >= torch.cuda.device_count():
                raise UserError(f"--devices {device} is not there: this machine has {torch.cuda.device_count()} GPU(s)")
            found["CUDA_VISIBLE_DEVICES"] = visible[number] if visible else str(number)
        if "OMP_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            found["OMP_NUM_THREADS"] = str(max(1, cores // jobs))
        environments.append(found)
    return environments


class SideBySide:
    """Runs jobs, a few at a time; a signal to this process is passed on, and its jobs may end in peace.

    Args:
        jobs: in their order.
        environments: one for each that runs at a time: what is set over this process' own.
    """

    def __init__(self, jobs: Sequence[Job], environments: Sequence[dict[str, str]]):
        self.waiting, self.environments = list(jobs), list(environments)
        self.running: dict[int, tuple[Job, subprocess.Popen]] = {}
        self.failed: list[Job] = []
        self.received: int | None = None

    def _pass_on(self, number: int, frame: object) -> None:
        self.received = number
        for _, process in self.running.values():
            process.send_signal(number)

    def run(self) -> list[Job]:
        """Run them all; returns those that failed, having let the others go on.

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
                )
            self.running[place] = job, process
            device = self.environments[place].get("CUDA_VISIBLE_DEVICES")
            logger.info("%s: started%s", job.name, f" on GPU {device}" if device else "")

    def _look(self) -> None:
        for place, (job, process) in list(self.running.items()):
            status = process.poll()
            if status is None:
                continue
            del self.running[place]
            if status == 0:
                logger.info("%s: finished", job.name)
            elif self.received is not None and status in EXIT_INTERRUPTED:
                logger.info("%s: stopped, goes on with the next call", job.name)
            else:
                logger.warning("%s: failed (%s): %s", job.name, status, last_line(job.folder / LOG))
                self.failed.append(job)


def last_line(path: Path) -> str:
    """The last line of a log that says something; its name where there is none."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    told = [line for line in lines if line.strip()]
    return told[-1].removeprefix("error: ") if told else f"see {path}"


def own_command(words: Sequence[str]) -> list[str]:
    """This program with other words, as a command to start."""
    return [sys.executable, "-m", __package__, *words]
