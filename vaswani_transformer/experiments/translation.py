"""Trainings of translation models: Tables 2 and 3."""

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

from ..data.recipe_data import data_sources
from ..decoding.scoring import score_pairs
from ..decoding.translator import Translator
from ..errors import UserError, reading
from ..evaluation.metrics import moses_tokenizer, paper_bleu, perplexity, score_translations
from ..hardware import choose_precision, measure_peak
from ..loading import load_model
from ..model.configuration_vaswani import PRESETS, VaswaniConfig
from ..output_folder import OutputFolder
from ..recipes.recipe import AUTO, CHOSEN, Recipe, load_recipe
from ..training.callbacks import read_training_log
from ..training.checkpoints import WEIGHTS
from ..training.run import train
from ..training.run_folder import LOG
from .base import TABLE2, TABLE3, Cell, Experiment, Setup, markdown_table, results_table

# Fields that do not change the result: where a run is, what it reads, how much of a batch one device takes.
PLACES = (
    "data_dir", "output", "overwrite", "prepared", "tokens_per_device", "data_workers", "report_to", "ddp_timeout",
    "log_every", "padding_free",
)  # fmt: skip
# The laptop's text in place of WMT's: Multi30k, image captions.
MULTI30K = {
    "train_data": None, "data_config": None, "source_column": "source", "target_column": "target",
    "validation_split": None, "train_source": "train.en.gz", "validation_source": "val.en.gz", "max_length": 100,
    "vocab_size": 4000, "tokens_per_batch": 2048, "tokens_per_device": 2048,
    "keep_checkpoints": 1, "validation_bleu": 0, "average_every": 0,
}  # fmt: skip
# Columns of both tables.
SCORES = {
    "sacreBLEU": "{bleu:.2f}", "BLEU, as the paper": "{paper_bleu:.2f}", "parameters": "{parameters:,}",
    "minutes": "{minutes:.1f}",
}  # fmt: skip
AVERAGE = {"keep_weights": "average"}  # Section 6.1, whatever validation prefers
# Table 2 at laptop scale: the paper's big model has three times the steps of the base model, here twice as many, so
# that all tables end within three hours on two cores. A checkpoint at each evaluation: those averaged must be of the
# end of training, where weights hardly move. The last 5 of base are its last tenth, the last 20 of big its last fifth
# (the paper's, by its minutes: 7.5% and 4%). English-French is word pieces in the paper, too.
TABLE2_STEPS, EVALUATE_EVERY = {"base": 2000, "big": 4000}, 40
SEEDS = 3  # of Table 3's base model: their range shows which differences may be chance
LAST = {"average_checkpoints": 0, "keep_weights": "last"}  # Table 3 is without averaging (Section 6.2)
TABLE3_STEPS = {"base": 2000, "big": 6000}  # at laptop scale; big has three times as many, in the paper and here


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


def facts_of(recipe: Recipe) -> dict[str, Any]:
    """Return fields of a `Cell`: the recipe, and as settings its fields that determine what is trained."""
    if left := [name for name in CHOSEN if getattr(recipe, name) == AUTO]:
        raise UserError(f"{left[0]} is auto, which `vaswani train` alone chooses: give a value")
    return {"recipe": recipe, "settings": {name: x for name, x in asdict(recipe).items() if name not in PLACES}}


def training(setup: Setup, recipe: str, changes: dict[str, Any], **fields) -> Cell:
    """Return the cell of a shipped recipe with changes, the call's among them; `fields` are others of `Cell`."""
    folder = {"data_dir": str(setup.data_dir) if setup.data_dir else None, "output": "runs"}
    return Cell(**facts_of(load_recipe(recipe, changes | setup.changes | folder)), **fields)


