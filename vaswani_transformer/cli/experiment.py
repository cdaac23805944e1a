"""The command that runs the paper's experiments: `vaswani experiment`."""

import argparse
import difflib
import importlib
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
    how = "settings of all cells that differ from the scale's: max_steps=100"
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help=how)
    how = "run nothing: write and print the table of the finished cells"
    parser.add_argument("--report", action="store_true", help=how)
    parser.add_argument("--dry-run", action="store_true", help="print what the cells will take, and run nothing")


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


@resumable
def _experiment(arguments: argparse.Namespace) -> int:
    from ..experiments.base import Setup, run_experiment

    experiment = load_experiment(arguments.name)
    output = Path(arguments.output).expanduser()
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file: give a folder")
    check_output_place(output)
    data_dir = Path(arguments.data_dir).expanduser() if arguments.data_dir else None
    setup = Setup(arguments.scale, output, data_dir, _changes(arguments.set))
    print(run_experiment(experiment, setup, arguments.only, arguments.dry_run, arguments.report))
    return 0
