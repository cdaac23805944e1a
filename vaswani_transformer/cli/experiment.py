"""The command that runs the paper's experiments: `vaswani experiment`."""

import argparse
import difflib
import importlib
import signal
from pathlib import Path

from ..errors import UserError
from .command import add_command, check_output_place, report_stop

# Name on the command line: module, and the class in it.
EXPERIMENTS = {
    "table1": ("table1", "Table1"),
    "table2": ("table2", "Table2"),
    "table3": ("table3", "Table3"),
    "table4": ("table4", "Table4"),
    "attention": ("heads", "HeadStudy"),
    "positions": ("positions", "Positions"),
}
_SCALES = ("laptop", "paper")
_NOT_SET = {
    "data_dir": "give --data-dir",
    "output": "give --output",
    "overwrite": "remove the folder of a cell to have it made anew",
}


def load_experiment(name: str):
    """An experiment by its name.

    Raises:
        UserError: for an unknown one, with the nearest.
    """
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, n=1, cutoff=0.5)
        known = ", ".join(EXPERIMENTS)
        raise UserError(
            f"there is no experiment {name!r}: {f'did you mean {near[0]!r}? ' if near else ''}there are {known}"
        )
    module, kind = EXPERIMENTS[name]
    return getattr(importlib.import_module(f"vaswani_transformer.experiments.{module}"), kind)()


def add_experiment(commands) -> None:
    """Add `vaswani experiment`."""
    parser = add_command(
        commands,
        "experiment",
        _experiment,
        "run an experiment of the paper: table1 ... table4, attention, positions",
        "Run an experiment of the paper, cell by cell, and print its table beside the paper's figures. Each cell is a"
        " folder OUTPUT/NAME/SCALE/CELL with its recipe, log and result; the same command does what is missing and goes"
        " on with what was interrupted.",
    )
    parser.add_argument("name", metavar="NAME", help="one of " + ", ".join(EXPERIMENTS))
    parser.add_argument("--scale", choices=_SCALES, default="laptop", help="default: laptop")
    parser.add_argument("--data-dir", metavar="FOLDER", help="where the data files are (Multi30k, trees)")
    parser.add_argument("--output", default="runs", metavar="FOLDER", help="folder of all experiments (default: runs)")
    parser.add_argument("--only", nargs="+", default=[], metavar="CELL", help="run these cells, or groups such as A")
    parser.add_argument("--jobs", type=int, metavar="N", help="cells side by side (default: one a device)")
    parser.add_argument("--devices", nargs="+", default=[], metavar="DEVICE", help="cpu, or cuda:0 cuda:1 ...")
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="that train one cell together, a device each (default: 1)"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="other settings of all cells: max_steps=100",
    )
    parser.add_argument("--report", action="store_true", help="run nothing: write and print the table of what is there")
    plan = parser.add_argument_group("plan")
    plan.add_argument("--dry-run", action="store_true", help="print what the cells will take, and end")
    plan.add_argument("--device", metavar="NAME", help="with --dry-run: the hours on it, such as 'p100 x8' or here")
    parser.add_argument("--one", metavar="CELL", help=argparse.SUPPRESS)  # a process of --jobs


def _changes(words: list[str]) -> dict[str, str]:
    changes = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise UserError(f"--set {word!r} is no setting: write FIELD=VALUE, such as max_steps=100")
        name = name.replace("-", "_")
        if name in _NOT_SET:
            raise UserError(f"--set {name} is not for an experiment: {_NOT_SET[name]}")
        changes[name] = value
    return changes


