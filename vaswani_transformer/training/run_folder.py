"""The folder of a training run: its files, whether it may be written to, where a run resumes."""

import hashlib
import json
import logging
import shlex
from dataclasses import asdict, fields
from pathlib import Path

import datasets
import numpy as np
import pandas
import yaml
from accelerate.utils import is_matplotlib_available

from ..data.prepared import PreparedPairs
from ..data.tokenization import tokenizer_sha256
from ..data.tokenized_pairs import pair_lengths
from ..errors import UserError, reading
from ..files import remove_leftovers, written_whole
from ..json_and_yaml import read_json, read_yaml
from ..model import configuration_vaswani
from ..output_folder import RECIPE, OutputFolder
from ..recipes.recipe import AUTO, CHOSEN, PATHS, Recipe
from .callbacks import TENSORBOARD, read_training_log
from .checkpoints import WEIGHTS, checkpoint_folders, checkpoint_to_resume, remove_checkpoint, remove_half_removed

logger = logging.getLogger(__name__)

CHECKPOINTS, LOG, CURVE = "checkpoints", "training_log.jsonl", "learning_curve.png"
TOKENIZER = "tokenizer"  # a folder beside the checkpoints, for a resumed run
PREPARED = "prepared"  # a folder: what `vaswani prepare` makes, of large text; it has a record of its own
VERDICT = "verdict.json"  # of a finished run: what came of it, with its verdict in words
FORECAST = "forecast"  # a folder: models of parts of the text, and these parts, with its mark
REVERSE = "reverse"  # a folder: the model of the reverse direction of a training with back-translation, with its mark
ADAPTER = "adapter"  # a folder: what LoRA has trained, beside the model that it is merged into
ORIGIN = "started_from.json"  # of a run that started from a model: its name and a hash of its weights
DISTILLATION = "distillation.json"  # of a run on a teacher's translations: its name, and how they were made
IMPORT = "import.json"  # where that model is from, if it was imported; also in the folder of an imported model
CONTENTS = "contents.json"  # beside it: hashes of tokenizer and data when the run began
# What a finished run puts beside its recipe and its log.
MODEL_FILES = (
    WEIGHTS, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    *(path.name for path in Path(configuration_vaswani.__file__).parent.glob("*_vaswani.py")),
)  # fmt: skip
_OF_RUN = (LOG, CURVE, VERDICT, ORIGIN, IMPORT)
_FILES = (RECIPE, *_OF_RUN, *MODEL_FILES, f"{CHECKPOINTS}/{RECIPE}", f"{CHECKPOINTS}/{CONTENTS}")
_OURS_WITHIN = (f"{CHECKPOINTS}/", f"{ADAPTER}/", f"{TENSORBOARD}/")
SAMPLE = 10_000  # pairs whose tokens are compared on a resume; lengths are compared for all
# Fields that a resumed run may change: what has been computed so far does not depend on them.
FREE_ON_RESUME = {
    "max_steps", "max_minutes", "decline_steps", "early_stopping", "keep_checkpoints", "average_checkpoints",
    "average_every", "keep_weights", "data_workers", "num_beams", "length_penalty", "max_extra_tokens", "output",
    "overwrite", "tokens_per_device", "padding_free", "ddp_timeout", "report_to", "log_every",
    "prepared",  # wherever the folder lies; what is in it is compared by content
}  # fmt: skip
# Others that may, as the text itself is compared.
_OF_TEXT = {"data_dir"} | {name for name in PATHS if name.startswith(("train", "validation"))}


