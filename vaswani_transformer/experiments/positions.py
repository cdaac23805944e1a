"""Section 3.5 checked, as an experiment: the study of positions, which keeps its own cells."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from ..files import write_text
from ..plots import new_figure
from .base import Cell, Estimate, Experiment, Setup, logger, told_machine, write_recipe
from .position_study import ENCODINGS, LengthStudy, offset_error, train_and_test, unexplained

#: What the study trains by default: minutes on two cores.
STUDIES = (
    LengthStudy(),
    LengthStudy(task="translate", trained=9, tested=tuple(range(4, 17)), dropout=0.1, steps=800),
)
OFFSETS = (1, 2, 5)  # k of the maps that are fitted to the trained tables
_CHECKED = {"d_model": 512, "positions": 1000, "offsets": list(range(1, 1001, 111))}  # of the closed form


def run_position_study(
    folder: str | Path,
    studies: Sequence[LengthStudy] = STUDIES,
    seeds: Sequence[int] = (0, 1),
    say: Callable[[str], None] = lambda line: None,
) -> dict:
    """Train what is missing, and write `positions.json`, `positions.md` and, with matplotlib, `positions.png`.

    Each model is a cell, a file `TASK-ENCODING-SEED.json`; a second call trains only those that are not there.

    Args:
        folder: where to; made if need be.
        studies: one for each task.
        seeds: of each study.
        say: takes a line now and then.

    Returns:
        what `positions.json` holds: `offsets` (the closed form and its largest error), `studies` (settings) and `cells`
        (`task`, `encoding`, `seed`, `seconds`, `lengths` as `accuracy_by_length` says, and `unexplained` by offset).

    Raises:
        UserError: for a cell of a study with other settings, or settings that make no study.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder for the results")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(study, encoding, seed) for study in studies for encoding in ENCODINGS for seed in seeds]
    done = [_read_cell(_path(folder, *cell), cell[0]) for cell in wanted]  # all before any is trained
    for place, cell in enumerate(wanted):
        if done[place] is None:
            done[place] = _train_cell(*cell, say)
            write_text(_path(folder, *cell), json.dumps(done[place], indent=1) + "\n")
    result = {
        "offsets": _CHECKED | {"largest_error": offset_error(**_CHECKED)},
        "studies": [dataclasses.asdict(study) for study in studies],
        "cells": [{name: value for name, value in cell.items() if name != "study"} for cell in done],
    }
    write_text(folder / "positions.json", json.dumps(result, indent=1) + "\n")
    write_text(folder / "positions.md", positions_as_markdown(result))
    if draw_positions(result, folder / "positions.png"):
        say(f"{folder / 'positions.png'}")
    return result


def _path(folder: Path, study: LengthStudy, encoding: str, seed: int) -> Path:
    return folder / f"{study.task}-{encoding}-{seed}.json"


