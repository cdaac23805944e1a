"""Checkpoints of a training: which are complete, why each was written, which are kept and averaged.

A checkpoint is written under another name, its files are forced to the disk, and it is renamed when it is complete. Its
manifest, written last, lists its files with their sizes, so that a half-copied or half-deleted one is noticed too, and
with their CRC-32, which is compared before a checkpoint is resumed from or its weights are averaged or selected.
"""

import contextlib
import json
import logging
import math
import os
import pickle
import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import UserError, one_line
from ..files import REMOVING, free_name, remove_files, set_aside, write_text
from ..json_and_yaml import read_json
from ..recipes.recipe import Recipe

logger = logging.getLogger(__name__)

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
    """List the files of a checkpoint, once all of them have been written; they are still in memory to be summed."""
    sizes = _sizes(folder)
    with ThreadPoolExecutor() as executor:
        sums = dict(zip(sizes, executor.map(lambda name: crc32(folder / name), sizes), strict=True))
    record = {"step": step, "world_size": world_size, "written_for": sorted(reasons), "files": sizes, "crc32": sums}
    write_text(folder / MANIFEST, json.dumps(record, indent=1) + "\n")


def remove_checkpoint(folder: Path) -> None:
    """Remove the files of a checkpoint that its manifest lists; the folder stays if it holds others, or is a link."""
    if folder.is_symlink() or not folder.is_dir():
        return
    final = folder.with_name(folder.name.removeprefix(REMOVING))
    doomed = folder.with_name(REMOVING + final.name)  # so that no half of it counts as a checkpoint
    names = []
    with contextlib.suppress(UserError, OSError):
        names = list((_read_manifest(folder) or {"files": {}})["files"])
    if doomed != folder:
        if not names:
            return
        remove_checkpoint(doomed)  # an earlier removal was cut off
        set_aside(doomed)
        folder.rename(doomed)
    remove_files(doomed, [*names, MANIFEST] if names else [])
    with contextlib.suppress(OSError):  # not empty
        doomed.rmdir()
    if doomed.exists():  # without a manifest it may be half of an earlier version's, which would count as complete
        doomed.rename(final if names and not os.path.lexists(final) else free_name(final))


def _sizes(folder: Path) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def crc32(path: Path) -> str:
    """CRC-32 of a file, in hexadecimal: against flipped bits, at several times the speed of SHA-256."""
    value, block = 0, memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            value = zlib.crc32(block[:size], value)
    return f"{value:08x}"


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name."""
    return int(Path(checkpoint).name.rpartition("-")[2])


_AGAIN = "copy the checkpoint again, or move its folder away to resume from an earlier one or anew"


def open_checkpoint(folder: Path) -> Checkpoint:
    """A complete checkpoint: it has the files of its manifest, of these sizes; what is in them is not read.

    One without a manifest, as earlier versions and other programs write them, is complete if its trainer's state can be
    read, which is written last.

    Raises:
        UserError: naming the file that is missing or damaged.
    """
    record = _read_manifest(folder)
    if record is None:
        _read_state(folder)
        return Checkpoint(folder)
    if not all(isinstance(reason, str) for reason in record["written_for"]) or record.get("step") != step_of(folder):
        raise UserError(f"{folder / MANIFEST} is not the manifest of this checkpoint: {_AGAIN}")
    present = _sizes(folder)
    for name, size in record["files"].items():
        if name not in present:
            raise UserError(f"{folder} has no file {name!r:.200}: {_AGAIN}")
        if present[name] != size:
            raise UserError(f"{folder / name} has {present[name]:,} bytes, not {size!r:.20} as written: {_AGAIN}")
    return Checkpoint(folder, frozenset(record["written_for"]))


def _read_manifest(folder: Path) -> dict | None:
    path = folder / MANIFEST
    try:
        record = read_json(path, _AGAIN)
    except FileNotFoundError:
        return None
    kinds = {"files": dict, "written_for": list, "crc32": dict}
    record = {"crc32": {}} | record  # an earlier version wrote none
    if not all(isinstance(record.get(name), kind) for name, kind in kinds.items()):
        raise UserError(f"{path} is no manifest of a checkpoint: {_AGAIN}")
    return record


def check_contents(folder: Path, weights_only: bool = False) -> None:
    """Compare the files of a complete checkpoint with their sums, all of them or just weights and configurations.

    Raises:
        UserError: naming a file that has changed since it was written. An earlier version's has no sum, and passes.
    """
    record = _read_manifest(folder) or {"crc32": {}}
    for name in sorted(_sizes(folder).keys() & record["crc32"].keys()):
        checked = not weights_only or name.endswith((".safetensors", ".json"))
        if checked and crc32(folder / name) != record["crc32"][name]:
            raise UserError(f"{folder / name} has changed since it was written, or the disk is failing: {_AGAIN}")


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """A checkpoint, or None where it is incomplete, see [`open_checkpoint`]."""
    with contextlib.suppress(UserError, OSError):
        return open_checkpoint(folder)
    return None


# Entries of a trainer's state that must be of a certain type to resume; the Trainer works out the others anew.
_STATE_TYPES = {
    **dict.fromkeys(("global_step", "num_input_tokens_seen"), int),
    **dict.fromkeys(("epoch", "total_flos", "max_steps"), int | float),
    **dict.fromkeys(("eval_steps", "save_steps", "logging_steps", "best_metric"), int | float | None),
    "best_global_step": int | None,
    "best_model_checkpoint": str | None,
    "train_batch_size": int | None,
    "log_history": list,
    "stateful_callbacks": dict,
}


def read_state(folder: Path) -> TrainerState:
    """The trainer's state in a checkpoint.

    Raises:
        UserError: for one that is missing, damaged, or of another step.
    """
    path, values = folder / TRAINER_STATE_NAME, _read_state(folder)
    try:
        wrong = [name for name in _STATE_TYPES.keys() & values if not isinstance(values[name], _STATE_TYPES[name])]
        entries = values.get("log_history", [])
        if wrong or not all(isinstance(entry, dict) and isinstance(entry.get("step"), int) for entry in entries):
            raise TypeError(f"its {wrong[0] if wrong else 'log_history'} is of a wrong type")
        if values.get("global_step") != step_of(folder):
            raise ValueError("it is of another step")
        if not math.isfinite(values.get("eval_steps") or 0):
            raise ValueError("its eval_steps is not finite")
        return TrainerState(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({one_line(error, 200)}): {_AGAIN}") from error


def _read_state(folder: Path) -> dict:
    try:  # with the log of all steps
        return read_json(folder / TRAINER_STATE_NAME, _AGAIN, most_bytes=1 << 30, finite=False)
    except FileNotFoundError:
        raise UserError(f"{folder} has no {TRAINER_STATE_NAME}: {_AGAIN}") from None


@contextlib.contextmanager
def reading(folder: Path, *names: str) -> Iterator[None]:
    """Errors of any kind in what reads these files of a checkpoint become a `UserError` that names them."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = one_line(error, 200)
        if isinstance(error, pickle.UnpicklingError):
            reason = "damaged, or more than tensors and plain values, which could run code"
        broken = [name for name in names if len(names) > 1 and not _can_load(folder / name)] or names
        raise UserError(f"{' or '.join(broken)} of {folder} cannot be used ({reason}): {_AGAIN}") from error


