"""What more text would bring: a training, and two more on parts of its text (`vaswani train --forecast`)."""

import json
import logging
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from ..data.prepare import LARGE
from ..data.recipe_data import data_sources
from ..data.tokenization import load_tokenizer
from ..data.tokenized_pairs import kept_rows
from ..distributed import is_first_process, joined_processes
from ..errors import UserError
from ..json_and_yaml import read_json
from ..output_folder import RECIPE, OutputFolder, locked_together
from ..recipes.recipe import AUTO, CHOSEN, DATA, Recipe, load_recipe
from .checkpoints import WEIGHTS
from .run import TrainingResult, join_process_group, tokenized_pairs, train, validation_sample
from .run_folder import CHECKPOINTS, CONTENTS, FORECAST, PREPARED, VERDICT, check_contents, content_hashes
from .settings import Row
from .verdict import has_learned_nothing

logger = logging.getLogger(__name__)

FEWEST = 40  # training pairs
ERROR = 2.5  # chrF: root mean square of what forecasts were off by (docs/measurements.md)


def gain_of_doubling(quarter: float, half: float, whole: float) -> float:
    """Extrapolate a score, 0 to 100, of models of a quarter, half and all of n pairs to what 2n would add.

    By the power law c - a * n^-b, which Kolachina et al. (2012, Prediction of Learning Curves in Machine Translation)
    found to fit best of six families: each doubling adds 2^-b times what the one before added. Scores of single
    trainings scatter too much to show b, which is 1/3 here; the rest is fitted to the three by least squares.
    """
    share = 0.5 ** (1 / 3)
    gain = share**2 * np.polyfit((0, 1, 1 + share), (quarter, half, whole), 1)[0]
    return float(np.clip(gain, 0, 100 - whole))


def train_with_forecast(recipe: Recipe, progress: bool = True) -> TrainingResult:
    """Train, then on a quarter and a half of the pairs too, and add to the verdict what twice as many would bring.

    These models, in the folder `forecast` of the output, are of the same size and dropout, and validated on the same
    pairs. The same call resumes after an interruption, and gives a finished run its forecast.

    Raises:
        UserError, TrainingStopped: as `train`, and for a recipe or a text of which there can be no forecast.
    """
    pairs = len(data_sources(recipe)[0].load())
    if not (FEWEST <= pairs < LARGE and recipe.validation_bleu):  # before hours are spent
        limits = f"from {FEWEST} to {LARGE:,} training pairs, here {pairs:,}"
        raise UserError(f"a forecast takes {limits}, and a validation_bleu above 0: leave --forecast out")
    OutputFolder(Path(recipe.output) / FORECAST).check_ours()
    join_process_group(recipe)
    with locked_together(recipe.output):
        whole, parts = train_once(recipe, progress), []
        if not has_learned_nothing(whole.metrics):
            with joined_processes() as processes:
                parts = processes.share("parts of the text", lambda: _write_parts(recipe))
        results = [*(train_once(part, progress) for part in parts), whole]
        if any(has_learned_nothing(result.metrics) for result in results):
            line = f"{FORECAST}: none, since a model has learned nothing: give more minutes or text"
        else:
            quarter, half, every = scores = [result.metrics["eval_chrf"] for result in results]
            gain = f"twice the pairs would bring about {gain_of_doubling(*scores):+.1f} chrF, give or take {ERROR}"
            line = f"{FORECAST}: {gain} (chrF with a quarter of them {quarter:.1f}, half {half:.1f}, all {every:.1f})"
        whole = replace(whole, verdict=[*(each for each in whole.verdict if not each.startswith(FORECAST)), line])
        if is_first_process():
            OutputFolder(recipe.output).write_text(VERDICT, json.dumps(vars(whole), default=str, indent=1))
    return whole


def train_once(recipe: Recipe, progress: bool) -> TrainingResult:
    """Train, unless there is a finished run of the same settings; return what came of it."""
    with joined_processes() as processes:
        result = processes.share("result", lambda: _finished(recipe))
    logger.info("%s: %s", "training" if result is None else "trained before", recipe.output)
    return train(recipe, progress) if result is None else result


def _finished(recipe: Recipe) -> TrainingResult | None:
    """Return the result of a finished run of the same text and settings, those aside that were chosen, if any."""
    folder = Path(recipe.output)
    if not all((folder / name).exists() for name in (WEIGHTS, VERDICT, f"{CHECKPOINTS}/{CONTENTS}")):
        return None
    made = load_recipe(str(folder / CHECKPOINTS / RECIPE))
    chosen = {name: getattr(made, name) for name in CHOSEN if getattr(recipe, name) == AUTO}
    chosen |= {name: getattr(made, name) for name in ("output", "data_workers", "log_every", "report_to")}
    is_same = replace(recipe, overwrite=False, **chosen) == made
    if is_same and not (folder / PREPARED).exists():  # and so is the text
        tokenizer, *pairs, _, _ = tokenized_pairs(made, lambda _: load_tokenizer(folder))
        is_same = content_hashes(tokenizer, *pairs) == read_json(folder / CHECKPOINTS / CONTENTS)
    return TrainingResult(**read_json(folder / VERDICT) | {"folder": folder}) if is_same else None


def _write_parts(recipe: Recipe) -> list[Recipe]:
    """Write a quarter and a half of the text, and the pairs that the whole was validated on; return their recipes."""
    made, folder = load_recipe(f"{recipe.output}/{CHECKPOINTS}/{RECIPE}"), Path(recipe.output).absolute() / FORECAST
    tokenizer, train, validation, _, texts = tokenized_pairs(made, lambda _: load_tokenizer(recipe.output))
    check_contents(folder.parent, content_hashes(tokenizer, train, validation))
    folder.mkdir(exist_ok=True)
    data = {each.name: each.default for each in fields(Recipe) if each.metadata["group"] == DATA}
    same = {*CHOSEN} & {*Row._fields, "label_smoothing", "augmentation", "validation_size"}  # or the curve has steps
    data |= {name: getattr(made, name) for name in (*same, "max_length", "max_length_ratio")}
    data["validation_data"] = str(folder / "validation.parquet")
    order, parts = np.random.default_rng([made.seed, 2]).permutation(len(texts[0])), []
    with OutputFolder(folder).placing() as staging:
        validation_sample(texts[1].select(kept_rows(validation)), made).to_parquet(staging / "validation.parquet")
        for name, pairs in (("quarter", len(order) // 4), ("half", len(order) // 2)):
            texts[0].select(np.sort(order[:pairs])).to_parquet(staging / f"{name}.parquet")
            data["train_data"] = str(folder / f"{name}.parquet")
            parts.append(replace(recipe, **data, overwrite=True, output=str(folder / name)))
    return parts
