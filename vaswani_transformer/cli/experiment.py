"""The command that runs the paper's experiments: `vaswani experiment`."""

import argparse
import difflib
import importlib
import re
import sys
from pathlib import Path

from ..errors import UserError
from .command import add_command, check_output_place, resumable

# Module and class in `experiments`, which are imported once they are needed.
EXPERIMENTS = {
    "table1": "table1.Table1",
    "table2": "table2.Table2",
    "table3": "table3.Table3",
    "table4": "table4.Table4",
    "attention": "heads.HeadStudy",
    "positions": "positions.Positions",
}
_SCALES = ("laptop", "paper")
_NO_SETTINGS = {
    "data_dir": "give --data-dir",
    "output": "give --output",
    "overwrite": "remove the folder of a cell to have it made anew",
}


def load_experiment(name: str):
    """An experiment by its name; a `UserError` names the nearest to an unknown one."""
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"there is no experiment {name!r}: {hint}there are {', '.join(EXPERIMENTS)}")
    module, _, kind = EXPERIMENTS[name].partition(".")
    return getattr(importlib.import_module(f"vaswani_transformer.experiments.{module}"), kind)()


def add_experiment(commands) -> None:
    """Add `vaswani experiment`."""
    description = (
        "Run an experiment of the paper, cell by cell, and print its table beside the paper's figures. Each cell is a"
        " folder OUTPUT/NAME/SCALE/CELL with its recipe, log and result; the same command runs what is missing and"
        " resumes what was interrupted."
    )
    help_text = "run an experiment of the paper: table1 ... table4, attention, positions"
    parser = add_command(commands, "experiment", _experiment, help_text, description)
    parser.add_argument("name", metavar="NAME", help="one of " + ", ".join(EXPERIMENTS))
    parser.add_argument("--scale", choices=_SCALES, default="laptop", help="default: laptop")
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder of the data files (Multi30k, trees)")
    parser.add_argument("--output", default="runs", metavar="FOLDER", help="folder of all experiments (default: runs)")
    parser.add_argument("--only", nargs="+", default=[], metavar="CELL", help="run these cells, or groups such as A")
    parser.add_argument("--jobs", type=int, metavar="N", help="cells that run at a time (default: one for each device)")
    parser.add_argument("--devices", nargs="+", default=[], metavar="DEVICE", help="cpu, or cuda:0 cuda:1 ...")
    how = "number that train one cell together, each on its own device (default: 1)"
    parser.add_argument("--processes", type=int, default=1, metavar="N", help=how)
    how = "settings of all cells that differ from the scale's: max_steps=100"
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help=how)
    how = "run nothing: write and print the table of the finished cells"
    parser.add_argument("--report", action="store_true", help=how)
    plan = parser.add_argument_group("plan")
    plan.add_argument("--dry-run", action="store_true", help="print what the cells will take, and run nothing")
    how = "with --dry-run: estimate hours for this device, such as 'p100 x8' or here"
    plan.add_argument("--device", metavar="NAME", help=how)
    parser.add_argument("--one", metavar="CELL", help=argparse.SUPPRESS)  # a process of --jobs


def _changes(words: list[str]) -> dict[str, str]:
    changes = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise UserError(f"--set {word!r} is not a setting: write FIELD=VALUE, such as max_steps=100")
        name = name.replace("-", "_")
        if name in _NO_SETTINGS:
            raise UserError(f"--set {name} is not for an experiment: {_NO_SETTINGS[name]}")
        changes[name] = value
    return changes


def _experiment(arguments: argparse.Namespace) -> int:
    from ..experiments.base import Setup, chosen_cells, read_results, write_report

    experiment = load_experiment(arguments.name)
    _check_options(experiment, arguments)
    data_dir = Path(arguments.data_dir).expanduser() if arguments.data_dir else None
    output = Path(arguments.output).expanduser()
    setup = Setup(arguments.scale, output, data_dir, _changes(arguments.set), arguments.processes)
    all_cells = experiment.cells(setup)
    cells = chosen_cells(all_cells, arguments.only)
    if arguments.one:  # a name only, where a group may have the same
        cells = [cell for cell in cells if cell.name == arguments.one]
    finished = read_results(experiment, setup, all_cells)  # the table at the end holds all of them
    missing = [cell for cell in cells if cell.name not in finished]
    if arguments.dry_run:
        return _print_plan(experiment, setup, cells, finished, arguments)
    if not arguments.report:
        experiment.check(setup, missing)
        status = _run_missing(experiment, setup, missing, arguments)
        if status or arguments.one:
            return status
    print(write_report(experiment, setup))
    return 0


