"""Table 4: English constituency parsing, labelled bracket F1."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..loading import load_model
from ..output_folder import OutputFolder
from ..parsing.evalb import BASELINES, Baselines, score_trees
from ..parsing.parser import Parser, TextForm, load_trees, parsing_recipe
from ..recipes.recipe import Recipe, load_recipe
from ..training.checkpoints import WEIGHTS
from ..training.plan import make_plan
from .base import Cell, Estimate, Experiment, Setup, as_text, describe_runs, markdown_table, write_recipe
from .paper_tables import TABLE4
from .translation import check_data_dir, settings_of, train_cell, training_log

PREDICTED = "predicted.trees"


@dataclasses.dataclass(frozen=True)
class ParsingData:
    """Recipe and data of a scale; the files of trees lie in the data folder, plain or as `.gz`."""

    recipe: str  # name of a shipped recipe
    parsers: dict[str, tuple[str, TextForm]]  # label and form of the trees' text, by the cell's name
    train: str
    dev: str
    test: str  # the scores are of it


# Sections of the Wall Street Journal as all rows of the table use them; GUM has no test trees here, so its development
# trees are both.
SCALES = {
    "laptop": ParsingData(
        "parser-small", {
            "transformer": ("Transformer, words in the trees", TextForm(words=True, augment=6)),
            "transformer-brackets": ("Transformer, brackets and tags alone", TextForm(augment=6)),
        }, "gum.train.trees", "gum.dev.trees", "gum.dev.trees"),
    "paper": ParsingData("parser", {"transformer": ("Transformer", TextForm())},
                         "wsj.02-21.trees", "wsj.22.trees", "wsj.23.trees"),
}  # fmt: skip
# What --dry-run expects of the text: trees, and tokens of a sentence and, without and with words, of a tree, `</s>`
# included.
LENGTHS = {"laptop": (4_906, 32.7, (55.7, 87.4)), "paper": (40_000, 28.0, (75.0, 103.0))}


def data_files(setup: Setup) -> tuple[Path, Path, Path]:
    """Files of the training, validation and test trees, plain or `.gz`, whichever are there."""
    data = SCALES[setup.scale]
    names = [data.train, data.dev, data.test]
    folder = setup.data_dir or Path()
    names = [name if (folder / name).is_file() else f"{name}.gz" for name in names]
    check_data_dir(setup, names, " (or as plain text, without .gz)")
    return tuple(folder / name for name in names)


@functools.cache
def _trees(path: Path) -> list:
    return load_trees(path)


class Table4(Experiment):
    """The Transformer as a parser, and two baselines that need no training."""

    name = "table4"
    title = "constituency parsing: labelled bracket F1"
    distributed = True

    def _recipe(self, setup: Setup, output: Path | None = None) -> Recipe:
        return load_recipe(SCALES[setup.scale].recipe, setup.changes | {"output": str(output or "runs")})

    def cells(self, setup: Setup) -> list[Cell]:
        """The baselines, then the parsers."""
        settings = settings_of(self._recipe(setup))
        # Fields that are set from the trees.
        own = ("train_source", "train_target", "validation_source", "validation_target", "tokenizer")
        settings = {name: value for name, value in settings.items() if name not in own}
        paper = {"bracket_f1": next(row.f1 for row in TABLE4 if row.parser.startswith("Transformer"))}
        return [Cell(name, name, {"baseline": name}) for name in BASELINES] + [
            Cell(name, label, settings | dataclasses.asdict(form), paper)
            for name, (label, form) in SCALES[setup.scale].parsers.items()
        ]

    def check(self, setup: Setup, cells: Sequence[Cell]) -> None:
        """Check that the files of trees are there."""
        if cells:
            data_files(setup)

    def estimate(self, setup: Setup, cell: Cell, device: str | None) -> Estimate:
        """Of the training, by `LENGTHS`; baselines take seconds."""
        if cell.name in BASELINES:
            return Estimate(seconds=10.0)
        pairs, source, targets = LENGTHS[setup.scale]
        target = targets[SCALES[setup.scale].parsers[cell.name][1].words]
        recipe = dataclasses.replace(
            self._recipe(setup), train_data="trees", expected_pairs=pairs,
            expected_source_length=source, expected_target_length=target)  # fmt: skip
        plan = make_plan(recipe, device, setup.processes)
        seconds = plan.seconds
        if recipe.max_minutes and seconds is not None:
            seconds = min(seconds, 60 * recipe.max_minutes)
        return Estimate(sum(plan.parameters.values()), plan.flops, recipe.max_steps, seconds)

    def run(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Train or resume, then parse and score; a baseline is derived from the training trees."""
        train_trees, dev, test = map(_trees, data_files(setup))
        if cell.name in BASELINES:
            write_recipe(folder, cell)
            baselines = Baselines(train_trees)
            return score_trees(test, [BASELINES[cell.name](baselines, tree.words()) for tree in test])
        if not (folder / WEIGHTS).exists():
            recipe = self._recipe(setup, folder)
            train_cell(setup, parsing_recipe(recipe, train_trees, dev, SCALES[setup.scale].parsers[cell.name][1]))
        model, tokenizer = load_model(folder)
        figures = {}
        for constrained, prefix in ((False, "free_"), (True, "")):
            started = time.monotonic()
            parses = list(Parser(model, tokenizer, constrained=constrained).parse(tree.words() for tree in test))
            scores = score_trees(test, [parse.tree for parse in parses])
            figures |= {prefix + name: value for name, value in scores.items()}
            figures[prefix + "well_formed"] = 100 * sum(parse.well_formed for parse in parses) / len(parses)
            figures[prefix + "seconds"] = round(time.monotonic() - started, 1)
        OutputFolder(folder).write_text(PREDICTED, "".join(f"{parse.tree}\n" for parse in parses))
        log = training_log(folder)
        return figures | {
            "parameters": model.num_parameters(),
            "steps": log[-1]["step"],
            "minutes": round(log[-1]["seconds"] / 60, 2),
        }

    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """Our scores, then the paper's table."""
        keys = ("bracket_f1", "bracket_precision", "bracket_recall", "exact_match", "pos_accuracy")
        rows, free = [], []
        for cell in cells:
            ours = results.get(cell.name, {}).get("figures", {})
            rows.append([cell.label, *(as_text(ours.get(key)) for key in keys), as_text(ours.get("minutes"), ".1f")])
            for prefix, constraint in (("", "on"), ("free_", "off")) if cell.name not in BASELINES else ():
                well_formed, seconds = (ours.get(prefix + key) for key in ("well_formed", "seconds"))
                scores = [as_text(ours.get(prefix + key)) for key in keys[:4]]
                free.append([cell.label, constraint, as_text(well_formed, ".1f"), *scores, as_text(seconds, ".0f")])
        titles = ["", "F1", "precision", "recall", "exact", "POS", "minutes of training"]
        free_titles = ["", "constraint", "well-formed (%)", *titles[1:5], "seconds"]
        data = SCALES[setup.scale]
        theirs = [[row.parser, row.training, f"{row.f1:.1f}"] for row in TABLE4]
        return "\n".join([
            f"# Table 4, {setup.scale} scale\n", markdown_table(titles, rows), "",
            f"Trained on {data.train}, scored on {data.test}, by evalb's rules, all lengths;"
            f" recipe {data.recipe}, decoding constrained to trees over the sentence's words.",
            "\nThe same models with that constraint and without; other outputs are repaired before scoring:\n",
            markdown_table(free_titles, free), "",
            describe_runs(results), "\nThe paper's table, section 23 of the Wall Street Journal:\n",
            markdown_table(["parser", "training", "F1"], theirs), "",
        ])  # fmt: skip

    def draw(self, figure, cells: Sequence[Cell], results: dict[str, dict]) -> None:
        """F1 as bars, the paper's rows and ours."""
        figure.set_size_inches(8, 5)
        axis = figure.subplots()
        bars = [(f"{row.parser}, {row.training}", row.f1,
                 "tab:orange" if row.parser.startswith("Transformer") else "tab:gray") for row in TABLE4]  # fmt: skip
        bars += [(f"{cell.label}, here", results[cell.name]["figures"]["bracket_f1"], "tab:blue")
                 for cell in cells if cell.name in results]  # fmt: skip
        labels, values, colors = zip(*bars, strict=True)
        axis.barh(labels, values, color=colors)
        axis.invert_yaxis()
        axis.set_xlabel("labelled bracket F1 (paper: WSJ 23; here: see the table)")
        axis.grid(alpha=0.3, axis="x")