def check_output(recipe: Recipe) -> Path | None:
    """Return the checkpoint to resume from, if an interrupted run of this recipe left one in its output folder.

    An interrupted run of the same settings and minutes is resumed with `overwrite` too. Nothing is written.

    Raises:
        UserError: for a folder that is not ours, or holds another run, a model without `overwrite`, or others' files.
    """
    output = OutputFolder(recipe.output)
    folder, checkpoints = output.shown, output.shown / CHECKPOINTS
    if recipe.from_model is not None:
        check_is_elsewhere(recipe.output, recipe.from_model)
    output.check_ours(PREPARED, REVERSE)
    finished = (folder / WEIGHTS).exists()
    if finished and not recipe.overwrite:
        more = f"vaswani train --from {shlex.quote(str(folder))} with another --output trains it further"
        raise UserError(f"{folder} already holds a model: give another --output, or --overwrite to replace it; {more}")
    output.check([*_FILES, *(f"{ADAPTER}/adapter_{name}" for name in ("config.json", "model.safetensors"))])
    if RECIPE not in output.names and any(checkpoints.glob("[!.]*")):
        raise UserError(f"{checkpoints} was not made by a training of this program: give another --output")
    checkpoint = None if finished else checkpoint_to_resume(checkpoints, required=not recipe.overwrite)
    if checkpoint is not None:
        if not (changes := changed_settings(recipe, checkpoints / RECIPE)):
            return checkpoint
        if not recipe.overwrite:
            fix = "give the same ones to resume it, another --output, or --overwrite to start again"
            raise UserError(f"{folder} holds an interrupted training with other settings ({', '.join(changes)}): {fix}")
    return None


def check_is_elsewhere(output: str, model: str) -> None:
    """Raise `UserError` for a model to read in the output folder, or among its checkpoints: `overwrite` removes it."""
    folder, source = Path(output).resolve(), Path(model).resolve()
    if source in (folder, folder / CHECKPOINTS / source.name):
        raise UserError(f"--output {output} is where the model {model} lies, which is needed: give another --output")


def changed_settings(recipe: Recipe, earlier_recipe: Path) -> list[str]:
    """Return settings that may not change on a resume and did, as `"seed: 1, was 0"`; `auto` stands for any."""
    with reading(earlier_recipe):
        # Fields that are newer than the run had no other value than their default.
        earlier = {field.name: field.default for field in fields(Recipe)} | read_yaml(earlier_recipe)
    free = FREE_ON_RESUME | {name for name in CHOSEN if getattr(recipe, name) == AUTO}
    free -= {"max_minutes"} if recipe.overwrite else set()  # or a first try would be resumed
    if recipe.from_model:  # whose search, where none is given, the run no longer has
        free -= {name for name in ("num_beams", "length_penalty", "max_extra_tokens") if getattr(recipe, name) is None}
    if not (recipe.overwrite or recipe.prepared or (Path(recipe.output) / PREPARED).exists()):
        # With `overwrite` other files start again; of prepared data its own content is compared.
        free |= _OF_TEXT | ({"tokenizer"} if recipe.tokenizer is not None else set())
    now = {name: value for name, value in asdict(recipe).items() if name not in free}
    return [f"{name}: {new}, was {earlier[name]!s:.100}" for name, new in sorted(now.items()) if new != earlier[name]]


def _data_sha256(pairs: datasets.Dataset | PreparedPairs) -> str:
    """Return a hash of the lengths of all tokenized pairs and the tokens of some, evenly spread."""
    if not isinstance(pairs, datasets.Dataset):
        return pairs.sha256()  # of its files, known since they were written
    digest, lengths = hashlib.sha256(), np.stack(pair_lengths(pairs))
    for start in range(0, len(pairs), 1_000_000):
        digest.update(lengths[:, start : start + 1_000_000].astype("<i4").tobytes())
    rows = np.unique(np.linspace(0, len(pairs) - 1, min(SAMPLE, len(pairs))).astype(np.int64))
    sample = pairs.select(rows).select_columns(["input_ids", "labels"]).with_format(None)
    for batch in sample.iter(batch_size=1000):
        ids = [token for name in ("input_ids", "labels") for row in batch[name] for token in row]
        digest.update(np.asarray(ids, "<i4").tobytes())
    return digest.hexdigest()


def content_hashes(tokenizer, train: datasets.Dataset, validation: datasets.Dataset) -> dict[str, str]:
    """Return hashes of tokenizer, training and validation pairs (tokenized, with lengths), by content."""
    parts = {"training data": train, "validation data": validation}
    return {"tokenizer": tokenizer_sha256(tokenizer)} | {name: _data_sha256(part) for name, part in parts.items()}


