"""Run experiments: tables of cells, each a folder with its recipe and result; finished cells are not run again."""

import contextlib
import datetime
import json
import logging
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..distributed import is_first_process, is_launched
from ..durations import duration
from ..errors import UserError, one_line, reading
from ..evaluation.records import versions
from ..json_and_yaml import read_json, read_yaml
from ..output_folder import RECIPE, OutputFolder, locked
from ..recipes.recipe import Recipe

logger = logging.getLogger(__name__)

RESULT = "result.json"


class Row(dict):
    """A row of one of the paper's tables; an attribute is None where it prints no figure."""

    __getattr__ = dict.get


# The figures that the paper prints (arXiv 1706.03762v7).
_TABLES = read_yaml(Path(__file__).with_name("paper_tables.yaml"))
TABLE2, TABLE3, TABLE4 = (list(map(Row, _TABLES[name])) for name in ("table2", "table3", "table4"))


@dataclass(frozen=True)
class Setup:
    """The options of a call."""

    scale: str = "laptop"  # or "paper"
    output: Path = Path("runs")  # folder of all experiments
    data_dir: Path | None = None  # None where the experiment needs none, or for data of the Hub
    changes: dict[str, str] = field(default_factory=dict)  # settings that replace those of all cells

    def folder(self, experiment: str) -> Path:
        """Return the folder of an experiment's cells and table."""
        return self.output / experiment / self.scale


@dataclass(frozen=True)
class Cell:
    """One run of an experiment."""

    name: str  # of its folder
    label: str  # of its row in the table
    settings: dict[str, Any]  # plain values that determine the result; a folder made with others is refused
    paper: dict[str, Any] = field(default_factory=dict)  # the paper's figures, by the names of ours
    group: str = ""  # of the rows that belong together in the paper's table
    recipe: Recipe | None = None  # of its training, in which `output` is not set
    language: str = "de"  # of a translation model's targets
    test: dict[str, str] = field(default_factory=dict)  # changes by which the recipe validates on the test set


class Experiment:
    """A table of the paper as cells to run; subclasses have these methods too.

    `cells(setup)` returns all cells of a scale, in the order of the paper's table; raises `UserError` for unknown
    settings. `check(setup, cells)` raises `UserError` if data of cells is missing, before any of them runs.
    `train(setup, cell, folder)` trains or resumes a cell with all processes of a launcher, writes `recipe.yaml`, raises
    `TrainingStopped` after a signal. `measure(setup, cell, folder)` returns the figures of a trained cell.
    `report(setup, cells, results)` returns the table of finished cells in Markdown, the paper's figures beside ours.
    """

    name: str


def run_experiment(
    experiment: Experiment, setup: Setup, only: Sequence[str] = (), dry_run: bool = False, report: bool = False
) -> str:
    """Run the cells that are missing, one after the other, and return the table.

    Under `torchrun` all processes train each cell together, and process 0 measures it and writes the table.

    `only` names cells, or their groups. `dry_run` runs nothing and returns what the cells will take; `report` runs
    nothing and returns the table of the finished cells.

    Raises:
        UserError: for unknown cells or settings, missing data, a folder made with other settings, and failed cells.
        TrainingStopped: after a signal; the same call resumes.
    """
    cells = experiment.cells(setup)
    finished = read_results(experiment, setup, cells)
    chosen = chosen_cells(cells, only)
    missing = [cell for cell in chosen if cell.name not in finished]
    if dry_run:
        rows = [
            [cell.name, "missing" if cell in missing else "finished", f"{cell.settings.get('max_steps', 0):,}"]
            for cell in chosen
        ]
        return markdown_table([str(setup.folder(experiment.name)), "state", "steps"], rows)
    if not report:
        experiment.check(setup, missing)
        _run_cells(experiment, setup, missing)
    return write_report(experiment, setup, cells) if is_first_process() else ""


