"""`vaswani clean`: a recipe's training text without the pairs that rules drop."""

import argparse
import dataclasses
import shlex
from pathlib import Path

from .command import add_command, add_engine_options, add_recipe_options, resumable

_FIELDS = (
    "train_source", "train_target", "train_data", "validation_source", "validation_target", "validation_data",
    "data_dir", "data_config", "train_split", "validation_split", "source_column", "target_column", "seed",
)  # fmt: skip


def add_clean(commands) -> None:
    """Add `vaswani clean`."""
    from ..data.cleaning_rules import BOTH, SIDES, CleaningRules
    from ..recipes.recipe import Recipe

    parser = add_command(
        commands,
        "clean",
        _clean,
        "write a recipe's training text without bad pairs, with a report",
        "Write the training text of a recipe without the pairs that rules drop, with a report of what each has dropped."
        " The same command resumes after an interruption.",
    )
    parser.usage = "vaswani clean RECIPE --output FOLDER [--RULE VALUE ...] [--workers N] [--FIELD VALUE ...]"
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe, or path of a YAML file")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="the folder to make, or to resume in")
    add_engine_options(parser, "processes (default: one per processor, fewer for a short text)")
    how = "replace what an earlier cleaning has written in the folder, once all is done"
    parser.add_argument("--overwrite", action="store_true", help=how)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    rules, default = parser.add_argument_group("rules, in their order"), CleaningRules()
    how = "keep pairs of two equal sides"
    rules.add_argument("--keep-identical", action="store_true", help=how)
    how = f"drop pairs with more characters on a side (default: {default.max_characters})"
    rules.add_argument("--max-characters", type=int, metavar="N", default=default.max_characters, help=how)
    how = f"drop pairs with more words on a side (default: {default.max_words})"
    rules.add_argument("--max-words", type=int, metavar="N", default=default.max_words, help=how)
    how = (
        "drop pairs whose ratio of characters is more than so many robust standard deviations off what is usual in"
        f" this text (default: {default.length_ratio:g}; 0: no limit)"
    )
    rules.add_argument("--length-ratio", type=float, metavar="X", default=default.length_ratio, help=how)
    how = "drop pairs with a side that is a line of these text files, as it is of the recipe's validation text"
    rules.add_argument("--test", metavar="FILE", nargs="+", default=[], help=how)
    how = "scores by another program, a line each pair: a number, TSV with it last (Bicleaner AI), JSON (OpusFilter)"
    rules.add_argument("--scores", metavar="FILE", help=how)
    how = "where the number is in JSON, such as LengthRatioFilter or LanguageIDFilter.0"
    rules.add_argument("--score-key", metavar="KEY", help=how)
    rules.add_argument("--minimum-score", type=float, metavar="X", help="drop pairs with a lower score")
    rules.add_argument("--maximum-score", type=float, metavar="X", help="drop pairs with a higher score")
    how = "drop pairs with a side that is not in its language, such as en de; needs the extra `cleaning`"
    rules.add_argument("--languages", nargs=2, metavar=("SOURCE", "TARGET"), help=how)
    rules.add_argument("--keep-duplicates", action="store_true", help="keep copies of earlier pairs")
    how = "drop pairs that are like an earlier one, with so much of their runs of letters in common; needs `cleaning`"
    rules.add_argument("--near-duplicates", type=float, metavar="X", help=how)
    how = "what is compared for that (default: both)"
    rules.add_argument("--near-side", choices=(*SIDES, BOTH), default=BOTH, help=how)
    add_recipe_options(parser, [field for field in dataclasses.fields(Recipe) if field.name in _FIELDS])


@resumable
def _clean(arguments: argparse.Namespace) -> int:
    from ..data.cleaning import REPORT, clean
    from ..data.cleaning_rules import KEPT, NAMES, CleaningRules
    from ..data.recipe_data import expand_home
    from ..recipes.recipe import load_recipe

    given = vars(arguments)
    names = {field.name for field in dataclasses.fields(CleaningRules)} & given.keys()
    rules = {name: given[name] for name in names} | {"tests": tuple(arguments.test)}
    rules["languages"] = arguments.languages and tuple(arguments.languages)
    recipe = load_recipe(arguments.recipe, {name: given[name] for name in _FIELDS if name in given})
    expand_home(recipe)
    manifest = clean(
        recipe, arguments.output, CleaningRules(**rules), arguments.workers, progress=not arguments.quiet,
        overwrite=arguments.overwrite, engine=arguments.engine,
    )  # fmt: skip
    counts = dict(manifest["counts"])
    kept, read = counts.pop(NAMES[KEPT]), sum(manifest["counts"].values())
    dropped = ", ".join(f"{pairs:,} {name}" for name, pairs in counts.items()) or "none"
    print(f"{read:,} pairs read, {kept:,} kept; dropped: {dropped}")
    print(f"report: {Path(arguments.output) / REPORT}")
    options = _train_options(load_recipe(arguments.recipe), recipe, arguments.output)
    print(f"train on it: vaswani train {shlex.join([arguments.recipe, *options])}")
    return 0


def _train_options(as_it_is, recipe, folder: str) -> list[str]:
    """Options by which a recipe as it is reads the text that was cleaned of it, and its validation text beside it."""
    fields = {"train_data": str(Path(folder).absolute()), "train_source": None, "train_target": None}
    fields |= {"data_config": None, "train_split": "train"}
    fields |= {"source_column": recipe.source_column, "target_column": recipe.target_column}
    if recipe.validation_source or recipe.validation_data or recipe.validation_split:
        fields |= {"validation_source": None, "validation_target": None, "validation_data": None}
        fields |= {"validation_split": "validation"}
    changed = {name: value for name, value in fields.items() if getattr(as_it_is, name) != value}
    return [word for name, value in changed.items() for word in (f"--{name.replace('_', '-')}", value or "none")]
