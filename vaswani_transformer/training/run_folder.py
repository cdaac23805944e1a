"""The folder of a training run: what lies in it, whether it may be written to, where a run resumes."""

import hashlib
import json
import shutil
from dataclasses import asdict, fields
from pathlib import Path

import datasets
import numpy as np
import yaml

from ..data.tokenization import tokenizer_sha256
from ..data.tokenized_pairs import pair_lengths
from ..errors import UserError
from ..files import publish, remove, remove_leftovers, unfinished, write_text
from ..json_and_yaml import read_json, read_yaml
from ..recipes.recipe import Recipe
from .checkpoints import WEIGHTS, checkpoint_to_resume

CHECKPOINTS, RECIPE, LOG, CURVE = "checkpoints", "recipe.yaml", "training_log.jsonl", "learning_curve.png"
TENSORBOARD, EVENTS = "tensorboard", "events.out.tfevents.*"  # a folder, and the files in it that are TensorBoard's
TOKENIZER = "tokenizer"  # a folder beside the checkpoints, for a resumed run
CONTENTS = "contents.json"  # beside it: hashes of tokenizer and data when the run began
SAMPLE = 10_000  # pairs whose tokens are compared on a resume; lengths are compared for all
BYTES_OF_A_CHECKPOINT, BYTES_OF_A_MODEL = 12, 4  # for each parameter: in float32 Adam's two averages and the weight
# Fields that a resumed run may change: what has been computed so far does not depend on them.
FREE_ON_RESUME = {
    "max_steps", "max_minutes", "early_stopping", "keep_checkpoints", "average_checkpoints", "checkpoint_minutes",
    "keep_weights", "data_workers", "num_beams", "length_penalty", "max_extra_tokens", "output", "overwrite",
    "tokens_per_device", "report_to", "log_every", "expected_pairs", "expected_source_length", "expected_target_length",
    "prepared",  # wherever the folder lies; what is in it is compared by content
}  # fmt: skip


def check_output(recipe: Recipe) -> Path | None:
    """Make the output folder; returns the checkpoint to resume from, if an interrupted run of this recipe left one.

    An interrupted run of the same settings is resumed with `overwrite` too. Nothing that is there is changed.

    Raises:
        UserError: for a folder that cannot be written to, or holds another run, or a model without `overwrite`.
    """
    folder = Path(recipe.output)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output {folder} is a file: give a folder")
    ours = (folder / RECIPE).is_file()
    finished = (folder / WEIGHTS).exists() or ((folder / "config.json").exists() and not ours)
    if finished and not recipe.overwrite:
        raise UserError(f"{folder} already holds a model: give another --output, or --overwrite to replace it")
    checkpoints = folder / CHECKPOINTS
    if checkpoints.exists() and not ours and (not checkpoints.is_dir() or any(checkpoints.glob("[!.]*"))):
        raise UserError(f"{checkpoints} was not made by a training of this program: give another --output")
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        probe = checkpoints / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)  # several processes may look
    except OSError as error:
        raise UserError(f"cannot write to output folder {folder}: {error.strerror}") from error
    checkpoint = None if finished else checkpoint_to_resume(checkpoints, required=not recipe.overwrite)
    if checkpoint is None:
        return None
    changes = _changed_settings(recipe, folder / RECIPE)
    if changes and not recipe.overwrite:
        raise UserError(
            f"{folder} holds an interrupted training with other settings ({', '.join(changes)}): give the same ones to"
            " resume it, another --output, or --overwrite to start anew"
        )
    return None if changes else checkpoint


_RESTORE = "write the run's recipe there again, give another --output, or move the checkpoints away to start anew"


def _changed_settings(recipe: Recipe, earlier_recipe: Path) -> list[str]:
    """Settings that may not change on a resume and did, as `"seed: 1, was 0"`."""
    earlier = read_yaml(earlier_recipe, _RESTORE)
    if not isinstance(earlier, dict):
        raise UserError(f"{earlier_recipe} holds no recipe: {_RESTORE}")
    # Fields that are newer than the run had no other value than their default.
    earlier = {field.name: field.default for field in fields(Recipe)} | earlier
    now = {name: value for name, value in asdict(recipe).items() if name not in FREE_ON_RESUME}
    return [
        f"{name}: {value}, was {earlier[name]!s:.100}" for name, value in sorted(now.items()) if value != earlier[name]
    ]


