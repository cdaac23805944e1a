"""The commands around text and recipes: `vaswani clean`, `prepare`, `tokenizer` and `recipes`."""

import shlex
import sys
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from ..data.cleaning_options import CleaningRules
from ..recipes.recipe import DATA, TOKENIZER, load_recipe, read_recipe, recipe_names
from . import options
from .options import REQUIRED, Engine, Overwrite, Path_, Quiet, RecipeName, Workers

_NOT_CLEANED = ("prepared", "validation_size", "max_length", "max_length_ratio", "fuzzy_matches", "augmentation")
TextOptions = options.recipe_options(
    lambda field: field.name == "seed" or (field.metadata["group"] == DATA and field.name not in _NOT_CLEANED)
)
_PREPARED = ("seed", "from_model")  # beside those of text and tokenizer
PrepareOptions = options.recipe_options(
    lambda field: (field.metadata["group"] in (DATA, TOKENIZER) and field.name != "prepared") or field.name in _PREPARED
)
options.group("rules, in their order", consume_multiple=True)(CleaningRules)


def tokenizer(
    *files: Annotated[Path_, REQUIRED],
    output: Path_,
    kind: Literal["bpe", "wordpiece"] = "bpe",
    vocab_size: Annotated[int | None, options.within(1, 10**9)] = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a shared subword vocabulary on text files.

    Args:
        files: text files of both languages (.gz works)
        output: folder for the tokenizer
        kind: bpe as for en-de, or wordpiece
        vocab_size: entries (default: 37000 for bpe, 32000 for wordpiece)
    """
    from ..data.parallel_text import check_lines
    from ..data.text_files import home_path, read_lines
    from ..data.tokenization import train_tokenizer
    from ..output_folder import RECIPE, written_at_once

    check_lines("text files", *files)
    with written_at_once(output, overwrite, "tokenizer.json", no=("generation_config.json", RECIPE)) as staging:
        lines = chain.from_iterable(read_lines(home_path(file)) for file in files)
        trained = train_tokenizer(lines, kind=kind, vocab_size=vocab_size, show_progress=sys.stderr.isatty())
        trained.save_pretrained(staging)
    print(f"tokenizer of {len(trained):,} entries: {output}")


def prepare(
    recipe: RecipeName,
    /,
    *,
    output: Path_,
    workers: Workers = None,
    engine: Engine = "local",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    fields: PrepareOptions = PrepareOptions(),  # noqa: B008 (of cyclopts)
) -> None:
    """Tokenise a recipe's data once, for `vaswani train RECIPE --prepared FOLDER`.

    Training maps the folder into memory. The same command resumes after an interruption.

    Args:
        output: the folder to make, or to resume in; also s3://bucket/folder
    """
    from ..data.prepare import prepare as prepare_data
    from ..data.tokenized_pairs import FilterCounts

    no_limit = dict.fromkeys(("tokens_per_batch", "tokens_per_device"), 10**9)  # batches are made in training
    settings = options.read_recipe(recipe, fields, **no_limit)
    manifest = prepare_data(settings, output, workers, not quiet, overwrite=overwrite, engine=engine)
    for label, part in (("training", "train"), ("validation", "validation")):
        print(f"{label}: {FilterCounts(**manifest['parts'][part]['counts'])}")
    print(f"prepared: {output}")


def clean(
    recipe: RecipeName,
    /,
    *,
    output: Path_,
    workers: Workers = None,
    engine: Engine = "local",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    rules: CleaningRules = CleaningRules(),  # noqa: B008 (of cyclopts)
    fields: TextOptions = TextOptions(),  # noqa: B008
) -> None:
    """Write a recipe's training text without bad pairs, with a report.

    The report says what each rule has dropped. The same command resumes after an interruption.

    Args:
        output: the folder to make, or to resume in
    """
    from ..data.cleaning import REPORT
    from ..data.cleaning import clean as clean_text
    from ..data.cleaning_rules import KEPT, NAMES

    changed = options.read_recipe(recipe, fields, chooses=True)
    manifest = clean_text(changed, output, rules, workers, not quiet, overwrite, engine)
    counts = dict(manifest["counts"])
    kept, read = counts.pop(NAMES[KEPT]), sum(manifest["counts"].values())
    dropped = ", ".join(f"{pairs:,} {name}" for name, pairs in counts.items()) or "none"
    print(f"{read:,} pairs read, {kept:,} kept; dropped: {dropped}")
    print(f"report: {Path(output) / REPORT}")
    words = _train_options(load_recipe(recipe), manifest, output)
    print(f"train on it: vaswani train {shlex.join([recipe, *words])}")


def _train_options(recipe: Any, manifest: dict, folder: str) -> list[str]:
    """Return options by which a recipe reads the text that was cleaned of it, and its validation text beside it."""
    columns, parts = manifest["columns"], manifest["parts"]
    fields = {"train_data": str(Path(folder).absolute()), "train_source": None, "train_target": None}
    fields |= {"source_column": columns[0], "target_column": columns[1], "train_split": "train"}
    fields |= dict.fromkeys(("data_config", "validation_source", "validation_target", "validation_data"))
    fields |= {"validation_split": "validation" if any("validation" in name for name in parts) else None}
    changed = {name: value for name, value in fields.items() if getattr(recipe, name) != value}
    return [word for name, value in changed.items() for word in (f"--{name.replace('_', '-')}", value or "none")]


def recipes(name: str | None = None, /) -> None:
    """List the recipes that ship with the package.

    Args:
        name: print this recipe
    """
    if name:
        print(read_recipe(name)[0], end="")
        return
    names = recipe_names()
    for each in names:
        first_line = read_recipe(each)[0].partition("\n")[0]
        print(f"{each:{max(map(len, names))}}  {first_line.lstrip('# ')}")