class TranslationExperiment(Experiment):
    """Trainings as cells; subclasses define them and the table."""

    def check(self, setup: Setup, cells: Sequence[Cell]) -> None:
        """Check that the data files are there, and the package that tokenised BLEU needs."""
        for cell in cells:
            for recipe in (cell.recipe, replace(cell.recipe, **cell.test)):
                data_sources(recipe)
            moses_tokenizer(cell.language)

    def train(self, setup: Setup, cell: Cell, folder: Path) -> None:
        """Train the model, unless its weights are there."""
        if not (folder / WEIGHTS).exists():
            train(replace(cell.recipe, output=str(folder)))

    def measure(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Score the model on the test set, and count the cost of its training in the paper's two ways (footnote 5)."""
        facts = trained(folder)
        pairs = data_sources(replace(cell.recipe, **cell.test))[1].load()
        figures = score_model(folder, list(pairs["source"]), list(pairs["target"]), cell.language)
        precision = next((kind for kind, chosen in choose_precision(cell.recipe.precision).items() if chosen), "fp32")
        peak, devices = measure_peak(precision), int(os.environ.get("WORLD_SIZE", "1"))
        figures["flops_counted"] = 6.0 * figures["parameters"] * cell.recipe.tokens_per_batch * facts["steps"]
        figures["flops_by_time"] = 60 * facts["minutes"] * devices * peak
        return figures | facts | {"devices": devices, "sustained_tflops": peak / 1e12}


def trained(folder: Path) -> dict[str, float]:
    """Return the steps and minutes of a trained cell, from its log."""
    with reading(folder / LOG):
        last = read_training_log(folder / LOG)[-1]
        return {"steps": last["step"], "minutes": last["seconds"] / 60}


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


class Table2(TranslationExperiment):
    """Four trainings: base and big, to German and to French.

    Paper scale: the shipped recipes, scored on newstest2014 (3,003 sentences). Laptop scale: the same on Multi30k with
    a smaller model (`laptop_changes`), smaller batches and fewer steps, scored on test_2016_flickr.
    """

    name = "table2"

    def cells(self, setup: Setup) -> list[Cell]:
        """Return base, then big; each to German, then to French."""
        cells, small = [], setup.scale == "laptop"
        for size, row in (("base", TABLE2[-2]), ("big", TABLE2[-1])):
            for language in ("de", "fr"):
                changes, test = AVERAGE, {"validation_split": "test"}
                if small:
                    changes = AVERAGE | laptop_changes(size if language == "de" else f"{size}-en-fr", language)
                    changes |= {"evaluate_every": EVALUATE_EVERY, "max_steps": TABLE2_STEPS[size]}
                    sides = {"source": "en", "target": language}
                    test = {f"validation_{side}": f"test_2016_flickr.{code}.gz" for side, code in sides.items()}
                paper = {"paper_bleu": getattr(row, f"bleu_{language}"), "flops": getattr(row, f"flops_{language}")}
                cells.append(training(
                    setup, f"wmt14-en-{language}-{size}", changes, name=f"en-{language}-{size}", group=language,
                    label=f"{row.model}, en-{language}", paper=paper, language=language, test=test,
                ))  # fmt: skip
        return cells

    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """Return ours beside the paper's row, then the paper's table."""
        columns = SCORES | {
            "FLOPs, time x devices x peak": "{flops_by_time:.1e}", "FLOPs, counted": "{flops_counted:.1e}",
            "peak, TFLOPS": "{sustained_tflops:.2f}",
            "paper: BLEU": "{paper[paper_bleu]:.1f}", "FLOPs": "{paper[flops]:.1e}",
        }  # fmt: skip
        notes = (
            f"Test set: {'test_2016_flickr of Multi30k' if setup.scale == 'laptop' else 'newstest2014'}; the paper:"
            " newstest2014. sacreBLEU makes its own tokens (13a), the paper's BLEU is multi-bleu.perl on Moses' tokens"
            " with German compounds put apart at hyphens: compare figures of one kind only. Cost by the paper's method"
            " (footnote 5): seconds of training times devices times the sustained TFLOPS of one, measured here."
            " Counted: six times the parameters and the tokens."
        )
        names = ("bleu_de", "bleu_fr", "flops_de", "flops_fr")
        theirs = [[row.model, *(f"{getattr(row, name) or '-'}" for name in names)] for row in TABLE2]
        return "\n\n".join([
            f"# Table 2, {setup.scale} scale", results_table(cells, results, columns), notes,
            "The paper's table (newstest2014):",
            markdown_table(["model", "BLEU en-de", "BLEU en-fr", "FLOPs en-de", "FLOPs en-fr"], theirs),
        ])  # fmt: skip


class Table3(TranslationExperiment):
    """Rows (A) to (E), base and big; the base model with three seeds.

    Paper scale: the recipe of the base or the big model with the row's sizes. Laptop scale: the same on Multi30k with
    the row's sizes scaled down (`laptop_changes`), smaller batches and fewer steps.
    """

    name = "table3"

    def cells(self, setup: Setup) -> list[Cell]:
        """Return one for each row; further seeds of the base model follow it."""
        cells, small = [], setup.scale == "laptop"
        for row in TABLE3:
            size, changes = "big" if row.preset == "big" else "base", {"preset": row.preset}
            if small:
                changes = laptop_changes(row.preset, "de") | {"evaluate_every": 500, "max_steps": TABLE3_STEPS[size]}
            changes["label_smoothing"] = PRESETS[row.preset].get("label_smoothing", Recipe.label_smoothing)
            changes["dropout"] = PRESETS[row.preset]["dropout"]
            name, label = row.preset.removeprefix("table3-"), row.label
            label = f"({row.group}) {label}" if len(row.group) == 1 else label
            paper = {key: getattr(row, key) for key in ("perplexity", "bleu", "millions") if getattr(row, key)}
            for seed in range(SEEDS if row.preset == "base" else 1):
                own = setup
                if seed:
                    name, label = f"base-seed-{seed}", f"base, seed {seed}"
                    first = int(setup.changes.get("seed", Recipe.seed))
                    own = replace(setup, changes=setup.changes | {"seed": first + seed})
                cells.append(training(
                    own, f"wmt14-en-de-{size}", LAST | changes, name=name, label=label, group=row.group, paper=paper,
                ))  # fmt: skip
        return cells

    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """Return perplexity, BLEU and parameters of each row, ours and the paper's."""
        columns = {
            "PPL": "{perplexity:.2f}", **SCORES, "paper: PPL": "{paper[perplexity]:.2f}", "BLEU": "{paper[bleu]:.1f}",
            "params": "{paper[millions]} M",
        }  # fmt: skip
        notes = "Perplexity a word piece, not comparable between vocabularies; BLEU as in Table 2."
        if setup.scale == "laptop":
            notes += " Here: Multi30k English-German, validation set; the paper: WMT 2014, newstest2013."
            notes += " Row labels are the paper's sizes."
        bases = [results[cell.name]["figures"] for cell in cells if cell.group == "base" and cell.name in results]
        for key in ("perplexity", "paper_bleu") if bases else ():
            values = [base[key] for base in bases]
            spread = (max(values) - min(values)) / 2
            notes += f" {key} of {len(bases)} seeds of the base: {mean(values):.2f} ± {spread:.2f}, which is chance."
        return "\n\n".join([f"# Table 3, {setup.scale} scale", results_table(cells, results, columns), notes])
