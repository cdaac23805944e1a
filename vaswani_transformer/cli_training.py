"""The commands that train: `vaswani train` and `vaswani demo`."""

import argparse
import dataclasses
import signal
from pathlib import Path

from .command_line import add_command, command_name, is_main_process, leave_process_group, report_stop


def add_train(commands) -> None:
    """Add `vaswani train`."""
    from .recipe import Recipe, field_type

    parser = add_command(
        commands,
        "train",
        _train,
        "train a model from a recipe",
        "Train a model. RECIPE is a name from `vaswani recipes` or a YAML file; every option below is a field of it."
        " The same command resumes an interrupted training.",
    )
    parser.usage = "vaswani train RECIPE [--FIELD VALUE ...]"
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe, or path of a YAML file")
    groups = {}
    for field in dataclasses.fields(Recipe):
        name = field.metadata["group"]
        group = groups.setdefault(name, parser.add_argument_group(name))
        kind, _ = field_type(field.name)
        default = "none" if field.default is None else field.default
        options = {"help": f"{field.metadata['help']} (default: {default})".replace("%", "%%")}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = {int: "N", float: "X", str: "TEXT"}[kind]
        flag = "--" + field.name.replace("_", "-")
        group.add_argument(flag, dest=field.name, default=argparse.SUPPRESS, **options)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _train(arguments: argparse.Namespace) -> int:
    from .recipe import Recipe, load_recipe
    from .training import TrainingStopped, train

    names = {field.name for field in dataclasses.fields(Recipe)}
    overrides = {name: value for name, value in vars(arguments).items() if name in names}
    recipe = load_recipe(arguments.recipe, overrides)
    try:
        result = train(recipe, progress=not arguments.quiet)
    except TrainingStopped as stopped:
        leave_process_group()
        return report_stop(stopped.signal_number, stopped.step)
    except KeyboardInterrupt:
        return report_stop(signal.SIGINT, None)
    leave_process_group()
    if not is_main_process():
        return 0
    shown = ", ".join(
        f"{label} {result.metrics[key]:.2f}"
        for key, label in (("eval_loss", "loss"), ("eval_perplexity", "perplexity"), ("eval_bleu", "BLEU (greedy)"))
        if key in result.metrics
    )
    kept = f"average of {result.averaged} checkpoints" if result.averaged else "best checkpoint"
    print(f"trained {result.steps:,} steps in {result.seconds / 60:.1f} minutes; kept the {kept}: validation {shown}")
    print(f"model: {result.folder}")
    print(f"translate with it: {command_name()} translate {result.folder} 'a sentence'")
    return 0


def add_demo(commands) -> None:
    """Add `vaswani demo`."""
    parser = add_command(
        commands, "demo", _demo, "train on a generated English-German corpus and show what was learned"
    )
    parser.add_argument("--output", default="demo_output", metavar="FOLDER", help="default: demo_output")
    parser.add_argument("--seed", type=int, default=0, help="of corpus and training")


def _demo(arguments: argparse.Namespace) -> int:
    from .demo import run_demo
    from .training import TrainingStopped

    try:
        return run_demo(Path(arguments.output), arguments.seed, _say, command_name())
    except TrainingStopped as stopped:
        return report_stop(stopped.signal_number, stopped.step)
    except KeyboardInterrupt:
        return report_stop(signal.SIGINT, None)


def _say(line: str) -> None:
    print(line, flush=True)  # in step with the progress bar on standard error
