"""Cells that train a translation model and score it: Tables 2 and 3 consist of them."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..data.parallel_text import load_pairs
from ..data.recipe_data import data_path
from ..decoding.scoring import score_pairs
from ..decoding.translator import Translator
from ..errors import UserError
from ..evaluation.metrics import PerplexityMetric, moses_tokenizer, paper_bleu, score_translations
from ..hardware import HERE, choose_precision, measure_device
from ..loading import load_model
from ..output_folder import OutputFolder
from ..recipes.recipe import Recipe, load_recipe, model_config
from ..training.callbacks import read_training_log
from ..training.checkpoints import WEIGHTS
from ..training.plan import Plan, make_plan
from ..training.run import train
from ..training.run_folder import LOG as TRAINING_LOG
from .base import Cell, Estimate, Experiment, Setup
from .launch import device_seconds, read_sessions, record_session, train_in_processes

# Fields that do not change the result: where a run lies, what it reads, how much of a batch one device takes.
PLACES = ("data_dir", "output", "overwrite", "prepared", "tokens_per_device", "data_workers", "report_to")
TRANSLATIONS = "translations.txt"

# The laptop's text in place of WMT's: Multi30k, image captions. Lengths are means of its training pairs.
MULTI30K = {
    "train_data": None, "data_config": None, "source_column": "source", "target_column": "target",
    "validation_split": None, "train_source": "train.en.gz", "validation_source": "val.en.gz", "max_length": 100,
    "expected_pairs": 29_000, "expected_source_length": 16.6, "expected_target_length": 17.7,
    "tokenizer_kind": "bpe", "vocab_size": 4000,
}  # fmt: skip
LAPTOP = {"tokens_per_batch": 2048, "tokens_per_device": 2048}
# Equation 3 gives widths this small a high rate: with 500 steps of warmup it peaks at 0.004, and models with more
# dropout or layers do not come to attend to the source within the steps there are (perplexity 17 where base has 8).
WARMUP = {"base": 1000, "big": 2000}
DIVISOR, LAYER_DIVISOR = 4, 2  # of widths and of layers, laptop scale


def scaled_down(recipe: Recipe) -> dict[str, Any]:
    """Fields of a recipe for its preset of the paper with d_model, d_ff, d_k and d_v divided by 4 and N halved.

    The number of heads, and so all ratios between rows of Table 3, are kept.
    """
    config = model_config(recipe, recipe.vocab_size)
    widths = {name: getattr(config, name) // DIVISOR for name in ("d_model", "d_ff", "d_k", "d_v")}
    layers = {name: max(1, getattr(config, name) // LAYER_DIVISOR) for name in ("encoder_layers", "decoder_layers")}
    others = ("num_heads", "dropout", "position_encoding")
    return widths | layers | {name: getattr(config, name) for name in others}


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe that determine what is trained."""
    return {name: value for name, value in dataclasses.asdict(recipe).items() if name not in PLACES}


@dataclasses.dataclass(frozen=True)
class Training:
    """A training of an experiment, and the test set of its model."""

    recipe: str  # name of a shipped recipe
    changes: dict[str, Any]  # fields that replace the recipe's
    language: str = "de"  # of the targets
    test_source: str | None = None  # text file, or None for `test_split` of the Hub dataset that the recipe trains on
    test_target: str | None = None
    test_split: str = "validation"
    tokenized_bleu: bool = False  # also compute BLEU as the paper did


