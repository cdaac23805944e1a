"""One training in several processes of this machine: started, stopped and waited for by the process of its cell."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch.distributed
import yaml

from ..distributed import LOST_SECONDS, ProcessLostError
from ..errors import UserError
from ..files import write_text
from ..recipes.recipe import Recipe
from ..training.callbacks import read_training_log
from ..training.checkpoints import last_complete_checkpoint, step_of
from ..training.run_folder import CHECKPOINTS
from ..training.run_folder import LOG as TRAINING_LOG
from .base import LOG
from .launch import Job, SideBySide, last_line, own_command

# Of the others, once one has failed: those that have met it learn of that by themselves, later than this they hang.
GRACE_SECONDS = LOST_SECONDS + 20.0
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
