"""Checkpoints of a training: which are complete, why each was written, which are kept and averaged.

A checkpoint is written under another name, its files are forced to the disk, and it is renamed when it is complete. Its
manifest, written last, lists its files with their sizes, so that a half-copied or half-deleted one is noticed too.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..files import REMOVING, remove_files, set_aside, write_text

MANIFEST = "checkpoint.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TIME, VALIDATION, INTERVAL, STOP, END = "time", "validation", "interval", "stop", "end"  # why one was written


class CheckpointError(OSError):
    """A checkpoint could not be written; the earlier ones are whole."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    reasons: frozenset[str] = frozenset()  # why it was written (time, stop, ...); none without a manifest

    @property
    def step(self) -> int:
        """The optimizer step after which it was written."""
        return step_of(self.path)

    @property
    def timed(self) -> bool:
        """Whether the clock asked for it, alone or among others."""
        return TIME in self.reasons


def write_manifest(folder: Path, step: int, world_size: int, reasons: set[str]) -> None:
    """List the files of a checkpoint, once all of them have been written."""
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    record = {"step": step, "world_size": world_size, "written_for": sorted(reasons), "files": files}
    write_text(folder / MANIFEST, json.dumps(record, indent=1) + "\n")


def remove_checkpoint(folder: Path) -> None:
    """Remove the files of a checkpoint that its manifest lists; the folder stays if it holds others, or is a link."""
    if folder.is_symlink() or not folder.is_dir():
        return
    final = folder.with_name(folder.name.removeprefix(REMOVING))
    doomed = folder.with_name(REMOVING + final.name)  # so that no half of it counts as a checkpoint
    if doomed != folder:
        remove_checkpoint(doomed)  # an earlier removal was cut off
        set_aside(doomed)
        folder.rename(doomed)
    try:
        names = list(json.loads((doomed / MANIFEST).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        names = []
    remove_files(doomed, [name for name in names if isinstance(name, str)] + [MANIFEST] * bool(names))
    if doomed.exists():
        set_aside(final)
        doomed.rename(final)


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name."""
    return int(Path(checkpoint).name.rpartition("-")[2])


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """A checkpoint, or None where it is incomplete.

    One without a manifest, as earlier versions and other programs write them, is complete if its trainer's state can be
    read, which is written last.
    """
    try:
        if not (folder / MANIFEST).exists():
            state = json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
            return Checkpoint(folder) if isinstance(state, dict) else None
        record = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in record["files"]}
        if sizes != record["files"] or record["step"] != step_of(folder):
            return None
        return Checkpoint(folder, frozenset(record["written_for"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def checkpoint_folders(folder: Path) -> list[Path]:
    """Folders that are named as checkpoints, complete or not, by step."""
    folders = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdigit()]
    return sorted(folders, key=step_of)


def read_checkpoints(folder: Path) -> list[Checkpoint]:
    """The complete checkpoints in a folder, by step."""
    checkpoints = [read_checkpoint(path) for path in checkpoint_folders(folder)]
    return [checkpoint for checkpoint in checkpoints if checkpoint is not None]


def complete_checkpoints(folder: Path) -> list[Path]:
    """Folders of the complete checkpoints, by step."""
    return [checkpoint.path for checkpoint in read_checkpoints(folder)]


def last_complete_checkpoint(folder: Path) -> Path | None:
    """Folder of the complete checkpoint with the highest step; None if there is none."""
    return next(reversed(complete_checkpoints(folder)), None)


def to_average(checkpoints: list[Checkpoint], count: int, timed: bool, every: int, end: int) -> list[Checkpoint]:
    """The last `count` checkpoints of a run, those that are averaged (Section 6.1), by step.

    If `timed` those that the clock asked for, else those of validations, which come `every` so many steps; and that of
    the step `end`. Those that a signal asked for do not count, so that an interrupted run ends as an uninterrupted one.
    """
    chosen = [one for one in checkpoints if (one.timed if timed else one.step % every == 0) or one.step == end]
    return chosen[-count:] if count > 0 else []


def surplus(
    checkpoints: list[Checkpoint], limit: int | None, timed_limit: int | None, best_step: int | None
) -> list[Checkpoint]:
    """The checkpoints to remove; the last, to resume from, and that of `best_step` are always kept.

    Args:
        checkpoints: oldest first.
        limit: how many to keep that neither the clock nor a signal alone asked for, the best one included; None: all.
            One that a signal asked for is of no use once there is a later one, and must not push out an averaged one.
        timed_limit: how many to keep that the clock asked for; None: all.
        best_step: of the best one, if there is any.
    """
    keep = {one.step for one in checkpoints[-1:]} | {best_step}
    timed = [one.step for one in checkpoints if one.timed]
    keep |= set(timed if timed_limit is None else timed[max(0, len(timed) - timed_limit) :])
    if limit is None:
        keep |= {one.step for one in checkpoints if one.reasons != {TIME}}
    else:
        others = [one.step for one in checkpoints if not one.reasons or one.reasons - {TIME, STOP}]
        room = max(0, limit - (best_step in others))
        others = [step for step in others if step != best_step]
        keep |= set(others[max(0, len(others) - room) :])
    return [one for one in checkpoints if one.step not in keep]


def is_failed_write(error: BaseException) -> bool:
    """Whether an error means that a file could not be written: a full disk, a quota, a disk that has gone."""
    if isinstance(error, RuntimeError):  # torch reports the system's error in its own words
        return any(words in str(error) for words in ("PytorchStreamWriter", "unexpected pos", "iostream error"))
    return isinstance(error, OSError | SafetensorError)