def check_contents(folder: Path, hashes: dict[str, str]) -> None:
    """Refuse to resume on another tokenizer or other data than the run in `folder` started with."""
    earlier = read_json(folder / CHECKPOINTS / CONTENTS)
    if changed := [name for name, value in hashes.items() if earlier.get(name) != value]:
        problem = f"changed since the training in {folder} started"
        fix = "restore the earlier content, remove the folder, or give another --output"
        raise UserError(f"the {' and the '.join(changed)} {problem}: {fix}")


def claim_output(
    recipe: Recipe, checkpoint: Path | None, tokenizer, hashes: dict[str, str], origin: dict[str, str]
) -> OutputFolder:
    """Take the folder for this run: write its recipe and, unless `checkpoint` is resumed, remove an earlier run.

    `origin` are names and contents of files about the model that a new run starts from.

    At whatever moment this is cut off, the next start finds an interrupted run with its own recipe, or none. A second
    recipe lies with the checkpoints, for the next start: the first is for the user, who may move it.
    """
    output = OutputFolder(recipe.output)
    folder, checkpoints = output.path, output.path / CHECKPOINTS
    values = asdict(recipe) | {"overwrite": False}  # or a training of this file would replace the model
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    if RECIPE in output.names:
        remove_leftovers(checkpoints)
        remove_half_removed(checkpoints)
    for name in (*_FILES, "files"):
        remove_leftovers(folder, name)
    output.note([LOG, CURVE])
    if checkpoint is None:  # what an earlier run wrote goes, all other files stay
        for path in checkpoint_folders(checkpoints):
            remove_checkpoint(path)
        ours = [name for name in output.names if name.startswith(_OURS_WITHIN)]
        output.remove([*ours, WEIGHTS, "config.json", "generation_config.json", *_OF_RUN])
    output.write_text(RECIPE, text)
    for name, content in origin.items():
        output.write_text(name, content)
    checkpoints.mkdir(exist_ok=True)
    if checkpoint is None:
        with output.placing(f"{CHECKPOINTS}/{TOKENIZER}") as staging:  # in a folder that may be on another disk
            tokenizer.save_pretrained(staging)
            output.check([path.name for path in staging.iterdir()])  # their names at the end
        output.write_text(f"{CHECKPOINTS}/{CONTENTS}", json.dumps(hashes, indent=1) + "\n")
    output.write_text(f"{CHECKPOINTS}/{RECIPE}", text)
    return output


def plot_learning_curve(folder: Path) -> None:
    """Draw losses (nats a token), BLEU and learning rate of a run's log over its steps, whole or not at all, as PNG."""
    try:
        keys = ["loss", "eval_loss", "eval_bleu", "learning_rate"]
        log = pandas.DataFrame(read_training_log(folder / LOG), columns=["step", *keys]).set_index("step")
        series = {key: log[key].dropna() for key in keys}  # matplotlib takes steps and values from each
        has_bleu = len(series["eval_bleu"]) > 0
        if not is_matplotlib_available():
            logger.warning("no picture drawn: pip install 'vaswani_transformer[plots]' to have one")
            return
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained", figsize=(8, 7 if has_bleu else 5))
        axes = figure.subplots(3 if has_bleu else 2, 1, sharex=True, height_ratios=[3, 2, 1] if has_bleu else [3, 1])
        axes[0].plot(series["loss"], color="tab:blue", alpha=0.7, label="training (label-smoothed)")
        axes[0].plot(series["eval_loss"], color="tab:orange", marker="o", markersize=3, label="validation")
        axes[0].set_ylabel("loss (nats a token)")
        axes[0].legend()
        if has_bleu:
            axes[1].plot(series["eval_bleu"], color="tab:green", marker="o", markersize=3)
            axes[1].set_ylabel("validation BLEU\n(greedy)")
        axes[-1].plot(series["learning_rate"], color="tab:gray")
        axes[-1].set(xlabel="optimizer step", ylabel="learning rate")
        for axis in axes:
            axis.grid(alpha=0.3)
        with written_whole(folder / CURVE) as new:
            figure.savefig(new, dpi=110, format="png")
    except OSError as error:  # a picture is not worth a training
        logger.warning("the learning curve could not be drawn (%s)", error.strerror or error)