def _data_sha256(pairs: datasets.Dataset) -> str:
    """A hash of the lengths of all tokenized pairs and the tokens of some, evenly spread: cheap for millions too."""
    if not isinstance(pairs, datasets.Dataset):
        return pairs.sha256()  # of its files, known since they were written
    digest = hashlib.sha256()
    source, target = pair_lengths(pairs)
    for start in range(0, len(pairs), 1_000_000):
        part = slice(start, start + 1_000_000)
        digest.update(np.stack([source[part], target[part]]).astype("<i4").tobytes())
    rows = np.unique(np.linspace(0, len(pairs) - 1, min(SAMPLE, len(pairs))).astype(np.int64))
    sample = pairs.select(rows).select_columns(["input_ids", "labels"]).with_format(None)
    for batch in sample.iter(batch_size=1000):
        ids = [token for name in ("input_ids", "labels") for row in batch[name] for token in row]
        digest.update(np.asarray(ids, "<i4").tobytes())
    return digest.hexdigest()


def content_hashes(tokenizer, train: datasets.Dataset, validation: datasets.Dataset) -> dict[str, str]:
    """Hashes of tokenizer, training and validation pairs (tokenized, with lengths), by content and not by path."""
    return {
        "tokenizer": tokenizer_sha256(tokenizer),
        "training data": _data_sha256(train),
        "validation data": _data_sha256(validation),
    }


def check_contents(folder: Path, hashes: dict[str, str]) -> None:
    """Refuse to resume on another tokenizer or other data than the run in `folder` began with."""
    try:
        earlier = read_json(folder / CHECKPOINTS / CONTENTS, "remove it to resume without comparing the data")
    except FileNotFoundError:  # an earlier version did not write it
        return
    changed = [name for name, value in hashes.items() if earlier.get(name) != value]
    if changed:
        raise UserError(
            f"the {' and the '.join(changed)} changed since the interrupted training in {folder} began: restore the"
            f" earlier content to resume it, give another --output, or remove {folder / CHECKPOINTS} to start anew"
        )


def claim_output(recipe: Recipe, checkpoint: Path | None, tokenizer, hashes: dict[str, str]) -> None:
    """Take the folder for this run: write its recipe and, unless `checkpoint` is resumed, remove an earlier run.

    At whatever moment this is cut off, the next start finds an interrupted run with its own recipe, or none.
    """
    folder = Path(recipe.output)
    checkpoints = folder / CHECKPOINTS
    if checkpoint is None:
        remove(checkpoints)
        for name in (WEIGHTS, "config.json", LOG, CURVE):
            (folder / name).unlink(missing_ok=True)
        if (folder / RECIPE).is_file():  # else they are another program's
            for path in (folder / TENSORBOARD).glob(EVENTS):  # shown together, two runs would look like one
                path.unlink()
    for place in (folder, checkpoints):
        remove_leftovers(place)
    write_text(folder / RECIPE, yaml.safe_dump(asdict(recipe), sort_keys=False, allow_unicode=True))
    if checkpoint is None:
        checkpoints.mkdir()
        new = unfinished(checkpoints / TOKENIZER)
        tokenizer.save_pretrained(new)
        publish(new, checkpoints / TOKENIZER)
        write_text(checkpoints / CONTENTS, json.dumps(hashes, indent=1) + "\n")


def checkpoints_at_most(recipe: Recipe) -> int:
    """How many checkpoints are on the disk at once: of validations, the best, timed ones, and the one being written."""
    timed = recipe.checkpoint_minutes > 0
    validated = recipe.keep_checkpoints if timed else max(recipe.keep_checkpoints, recipe.average_checkpoints)
    return validated + (max(recipe.average_checkpoints, 1) if timed else 0) + 2


def check_space(folder: Path, parameters: int, checkpoints: int) -> None:
    """Refuse to start where so many checkpoints and the model would not fit; present ones count as free space."""
    taken = sum(path.stat().st_size for path in (folder / CHECKPOINTS).rglob("*") if path.is_file())
    needed = (BYTES_OF_A_CHECKPOINT * checkpoints + BYTES_OF_A_MODEL) * parameters
    free = shutil.disk_usage(folder).free + taken
    if free < needed:
        raise UserError(
            f"{folder} has {free / 1e9:.2f} GB of free space and {checkpoints} checkpoints need {needed / 1e9:.2f} GB:"
            " free some, give another --output, or lower keep_checkpoints and average_checkpoints"
        )