def _experiment(arguments: argparse.Namespace) -> int:
    from ..experiments.base import Setup, chosen_cells, read_results, run_cell, write_report
    from ..training.run import TrainingStopped

    experiment = load_experiment(arguments.name)
    data_dir = Path(arguments.data_dir).expanduser() if arguments.data_dir else None
    output, processes = Path(arguments.output).expanduser(), arguments.processes
    if not arguments.output:
        raise UserError("--output is empty: give a folder")
    setup = Setup(arguments.scale, output, data_dir, _changes(arguments.set), processes)
    _check_output(setup.output)
    if arguments.device is not None and not arguments.dry_run:
        raise UserError("--device is for --dry-run: --devices says what to run on")
    _check_numbers(experiment, arguments)
    if processes > 1 and not experiment.distributed:
        raise UserError(f"--processes is {processes}: a cell of {experiment.name} runs in one process, leave it out")
    everything = experiment.cells(setup)
    cells = chosen_cells(everything, arguments.only)
    if arguments.one:  # a name only, where a group may have the same
        cells = [cell for cell in cells if cell.name == arguments.one]
    finished = read_results(experiment, setup, everything)  # of all: the table at the end is of all
    missing = [cell for cell in cells if cell.name not in finished]
    if arguments.dry_run:
        return _print_plan(experiment, setup, cells, finished, arguments)
    if not arguments.report:
        experiment.check(setup, missing)
        try:
            if arguments.one:
                for cell in missing:
                    run_cell(experiment, setup, cell, logged=False)
                return 0
            _run_missing(experiment, setup, missing, arguments)
        except TrainingStopped as stopped:
            return report_stop(stopped.signal_number, stopped.step)
        except KeyboardInterrupt:
            return report_stop(signal.SIGINT, None)
    print(write_report(experiment, setup))
    return 0


def _check_numbers(experiment, arguments: argparse.Namespace) -> None:
    for name in ("jobs", "processes"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}: it must be 1 or more")
    jobs = _jobs(arguments)
    if experiment.one_at_a_time and jobs > max(1, len(set(arguments.devices))):
        raise UserError(f"--jobs is {jobs}: {experiment.name} measures time, give one job a device at most")


