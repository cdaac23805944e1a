"""Section 3.5 as an experiment: offsets as linear maps, and accuracy on sentences longer than any in training."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from .base import Cell, Estimate, Experiment, Setup, describe_runs, markdown_table, write_recipe
from .position_study import ENCODINGS, LengthStudy, offset_error, train_and_test, unpredicted

STUDIES = (
    LengthStudy(),
    LengthStudy(task="translate", trained=9, tested=tuple(range(4, 17)), dropout=0.1, steps=800),
)
SEEDS = (0, 1)
OFFSETS = (1, 2, 5)  # k of the maps that are fitted to the trained tables
CLOSED_FORM = {"d_model": 512, "positions": 1000, "offsets": list(range(1, 1001, 111))}  # arguments of `offset_error`
SECONDS = 50.0  # of a cell, on one core
MEASURES = {"token_accuracy": "tokens", "exact_match": "exact"}


class Positions(Experiment):
    """A cell for each task, encoding and seed, of the same size at both scales."""

    name = "positions"
    title = "offsets as linear maps of sinusoids, and learned against sinusoidal positions on long sentences"

    def cells(self, setup: Setup) -> list[Cell]:
        """One for each model.

        Raises:
            UserError: for changes.
        """
        if setup.changes:
            raise UserError(f"positions has no setting {next(iter(setup.changes))!r}: leave --set out")
        return [
            Cell(
                f"{study.task}-{encoding}-{seed}",
                f"{study.task}, {encoding} positions, seed {seed}",
                dataclasses.asdict(study) | {"encoding": encoding, "seed": seed},
                group=study.task,
            )
            for study in STUDIES
            for encoding in ENCODINGS
            for seed in SEEDS
        ]

    def estimate(self, setup: Setup, cell: Cell, device: str | None) -> Estimate:
        """About a minute on one core."""
        return Estimate(steps=cell.settings["steps"], seconds=SECONDS)

    def run(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Train a model on short sentences and test it at every length."""
        write_recipe(folder, cell)
        settings = dict(cell.settings)
        encoding, seed = settings.pop("encoding"), settings.pop("seed")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the matrices are so small that more threads cost more than they bring
        try:
            lengths, table = train_and_test(LengthStudy(**settings), encoding, seed)
        finally:
            torch.set_num_threads(threads)
        return {"lengths": lengths, "unpredicted": {str(offset): unpredicted(table, offset) for offset in OFFSETS}}

    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """The closed form's error, what linear maps leave of trained tables, accuracies by length."""
        positions, offsets = CLOSED_FORM["positions"], CLOSED_FORM["offsets"]
        rows = [
            [cell.settings["task"], cell.settings["encoding"], str(cell.settings["seed"])]
            + [f"{results[cell.name]['figures']['unpredicted'][str(offset)]:.1%}" for offset in OFFSETS]
            for cell in cells
            if cell.name in results
        ]
        lines = [
            "# Positions (Section 3.5)\n",
            f"PE(pos+k) = M(k) PE(pos) with M(k) made of rotations: largest error {offset_error(**CLOSED_FORM):.1e}"
            f" over positions 0 to {positions - 1:,}, {len(offsets)} offsets from {min(offsets)} to {max(offsets):,},"
            f" d_model {CLOSED_FORM['d_model']}.\n",
            "The share of a trained table's variance that the best linear map from the rows k before does not predict"
            " (fitted to four fifths of the rows, measured on the others):\n",
            markdown_table(["task", "positions", "seed", *(f"k = {offset}" for offset in OFFSETS)], rows),
        ]
        for study in STUDIES:
            lines += [
                f"\n## {study.task}, trained on sources of at most {study.trained} tokens\n",
                f"{study.steps:,} steps with the same batches for both encodings. Percent, mean over the seeds, in"
                " brackets each seed. Tokens: the right one is the likeliest, given the right ones before it; exact:"
                " all tokens of a sentence are, which greedy search then writes. Learned positions that training never"
                " reaches keep their initial values.\n",
                _accuracy_table(study, results),
            ]
        return "\n".join([*lines, "", describe_runs(results)]) + "\n"

    def draw(self, figure, cells: Sequence[Cell], results: dict[str, dict]) -> None:
        """Accuracy over length: a row of panels for each task, the mean of the seeds thick, each seed thin."""
        figure.set_size_inches(9, 3.1 * len(STUDIES))
        panels = figure.subplots(len(STUDIES), len(MEASURES), squeeze=False)
        for row, study in zip(panels, STUDIES, strict=True):
            for axis, measure in zip(row, MEASURES, strict=True):
                for encoding, color, marker in zip(ENCODINGS, ("tab:blue", "tab:orange"), ("o", "s"), strict=True):
                    if not (seeds := _accuracies(study, encoding, results)):
                        continue
                    lengths = [entry["length"] for entry in seeds[0]]
                    values = np.array([[entry[measure] for entry in entries] for entries in seeds])
                    axis.plot(lengths, values.T, color=color, alpha=0.35, linewidth=0.8)
                    axis.plot(lengths, values.mean(0), color=color, marker=marker, markersize=4, label=encoding)
                axis.axvline(study.trained + 0.5, color="0.4", linestyle="--", linewidth=1)
                place = (study.trained + 0.7, 103)
                axis.annotate("longer than trained →", place, fontsize=8, color="0.3", annotation_clip=False)
                axis.set_ylim(-3, 110)
                title = "token accuracy" if measure == "token_accuracy" else "sentences exactly right"
                axis.set_title(f"{study.task}: {title}")
                axis.set_xlabel("source length (tokens)")
                axis.set_ylabel("%")
                axis.grid(alpha=0.3)
                axis.legend(loc="lower left", title="positions", fontsize=8)


def _accuracies(study: LengthStudy, encoding: str, results: dict[str, dict]) -> list[list[dict]]:
    """The entries of `accuracy_by_length` of each finished seed."""
    names = [f"{study.task}-{encoding}-{seed}" for seed in SEEDS]
    return [results[name]["figures"]["lengths"] for name in names if name in results]


def _accuracy_table(study: LengthStudy, results: dict[str, dict]) -> str:
    columns = [(encoding, measure) for encoding in ENCODINGS for measure in MEASURES]
    titles = ["length", "pairs", *(f"{encoding}: {MEASURES[measure]}" for encoding, measure in columns)]
    rows: dict[int, list[str]] = {}
    for encoding, measure in columns:
        for entries in zip(*_accuracies(study, encoding, results), strict=True):  # of the seeds, at one length
            length, values = entries[0]["length"], [entry[measure] for entry in entries]
            label = str(length) if length <= study.trained else f"{length} (longer)"
            row = rows.setdefault(length, [label, str(entries[0]["examples"]), *[""] * len(columns)])
            each = ", ".join(f"{value:.0f}" for value in values)
            row[2 + columns.index((encoding, measure))] = f"{np.mean(values):.1f} ({each})"
    return markdown_table(titles, list(rows.values()))
