"""Cells in processes side by side, each with its devices and its share of the cores; cells that several train."""

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from ..errors import UserError
from ..hardware import own_processors
from ..json_and_yaml import read_json
from ..output_folder import OutputFolder
from ..recipes.recipe import Recipe
from ..training.callbacks import read_training_log
from ..training.checkpoints import last_complete_checkpoint, step_of
from ..training.run_folder import CHECKPOINTS
from ..training.run_folder import LOG as TRAINING_LOG
from .base import LOG

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2  # between two checks whether a job has ended
SESSIONS = "sessions.json"  # how many processes took part from which second of the training on


@dataclass(frozen=True)
class Job:
    """A process to start."""

    name: str  # in log messages
    command: Sequence[str]
    folder: Path  # standard error is appended to `log.txt` in it


def device_environments(devices: Sequence[str], jobs: int, processes: int = 1) -> list[dict[str, str]]:
    """For each job that runs at a time: the environment variables that deal out devices and cores.

    Jobs take the devices, `"cpu"` or `"cuda:N"` of those that this process sees, in turn, as many at a time as they
    have processes; none are all that there are. On CPUs they share the cores, unless `OMP_NUM_THREADS` is set already.

    Raises:
        UserError: for a device that is missing, and devices that jobs of so many processes cannot share.
    """
    available = torch.cuda.device_count()
    if not devices and processes > 1:  # or the processes of all jobs would take the first GPUs
        devices = [f"cuda:{number}" for number in range(available)]
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(available)))).split(",")
    numbers = [int(device.removeprefix("cuda:")) for device in devices if device != "cpu"]
    if numbers and max(numbers) >= available:
        raise UserError(f"--devices cuda:{max(numbers)} is not there: this machine has {available} GPU(s)")
    groups = ["" if device == "cpu" else visible[int(device.removeprefix("cuda:"))] for device in devices]
    if processes > 1 and numbers:
        rule = f"--processes is {processes}: each takes a GPU of its own"
        if len(set(numbers)) < len(devices):
            raise UserError(f"{rule}, name different ones in --devices")
        if len(devices) % processes:
            raise UserError(f"{rule}, give a multiple of {processes} in --devices and not {len(devices)}")
        groups = [",".join(groups[place : place + processes]) for place in range(0, len(groups), processes)]
    dealt = [{"CUDA_VISIBLE_DEVICES": group} for group in groups] or [{}]
    cores = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, len(own_processors()) // jobs))}
    return [dealt[place % len(dealt)] | cores for place in range(jobs)]


def run_side_by_side(jobs: Sequence[Job], environments: Sequence[dict[str, str]]) -> list[Job]:
    """Run jobs in their order, as many at a time as there are environments, which replace variables of this process.

    Returns those that failed; one that fails stops no other. SIGINT and SIGTERM are passed on to the running jobs, and
    `KeyboardInterrupt` is raised once all have ended.
    """
    waiting, failed, signals = list(jobs), [], []
    running: dict[int, tuple[Job, subprocess.Popen]] = {}  # by the place of the environment

    def pass_on(number: int, frame: object) -> None:
        signals.append(number)
        for _, process in running.values():
            process.send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while running or (waiting and not signals):
            for place, environment in enumerate(environments):
                if waiting and not signals and place not in running:
                    job = waiting.pop(0)
                    running[place] = job, _start(job, environment)
                    for number in signals:  # received while it was being started
                        running[place][1].send_signal(number)
            time.sleep(POLL_SECONDS)
            for place, (job, process) in list(running.items()):
                status = process.poll()
                if status is None:
                    continue
                del running[place]
                if status == 0:
                    logger.info("%s: finished", job.name)
                elif signals:
                    logger.info("%s: stopped, the next call resumes it", job.name)
                else:
                    logger.warning("%s: failed (%s): %s", job.name, status, last_error(job.folder / LOG))
                    failed.append(job)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for _, process in running.values():
            process.terminate()
    if signals:
        raise KeyboardInterrupt
    return failed


def _start(job: Job, environment: dict[str, str]) -> subprocess.Popen:
    device = environment.get("CUDA_VISIBLE_DEVICES")
    logger.info("%s: started%s", job.name, f" on GPU {device}" if device else "")
    job.folder.mkdir(parents=True, exist_ok=True)
    with (job.folder / LOG).open("ab") as log:
        return subprocess.Popen(
            list(job.command),
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )


def last_error(path: Path, start: int = 0) -> str:
    """The last error of a log from byte `start` on, or else its last line that is not blank, or its name."""
    content = path.read_bytes()[start:] if path.is_file() else b""
    lines = content.decode("utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return next(reversed(errors or [line for line in lines if line.strip()]), f"see {path}")


def train_in_processes(recipe: Recipe, processes: int) -> None:
    """Train a recipe, or resume it, as `torchrun -m vaswani_transformer train` does; the log goes to its folder.

    Each process takes the GPU of its number, or its share of the cores.

    Raises:
        UserError: if a process failed, with the last error of the log.
        KeyboardInterrupt: after a signal, which is passed on; a checkpoint is written then.
    """
    folder = Path(recipe.output)
    written = (folder / LOG).stat().st_size if (folder / LOG).is_file() else 0  # by earlier sessions
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "recipe.yaml"
        path.write_text(yaml.safe_dump(dataclasses.asdict(recipe), allow_unicode=True), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += [f"--nproc-per-node={processes}", "-m", "vaswani_transformer", "train", str(path), "--quiet"]
        environment = {
            "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // processes)),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600",  # seconds for a last checkpoint, in place of 30
        }
        failed = run_side_by_side([Job(f"{processes} processes", command, folder)], [environment])
    if failed:
        raise UserError(last_error(folder / LOG, written))


def record_session(folder: Path, processes: int) -> None:
    """Record how many processes a training has from here on, as it is about to start or to be resumed."""
    checkpoint, log = last_complete_checkpoint(folder / CHECKPOINTS), folder / TRAINING_LOG
    step = 0 if checkpoint is None else step_of(checkpoint)
    entries = read_training_log(log) if step and log.is_file() else []
    seconds = max((entry["seconds"] for entry in entries if entry["step"] <= step), default=0.0)
    # What an earlier session trained after its last checkpoint is lost.
    sessions = [session for session in read_sessions(folder) if session[0] < seconds]
    if processes > 1 or sessions:
        output = OutputFolder(folder)
        output.write_text(SESSIONS, json.dumps([*sessions, (seconds, processes)]) + "\n")


def read_sessions(folder: Path) -> list[tuple[float, int]]:
    """`(seconds of training so far, processes from then on)` of each session; none where it was always one process.

    Raises:
        UserError: for a damaged file, without which the work of several processes would count as that of one.
    """
    path, advice = folder / SESSIONS, f"remove {folder} to run the cell anew"
    try:
        sessions = read_json(path, advice, kind=list)
    except FileNotFoundError:
        return []
    try:
        return [(float(start), int(count)) for start, count in sessions]
    except (OverflowError, TypeError, ValueError):
        raise UserError(f"{path} holds no sessions: {advice}") from None


def device_seconds(seconds: float, sessions: Sequence[tuple[float, int]]) -> float:
    """Seconds of the whole training, each times the processes that took part; before the first session it was one."""
    counts = [1, *(processes for _, processes in sessions)]
    bounds = [0.0, *(start for start, _ in sessions), seconds]
    return sum(max(0.0, end - start) * count for start, end, count in zip(bounds, bounds[1:], counts, strict=False))
