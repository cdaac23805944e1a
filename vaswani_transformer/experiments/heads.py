"""What the heads of the base model attend to (Section 4 and the appendix): a report over sentences, and pictures."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..attention.heads import heads_as_markdown, name_heads
from ..attention.page import write_attention_page
from ..attention.pictures import draw_attention
from ..attention.weights import KINDS, attend
from ..errors import UserError
from ..loading import load_model
from ..plots import can_draw
from .base import Cell, Experiment, Setup, describe_runs, experiment_folder
from .table2 import Table2
from .translation import test_pairs

MODEL = "en-de-base"  # the cell of Table 2 whose model it is about
SENTENCES, WORDS = 3, 10  # that are drawn, and about how many words they have


class HeadStudy(Experiment):
    """One cell, on the model of Table 2's base row, English to German, which is trained if it is missing."""

    name = "attention"
    title = "what the heads of the base model do, and pictures of some sentences"

    def _model_cell(self, setup: Setup) -> Cell:
        return next(cell for cell in Table2().cells(setup) if cell.name == MODEL)

    def cells(self, setup: Setup) -> list[Cell]:
        """Return one, with the settings of its model."""
        return [Cell("heads", "heads of the base model", self._model_cell(setup).settings)]

    def check(self, setup: Setup, cells: Sequence[Cell]) -> None:
        """Check that the data of Table 2's cell is there."""
        Table2().check(setup, [self._model_cell(setup)] if cells else [])

    def train(self, setup: Setup, cell: Cell, folder: Path) -> None:
        """Train the model, unless it is there."""
        Table2().train(setup, self._model_cell(setup), experiment_folder(Table2(), setup) / MODEL)

    def measure(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Name the model's heads on the validation set, and draw some of its sentences."""
        model, tokenizer = load_model(experiment_folder(Table2(), setup) / MODEL)
        validation = replace(self._model_cell(setup), test="val" if setup.scale == "laptop" else "validation")
        pairs = list(zip(*test_pairs(validation), strict=True))
        report = name_heads(model, tokenizer, pairs)
        pairs.sort(key=lambda pair: abs(len(pair[0].split()) - WORDS))
        for number, (source, _) in enumerate(pairs[:SENTENCES], 1):
            weights = attend(model, tokenizer, source)
            write_attention_page(weights, folder / f"sentence-{number}.html")
            for kind in KINDS if can_draw() else ():
                with contextlib.suppress(UserError):  # too long for a readable picture; the page has it
                    draw_attention(weights, kind, folder / f"sentence-{number}-{kind}.png")
        return {"report": report}

    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """Return a row for each head, as `vaswani attention --report` prints it."""
        text = heads_as_markdown(results["heads"]["figures"]["report"]) if results else "# Attention"
        return f"{text}\n\n{describe_runs(results)}"