def _check_options(experiment, arguments: argparse.Namespace) -> None:
    """Raise `UserError` for options that do not go together, or an output folder that cannot be written."""
    from ..hardware import check_workers

    output = Path(arguments.output).expanduser()
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file: give a folder")
    check_output_place(output)
    if arguments.device is not None and not arguments.dry_run:
        raise UserError("--device goes with --dry-run: --devices names those to run on")
    for name in ("jobs", "processes"):
        value = getattr(arguments, name)
        if value is not None:
            check_workers(f"--{name}", value)
    for device in arguments.devices:
        if not re.fullmatch(r"cpu|cuda:\d{1,4}", device):
            raise UserError(f"--devices {device!r} is not known: give cpu, or cuda:0, cuda:1, ...")
    jobs = _jobs(arguments)
    if experiment.one_at_a_time and jobs > max(1, len(set(arguments.devices))):
        raise UserError(f"--jobs is {jobs}: {experiment.name} measures time, give one job for each device at most")
    if arguments.processes > 1 and not experiment.distributed:
        raise UserError(
            f"--processes is {arguments.processes}: a cell of {experiment.name} runs in one process, leave it out"
        )


def _jobs(arguments: argparse.Namespace) -> int:
    """Cells that run at a time: as --jobs says, or else as many as the devices have room for."""
    if arguments.jobs is not None:
        return arguments.jobs
    return max(1, len(arguments.devices) // arguments.processes)


@resumable
def _run_missing(experiment, setup, missing: list, arguments: argparse.Namespace) -> int:
    """Run cells, in this process where they need no other environment; the error names those that failed."""
    from ..experiments.base import LOG, experiment_folder, run_cell
    from ..experiments.launch import Job, device_environments, run_side_by_side

    if arguments.one:
        for cell in missing:
            run_cell(experiment, setup, cell, logged=False)
        return 0
    jobs = _jobs(arguments)
    environments = device_environments(arguments.devices, jobs, setup.processes)
    if jobs == 1 and not arguments.devices and setup.processes == 1:
        failed, where = _run_in_turn(experiment, setup, missing), "above"
    else:
        # The longest first, so that none is left to run alone at the end.
        missing = sorted(missing, key=lambda cell: -experiment.estimate(setup, cell, None).flops)
        folder = experiment_folder(experiment, setup)
        words = [sys.executable, "-m", "vaswani_transformer", "experiment", experiment.name]
        words += ["--scale", setup.scale, "--output", str(setup.output)]
        words += ["--data-dir", str(setup.data_dir)] if setup.data_dir else []
        words += ["--processes", str(setup.processes)] if setup.processes > 1 else []
        words += ["--set", *(f"{name}={value}" for name, value in setup.changes.items())] if setup.changes else []
        tasks = [Job(cell.name, [*words, "--one", cell.name], folder / cell.name) for cell in missing]
        failed = [job.name for job in run_side_by_side(tasks, environments)]
        where = f"{LOG} in their folders, such as {folder / failed[0] / LOG}" if failed else ""
    if failed:
        raise UserError(
            f"{len(failed)} of {len(missing)} cells failed ({', '.join(failed)}), see {where}; the others are kept, the"
            " same command tries these again"
        )
    return 0


def _run_in_turn(experiment, setup, missing: list) -> list[str]:
    """Run cells in this process; returns the names of those that failed, but raises the error of a single one."""
    from ..experiments.base import logger, run_cell
    from ..training.run import TrainingStopped

    failed = []
    for cell in missing:
        try:
            run_cell(experiment, setup, cell)
        except TrainingStopped:
            raise
        except Exception as error:
            if len(missing) == 1:
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            logger.warning("%s: failed: %s", cell.name, reason, exc_info=not isinstance(error, UserError | OSError))
            failed.append(cell.name)
    return failed


def _planned_device(setup, arguments: argparse.Namespace) -> str:
    """The device that a plan's hours are for, as `parse_device` takes it."""
    from ..experiments.launch import device_environments
    from ..hardware import HERE, parse_device

    device = arguments.device
    if device is None and setup.scale == "laptop":
        device = HERE
    elif device is None:  # the paper's machine, unless options say how a cell is to run
        device = "p100" if arguments.devices or arguments.jobs is not None or setup.processes > 1 else "p100 x8"
    name, count = parse_device(device)
    if setup.processes > 1 and count not in (None, setup.processes):
        raise UserError(f"--device {device!r} names {count} devices and --processes is {setup.processes}: give one")
    if name == HERE:
        device_environments(arguments.devices, 1, setup.processes)  # refuses devices that are missing
    elif setup.processes > 1 and count is None:
        device = f"{device} x{setup.processes}"
    return device


def _print_plan(experiment, setup, cells: list, finished: dict, arguments: argparse.Namespace) -> int:
    import torch

    from ..experiments.base import RECIPE, counted, experiment_folder, markdown_table
    from ..hardware import HERE, parse_device

    device = _planned_device(setup, arguments)
    folder = experiment_folder(experiment, setup)
    estimates = {cell.name: experiment.estimate(setup, cell, device) for cell in cells}
    rows = []
    for name, estimate in estimates.items():
        started = (folder / name / RECIPE).is_file()
        rows.append([
            name,
            "finished" if name in finished else "started" if started else "missing",
            f"{estimate.parameters:,}" if estimate.parameters else "",
            f"{estimate.steps:,}" if estimate.steps else "",
            f"{estimate.flops:.2e}" if estimate.flops else "",
            "" if estimate.seconds is None else _hours(estimate.seconds),
        ])  # fmt: skip
    trains = any(estimate.flops for estimate in estimates.values())
    print(f"{experiment.name}, {setup.scale} scale: {experiment.title}")
    print(f"in {folder}; {_basis(device) if trains else 'hours are those of two CPU cores'}\n")
    print(markdown_table(["cell", "state", "parameters", "steps", "FLOPs", "hours"], rows))
    to_run = [estimate for name, estimate in estimates.items() if name not in finished]
    seconds, flops = sum(estimate.seconds or 0 for estimate in to_run), sum(estimate.flops for estimate in to_run)
    jobs, beside = _jobs(arguments), ""
    if jobs > 1:
        shares_cores = parse_device(device)[0] == HERE and (not torch.cuda.is_available() or "cpu" in arguments.devices)
        beside = ", jobs share the cores" if shares_cores else f", about {_hours(seconds / jobs)} with {jobs} jobs"
    hours = f"{_hours(seconds)} hours one after the other{beside}" if seconds or not to_run else "hours are not known"
    work = f"{flops:.2e} FLOPs, " if flops else ""
    print(f"\n{len(to_run)} of {counted(len(cells), 'cell')} to run: {work}{hours}")
    return 0


def _hours(seconds: float) -> str:
    """Hours with two decimals, or below 0.1 with two digits."""
    hours = seconds / 3600
    return f"{hours:.2f}" if hours >= 0.1 or not hours else f"{hours:.2g}"


def _basis(device: str) -> str:
    """What a plan's hours are based on."""
    from ..hardware import DEFAULT_UTILISATION, HERE, parse_device
    from ..training.plan import PAPER_GPU, PAPER_UTILISATION

    name = parse_device(device)[0]
    if name == PAPER_GPU:
        return (
            f"hours are for {device}, base and big by the paper's step times, other sizes by FLOPs at"
            f" {PAPER_UTILISATION:.0%} of its peak, which is what base reached, training alone"
        )
    machine = "this machine" if name == HERE else device
    return f"hours are for {machine}, by FLOPs at {DEFAULT_UTILISATION:.0%} of its peak, training alone"
