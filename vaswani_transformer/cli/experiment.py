"""The command that runs the paper's experiments: `vaswani experiment`."""

import pkgutil
from pathlib import Path
from typing import Annotated, Literal

from ..errors import UserError
from .options import SEVERAL, Path_

# Module and class in `experiments`, which are imported once they are needed.
_EXPERIMENTS = {"table2": "translation:Table2", "table3": "translation:Table3", "table4": "table4:Table4"}
_NO_SETTINGS = ("data_dir", "output", "overwrite")  # options of their own, or what the command does by itself


def experiment(
    name: Literal[tuple(_EXPERIMENTS)],
    /,
    *,
    scale: Literal["laptop", "paper"] = "laptop",
    data_dir: Path_ | None = None,
    output: Path_ = "runs",
    only: Annotated[list[str] | None, SEVERAL] = None,
    set: Annotated[list[str] | None, SEVERAL] = None,
    report: bool = False,
    dry_run: bool = False,
) -> None:
    """Run an experiment of the paper, and print its table beside the paper's figures.

    Each cell is a folder OUTPUT/NAME/SCALE/CELL with its recipe, log and result; the same command runs what is missing
    and resumes what was interrupted.

    Args:
        name: of the experiment
        scale: size of models and data
        data_dir: folder of the data files (Multi30k, trees)
        output: folder of all experiments
        only: run these cells, or groups such as A
        set: settings of all cells that differ from the scale's: max_steps=100
        report: run nothing: write and print the table of the finished cells
        dry_run: print the cells with their state and steps, and run nothing
    """
    from ..experiments.base import Setup, run_experiment

    changes = {}
    for word in set or []:
        field, sign, value = word.partition("=")
        field = field.replace("-", "_")
        if not (sign and field) or field in _NO_SETTINGS:
            raise UserError(f"--set {word!r} is not a setting of a cell: write FIELD=VALUE, such as max_steps=100")
        changes[field] = value
    setup = Setup(scale, Path(output).expanduser(), data_dir and Path(data_dir).expanduser(), changes)
    chosen = pkgutil.resolve_name(f"vaswani_transformer.experiments.{_EXPERIMENTS[name]}")()
    print(run_experiment(chosen, setup, only or [], dry_run, report))
