"""Experiments: tables of cells, each a folder with its recipe, log and result; what is there is not made again."""

import abc
import contextlib
import datetime
import difflib
import fcntl
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
from ..errors import UserError
from ..evaluation.records import versions
from ..files import write_text, written_whole
from ..plots import new_figure

logger = logging.getLogger(__name__)

SCALES = ("laptop", "paper")
RECIPE, LOG, RESULT, LOCK = "recipe.yaml", "log.txt", "result.json", ".lock"
# File numbers of the locks that this process holds. What it starts for a cell keeps them too, so that the cell is free
# once all of it has ended, also where this process is killed first.
locks: set[int] = set()


_RESULT = {
    "figures": dict,
    "settings": dict,
    "machine": dict,
    "seconds": int | float,
    "date": str,
}  # what has to be there


@dataclass(frozen=True)
class Setup:
    """What a call of an experiment is given.

    Args:
        scale: one of `SCALES`.
        output: folder of all experiments.
        data_dir: folder of the data files; None where the experiment needs none, or for data of the Hub.
        changes: settings that all cells get over their own, as text.
        processes: that train one cell together, each on a device of its own or with its share of the cores.
    """

    scale: str = "laptop"
    output: Path = Path("runs")
    data_dir: Path | None = None
    changes: dict[str, str] = field(default_factory=dict)
    processes: int = 1


@dataclass(frozen=True)
class Cell:
    """One run of an experiment.

    Args:
        name: of its folder.
        label: what its row is called in the table.
        settings: what decides on the result, plain values; a folder of other settings is refused.
        paper: what the paper prints for it, by the names of the result's figures.
        group: of the rows that belong together in the paper's table.
    """

    name: str
    label: str
    settings: dict[str, Any]
    paper: dict[str, float | str] = field(default_factory=dict)
    group: str = ""


@dataclass(frozen=True)
class Estimate:
    """What a cell will take: trained parameters, FLOPs, optimizer steps (0 where it trains nothing), seconds."""

    parameters: int = 0
    flops: float = 0.0
    steps: int = 0
    seconds: float | None = None


