"""The command that averages checkpoints: `vaswani average`."""

import argparse
from pathlib import Path

from ..errors import UserError
from .command import add_command, command_name

DEFAULT_LAST = 5  # Section 6.1, for the base model


def add_average(commands) -> None:
    """Add `vaswani average`."""
    parser = add_command(
        commands,
        "average",
        _average,
        "average checkpoints into a model",
        "Write a model whose weights are the mean of checkpoints. FOLDER is the output folder of a training, of which"
        f" the last {DEFAULT_LAST} are taken, or --last or --best; or several checkpoints or models are given.",
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="of a training, or checkpoints")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="for the model")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--last", type=_count, metavar="N", help=f"the last N checkpoints (default: {DEFAULT_LAST})")
    choice.add_argument("--best", type=_count, metavar="N", help="the N checkpoints that validated best")
    parser.add_argument("--by", choices=("loss", "bleu"), help="what --best goes by (default: loss)")
    parser.add_argument("--overwrite", action="store_true", help="replace a model in the output folder")


def _count(text: str) -> int:
    try:
        if int(text) > 0:
            return int(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no number of checkpoints: give 1 or more")


def _average(arguments: argparse.Namespace) -> int:
    from ..training.averaged_model import average_models, best_checkpoints, last_checkpoints
    from ..training.checkpoints import step_of
    from ..training.run_folder import CHECKPOINTS

    folders = [Path(folder) for folder in arguments.folders]
    if arguments.by is not None and arguments.best is None:
        raise UserError("--by is for --best: give --best N")
    first = folders[0]
    of_a_run = len(folders) == 1 and ((first / CHECKPOINTS).is_dir() or first.name == CHECKPOINTS)
    if not of_a_run:
        if arguments.last is not None or arguments.best is not None:
            raise UserError(
                "--last and --best choose within one training: give its output folder, that holds checkpoints/"
            )
        if len(folders) == 1 and first.is_dir():
            raise UserError(f"{first} is one folder and no training with checkpoints/: give two or more checkpoints")
        paths = [folder.resolve() for folder in folders]
        if twice := [folder for folder, path in zip(folders, paths, strict=True) if paths.count(path) > 1]:
            raise UserError(f"{twice[0]} is given twice: give each checkpoint once")
        chosen = folders
    elif arguments.best is not None:
        by = arguments.by or "loss"
        chosen, gone = best_checkpoints(first, arguments.best, by)
        for step, score in gone:
            print(f"step {step:,} validated better ({by} {score:.3f}), but its checkpoint is gone")
    else:
        chosen = last_checkpoints(first, arguments.last or DEFAULT_LAST)
    output = average_models(chosen, arguments.output, overwrite=arguments.overwrite)
    if of_a_run:
        names = f"steps {', '.join(f'{step_of(path):,}' for path in chosen)}"
    else:
        names = ", ".join(map(str, chosen))
    print(f"averaged {len(chosen)} checkpoint{'s' if len(chosen) > 1 else ''}: {names}")
    print(f"model: {output}")
    print(f"evaluate it with: {command_name()} evaluate {output} --source FILE --reference FILE")
    return 0
