"""Experiments: tables of cells, each a folder with its recipe, log and result; a finished cell is not run again."""

import abc
import contextlib
import datetime
import difflib
import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from ..durations import duration
from ..errors import UserError, one_line
from ..evaluation.records import versions
from ..files import unfinished
from ..hardware import own_processors
from ..json_and_yaml import read_json, read_yaml
from ..output_folder import OutputFolder, locked
from ..plots import new_figure

logger = logging.getLogger(__name__)

RECIPE, LOG, RESULT = "recipe.yaml", "log.txt", "result.json"
LOCK = ".cell.lock"  # beside that of a training in the same folder, which other processes may take for the cell

# Entries that every result has, and their types.
_RESULT_ENTRIES = {"figures": dict, "settings": dict, "machine": dict, "seconds": int | float, "date": str}


@dataclass(frozen=True)
class Setup:
    """The options of a call."""

    scale: str = "laptop"  # or "paper"
    output: Path = Path("runs")  # folder of all experiments
    data_dir: Path | None = None  # None where the experiment needs none, or for data of the Hub
    changes: dict[str, str] = field(default_factory=dict)  # settings that replace those of all cells
    processes: int = 1  # that train one cell together, each on its own device or with its share of the cores


@dataclass(frozen=True)
class Cell:
    """One run of an experiment."""

    name: str  # of its folder
    label: str  # of its row in the table
    settings: dict[str, Any]  # plain values that determine the result; a folder made with others is refused
    paper: dict[str, float | str] = field(default_factory=dict)  # the paper's figures, by the names of ours
    group: str = ""  # of the rows that belong together in the paper's table


@dataclass(frozen=True)
class Estimate:
    """What a cell will take: trained parameters, FLOPs, optimizer steps (0 where it trains nothing), seconds."""

    parameters: int = 0
    flops: float = 0.0
    steps: int = 0
    seconds: float | None = None