class Experiment(abc.ABC):
    """A table of the paper as cells to run; subclasses say which, what a run is, and what the table looks like."""

    name: str
    title: str
    one_at_a_time = False  # a measurement of time would disturb another on the same device
    distributed = False  # a cell may train in several processes

    @abc.abstractmethod
    def cells(self, setup: Setup) -> list[Cell]:
        """All cells of a scale, in the order of the paper's table.

        Raises:
            UserError: for changes that no setting takes.
        """

    def check(self, setup: Setup, cells: Sequence[Cell]) -> None:  # noqa: B027 (some need nothing)
        """Look whether what the cells need is there, before any of them runs.

        Raises:
            UserError: naming what is missing.
        """

    @abc.abstractmethod
    def estimate(self, setup: Setup, cell: Cell, device: str | None) -> Estimate:
        """What a cell will take on a device, a name as `parse_device` takes it; None for no time."""

    @abc.abstractmethod
    def run(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Run a cell, going on where an earlier run of it was cut off; returns its figures.

        Raises:
            UserError: for mistakes in what was given.
            TrainingStopped: after a signal.
        """

    @abc.abstractmethod
    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """The table in Markdown, the paper's figures beside ours; `results` holds finished cells by name."""

    @abc.abstractmethod
    def draw(self, figure, cells: Sequence[Cell], results: dict[str, dict]) -> None:
        """Draw the finished cells into a matplotlib figure."""

    def save_picture(self, picture: Path, cells: Sequence[Cell], results: dict[str, dict]) -> None:
        """Write the finished cells as a PNG; without matplotlib nothing but a line of advice."""
        figure = new_figure()
        if figure is not None:
            self.draw(figure, cells, results)
            with written_whole(picture) as new:
                figure.savefig(new, dpi=110, format="png")


def experiment_folder(experiment: Experiment, setup: Setup) -> Path:
    """Where an experiment's cells and tables lie."""
    return setup.output / experiment.name / setup.scale


def chosen_cells(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells of these names or groups, in the table's order; all for none.

    Raises:
        UserError: for a name that no cell and no group has, with the nearest.
    """
    names = {cell.name.lower() for cell in cells} | {cell.group.lower() for cell in cells if cell.group}
    for name in only:
        if name.lower() not in names:
            near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
            groups = sorted({cell.group for cell in cells if cell.group} - {cell.name for cell in cells})
            known = ", ".join(cell.name for cell in cells) + (f"; groups {', '.join(groups)}" if groups else "")
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {known}"
            raise UserError(f"there is no row {name!r} in this table: {hint}")
    wanted = {name.lower() for name in only}
    return [cell for cell in cells if not only or {cell.name.lower(), cell.group.lower()} & wanted]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def check_settings(folder: Path, cell: Cell) -> None:
    """Refuse a cell's folder that another recipe has made.

    Raises:
        UserError: naming up to three settings that differ, and both values.
    """
    path = folder / RECIPE
    if not path.is_file():
        return
    try:
        earlier = yaml.safe_load(path.read_text(encoding="utf-8"))
        earlier = earlier if isinstance(earlier, dict) else {}
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UserError(f"{path} cannot be read: remove {folder} to run {cell.name} anew") from None
    _compare(folder, cell, earlier)


def _compare(folder: Path, cell: Cell, earlier: dict[str, Any]) -> None:
    settings = _plain(cell.settings)
    differ = [name for name in settings if name in earlier and earlier[name] != settings[name]]
    if differ:
        shown = ", ".join(f"{name} {earlier[name]} there and {settings[name]} here" for name in differ[:3])
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise UserError(
            f"{folder} is of another recipe ({shown}{more}): give the --set that it was made with, another --output, or"
            " remove that folder"
        )


def read_result(folder: Path, cell: Cell) -> dict | None:
    """The result of a finished cell; None if it is not finished.

    Raises:
        UserError: as `check_settings`, and for a result file that is damaged.
    """
    check_settings(folder, cell)
    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        is_result = all(isinstance(result[name], kind) for name, kind in _RESULT.items())
    except (ValueError, TypeError, KeyError):
        is_result = False
    if not is_result:
        raise UserError(f"{path} is not a result of an experiment: remove it to have it made again")
    _compare(folder, cell, result["settings"])  # the recipe may be gone
    return result


def read_results(experiment: Experiment, setup: Setup, cells: Sequence[Cell]) -> dict[str, dict]:
    """The results of all finished cells, by name.

    Raises:
        UserError: as `read_result`.
    """
    folder = experiment_folder(experiment, setup)
    found = {cell.name: read_result(folder / cell.name, cell) for cell in cells}
    return {name: result for name, result in found.items() if result is not None}


def machine() -> dict[str, Any]:
    """What this process runs on: processor, accelerator if there is one, cores, threads."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"processor": name, "cores": cores, "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        found["accelerator"] = torch.cuda.get_device_name()
    return found


def _processor_seconds() -> float:
    """What processors have worked for this process and for those that it started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@contextlib.contextmanager
def _held(folder: Path, cell: Cell) -> Iterator[None]:
    """Keep other processes out of a cell's folder; the system lets go of it when this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{cell.name} is being run by another process in {folder}: wait for it to end") from None
        locks.add(file.fileno())
        try:
            yield
        finally:
            locks.discard(file.fileno())


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Also write what the package tells to a file, after what is there."""
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
    """Run one cell in this process, unless it is finished; its `result.json` comes last and whole.

    Args:
        experiment: whose cell.
        setup: of the call.
        cell: which.
        logged: write what is told to the cell's log; not where standard error goes there already.

    Returns:
        what `result.json` holds: the figures of `Experiment.run` under `figures`, with settings, seconds of this last
        session by the clock and of processors at work for it, machine, versions and date.

    Raises:
        UserError: as `check_settings` and `Experiment.run`, and for a cell that another process is at.
        TrainingStopped, KeyboardInterrupt: after a signal; the next call goes on.
    """
    folder = experiment_folder(experiment, setup) / cell.name
    check_settings(folder, cell)
    with _held(folder, cell), _logged(folder / LOG) if logged else contextlib.nullcontext():
        if (earlier := read_result(folder, cell)) is not None:
            return earlier
        started, worked = time.monotonic(), _processor_seconds()
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
            "processor_seconds": round(_processor_seconds() - worked, 1),
            "machine": machine() | ({"processes": setup.processes} if setup.processes > 1 else {}),
            "versions": versions(),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "settings": cell.settings,
        }
        write_text(folder / RESULT, json.dumps(result, indent=1) + "\n")
        logger.info("%s %s: finished in %s", experiment.name, cell.name, duration(seconds))
        return _plain(result)


def write_recipe(folder: Path, cell: Cell) -> None:
    """Write a cell's settings where `check_settings` looks; a training writes its own recipe there."""
    write_text(folder / RECIPE, yaml.safe_dump(_plain(cell.settings), sort_keys=False, allow_unicode=True))


def write_report(experiment: Experiment, setup: Setup) -> str:
    """Write the table of what is finished as Markdown, JSON and, where matplotlib is installed, PNG.

    Returns:
        the Markdown.

    Raises:
        UserError: as `read_results`.
    """
    cells = experiment.cells(setup)
    results = read_results(experiment, setup, cells)
    folder = experiment_folder(experiment, setup)
    folder.mkdir(parents=True, exist_ok=True)
    text = experiment.report(setup, cells, results)
    if setup.changes:
        changes = ", ".join(f"`{name}={value}`" for name, value in setup.changes.items())
        text = f"{text.rstrip()}\n\nOther settings than those of this scale: {changes}.\n"
    write_text(folder / f"{experiment.name}.md", text)
    write_text(folder / f"{experiment.name}.json", json.dumps(list(results.values()), indent=1) + "\n")
    if results:
        experiment.save_picture(folder / f"{experiment.name}.png", cells, results)
    return text


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, a line each row."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def shown(value: float | None, form: str = ".2f") -> str:
    """A figure for a table, empty where there is none."""
    return "" if value is None else format(value, form)


def counted(number: int, what: str) -> str:
    """A number of things, such as "1 run" and "2 runs"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def told_machine(results: dict[str, dict]) -> str:
    """One sentence on what the finished cells ran on and for how long."""
    if not results:
        return "Nothing is finished yet."
    machines = []
    for result in results.values():
        where = result["machine"]
        name = where.get("accelerator") or where["processor"]
        text = f"{name}, {counted(where['cores'], 'core')}, {counted(where['threads'], 'thread')}"
        text += f", {where['processes']} processes a run" if where.get("processes", 1) > 1 else ""
        machines += [text] if text not in machines else []
    # Seconds are those of a cell's last session, a training's minutes those of all: if more, it was resumed.
    found = [(r["seconds"] / 60, r["figures"].get("minutes", 0), r.get("processor_seconds")) for r in results.values()]
    minutes = sum(max(session, training) for session, training, _ in found)
    known = all(session >= training and work is not None for session, training, work in found)
    work = f" ({sum(work for *_, work in found) / 60:.1f} minutes of processor time)" if known else ""
    dates = sorted(result["date"] for result in results.values())
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    runs = counted(len(results), "run")
    return f"{runs}, {minutes:.1f} minutes in all by the clock{work}; {'; '.join(machines)}; {when}."
