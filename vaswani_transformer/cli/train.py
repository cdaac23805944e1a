"""The commands that train: `vaswani train` and `vaswani demo`."""

import argparse
import dataclasses
import os
import signal
from pathlib import Path

from ..durations import duration
from ..errors import UserError
from .command import add_command, add_recipe_options, command_name, is_first_process, leave_process_group, report_stop


def add_train(commands) -> None:
    """Add `vaswani train`."""
    from ..recipes.recipe import Recipe

    description = (
        "Train a model. RECIPE is a name from `vaswani recipes` or a YAML file; every option below is a field of it."
        " The same command resumes an interrupted training."
    )
    parser = add_command(commands, "train", _train, "train a model from a recipe", description)
    parser.usage = "vaswani train RECIPE [--FIELD VALUE ...] [--dry-run [--device NAME]]"
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe, or path of a YAML file")
    add_recipe_options(parser, dataclasses.fields(Recipe))
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    plan = parser.add_argument_group("plan")
    plan.add_argument("--dry-run", action="store_true", help="print what it takes (tokens, FLOPs, time, disk), and end")
    plan.add_argument("--device", metavar="NAME", help="with --dry-run: time on it, such as 'p100 x8' or here")
    share = "with --dry-run: assumed share of the device's peak (default: 0.35, of a P100 0.308)"
    plan.add_argument("--utilisation", type=float, metavar="X", help=share)


def _print_plan(recipe, arguments: argparse.Namespace) -> int:
    import datasets

    from ..training.plan import describe_plan, make_plan

    datasets.disable_progress_bars()
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # set by accelerate launch and torchrun
    if is_first_process():
        print(describe_plan(make_plan(recipe, arguments.device, processes, arguments.utilisation)))
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from ..data.recipe_data import expand_home
    from ..recipes.recipe import Recipe, load_recipe
    from ..training.run import TrainingStopped, train

    names = {field.name for field in dataclasses.fields(Recipe)}
    overrides = {name: value for name, value in vars(arguments).items() if name in names}
    recipe = load_recipe(arguments.recipe, overrides)
    expand_home(recipe)
    if arguments.dry_run:
        return _print_plan(recipe, arguments)
    for option in ("device", "utilisation"):
        if getattr(arguments, option) is not None:
            raise UserError(f"--{option} is for --dry-run: training takes the devices that it is launched on")
    try:
        result = train(recipe, progress=not arguments.quiet)
    except TrainingStopped as stopped:
        leave_process_group()
        return report_stop(stopped.signal_number, stopped.step)
    except KeyboardInterrupt:
        return report_stop(signal.SIGINT, None)
    leave_process_group()
    if not is_first_process():
        return 0
    labels = {"eval_loss": "loss", "eval_perplexity": "perplexity", "eval_bleu": "BLEU (greedy)"}
    shown = ", ".join(f"{labels[key]} {result.metrics[key]:.2f}" for key in labels if key in result.metrics)
    print(f"trained {result.steps:,} steps in {duration(result.seconds)}; kept the {result.kept}: validation {shown}")
    print(f"model: {result.folder}")
    print(f"translate with it: {command_name()} translate {result.folder} 'a sentence'")
    return 0


def add_demo(commands) -> None:
    """Add `vaswani demo`."""
    what = "train on a generated English-German corpus and show what was learned"
    parser = add_command(commands, "demo", _demo, what)
    parser.add_argument("--output", default="demo_output", metavar="FOLDER", help="default: demo_output")
    parser.add_argument("--seed", type=int, default=0, help="of corpus and training")


def _demo(arguments: argparse.Namespace) -> int:
    from ..experiments.demo import run_demo
    from ..training.run import TrainingStopped

    try:
        run_demo(Path(arguments.output), arguments.seed, _say, command_name())
        return 0
    except TrainingStopped as stopped:
        return report_stop(stopped.signal_number, stopped.step)
    except KeyboardInterrupt:
        return report_stop(signal.SIGINT, None)


def _say(line: str) -> None:
    print(line, flush=True)  # in step with the progress bar on standard error
