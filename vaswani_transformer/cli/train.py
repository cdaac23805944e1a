"""The commands that train: `vaswani train`, `vaswani distill` and `vaswani demo`."""

import argparse
import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..durations import duration
from .command import add_command, add_recipe_options, command_name, is_first_process, leave_process_group, resumable
from .options import load_for_decoding


def add_train(commands) -> None:
    """Add `vaswani train`."""
    from ..recipes.recipe import Recipe

    description = (
        "Train a model. RECIPE is a name from `vaswani recipes` or a YAML file; every option below is a field of it."
        " The same command resumes an interrupted training."
    )
    parser = add_command(commands, "train", _train, "train a model from a recipe", description)
    parser.usage = "vaswani train RECIPE [--FIELD VALUE ...] [--dry-run]"
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe, or path of a YAML file")
    add_recipe_options(parser, dataclasses.fields(Recipe))
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    plan = parser.add_argument_group("plan")
    what = "print what it takes (tokens, FLOPs, memory, time by a trial of ten steps), and end"
    plan.add_argument("--dry-run", action="store_true", help=what)


def _print_plan(recipe) -> int:
    import datasets

    from ..training.plan import describe_plan, make_plan

    datasets.disable_progress_bars()
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # set by accelerate launch and torchrun
    if is_first_process():
        print(describe_plan(make_plan(recipe, processes)))
    return 0


def _recipe(arguments: argparse.Namespace, name: str):
    """A recipe with the fields that the options give."""
    from ..data.recipe_data import expand_home
    from ..recipes.recipe import Recipe, load_recipe

    names = {field.name for field in dataclasses.fields(Recipe)}
    recipe = load_recipe(name, {name: value for name, value in vars(arguments).items() if name in names})
    expand_home(recipe)
    return recipe


def _train(arguments: argparse.Namespace) -> int:
    from ..training.run import train

    recipe = _recipe(arguments, arguments.recipe)
    if arguments.dry_run:
        return _print_plan(recipe)
    return _run(partial(train, recipe, progress=not arguments.quiet))


@resumable
def _run(run: Callable[[], Any]) -> int:
    """Run a training; print what came of it."""
    result = run()
    leave_process_group()
    if not is_first_process():
        return 0
    labels = {"eval_loss": "loss", "eval_perplexity": "perplexity", "eval_bleu": "BLEU (greedy)"}
    shown = ", ".join(f"{labels[key]} {result.metrics[key]:.2f}" for key in labels if key in result.metrics)
    print(f"trained {result.steps:,} steps in {duration(result.seconds)}; kept the {result.kept}: validation {shown}")
    print(f"model: {result.folder}")
    print(f"translate with it: {command_name()} translate {result.folder} 'a sentence'")
    return 0


def add_distill(commands) -> None:
    """Add `vaswani distill`."""
    from ..recipes.recipe import TOKENIZER, Recipe

    description = (
        "Train a student on what larger models translate (sequence-level knowledge distillation, Kim and Rush, 2016):"
        " the teachers translate the text, which stays in the output folder, and the student learns it. Options of the"
        " groups below are fields of the student's recipe. The same command resumes after an interruption."
    )
    parser = add_command(
        commands, "distill", _distill, "train a small, fast model on a large one's translations", description
    )
    parser.usage = "vaswani distill TEACHER ... --student RECIPE --output FOLDER [--text FILE] [--FIELD VALUE ...]"
    how = "model folder; of several, which have one tokenizer, the probabilities are averaged"
    parser.add_argument("teachers", metavar="MODEL", nargs="+", help=how)
    parser.add_argument("--student", required=True, metavar="RECIPE", help="name of a recipe, or path of a YAML file")
    how = "text to translate, or a pattern: a.*.en.gz (default: the training sources of the recipe)"
    parser.add_argument("--text", metavar="FILE", help=how)
    how = "beam size of the teacher (default: as it was saved; the paper: 5, with --interpolate 35)"
    parser.add_argument("--beams", metavar="N", type=int, help=how)
    how = "learn of each beam the translation nearest to the reference, by sentence BLEU, in place of the likeliest"
    parser.add_argument("--interpolate", action="store_true", help=how)
    how = "draw translations at random, by the recipe's seed, instead of searching for the likeliest"
    parser.add_argument("--sample", action="store_true", help=how)
    how = "learn this share of the translations, those of the most log-probability a token (default: 1)"
    parser.add_argument("--keep", metavar="X", type=float, default=1.0, help=how)
    how = "of the teacher: float32, bfloat16, float16, or int8 on a CPU (default: as it was saved)"
    parser.add_argument("--teacher-precision", metavar="TYPE", help=how)
    how = "processes that translate, each on its own GPU if any (default: 1)"
    parser.add_argument("--workers", metavar="N", type=int, default=1, help=how)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    fields = [field for field in dataclasses.fields(Recipe) if field.metadata["group"] != TOKENIZER]
    fields = [field for field in fields if field.name != "prepared" and not field.name.startswith("expected_")]
    add_recipe_options(parser, fields)


def _distill(arguments: argparse.Namespace) -> int:
    from ..distillation import Teaching, distill

    recipe = _recipe(arguments, arguments.student)
    first, *others = arguments.teachers
    teachers = argparse.Namespace(
        model=first,
        ensemble=others,
        combine=None,
        device="auto",
        precision=arguments.teacher_precision,
        sample=arguments.sample,
    )
    teaching = Teaching(
        arguments.beams, arguments.sample, arguments.interpolate, arguments.keep, arguments.teacher_precision
    )
    load = partial(load_for_decoding, teachers)
    rest = arguments.text, not arguments.quiet, arguments.workers
    return _run(partial(distill, arguments.teachers, recipe, load, teaching, *rest))


def add_demo(commands) -> None:
    """Add `vaswani demo`."""
    what = "train on a generated English-German corpus and show what was learned"
    parser = add_command(commands, "demo", _demo, what)
    parser.add_argument("--output", default="demo_output", metavar="FOLDER", help="default: demo_output")
    parser.add_argument("--seed", type=int, default=0, help="of corpus and training")


@resumable
def _demo(arguments: argparse.Namespace) -> int:
    from ..experiments.demo import run_demo

    run_demo(Path(arguments.output), arguments.seed, _say, command_name())
    return 0


def _say(line: str) -> None:
    print(line, flush=True)  # in step with the progress bar on standard error
