"""Table 3: variations of the base model, perplexity and BLEU on the development set."""

from collections.abc import Callable, Sequence
from statistics import mean

from .base import Cell, Setup, describe_runs, results_table
from .paper_tables import TABLE3
from .translation import SCORES, TranslationExperiment, laptop_changes, training

SEEDS = 3  # of the base model: their range shows which differences may be chance
PAPER = {"average_checkpoints": 0, "keep_weights": "last"}  # Table 3 is without averaging (its caption)
STEPS = {"base": 2000, "big": 6000}  # laptop scale; big has three times as many, in the paper and here
SMOOTHING = {"table3-d-smoothing-0.0": 0.0, "table3-d-smoothing-0.2": 0.2}  # 0.1 in the others
DROPOUT = {"table3-d-dropout-0.0": 0.0, "table3-d-dropout-0.2": 0.2, "big": 0.3}  # likewise


class Table3(TranslationExperiment):
    """Rows (A) to (E), base and big; the base model with three seeds.

    Paper scale: the recipe of the base or the big model with the row's sizes. Laptop scale: the same on Multi30k with
    the row's sizes `scaled_down`, smaller batches and fewer steps.
    """

    name = "table3"
    title = "variations of the base model: development perplexity and BLEU, parameters"

    def cells(self, setup: Setup) -> list[Cell]:
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
                    setup, f"wmt14-en-de-{size}", PAPER | changes | {"seed": seed}, name=name, label=label,
                    group=row.group, paper=paper, test="val" if small else "validation",
                ))  # fmt: skip
        return cells

    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """Return perplexity, BLEU and parameters of each row, and its distance from the base, ours and the paper's."""
        bases = [results[cell.name]["figures"] for cell in cells if cell.group == "base" and cell.name in results]
        at_base = {key: [base[key] for base in bases] for key in ("perplexity", "paper_bleu") if bases}

        def to_base(key: str) -> Callable:
            return lambda ours, _: f"{ours[key] - mean(at_base[key]):+.2f}"

        columns = {
            "PPL": lambda ours, _: f"{ours['perplexity']:.2f}", "PPL to base": to_base("perplexity"),
            **SCORES, "BLEU to base": to_base("paper_bleu"),
            "paper: PPL": lambda _, cell: f"{cell.paper['perplexity']:.2f}",
            "to base": lambda _, cell: f"{cell.paper['perplexity'] - TABLE3[0].perplexity:+.2f}",
            "BLEU": lambda _, cell: f"{cell.paper['bleu']:.1f}",
            "to base ": lambda _, cell: f"{cell.paper['bleu'] - TABLE3[0].bleu:+.1f}",
            "params": lambda _, cell: f"{cell.paper['millions']} M",
        }  # fmt: skip
        notes = "Perplexity a word piece, not comparable between vocabularies; BLEU as in Table 2."
        if setup.scale == "laptop":
            notes += (
                " Here: Multi30k English-German, validation set; the paper: WMT 2014, newstest2013. Row labels are the"
                " paper's sizes. Distances are from the mean of the base's seeds."
            )
        if bases:
            ranges = (f"{key} {mean(x):.2f} ± {(max(x) - min(x)) / 2:.2f}" for key, x in at_base.items())
            notes += f" {len(bases)} seeds of the base: {', '.join(ranges)}; a difference within that is chance."
        title = f"# Table 3, {setup.scale} scale: development set"
        return "\n\n".join([title, results_table(cells, results, columns), f"{notes} {describe_runs(results)}"])
