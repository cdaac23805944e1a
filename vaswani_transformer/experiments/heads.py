"""What the heads of the base model attend to (Section 4 and the appendix): a report over sentences, and pictures."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..attention.heads import heads_as_markdown, name_heads
from ..attention.page import write_attention_page
from ..attention.pictures import draw_attention
from ..attention.weights import KINDS, attend
from ..errors import UserError
from ..files import write_text
from ..loading import load_model
from ..plots import new_figure
from .base import (
    Cell,
    Estimate,
    Experiment,
    Setup,
    describe_runs,
    experiment_folder,
    read_results,
    run_cell,
    write_recipe,
)
from .table2 import Table2
from .translation import data_pairs

CELL, MODEL = "heads", "en-de-base"  # the cell here, and the one of Table 2 whose model it is about
SENTENCES, WORDS = 3, 10  # that are drawn, and about how many words they have
REPORT = "heads.json"


class HeadStudy(Experiment):
    """One cell, on the model of Table 2's base row, English to German, which is trained if it is missing."""

    name = "attention"
    title = "what the heads of the base model do, and pictures of some sentences"

    def _model_cell(self, setup: Setup) -> Cell:
        return next(cell for cell in Table2().cells(setup) if cell.name == MODEL)

    def cells(self, setup: Setup) -> list[Cell]:
        """One, with the settings of its model."""
        return [Cell(CELL, "heads of the base model", self._model_cell(setup).settings)]

    def check(self, setup: Setup, cells: Sequence[Cell]) -> None:
        """Check that the data of Table 2's cell is there."""
        if cells:
            Table2().check(setup, [self._model_cell(setup)])

    def estimate(self, setup: Setup, cell: Cell, device: str | None) -> Estimate:
        """The training, if it is not finished."""
        table, trained = Table2(), self._model_cell(setup)
        is_finished = bool(read_results(table, setup, [trained]))
        return Estimate(seconds=0.0) if is_finished else table.estimate(setup, trained, device)

    def run(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Train the model unless it is there, name its heads on the validation set, draw some of its sentences."""
        table, model_cell = Table2(), self._model_cell(setup)
        run_cell(table, setup, model_cell)
        write_recipe(folder, cell)
        model, tokenizer = load_model(experiment_folder(table, setup) / MODEL)
        recipe = table.recipe(setup, table.training(setup, model_cell))
        pairs = data_pairs(recipe, recipe.validation_source, recipe.validation_target, recipe.validation_split)
        report = name_heads(model, tokenizer, zip(*pairs, strict=True))
        write_text(folder / REPORT, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        chosen = sorted(zip(*pairs, strict=True), key=lambda pair: abs(len(pair[0].split()) - WORDS))[:SENTENCES]
        for number, (source, _) in enumerate(chosen, 1):
            weights = attend(model, tokenizer, source)
            write_attention_page(weights, folder / f"sentence-{number}.html")
            self._draw_sentence(weights, folder, number)
        roles = {kind: Counter(head["role"] for head in heads["heads"]) for kind, heads in report["kinds"].items()}
        return {"roles": roles, "report": report}

    def _draw_sentence(self, weights, folder: Path, number: int) -> None:
        for kind in KINDS if new_figure() is not None else ():
            try:
                draw_attention(weights, kind, folder / f"sentence-{number}-{kind}.png")
            except UserError:  # too long for a readable picture of all heads; the page has them
                continue

    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """A row for each head, as `vaswani attention --report` prints it."""
        if CELL not in results:
            return f"# Attention, {setup.scale} scale\n\n{describe_runs(results)}\n"
        return f"{heads_as_markdown(results[CELL]['figures']['report'])}\n\n{describe_runs(results)}\n"

    def draw(self, figure, cells: Sequence[Cell], results: dict[str, dict]) -> None:
        """Number of heads of each role, by kind of attention."""
        figure.set_size_inches(9, 4)
        axis, counts = figure.subplots(), results[CELL]["figures"]["roles"]
        roles = sorted({role for kind in counts.values() for role in kind})
        left = dict.fromkeys(counts, 0)
        for place, role in enumerate(roles):
            widths = [counts[kind].get(role, 0) for kind in counts]
            labels = [f"{kind} attention" for kind in counts]
            axis.barh(labels, widths, left=list(left.values()), label=role, color=f"C{place}")
            left = {kind: left[kind] + width for kind, width in zip(left, widths, strict=True)}
        axis.set_xlabel("heads")
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
