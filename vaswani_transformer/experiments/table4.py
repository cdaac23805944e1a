"""Table 4: English constituency parsing, labelled bracket F1."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..loading import load_model
from ..output_folder import OutputFolder
from ..parsing.evalb import score_trees
from ..parsing.parser import OWN_FIELDS, Parser, TextForm, load_trees, parsing_recipe
from ..recipes.recipe import load_recipe
from ..training.checkpoints import WEIGHTS
from ..training.run import train
from .base import TABLE4, Cell, Experiment, Setup, markdown_table, results_table
from .translation import facts_of, trained

# By scale: a shipped recipe; trees to train on, to validate on and to score, plain or as `.gz`, sections of the Wall
# Street Journal as all rows of the table use them (GUM has no test trees here, so its development trees are both).
SCALES = {
    "laptop": ("parser-small", ("gum.train.trees", "gum.dev.trees", "gum.dev.trees")),
    "paper": ("parser", ("wsj.02-21.trees", "wsj.22.trees", "wsj.23.trees")),
}
# Label and form of the trees' text, by the cell's name.
PARSERS = {
    "laptop": {
        "transformer": ("Transformer, words in the trees", TextForm(words=True, augment=6)),
        "transformer-brackets": ("Transformer, brackets and tags alone", TextForm(augment=6)),
    },
    "paper": {"transformer": ("Transformer", TextForm())},
}
COLUMNS = {
    "F1": "{bracket_f1:.2f}", "precision": "{bracket_precision:.2f}", "recall": "{bracket_recall:.2f}",
    "exact": "{exact_match:.2f}", "POS": "{pos_accuracy:.2f}", "minutes of training": "{minutes:.1f}",
    "free: F1": "{free_bracket_f1:.2f}", "free: well-formed": "{free_well_formed:.1f}",
}  # fmt: skip
_load = functools.cache(load_trees)  # all cells read the same files, whose warnings are logged once


def _trees(setup: Setup) -> list[list]:
    """Return the trees to train on, to validate on and to score."""
    folder = setup.data_dir or Path()
    paths = [folder / name for name in SCALES[setup.scale][1]]
    return [_load(path if path.is_file() else f"{path}.gz") for path in paths]


class Table4(Experiment):
    """The Transformer as a parser."""

    name = "table4"

    def cells(self, setup: Setup) -> list[Cell]:
        """Return the parsers of a scale."""
        recipe = load_recipe(SCALES[setup.scale][0], setup.changes | {"output": "runs"})
        settings = {name: x for name, x in facts_of(recipe)["settings"].items() if name not in OWN_FIELDS}
        return [
            Cell(name, label, settings | dataclasses.asdict(form), {"bracket_f1": TABLE4[4].f1}, recipe=recipe)
            for name, (label, form) in PARSERS[setup.scale].items()
        ]

    def check(self, setup: Setup, cells: Sequence[Cell]) -> None:
        """Check the files of trees."""
        if cells:
            _trees(setup)

    def train(self, setup: Setup, cell: Cell, folder: Path) -> None:
        """Train a parser, unless its weights are there."""
        if not (folder / WEIGHTS).exists():
            train_trees, dev, _ = _trees(setup)
            form = PARSERS[setup.scale][cell.name][1]
            train(parsing_recipe(dataclasses.replace(cell.recipe, output=str(folder)), train_trees, dev, form))

    def measure(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Parse and score the test trees."""
        (*_, test), (model, tokenizer) = _trees(setup), load_model(folder)
        figures = trained(folder) | {"parameters": model.num_parameters()}
        for constrained, prefix in ((False, "free_"), (True, "")):
            parses = list(Parser(model, tokenizer, constrained=constrained).parse(tree.words() for tree in test))
            scores = score_trees(test, [parse.tree for parse in parses])
            scores["well_formed"] = 100 * sum(parse.well_formed for parse in parses) / len(parses)
            figures |= {prefix + name: value for name, value in scores.items()}
        OutputFolder(folder).write_text("predicted.trees", "".join(f"{parse.tree}\n" for parse in parses))
        return figures

    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """Return our scores, then the paper's table."""
        recipe, files = SCALES[setup.scale]
        return "\n\n".join([
            f"# Table 4, {setup.scale} scale", results_table(cells, results, COLUMNS),
            f"Trained on {files[0]}, scored on {files[2]}, by evalb's rules, all lengths; recipe {recipe}, decoding"
            " constrained to trees over the sentence's words. Free: without that constraint; outputs that are not"
            " well-formed are repaired before scoring.",
            "The paper's table, section 23 of the Wall Street Journal:",
            markdown_table(["parser", "training", "F1"], [[row.model, row.training, str(row.f1)] for row in TABLE4]),
        ])  # fmt: skip
