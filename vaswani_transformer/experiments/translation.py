"""Cells that train a translation model and score it: Tables 2 and 3 consist of them."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..data.recipe_data import data_sources
from ..decoding.scoring import score_pairs
from ..decoding.translator import Translator
from ..errors import reading
from ..evaluation.metrics import moses_tokenizer, paper_bleu, perplexity, score_translations
from ..hardware import choose_precision, measure_peak
from ..loading import load_model
from ..model.configuration_vaswani import VaswaniConfig
from ..output_folder import OutputFolder
from ..recipes.recipe import Recipe, load_recipe, model_config
from ..training.callbacks import read_training_log
from ..training.checkpoints import WEIGHTS
from ..training.flops import model_flops
from ..training.plan import EXPECTED_FILL
from ..training.run import train
from ..training.run_folder import LOG
from .base import Cell, Experiment, Setup

# Fields that do not change the result: where a run is, what it reads, how much of a batch one device takes.
PLACES = ("data_dir", "output", "overwrite", "prepared", "tokens_per_device", "data_workers", "report_to")
# The laptop's text in place of WMT's: Multi30k, image captions. Lengths are means of its training pairs.
MULTI30K = {
    "train_data": None, "data_config": None, "source_column": "source", "target_column": "target",
    "validation_split": None, "train_source": "train.en.gz", "validation_source": "val.en.gz", "max_length": 100,
    "expected_pairs": 29_000, "expected_source_length": 16.6, "expected_target_length": 17.7,
    "tokenizer_kind": "bpe", "vocab_size": 4000, "tokens_per_batch": 2048, "tokens_per_device": 2048,
    "keep_checkpoints": 1, "validation_bleu": 0,
}  # fmt: skip
# Columns of both tables.
SCORES = {
    "sacreBLEU": "{bleu:.2f}", "BLEU, as the paper": "{paper_bleu:.2f}", "parameters": "{parameters:,}",
    "minutes": "{minutes:.1f}",
}  # fmt: skip


def laptop_changes(preset: str, language: str) -> dict[str, Any]:
    """Return fields of a recipe for Multi30k from English, and a model with the preset's widths / 4 and layers / 2.

    The number of heads, and so all ratios between rows of Table 3, are kept.
    """
    config = VaswaniConfig.from_preset(preset)
    sizes = {name: getattr(config, name) // 4 for name in ("d_model", "d_ff", "d_k", "d_v")}
    sizes |= {name: max(1, getattr(config, name) // 2) for name in ("encoder_layers", "decoder_layers")}
    sizes |= {name: getattr(config, name) for name in ("num_heads", "dropout", "position_encoding")}
    targets = {"train_target": f"train.{language}.gz", "validation_target": f"val.{language}.gz"}
    # Equation 3 gives widths this small a high rate: with 500 steps of warmup it peaks at 0.004, and models with more
    # dropout or layers do not come to attend to the source within the steps there are (perplexity 17 where base has 8).
    warmup = 2000 if preset.startswith("big") else 1000
    return MULTI30K | targets | sizes | {"preset": "base", "warmup_steps": warmup}


def facts_of(recipe: Recipe, *lengths: float) -> dict[str, Any]:
    """Return fields of a `Cell`: settings, parameters, FLOPs of training on sentences of these mean lengths in tokens.

    Settings are the fields that determine what is trained; lengths are of source and target.
    """
    config = model_config(recipe, recipe.vocab_size)
    pairs = EXPECTED_FILL * recipe.tokens_per_batch / max(lengths) * recipe.max_steps
    return {
        "settings": {name: value for name, value in asdict(recipe).items() if name not in PLACES},
        "parameters": config.num_parameters(),
        "flops": pairs * model_flops(config, *lengths),
    }


@dataclass(frozen=True)
class Training(Cell):
    """A cell that trains a recipe, in which `output` is not set."""

    recipe: Recipe | None = None
    language: str = "de"  # of the targets
    test: dict[str, str] = field(default_factory=dict)  # changes by which the recipe validates on the test set


def training(setup: Setup, recipe: str, changes: dict[str, Any], **fields) -> Training:
    """Return the cell of a shipped recipe with changes, the call's among them; `fields` are others of `Training`."""
    folder = {"data_dir": str(setup.data_dir) if setup.data_dir else None, "output": "runs"}
    loaded = load_recipe(recipe, changes | setup.changes | folder)
    facts = facts_of(loaded, loaded.expected_source_length, loaded.expected_target_length)
    return Training(recipe=loaded, **facts, **fields)


class TranslationExperiment(Experiment):
    """Trainings as cells; subclasses define them and the table."""

    def check(self, setup: Setup, cells: Sequence[Training]) -> None:
        """Check that the data files are there, and the package that tokenised BLEU needs."""
        for cell in cells:
            for recipe in (cell.recipe, replace(cell.recipe, **cell.test)):
                data_sources(recipe)
            moses_tokenizer(cell.language)

    def train(self, setup: Setup, cell: Training, folder: Path) -> None:
        """Train the model, unless its weights are there."""
        if not (folder / WEIGHTS).exists():
            train(replace(cell.recipe, output=str(folder)))

    def measure(self, setup: Setup, cell: Training, folder: Path) -> dict[str, Any]:
        """Score the model on the test set, and count the cost of its training in the paper's two ways (footnote 5)."""
        facts = trained(folder)
        figures = score_model(folder, *test_pairs(cell), cell.language)
        precision = next((kind for kind, chosen in choose_precision(cell.recipe.precision).items() if chosen), "fp32")
        peak, devices = measure_peak(precision), int(os.environ.get("WORLD_SIZE", "1"))
        figures["flops_counted"] = cell.flops * facts["steps"] / cell.recipe.max_steps
        figures["flops_by_time"] = 60 * facts["minutes"] * devices * peak
        return figures | facts | {"devices": devices, "sustained_tflops": peak / 1e12}


def trained(folder: Path) -> dict[str, float]:
    """Return the steps and minutes of a trained cell, from its log."""
    with reading(folder / LOG):
        last = read_training_log(folder / LOG)[-1]
        return {"steps": last["step"], "minutes": last["seconds"] / 60}


def test_pairs(cell: Training) -> tuple[list[str], list[str]]:
    """Return sources and targets of a cell's test set."""
    _, source = data_sources(replace(cell.recipe, **cell.test))
    pairs = source.load()
    return list(pairs["source"]), list(pairs["target"])


def score_model(folder: Path, sources: list[str], references: list[str], language: str) -> dict[str, Any]:
    """Return BLEU, perplexity a word piece and parameters of a trained model; writes its translations to its folder."""
    model, tokenizer = load_model(folder)
    translations = list(Translator(model, tokenizer).translate(sources))
    OutputFolder(folder).write_text("translations.txt", "".join(line + "\n" for line in translations))
    return score_translations(translations, references) | {
        "paper_bleu": paper_bleu(translations, references, language),
        "perplexity": perplexity(*score_pairs(model, tokenizer, sources, references)),
        "parameters": model.num_parameters(),
        "sentences": len(sources),
    }