def chosen_cells(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Return the cells of these names or groups, in the table's order; all if no name is given."""
    names = {name.lower(): name for cell in cells for name in (cell.name, cell.group) if name}
    chosen = {name.lower() for name in only}
    if unknown := chosen - names.keys():
        raise UserError(f"there is no row {min(unknown)!r} in this table: there are {', '.join(names.values())}")
    return [cell for cell in cells if not only or {cell.name.lower(), cell.group.lower()} & chosen]


def read_results(experiment: Experiment, setup: Setup, cells: Sequence[Cell]) -> dict[str, dict]:
    """Return the results of all finished cells, by name.

    `UserError` for a folder made with other settings (those newer than it do not count), and for a damaged result.
    """
    results = {}
    for cell in cells:
        folder = setup.folder(experiment.name) / cell.name
        earlier = read_yaml(folder / RECIPE) if (folder / RECIPE).exists() else {}
        with reading(folder / RECIPE):
            changed = [name for name, value in cell.settings.items() if earlier.get(name, value) != value]
        for name in changed:
            problem = f"{folder} is of another recipe ({name} {earlier[name]} there and {cell.settings[name]} here)"
            raise UserError(f"{problem}: give the --set that it was made with, another --output, or remove that folder")
        if (folder / RESULT).exists():
            results[cell.name] = read_json(folder / RESULT, finite=False)
    return results


def _run_cells(experiment: Experiment, setup: Setup, cells: Sequence[Cell]) -> None:
    """Run cells in turn; one that fails stops no other, unless processes were launched together; the error names it."""
    failed = []
    for cell in cells:
        try:
            if is_first_process():
                run_cell(experiment, setup, cell)
            else:
                experiment.train(setup, cell, setup.folder(experiment.name) / cell.name)
        except (UserError, ArithmeticError, RuntimeError) as error:
            if is_launched():  # the other processes would wait for this one
                raise
            logger.warning("%s: failed: %s", cell.name, one_line(error))
            failed.append(cell.name)
    if failed:
        names = f"{len(failed)} of {len(cells)} cells failed ({', '.join(failed)})"
        raise UserError(f"{names}, see above: the same command tries again")


def run_cell(experiment: Experiment, setup: Setup, cell: Cell) -> None:
    """Run one cell unless it is finished; its `result.json` is written last.

    Seconds are those of this session. After a `TrainingStopped` or `KeyboardInterrupt` the next call resumes the cell.
    Errors as in `read_results`, and `UserError` for a cell that another process is running.
    """
    folder = setup.folder(experiment.name) / cell.name
    with locked(folder.parent, f".{cell.name}.lock"):  # a training locks the folder itself
        if read_results(experiment, setup, [cell]):  # of a process that ran it meanwhile
            return
        started = time.monotonic()
        logger.info("%s %s: started", experiment.name, cell.name)
        experiment.train(setup, cell, folder)
        figures = experiment.measure(setup, cell, folder)
        seconds = time.monotonic() - started
        cpu_info = Path("/proc/cpuinfo")  # of Linux
        processors = re.findall(r"model name\s*: (.*)", cpu_info.read_text("utf-8")) if cpu_info.exists() else []
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else (processors or [platform.machine()])[0]
        result = {
            "experiment": experiment.name, "scale": setup.scale, "cell": cell.name,
            "figures": figures, "paper": cell.paper, "seconds": round(seconds, 1),
            "machine": {"device": device, "threads": torch.get_num_threads()},
            "versions": versions(), "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "settings": cell.settings,
        }  # fmt: skip
        OutputFolder(folder).write_text(RESULT, json.dumps(result, indent=1) + "\n")
        logger.info("%s %s: finished in %s", experiment.name, cell.name, duration(seconds))


def write_report(experiment: Experiment, setup: Setup, cells: Sequence[Cell]) -> str:
    """Write the table of the finished cells as Markdown, and return it."""
    folder, results = setup.folder(experiment.name), read_results(experiment, setup, cells)
    with locked(folder), reading(folder):
        # Seconds are those of a cell's last session, a training's minutes those of all.
        minutes = sum(max(each["seconds"] / 60, each["figures"].get("minutes", 0)) for each in results.values())
        parts = [experiment.report(setup, cells, results)]
        parts.append(f"Finished runs: {len(results)}, {minutes:.1f} minutes in all by the clock.")
        if setup.changes:
            changes = ", ".join(f"`{name}={value}`" for name, value in setup.changes.items())
            parts.append(f"Other settings than those of this scale: {changes}.")
        text = "\n\n".join(parts)
        OutputFolder(folder).write_text(f"{experiment.name}.md", text + "\n")
    return text


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, a line each row."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def results_table(cells: Sequence[Cell], results: dict[str, dict], columns: dict[str, str]) -> str:
    """Return a table with a row a cell.

    `columns` are titles, and formats of a cell's figures (`{bleu:.2f}`) and of the paper's (`{paper[bleu]:.1f}`). What
    is missing, figures of a cell that is not finished among it, is left empty.
    """

    def text(column: str, cell: Cell) -> str:
        with contextlib.suppress(KeyError):
            return column.format_map(results.get(cell.name, {"figures": {}})["figures"] | {"paper": cell.paper})
        return ""

    rows = [[cell.label, *(text(column, cell) for column in columns.values())] for cell in cells]
    return markdown_table(["", *columns], rows)
