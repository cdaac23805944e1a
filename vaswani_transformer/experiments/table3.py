"""Table 3: variations of the base model, perplexity and BLEU on the development set."""

from collections.abc import Sequence
from statistics import mean

from .base import TABLE3, Cell, Setup, results_table
from .translation import SCORES, Training, TranslationExperiment, laptop_changes, training

SEEDS = 3  # of the base model: their range shows which differences may be chance
LAST = {"average_checkpoints": 0, "keep_weights": "last"}  # Table 3 is without averaging (its caption)
STEPS = {"base": 2000, "big": 6000}  # laptop scale; big has three times as many, in the paper and here
SMOOTHING = {"table3-d-smoothing-0.0": 0.0, "table3-d-smoothing-0.2": 0.2}  # 0.1 in the others
DROPOUT = {"table3-d-dropout-0.0": 0.0, "table3-d-dropout-0.2": 0.2, "big": 0.3}  # likewise


class Table3(TranslationExperiment):
    """Rows (A) to (E), base and big; the base model with three seeds.

    Paper scale: the recipe of the base or the big model with the row's sizes. Laptop scale: the same on Multi30k with
    the row's sizes in small (`laptop_changes`), smaller batches and fewer steps.
    """

    name = "table3"

    def cells(self, setup: Setup) -> list[Training]:
        """Return one for each row; further seeds of the base model follow it."""
        cells, small = [], setup.scale == "laptop"
        for row in TABLE3:
            size, changes = "big" if row.preset == "big" else "base", {"preset": row.preset}
            if small:
                changes = laptop_changes(row.preset, "de") | {"evaluate_every": 500, "max_steps": STEPS[size]}
            changes |= {"label_smoothing": SMOOTHING.get(row.preset, 0.1), "dropout": DROPOUT.get(row.preset, 0.1)}
            name, label = row.preset.removeprefix("table3-"), row.label
            label = f"({row.group}) {label}" if len(row.group) == 1 else label
            paper = {key: getattr(row, key) for key in ("perplexity", "bleu", "millions") if getattr(row, key)}
            for seed in range(SEEDS if row.preset == "base" else 1):
                if seed:
                    name, label = f"base-seed-{seed}", f"base, seed {seed}"
                cells.append(training(
                    setup, f"wmt14-en-de-{size}", LAST | changes | {"seed": seed}, name=name, label=label,
                    group=row.group, paper=paper,
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
            notes += (
                " Here: Multi30k English-German, validation set; the paper: WMT 2014, newstest2013. Row labels are the"
                " paper's sizes."
            )
        bases = [results[cell.name]["figures"] for cell in cells if cell.group == "base" and cell.name in results]
        for key in ("perplexity", "paper_bleu") if bases else ():
            values = [base[key] for base in bases]
            spread = (max(values) - min(values)) / 2
            notes += f" {key} of {len(bases)} seeds of the base: {mean(values):.2f} ± {spread:.2f}, which is chance."
        return "\n\n".join([f"# Table 3, {setup.scale} scale", results_table(cells, results, columns), notes])
