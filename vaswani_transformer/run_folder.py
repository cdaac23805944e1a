"""The folder of a training run: what lies in it, whether it may be written to, where a run goes on."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import yaml

from .averaging import WEIGHTS
from .errors import UserError
from .recipe import Recipe

CHECKPOINTS, RECIPE, LOG, CURVE = "checkpoints", "recipe.yaml", "training_log.jsonl", "learning_curve.png"
TOKENIZER = "tokenizer"  # within the checkpoints: what a resumed run goes on with
# Fields that a resumed run may change: they do not alter what has been computed so far.
FREE_ON_RESUME = {
    "max_steps",
    "max_minutes",
    "keep_checkpoints",
    "average_checkpoints",
    "num_beams",
    "length_penalty",
    "max_extra_tokens",
    "output",
    "overwrite",
    "early_stopping",
    "tokens_per_device",
    "report_to",
    "log_every",
}


def check_output(recipe: Recipe) -> Path | None:
    """Make the output folder; returns the checkpoint to resume from, if an interrupted run of this recipe left one.

    An interrupted run of the same settings is resumed with `overwrite` too. Nothing that is there is changed.

    Raises:
        UserError: if the folder holds a finished model and `overwrite` is not set, checkpoints of another recipe or of
            another program, or cannot be written to.
    """
    folder = Path(recipe.output)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output {folder} is a file: give a folder")
    ours = (folder / RECIPE).is_file()
    finished = (folder / WEIGHTS).exists() or ((folder / "config.json").exists() and not ours)
    if finished and not recipe.overwrite:
        raise UserError(f"{folder} already holds a model: give another --output, or --overwrite to replace it")
    checkpoints = folder / CHECKPOINTS
    if checkpoints.exists() and not ours and (not checkpoints.is_dir() or any(checkpoints.iterdir())):
        raise UserError(f"{checkpoints} is there and not from a training of ours: give another --output")
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        probe = checkpoints / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to output folder {folder}: {error.strerror}") from error
    checkpoint = last_complete_checkpoint(checkpoints)
    if checkpoint is None or finished:
        return None
    settings = asdict(recipe)
    try:
        earlier = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError):
        earlier = {}  # a torn file: nothing says that the settings were the same
    changed = sorted(name for name in settings if name not in FREE_ON_RESUME and earlier.get(name) != settings[name])
    if changed and recipe.overwrite:
        return None
    if changed:
        raise UserError(
            f"{folder} holds an interrupted training with other settings ({', '.join(changed)}): give the same ones to"
            " resume it, another --output, or --overwrite to start anew"
        )
    return checkpoint


def claim_output(recipe: Recipe, checkpoint: Path | None) -> None:
    """Take the folder for this run: write its recipe and, unless it is resumed, remove what an earlier one left.

    Args:
        recipe: the run, for which `check_output` found nothing wrong.
        checkpoint: what `check_output` returned.
    """
    folder = Path(recipe.output)
    if checkpoint is None:
        shutil.rmtree(folder / CHECKPOINTS)
        (folder / CHECKPOINTS).mkdir()
        for name in (WEIGHTS, "config.json", LOG, CURVE):
            (folder / name).unlink(missing_ok=True)
    text = yaml.safe_dump(asdict(recipe), sort_keys=False, allow_unicode=True)
    (folder / RECIPE).write_text(text, encoding="utf-8")


def check_space(folder: Path, parameters: int, checkpoints: int) -> None:
    """Refuse to start where the checkpoints would not fit; those that are there already count as free space.

    Args:
        folder: the output folder.
        parameters: of the model; each takes 12 bytes in a checkpoint: the weight and Adam's two averages, in float32.
        checkpoints: how many there are at most.

    Raises:
        UserError: with the space needed and the space there is, in GB.
    """
    taken = sum(path.stat().st_size for path in (folder / CHECKPOINTS).glob("checkpoint-*/*") if path.is_file())
    needed, free = 12 * parameters * checkpoints, shutil.disk_usage(folder).free + taken
    if free < needed:
        raise UserError(
            f"{folder} has {free / 1e9:.2f} GB of free space and {checkpoints} checkpoints need {needed / 1e9:.2f} GB:"
            " free some, give another --output, or lower keep_checkpoints and average_checkpoints"
        )


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that were written to their end, by step; a checkpoint's trainer state is written last."""
    found = []
    for path in folder.glob("checkpoint-*"):
        if path.name.rpartition("-")[2].isdigit():
            try:
                json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            except (OSError, json.JSONDecodeError):
                continue
            found.append(path)
    return sorted(found, key=step_of)


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step that was written to its end."""
    return next(reversed(complete_checkpoints(folder)), None)


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name."""
    return int(checkpoint.name.rpartition("-")[2])