class TranslationExperiment(Experiment):
    """Trainings as cells; subclasses define them and the table."""

    distributed = True

    def trainings(self, setup: Setup) -> dict[str, tuple[str, str, Training, dict]]:
        """Label, group, training and the paper's figures, by the cell's name."""
        raise NotImplementedError

    def recipe(self, setup: Setup, training: Training, output: Path | None = None) -> Recipe:
        """A training's recipe, with the changes of the call."""
        values = training.changes | setup.changes
        folders = {"data_dir": str(setup.data_dir) if setup.data_dir else None, "output": str(output or "runs")}
        return load_recipe(training.recipe, values | folders)

    def cells(self, setup: Setup) -> list[Cell]:
        """One for each training."""
        return [
            Cell(name, label, settings_of(self.recipe(setup, training)), paper, group)
            for name, (label, group, training, paper) in self.trainings(setup).items()
        ]

    def training(self, setup: Setup, cell: Cell) -> Training:
        """The training of a cell."""
        return self.trainings(setup)[cell.name][2]

    def check(self, setup: Setup, cells: Sequence[Cell]) -> None:
        """Check that the data files are there, and the package that tokenised BLEU needs."""
        for cell in cells:
            training = self.training(setup, cell)
            recipe = self.recipe(setup, training)
            if training.test_source is not None:
                names = ("train_source", "train_target", "validation_source", "validation_target")
                files = [getattr(recipe, name) for name in names]
                check_data_dir(setup, [*files, training.test_source, training.test_target])
            if training.tokenized_bleu:
                moses_tokenizer(training.language)

    def plan(self, setup: Setup, cell: Cell, device: str | None) -> Plan:
        """The training's plan by the pairs and lengths that its recipe expects; no text is read."""
        recipe = self.recipe(setup, self.training(setup, cell))
        unread = dict.fromkeys(("train_source", "train_target", "data_dir", "prepared"))
        recipe = dataclasses.replace(recipe, **unread, train_data=recipe.train_data or "text")
        return make_plan(recipe, device, setup.processes)

    def estimate(self, setup: Setup, cell: Cell, device: str | None) -> Estimate:
        """By the plan; scoring is not included."""
        plan = self.plan(setup, cell, None if device == HERE else device)
        seconds = plan.seconds
        if device == HERE:
            peak = setup.processes * _peak_here(_precision(plan.recipe), setup.processes)
            seconds = plan.flops / (peak * plan.utilisation)
        return Estimate(sum(plan.parameters.values()), plan.flops, plan.recipe.max_steps, seconds)

    def run(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Train or resume, then translate and score the test set."""
        training = self.training(setup, cell)
        recipe = self.recipe(setup, training, folder)
        if not (folder / WEIGHTS).exists():
            train_cell(setup, recipe)
        log = training_log(folder)
        figures = score_translation_model(folder, recipe, training)
        sessions = read_sessions(folder)
        devices = sessions[-1][1] if sessions else 1
        peak = _peak_here(_precision(recipe), devices)
        seconds = log[-1]["seconds"]
        return figures | {
            "steps": log[-1]["step"],
            "minutes": round(seconds / 60, 2),
            "flops_counted": self.plan(setup, cell, None).flops * log[-1]["step"] / recipe.max_steps,
            "devices": devices,
            "flops_by_time": device_seconds(seconds, sessions) * peak,
            "sustained_tflops": peak / 1e12,
        }


def train_cell(setup: Setup, recipe: Recipe) -> None:
    """Train a recipe, or resume it, in as many processes as the call asks for."""
    record_session(Path(recipe.output), setup.processes)
    if setup.processes > 1:
        train_in_processes(recipe, setup.processes)
    else:
        train(recipe)


def training_log(folder: Path) -> list[dict]:
    """The training log of a trained cell, from which its steps and minutes are read."""
    path = folder / TRAINING_LOG
    entries = read_training_log(path) if path.is_file() else []
    if not entries:
        raise UserError(f"{folder} holds a model but no {TRAINING_LOG}: remove that folder to run the cell anew")
    return entries


def _precision(recipe: Recipe) -> str:
    return next((kind for kind, chosen in choose_precision(recipe.precision).items() if chosen), "fp32")


@functools.cache
def _peak_here(precision: str, devices: int = 1) -> float:
    """FLOP/s of one device: a GPU, or the share of this process' threads that one of so many processes has."""
    threads = torch.get_num_threads()
    try:
        if not torch.cuda.is_available():
            torch.set_num_threads(max(1, threads // devices))
        return measure_device(precision).peak(precision, HERE)[1]
    finally:
        torch.set_num_threads(threads)


def check_data_dir(setup: Setup, names: Sequence[str | None], forms: str = "") -> None:
    """Raise `UserError` for no data folder, a missing one, or one without these files; a name of None is none.

    `forms` names other forms of the files that are read too, for the message.
    """
    names = list(dict.fromkeys(filter(None, names)))
    if setup.data_dir is None:
        raise UserError(f"give --data-dir, the folder with {', '.join(names)}{forms}")
    if not setup.data_dir.is_dir():
        raise UserError(f"--data-dir {setup.data_dir} is not a folder: give the one that holds the data files")
    missing = [name for name in names if not (setup.data_dir / name).is_file()]
    if missing:
        raise UserError(
            f"--data-dir {setup.data_dir} has no {', '.join(missing)}{forms}: give the folder that has them"
        )


def data_pairs(
    recipe: Recipe, source: str | None, target: str | None, split: str | None
) -> tuple[list[str], list[str]]:
    """Sources and targets of two files of the data folder, or of a split of the Hub dataset that a recipe trains on."""
    if source is not None:
        pairs = load_pairs(source=data_path(recipe, source), target=data_path(recipe, target))
    else:
        columns = {"source_column": recipe.source_column, "target_column": recipe.target_column}
        pairs = load_pairs(data=recipe.train_data, config=recipe.data_config, split=split, **columns)
    return list(pairs["source"]), list(pairs["target"])


def score_translation_model(folder: Path, recipe: Recipe, training: Training) -> dict[str, Any]:
    """BLEU, perplexity a word piece and parameters of a trained model; its translations are written to its folder."""
    sources, references = data_pairs(recipe, training.test_source, training.test_target, training.test_split)
    model, tokenizer = load_model(folder)
    translations = list(Translator(model, tokenizer).translate(sources))
    OutputFolder(folder).write_text(TRANSLATIONS, "".join(line + "\n" for line in translations))
    scores = score_translations(translations, references)
    filled = [pair for pair in zip(sources, references, strict=True) if all(side.strip() for side in pair)]
    losses, counts = score_pairs(model, tokenizer, *map(list, zip(*filled, strict=True)))
    figures = {name: scores[name] for name in ("bleu", "chrf", "bleu_signature")}
    figures |= PerplexityMetric().compute(predictions=losses, references=counts)
    if training.tokenized_bleu:
        figures["paper_bleu"] = paper_bleu(translations, references, training.language)
    return figures | {"parameters": model.num_parameters(), "sentences": len(sources)}


def with_target(language: str) -> dict[str, Any]:
    """Fields of a recipe for Multi30k from English to `de` or `fr`."""
    return MULTI30K | {"train_target": f"train.{language}.gz", "validation_target": f"val.{language}.gz"}


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the range of values, one at least."""
    return sum(values) / len(values), (max(values) - min(values)) / 2


def draw_against(axis, labels: Sequence[str], ours: Sequence[float | None], paper: Sequence[float | None]) -> None:
    """Two series of dots on one axis, a row each label: ours filled, the paper's hollow."""
    for values, color, face, name in ((ours, "tab:blue", "tab:blue", "here"), (paper, "tab:orange", "none", "paper")):
        places = [(value, place) for place, value in enumerate(values) if value is not None]
        if places:
            axis.scatter(*zip(*places, strict=True), edgecolors=color, facecolors=face, label=name, zorder=3)
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.grid(alpha=0.3)