def _read_cell(path: Path, study: LengthStudy) -> dict | None:
    """A cell that was trained before; None where there is none."""
    if not path.exists():
        return None
    try:
        cell = json.loads(path.read_text(encoding="utf-8"))
        earlier = cell["study"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it, and it is trained again") from error
    now = json.loads(json.dumps(dataclasses.asdict(study)))
    changed = [f"{name} was {earlier.get(name)} and is {now[name]}" for name in now if now[name] != earlier.get(name)]
    if changed:
        raise UserError(f"{path} comes from another study ({'; '.join(changed)}): give another folder")
    return cell


def _train_cell(study: LengthStudy, encoding: str, seed: int, say: Callable[[str], None]) -> dict:
    name, started = f"{study.task}, {encoding} positions, seed {seed}", time.monotonic()

    def progress(step: int, loss: float) -> None:
        if step % 500 == 0 or step == study.steps:
            say(f"{name}: step {step:,}, loss {loss:.3f}, {time.monotonic() - started:.0f} s")

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are so small that more threads cost more than they bring
    try:
        lengths, table = train_and_test(study, encoding, seed, progress)
    finally:
        torch.set_num_threads(threads)
    return {
        "task": study.task,
        "encoding": encoding,
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "threads": 1,
        "lengths": lengths,
        "unexplained": {str(offset): unexplained(table, offset) for offset in OFFSETS},
        "study": dataclasses.asdict(study),
    }


def _means(result: dict, task: str, encoding: str) -> tuple[list[dict], list[list[dict]]]:
    """By length the mean over seeds, and the rows of each seed."""
    seeds = [cell["lengths"] for cell in result["cells"] if (cell["task"], cell["encoding"]) == (task, encoding)]
    names = ("token_accuracy", "exact_match")
    rows = zip(*seeds, strict=True)
    return [same[0] | {name: float(np.mean([row[name] for row in same])) for name in names} for same in rows], seeds


def positions_as_markdown(result: dict) -> str:
    """Tables of a result of `run_position_study`."""
    told, lines = result["offsets"], ["# Positions (Section 3.5)\n"]
    lines.append(
        f"PE(pos+k) = M(k) PE(pos) with M(k) made of rotations: largest error {told['largest_error']:.1e} over"
        f" positions 0 to {told['positions'] - 1:,}, {len(told['offsets'])} offsets from {min(told['offsets'])} to"
        f" {max(told['offsets']):,}, d_model {told['d_model']}.\n"
    )
    lines.append(
        "What no linear map foretells of a trained model's rows (fitted to four fifths, judged on the others):\n"
    )
    lines += [
        "| task | positions | seed | " + " | ".join(f"k = {offset}" for offset in OFFSETS) + " |",
        "|" + "---|" * (3 + len(OFFSETS)),
    ]
    for cell in result["cells"]:
        numbers = " | ".join(f"{cell['unexplained'][str(offset)]:.1%}" for offset in OFFSETS)
        lines.append(f"| {cell['task']} | {cell['encoding']} | {cell['seed']} | {numbers} |")
    for study in result["studies"]:
        lines.append(f"\n## {study['task']}, trained on sources of at most {study['trained']} tokens\n")
        seeds = len({cell["seed"] for cell in result["cells"] if cell["task"] == study["task"]})
        lines.append(
            f"{study['steps']:,} steps with the same batches for both. Percent, mean over {seeds} seeds, in brackets"
            " each seed. Tokens: the right one is the likeliest, given the right ones before it; exact: so in all of a"
            " sentence, which greedy search then writes. Learned positions that training never reaches are as they"
            " were drawn.\n"
        )
        lines.append("| length | pairs | " + " | ".join(f"{e}: tokens | {e}: exact" for e in ENCODINGS) + " |")
        lines.append("|" + "---|" * (2 + 2 * len(ENCODINGS)))
        both = [_means(result, study["task"], encoding) for encoding in ENCODINGS]
        for place, row in enumerate(both[0][0]):
            cells = []
            for means, seeds in both:
                for name in ("token_accuracy", "exact_match"):
                    each = ", ".join(f"{rows[place][name]:.0f}" for rows in seeds)
                    cells.append(f"{means[place][name]:.1f} ({each})")
            mark = "" if row["length"] <= study["trained"] else " (longer)"
            lines.append(f"| {row['length']}{mark} | {row['examples']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_positions(result: dict, picture: str | Path) -> bool:
    """Draw accuracy over length: a row a task, the mean of the seeds thick, each seed thin.

    Returns:
        Whether matplotlib was there to draw it.
    """
    if (figure := new_figure()) is None:
        return False
    studies = result["studies"]
    figure.set_size_inches(9, 3.1 * len(studies))
    axes = figure.subplots(len(studies), 2, squeeze=False)
    for row, study in zip(axes, studies, strict=True):
        for axis, name in zip(row, ("token_accuracy", "exact_match"), strict=True):
            for encoding, colour, marker in zip(ENCODINGS, ("tab:blue", "tab:orange"), ("o", "s"), strict=True):
                means, seeds = _means(result, study["task"], encoding)
                lengths = [one["length"] for one in means]
                for rows in seeds:
                    axis.plot(lengths, [one[name] for one in rows], color=colour, alpha=0.35, linewidth=0.8)
                axis.plot(
                    lengths, [one[name] for one in means], color=colour, marker=marker, markersize=4, label=encoding
                )
            axis.axvline(study["trained"] + 0.5, color="0.4", linestyle="--", linewidth=1)
            axis.annotate(
                "longer than trained →", (study["trained"] + 0.7, 103), fontsize=8, color="0.3", annotation_clip=False
            )
            axis.set_ylim(-3, 110)
            axis.set_title(
                f"{study['task']}: {name.replace('_', ' ').replace('exact match', 'sentences exactly right')}"
            )
            axis.set_xlabel("source length (tokens)")
            axis.set_ylabel("%")
            axis.grid(alpha=0.3)
            axis.legend(loc="lower left", title="positions", fontsize=8)
    figure.savefig(picture, dpi=110)
    return True


__all__ = ["draw_positions", "positions_as_markdown", "run_position_study"]


CELL = "study"
SECONDS = 400.0  # on two cores


class Positions(Experiment):
    """One cell, of the same size at both scales."""

    name = "positions"
    title = "offsets as linear maps of sinusoids, and learned against sinusoidal positions on long sentences"

    def cells(self, setup: Setup) -> list[Cell]:
        """One.

        Raises:
            UserError: for changes.
        """
        if setup.changes:
            raise UserError(f"positions has no setting {next(iter(setup.changes))!r}: leave --set out")
        return [Cell(CELL, "the study", {"tasks": [study.task for study in STUDIES]})]

    def estimate(self, setup: Setup, cell: Cell, device: str | None) -> Estimate:
        """Minutes."""
        return Estimate(seconds=SECONDS)

    def run(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Train what is missing of the study."""
        write_recipe(folder, cell)
        return run_position_study(folder, say=logger.info)

    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """The tables of the study."""
        found = [positions_as_markdown(result["figures"]) for result in results.values()]
        return "\n".join([*found, told_machine(results)]) + "\n"

    def draw(self, figure, cells: Sequence[Cell], results: dict[str, dict]) -> None:
        """Nothing: the study draws its own picture."""

    def save_picture(self, picture: Path, cells: Sequence[Cell], results: dict[str, dict]) -> None:
        """Accuracy over length."""
        draw_positions(results[CELL]["figures"], picture)
