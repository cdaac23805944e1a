"""Checkpoints of a training: which are complete, which are kept and averaged.

A checkpoint is written under another name, its files are forced to the disk, and it is renamed when it is complete. Its
manifest, written last, lists its files with their sizes, by which a half-copied one is noticed, and with their CRC-32,
which is compared before a checkpoint is resumed from or its weights are averaged or selected.
"""

import contextlib
import json
import logging
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import UserError, reading
from ..files import REMOVING, remove_files, write_text
from ..json_and_yaml import read_json
from ..recipes.recipe import Recipe

logger = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    by_signal: bool = False  # written for a signal alone

    @property
    def step(self) -> int:
        """Return the optimizer step after which it was written."""
        return step_of(self.path)


def write_manifest(folder: Path, step: int, by_signal: bool) -> None:
    """List the files of a checkpoint, once all of them have been written; they are still in memory to be summed."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    with ThreadPoolExecutor() as executor:
        sums = dict(zip(sizes, executor.map(lambda name: crc32(folder / name), sizes), strict=True))
    record = {"step": step, "written_for": ["stop"] if by_signal else [], "files": sizes, "crc32": sums}
    write_text(folder / MANIFEST, json.dumps(record, indent=1) + "\n")


def remove_checkpoint(folder: Path) -> None:
    """Remove the files of a checkpoint that its manifest lists; the folder stays if it holds others, or is a link.

    First the manifest is renamed, so that no half of it counts as a checkpoint.
    """
    doomed = folder / (REMOVING + MANIFEST)
    if folder.is_symlink():
        return
    with contextlib.suppress(UserError, OSError):  # no manifest, or not empty at the end
        if not doomed.exists():
            (folder / MANIFEST).rename(doomed)
        with reading(doomed):
            names = list(read_json(doomed)["files"])
        remove_files(folder, [*names, doomed.name])
        folder.rmdir()


def remove_half_removed(folder: Path) -> None:
    """Finish removals of checkpoints that were cut off."""
    for path in checkpoint_folders(folder):
        if (path / (REMOVING + MANIFEST)).exists():
            remove_checkpoint(path)
        with contextlib.suppress(OSError):  # not empty, or a link
            path.rmdir()


def crc32(path: Path) -> str:
    """Return the CRC-32 of a file, in hexadecimal: against flipped bits, at several times the speed of SHA-256."""
    value, block = 0, memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            value = zlib.crc32(block[:size], value)
    return f"{value:08x}"


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step in a checkpoint's name."""
    return int(Path(checkpoint).name.rpartition("-")[2])


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return a complete checkpoint: it has the files of its manifest, of these sizes; their contents are not read."""
    with reading(folder / MANIFEST):
        manifest = read_json(folder / MANIFEST)
        wrong = {name for name, size in manifest["files"].items() if (folder / name).stat().st_size != size}
        if wrong or manifest["step"] != step_of(folder):
            raise ValueError(f"{min(wrong, default='the step')} is not as written")
        return Checkpoint(folder, manifest["written_for"] == ["stop"])


def check_contents(folder: Path, weights_only: bool = False) -> None:
    """Compare the files of a checkpoint with their sums, all of them or just weights and configurations.

    Raises:
        UserError: naming a file that has changed since it was written. A model folder has no sums, and passes.
    """
    path = folder / MANIFEST
    with reading(path):
        sums = read_json(path)["crc32"].items() if path.is_file() else ()
    for name, value in sums:
        checked = (not weights_only or name.endswith((".safetensors", ".json"))) and (folder / name).is_file()
        if checked and crc32(folder / name) != value:
            raise UserError(f"{folder / name} has changed since it was written, or the disk is failing")


def read_state(folder: Path) -> TrainerState:
    """Return the trainer's state in a checkpoint; raises `UserError` where it cannot be read."""
    path = folder / TRAINER_STATE_NAME
    with reading(path):  # with the log of all steps
        return TrainerState(**read_json(path, most_bytes=1 << 30, finite=False))


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the folders that are named as checkpoints, complete or not, by step."""
    name = re.compile(f"{PREFIX_CHECKPOINT_DIR}-(0|[1-9][0-9]{{0,17}})")
    folders = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if name.fullmatch(path.name)]
    return sorted((path for path in folders if path.is_dir()), key=step_of)


def read_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints in a folder, by step; see `open_checkpoint`."""
    checkpoints = []
    for path in checkpoint_folders(folder):
        with contextlib.suppress(UserError, OSError):
            checkpoints.append(open_checkpoint(path))
    return checkpoints


def checkpoint_to_resume(folder: Path, required: bool = True) -> Path | None:
    """Return the folder of the checkpoint with the highest step that is complete and unchanged.

    Damaged ones are passed over with a warning. None if there are none, or no whole one and none is `required`.

    Raises:
        UserError: if one is required and all are damaged: what is wrong with the last.
    """
    damage = None
    for path in reversed(checkpoint_folders(folder)):
        try:
            open_checkpoint(path)
            check_contents(path)
            return path
        except (UserError, OSError) as error:
            logger.warning("not resumed from %s: %s", path.name, error)
            damage = damage or error
    if damage is not None and required:
        raise UserError(f"no checkpoint can be resumed from; the last: {damage}; --overwrite starts again") from damage
    return None


def to_average(checkpoints: list[Checkpoint], count: int, every: int, end: int) -> list[Checkpoint]:
    """Return the last `count` checkpoints of a run, those that are averaged (Section 6.1), by step.

    They are those at multiples of `every` steps, of the last `count` times so many, and that of the step `end`. Those
    that a signal asked for do not count, so that an interrupted run ends as an uninterrupted one.
    """
    start = end - count * every  # a run that was ended before `averaged_from` has others, too far from each other
    steps = range(max(every, start + every - start % every), end, every)
    chosen = [each for each in checkpoints if each.step in steps or each.step == end]
    return chosen[-count:] if count > 0 else []


def averaged_from(recipe: Recipe, end: int) -> int:
    """Return the first step with a checkpoint because of `average_every`: or a fast GPU would write all the time."""
    every, count, end = recipe.average_every, recipe.average_checkpoints, min(end, recipe.max_steps)
    # The first of those that `to_average` chooses, or the last step of all.
    return [*range(every, end, every), end][-max(1, count) :][0] if every else 0


def surplus(checkpoints: list[Checkpoint], limit: int | None, best_step: int | None) -> list[Checkpoint]:
    """Return the checkpoints to remove, of these, oldest first.

    The last, to resume from, and that of `best_step`, if any, are always kept, and of those that not a signal alone
    asked for the last ones, `limit` in all with the best; None or 0: all are kept, those of signals too. One that a
    signal asked for is of no use once there is a later one, and must not push out an averaged one.
    """
    if not limit:
        return []
    others = [each.step for each in checkpoints if not each.by_signal and each.step != best_step]
    room = max(0, limit - any(each.step == best_step and not each.by_signal for each in checkpoints))
    keep = {best_step, *others[max(0, len(others) - room) :], *(each.step for each in checkpoints[-1:])}
    return [each for each in checkpoints if each.step not in keep]
