"""What the heads of the base model attend to (Section 4 and the appendix): a report over sentences, and pages."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..attention.heads import heads_as_markdown, name_heads
from ..attention.page import write_attention_page
from ..attention.weights import attend
from ..loading import load_model
from .base import Setup
from .table2 import Table2
from .translation import Training, test_pairs

MODEL = "en-de-base"  # the cell of Table 2 whose model it is about
SENTENCES, WORDS = 3, 10  # that have a page, and about how many words they have


class HeadStudy(Table2):
    """One cell, on the model of Table 2's base row, English to German, which is trained if it is missing."""

    name = "attention"

    def cells(self, setup: Setup) -> list[Training]:
        """Return that of Table 2, on the validation set."""
        model = next(cell for cell in super().cells(setup) if cell.name == MODEL)
        return [replace(model, name="heads", label="heads of the base model", paper={}, test={})]

    def train(self, setup: Setup, cell: Training, folder: Path) -> None:
        """Train the model, unless it is there."""
        super().train(setup, cell, setup.folder(Table2.name) / MODEL)

    def measure(self, setup: Setup, cell: Training, folder: Path) -> dict[str, Any]:
        """Name the model's heads on the validation set, and write pages of some of its sentences."""
        model, tokenizer = load_model(setup.folder(Table2.name) / MODEL)
        pairs = list(zip(*test_pairs(cell), strict=True))
        report = name_heads(model, tokenizer, pairs)
        pairs.sort(key=lambda pair: abs(len(pair[0].split()) - WORDS))
        for number, (source, _) in enumerate(pairs[:SENTENCES], 1):
            write_attention_page(attend(model, tokenizer, source), folder / f"sentence-{number}.html")
        return {"report": report}

    def report(self, setup: Setup, cells: Sequence[Training], results: dict[str, dict]) -> str:
        """Return a row for each head, as `vaswani attention --report` prints it."""
        return heads_as_markdown(results["heads"]["figures"]["report"]) if results else "# Attention"