def _jobs(arguments: argparse.Namespace) -> int:
    """Cells side by side: as asked for, else as many as the devices have room for."""
    if arguments.jobs is not None:
        return arguments.jobs
    return max(1, len(arguments.devices) // arguments.processes)


def _run_missing(experiment, setup, missing: list, arguments: argparse.Namespace) -> None:
    from ..experiments.base import LOG, experiment_folder
    from ..experiments.launch import Job, SideBySide, device_environments, own_command

    jobs = _jobs(arguments)
    environments = device_environments(arguments.devices, jobs, setup.processes)
    if jobs == 1 and not arguments.devices and setup.processes == 1:
        _run_in_turn(experiment, setup, missing)
        return
    # The longest first, so that no one is left alone at the end.
    missing = sorted(missing, key=lambda cell: -experiment.estimate(setup, cell, None).flops)
    folder = experiment_folder(experiment, setup)
    words = ["experiment", experiment.name, "--scale", setup.scale, "--output", str(setup.output)]
    words += ["--data-dir", str(setup.data_dir)] if setup.data_dir else []
    words += ["--processes", str(setup.processes)] if setup.processes > 1 else []
    words += ["--set", *(f"{name}={value}" for name, value in setup.changes.items())] if setup.changes else []
    tasks = [Job(cell.name, own_command([*words, "--one", cell.name]), folder / cell.name) for cell in missing]
    failed = SideBySide(tasks, environments).run()
    if failed:
        names = ", ".join(job.name for job in failed)
        raise UserError(
            f"{len(failed)} of {len(tasks)} cells failed ({names}): see {LOG} in their folders, such as"
            f" {failed[0].folder / LOG}; the others are kept, the same command tries these again"
        )


def _planned_device(setup, arguments: argparse.Namespace) -> tuple[str, bool]:
    """What a plan's hours are for, as `parse_device` takes it, and whether that is this machine's cores.

    Raises:
        UserError: for an unknown device, one that is not here where the plan is for this machine, or another number of
            devices than processes.
    """
    import torch

    from ..experiments.launch import check_devices, device_environments
    from ..hardware import HERE, parse_device

    devices, device = arguments.devices, arguments.device
    if device is None and setup.scale == "laptop":
        device = HERE
    elif device is None:  # the paper's machine, unless it is said how a cell is to run
        told = devices or arguments.jobs is not None or setup.processes > 1
        device = "p100" if told else "p100 x8"
    name, count = parse_device(device)
    if setup.processes > 1 and count not in (None, setup.processes):
        raise UserError(f"--device {device!r} names {count} devices and --processes is {setup.processes}: give one")
    check_devices(devices)
    if name == HERE:
        device_environments(devices, 1, setup.processes)  # refuses what is not here
    on_cpus = name == HERE and (not torch.cuda.is_available() or "cpu" in devices)
    if setup.processes > 1 and count is None and name != HERE:
        device = f"{device} x{setup.processes}"
    return device, on_cpus


def _run_in_turn(experiment, setup, missing: list) -> None:
    """Run cells in this process; one that fails stops no other.

    Raises:
        UserError: naming those that failed; of a single cell what it raised.
    """
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
    if failed:
        raise UserError(
            f"{len(failed)} of {len(missing)} cells failed ({', '.join(failed)}), see above; the others are kept, the"
            " same command tries these again"
        )


def _check_output(output: Path) -> None:
    """Look whether the folder of all experiments can be made, before hours are spent.

    Raises:
        UserError: where a file is in its place, or above it, or nothing may be written there.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file: give a folder")
    check_output_place(output)


def _print_plan(experiment, setup, cells: list, finished: dict, arguments: argparse.Namespace) -> int:
    from ..experiments.base import RECIPE, counted, experiment_folder, markdown_table

    device, on_cpus = _planned_device(setup, arguments)
    folder, rows = experiment_folder(experiment, setup), []
    total, flops, trains = 0.0, 0.0, False
    for cell in cells:
        estimate = experiment.estimate(setup, cell, device)
        trains = trains or estimate.flops > 0
        started = (folder / cell.name / RECIPE).is_file()
        state = "finished" if cell.name in finished else "begun" if started else "missing"
        if cell.name not in finished:
            total += estimate.seconds or 0.0
            flops += estimate.flops
        rows.append([
            cell.name, state, f"{estimate.parameters:,}" if estimate.parameters else "",
            f"{estimate.steps:,}" if estimate.steps else "", f"{estimate.flops:.2e}" if estimate.flops else "",
            "" if estimate.seconds is None else _hours(estimate.seconds),
        ])  # fmt: skip
    print(f"{experiment.name}, {setup.scale} scale: {experiment.title}")
    print(f"in {folder}; {_told_hours(device) if trains else 'nothing is trained, hours are those of two CPU cores'}\n")
    print(markdown_table(["cell", "state", "parameters", "steps", "FLOPs", "hours"], rows))
    missing = sum(cell.name not in finished for cell in cells)
    jobs = max(1, _jobs(arguments))
    beside = f", about {_hours(total / jobs)} with {jobs} jobs" if jobs > 1 else ""
    beside = ", jobs share the cores" if jobs > 1 and on_cpus else beside
    work = f"{flops:.2e} FLOPs, " if flops else ""
    hours = f"{_hours(total)} hours one after the other{beside}" if total or not missing else "hours are not known"
    print(f"\n{missing} of {counted(len(cells), 'cell')} to run: {work}{hours}")
    return 0


def _hours(seconds: float) -> str:
    """Two decimals, or of what is shorter one digit that says something."""
    hours = seconds / 3600
    return f"{hours:.2f}" if hours >= 0.1 or not hours else f"{hours:.2g}"


def _told_hours(device: str) -> str:
    """What a plan's hours are of."""
    from ..hardware import DEFAULT_UTILISATION, HERE, parse_device
    from ..training.plan import PAPER_GPU, PAPER_UTILISATION

    name = parse_device(device)[0]
    share = PAPER_UTILISATION if name == PAPER_GPU else DEFAULT_UTILISATION
    reckoned = f"by FLOPs at {share:.0%} of its peak"
    if name == PAPER_GPU:
        reckoned = f"base and big by the paper's step times, other sizes {reckoned}, which is what base reached"
    return f"hours are for {'this machine' if name == HERE else device}, {reckoned}, training alone"
