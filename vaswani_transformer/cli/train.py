"""The commands that train: `vaswani train`, `vaswani distill` and `vaswani demo`."""

import shlex
from pathlib import Path
from typing import Annotated, Any

from ..distributed import is_first_process
from ..durations import duration
from ..hardware import MOST_WORKERS
from ..recipes.recipe import AUTO, TOKENIZER
from . import options
from .options import REQUIRED, Path_, Quiet, RecipeName, setting, within

RecipeOptions = options.recipe_options()
StudentOptions = options.recipe_options(lambda field: field.metadata["group"] != TOKENIZER and field.name != "prepared")


def train(
    recipe: RecipeName | None = None,
    /,
    *,
    quiet: Quiet = False,
    target_text: Path_ | None = None,
    forecast: bool = False,
    fields: RecipeOptions = RecipeOptions(),  # noqa: B008 (of cyclopts)
) -> None:
    """Train a model from a recipe, by default `auto`, which chooses settings by the text and the time.

    With --from the default is `finetune`. RECIPE is a name from `vaswani recipes` or a YAML file; the grouped options
    are its fields, and a default shown there holds only where the recipe has no value (`vaswani recipes auto` prints
    those it has). The same command resumes an interrupted training.

    Args:
        target_text: also learn from this text of the target language alone (or a folder, or a pattern: a.*.de.gz),
            which a model of the reverse direction, trained first, translates back
        forecast: also train on a half and a quarter of the pairs, which takes three times as long with --max-minutes,
            and print what twice as many would bring
    """
    from ..training.run import train as train_recipe

    usual = AUTO if fields.from_model is None else "finetune"
    settings = options.read_recipe(recipe or usual, fields, chooses=True)
    others = {"prepared": settings.prepared, "fuzzy_matches": settings.fuzzy_matches}
    options.exclude("--target-text", target_text, others | {"from": settings.from_model})
    options.exclude("--forecast", forecast, others | {"target_text": target_text})
    if target_text is not None:
        from ..distillation import train_with_target_text

        _print_trained(train_with_target_text(settings, target_text, not quiet))
    elif forecast:
        from ..training.forecast import train_with_forecast

        _print_trained(train_with_forecast(settings, not quiet))
    else:
        _print_trained(train_recipe(settings, progress=not quiet))


def _print_trained(result: Any) -> None:
    if not is_first_process():
        return
    from ..training.callbacks import SHOWN

    shown = ", ".join(f"{label} {result.metrics[key]:.2f}" for key, label in SHOWN if key in result.metrics)
    print(f"trained {result.steps:,} steps in {duration(result.seconds)}; kept the {result.kept}: validation {shown}")
    curve = result.folder / "learning_curve.png"
    print("\n".join([*result.verdict, *([f"learning curve: {curve}"] if curve.exists() else [])]))
    command = shlex.join(["vaswani", "translate", str(result.folder), "a sentence"])
    print(f"model: {result.folder}\ntranslate with it: {command}")


def distill(
    *teachers: Annotated[Path_, REQUIRED],
    student: RecipeName,
    text: Path_ | None = None,
    beams: Annotated[int | None, setting("num_beams")] = None,
    teacher_precision: str | None = None,
    workers: Annotated[int, within(1, MOST_WORKERS)] = 1,
    quiet: Quiet = False,
    fields: StudentOptions = StudentOptions(),  # noqa: B008 (of cyclopts)
) -> None:
    """Train a small, fast model on what larger ones translate.

    Sequence-level knowledge distillation (Kim and Rush, 2016): the teachers translate the text, which stays in the
    output folder, and the student learns it. The grouped options are fields of the student's recipe; a default shown
    there holds only where that has no value. The same command resumes after an interruption.

    Args:
        teachers: model folders; of several, which have one tokenizer, the probabilities are averaged
        text: text to translate, a folder, or a pattern: a.*.en.gz (default: the training sources of the recipe)
        beams: beam size of the teacher (default: as it was saved; the paper: 5)
        teacher_precision: of the teacher: float32, bfloat16, float16, or int8 on a CPU (default: as it was saved)
        workers: processes that translate, each on its own GPU if any
    """
    from ..distillation import distill as train_student

    recipe = options.read_recipe(student, fields)
    _print_trained(train_student(list(teachers), recipe, text, beams, teacher_precision, not quiet, workers))


def demo(*, output: Path_ = "demo_output", seed: int = 0) -> None:
    """Train on a generated English-German corpus and show what was learned.

    Args:
        output: folder of the demo
        seed: of corpus and training
    """
    from ..experiments.demo import run_demo

    run_demo(Path(output), seed)