def _can_load(pickled: Path) -> bool:
    try:
        torch.load(pickled, map_location="cpu", weights_only=True)
        return True
    except Exception:
        return False


def checkpoint_folders(folder: Path) -> list[Path]:
    """Folders that are named as checkpoints, complete or not, by step."""
    name = re.compile(f"{PREFIX_CHECKPOINT_DIR}-(0|[1-9][0-9]{{0,17}})")
    folders = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if name.fullmatch(path.name)]
    return sorted((path for path in folders if path.is_dir()), key=step_of)


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


def checkpoint_to_resume(folder: Path, required: bool = True) -> Path | None:
    """Folder of the checkpoint with the highest step that is complete and unchanged, and can be resumed from.

    One that is not is passed over with a warning. None if there are none, or no such one and none is `required`.

    Raises:
        UserError: if one is required and there are damaged ones alone: what is wrong with the last.
    """
    damage = None
    for path in reversed(checkpoint_folders(folder)):
        try:
            open_checkpoint(path)
            check_contents(path)
            read_state(path)
            return path
        except (UserError, OSError) as error:
            logger.warning("not resumed from %s: %s", path.name, error)
            damage = damage or error
    if damage is not None and required:
        raise UserError(f"no checkpoint can be resumed from; the last: {damage}") from damage
    return None


def to_average(checkpoints: list[Checkpoint], count: int, timed: bool, every: int, end: int) -> list[Checkpoint]:
    """The last `count` checkpoints of a run, those that are averaged (Section 6.1), by step.

    If `timed` those that the clock asked for, else those at multiples of `every` steps, of the last `count` times so
    many; and that of the step `end`. Those that a signal asked for do not count, so that an interrupted run ends as an
    uninterrupted one.
    """
    start = end - count * every  # a run that was ended before `averaged_from` has others, too far from each other
    chosen = [
        one
        for one in checkpoints
        if (one.timed if timed else one.step % every == 0 and one.step > start) or one.step == end
    ]
    return chosen[-count:] if count > 0 else []


def averaged_from(recipe: Recipe) -> int:
    """The first step with a checkpoint because of `average_every`: without it a fast GPU would write all the time."""
    if not recipe.average_every:
        return 0
    steps = steps_to_average(recipe.average_checkpoints, recipe.average_every, recipe.max_steps)
    return min(steps) if steps and not recipe.checkpoint_minutes else recipe.max_steps


def steps_to_average(count: int, every: int, end: int) -> list[int]:
    """The steps whose checkpoints `to_average` chooses in a run to step `end` with a checkpoint `every` so many."""
    steps = sorted({*range(every, end, every), end})
    return steps[-count:] if count > 0 else []


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