class Experiment(abc.ABC):
    """A table of the paper as cells to run; subclasses define the cells, how to run one, and the table."""

    name: str
    title: str
    one_at_a_time = False  # it measures time, which a second cell on the same device would disturb
    distributed = False  # a cell may train in several processes

    @abc.abstractmethod
    def cells(self, setup: Setup) -> list[Cell]:
        """All cells of a scale, in the order of the paper's table; raises `UserError` for unknown settings."""

    def check(self, setup: Setup, cells: Sequence[Cell]) -> None:  # noqa: B027 (some need nothing)
        """Raise `UserError` if data of these cells is missing, before any of them runs."""

    @abc.abstractmethod
    def estimate(self, setup: Setup, cell: Cell, device: str | None) -> Estimate:
        """What a cell will take on a device, a name as `parse_device` takes it; without one no seconds."""

    @abc.abstractmethod
    def run(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Run a cell, or resume it where an earlier run was interrupted; returns its figures.

        Raises:
            UserError: for mistakes in the settings or the data.
            TrainingStopped: after a signal.
        """

    @abc.abstractmethod
    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """The table in Markdown, the paper's figures beside ours; `results` holds finished cells by name."""

    @abc.abstractmethod
    def draw(self, figure, cells: Sequence[Cell], results: dict[str, dict]) -> None:
        """Draw the finished cells, one at least, into a matplotlib figure."""


def experiment_folder(experiment: Experiment, setup: Setup) -> Path:
    """Folder of an experiment's cells and tables."""
    return setup.output / experiment.name / setup.scale


def chosen_cells(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells of these names or groups, in the table's order; all if no name is given."""
    names = {cell.name.lower() for cell in cells} | {cell.group.lower() for cell in cells if cell.group}
    for name in only:
        if name.lower() not in names:
            near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
            groups = sorted({cell.group for cell in cells if cell.group} - {cell.name for cell in cells})
            known = ", ".join(cell.name for cell in cells) + (f"; groups {', '.join(groups)}" if groups else "")
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {known}"
            raise UserError(f"there is no row {name!r} in this table: {hint}")
    chosen = {name.lower() for name in only}
    return [cell for cell in cells if not only or {cell.name.lower(), cell.group.lower()} & chosen]


def check_settings(folder: Path, cell: Cell) -> None:
    """Raise `UserError` for a cell's folder that was made with other settings, naming up to three and both values."""
    path = folder / RECIPE
    advice = f"remove {folder} to run {cell.name} anew"
    try:
        earlier = read_yaml(path, advice)
    except FileNotFoundError:
        return
    if not isinstance(earlier, dict):
        raise UserError(f"{path} holds no settings: {advice}")
    _compare(folder, cell, earlier)


def _compare(folder: Path, cell: Cell, earlier: dict[str, Any]) -> None:
    """Settings that are newer than the folder do not count."""
    settings = _as_json(cell.settings)
    differ = [name for name in settings if name in earlier and earlier[name] != settings[name]]
    if differ:
        values = ", ".join(f"{name} {earlier[name]} there and {settings[name]} here" for name in differ[:3])
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise UserError(
            f"{folder} is of another recipe ({values}{more}): give the --set that it was made with, another --output,"
            " or remove that folder"
        )


def _as_json(value: Any) -> Any:
    """A value as it is read from a file again: lists in place of tuples, text for keys."""
    return json.loads(json.dumps(value))


def read_result(folder: Path, cell: Cell) -> dict | None:
    """The result of a finished cell; None if it is not finished.

    Raises:
        UserError: as `check_settings`, and for a damaged result file.
    """
    check_settings(folder, cell)
    path = folder / RESULT
    advice = "remove it to have it made again"
    try:
        result = read_json(path, advice, finite=False)
    except FileNotFoundError:
        return None
    for name, kind in _RESULT_ENTRIES.items():
        if not isinstance(result.get(name), kind):
            raise UserError(f"{path} is not a result of an experiment ({name} is {result.get(name)!r:.40}): {advice}")
    _compare(folder, cell, result["settings"])  # its recipe may have been removed
    return result


def read_results(experiment: Experiment, setup: Setup, cells: Sequence[Cell]) -> dict[str, dict]:
    """The results of all finished cells, by name; raises `UserError` as `read_result`."""
    folder = experiment_folder(experiment, setup)
    results = {cell.name: read_result(folder / cell.name, cell) for cell in cells}
    return {name: result for name, result in results.items() if result is not None}


def machine() -> dict[str, Any]:
    """Processor, accelerator if there is one, number of cores and of threads."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    facts = {"processor": processor, "cores": len(own_processors()), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        facts["accelerator"] = torch.cuda.get_device_name()
    return facts


def _processor_seconds() -> float:
    return sum(os.times()[:4])  # of this process and of its children that have ended


@contextlib.contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """Append the package's log to a file, too."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    package = logging.getLogger("vaswani_transformer")
    level = package.level
    package.addHandler(handler)
    package.setLevel(min(package.getEffectiveLevel(), logging.INFO))
    try:
        yield
    finally:
        package.setLevel(level)
        package.removeHandler(handler)
        handler.close()


def run_cell(experiment: Experiment, setup: Setup, cell: Cell, logged: bool = True) -> dict:
    """Run one cell in this process, unless it is finished; returns its `result.json`, which is written last.

    Seconds are those of this session. `logged=False`, where standard error goes to the cell's log already, does not
    append to it. After a `TrainingStopped` or `KeyboardInterrupt` the next call resumes the cell.

    Raises:
        UserError: as `check_settings` and `Experiment.run`, and for a cell that another process is running.
    """
    folder = experiment_folder(experiment, setup) / cell.name
    check_settings(folder, cell)
    with locked(folder, LOCK), _logged_to(folder / LOG) if logged else contextlib.nullcontext():
        if (earlier := read_result(folder, cell)) is not None:
            return earlier
        with locked(folder):  # processes that train for the cell may have outlived the one that started them
            pass
        started, processor_started = time.monotonic(), _processor_seconds()
        logger.info("%s %s: started", experiment.name, cell.name)
        figures = experiment.run(setup, cell, folder)
        seconds = time.monotonic() - started
        result = {
            "experiment": experiment.name,
            "scale": setup.scale,
            "cell": cell.name,
            "figures": figures,
            "paper": cell.paper,
            "seconds": round(seconds, 1),
            "processor_seconds": round(_processor_seconds() - processor_started, 1),
            "machine": machine() | ({"processes": setup.processes} if setup.processes > 1 else {}),
            "versions": versions(),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "settings": cell.settings,
        }
        OutputFolder(folder).write_text(RESULT, json.dumps(result, indent=1) + "\n")
        logger.info("%s %s: finished in %s", experiment.name, cell.name, duration(seconds))
        return _as_json(result)


def write_recipe(folder: Path, cell: Cell) -> None:
    """Write a cell's settings for `check_settings`; a training writes its own recipe in this place."""
    text = yaml.safe_dump(_as_json(cell.settings), sort_keys=False, allow_unicode=True)
    OutputFolder(folder).write_text(RECIPE, text)


@contextlib.contextmanager
def _damaged_figures_named(folder: Path) -> Iterator[None]:
    """Raise `UserError` where a table cannot be made of results: each experiment has figures of its own."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"the results in {folder} make no table ({type(error).__name__}: {one_line(error)}): if a {RESULT} there"
            " was edited, remove it to have it made again"
        ) from error


def write_report(experiment: Experiment, setup: Setup) -> str:
    """Write the table of the finished cells as Markdown, which is returned, JSON and, with matplotlib, PNG."""
    cells = experiment.cells(setup)
    results = read_results(experiment, setup, cells)
    folder = experiment_folder(experiment, setup)
    with _damaged_figures_named(folder):
        text = experiment.report(setup, cells, results)
    if setup.changes:
        changes = ", ".join(f"`{name}={value}`" for name, value in setup.changes.items())
        text = f"{text.rstrip()}\n\nOther settings than those of this scale: {changes}.\n"
    with locked(folder):
        output, names = OutputFolder(folder), [f"{experiment.name}.{kind}" for kind in ("md", "json", "png")]
        output.check(names)
        output.write_text(names[0], text)
        output.write_text(names[1], json.dumps(list(results.values()), indent=1) + "\n")
        figure = new_figure() if results else None
        if figure is not None:
            with _damaged_figures_named(folder):
                experiment.draw(figure, cells, results)
            new = unfinished(folder / names[2])
            figure.savefig(new, dpi=110, format="png")
            output.move(new, names[2])
    return text


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, a line each row."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def as_text(value: float | None, form: str = ".2f") -> str:
    """A figure for a table, empty for None."""
    return "" if value is None else format(value, form)


def counted(number: int, noun: str) -> str:
    """A number and its noun, such as "1 run" and "2 runs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def describe_runs(results: dict[str, dict]) -> str:
    """One sentence on the number of finished cells, their time, machines and dates."""
    if not results:
        return "Nothing is finished yet."
    machines = []
    for result in results.values():
        facts = result["machine"]
        name = facts.get("accelerator") or facts["processor"]
        text = f"{name}, {counted(facts['cores'], 'core')}, {counted(facts['threads'], 'thread')}"
        text += f", {facts['processes']} processes a run" if facts.get("processes", 1) > 1 else ""
        machines += [text] if text not in machines else []
    # Seconds are those of a cell's last session, a training's minutes those of all: if more, it was resumed.
    times = [(r["seconds"] / 60, r["figures"].get("minutes", 0), r.get("processor_seconds")) for r in results.values()]
    minutes = sum(max(session, training) for session, training, _ in times)
    known = all(session >= training and work is not None for session, training, work in times)
    work = f" ({sum(work for *_, work in times) / 60:.1f} minutes of processor time)" if known else ""
    dates = sorted(result["date"] for result in results.values())
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    runs = counted(len(results), "run")
    return f"{runs}, {minutes:.1f} minutes in all by the clock{work}; {'; '.join(machines)}; {when}."
