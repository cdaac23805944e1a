"""The text that a recipe names: where it is, what is held out of it, the tokenizer trained on it."""

import glob
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path

import datasets
import numpy as np

from ..errors import UserError, reading
from ..files import is_local
from ..recipes.recipe import Recipe, augmentation_shares
from .augmentation import choose_change
from .memory import Memory
from .parallel_text import CACHE_VERSION, PairSource, cache_file, held_out_rows, pair_source, pairs_of, random_rows
from .text_files import home_path
from .tokenization import SIDES, load_tokenizer, train_tokenizer

TOKENIZER_PAIRS = 1_000_000  # that a tokenizer is trained on at most; more change next to nothing


def data_path(recipe: Recipe, name: str) -> Path:
    """Return the path of a name of the recipe's data: relative to `data_dir`, a leading ``~`` being the home folder."""
    path = home_path(name)
    return home_path(recipe.data_dir or "") / path if is_local(path) and not path.is_absolute() else path


def _is_file(recipe: Recipe, data: str) -> bool:
    """Return whether a name of data is of files, not of a folder below `data_dir` or of a dataset on the Hub."""
    path = data_path(recipe, data)
    is_file = path.is_file() or (path / "state.json").is_file()  # by `save_to_disk`, of one split
    return not is_local(path) or is_file or (glob.has_magic(data) and not path.exists())


def validation_text(recipe: Recipe) -> tuple[str | None, str | None, str | None]:
    """Return source, target and data to validate on: the training text if a split of it is meant and none is named."""
    named = recipe.validation_source, recipe.validation_target, recipe.validation_data
    split, data = recipe.validation_split or "", recipe.train_data
    has_split = "[" in split or (split and data and not _is_file(recipe, data))  # a file has slices, but no splits
    return (recipe.train_source, recipe.train_target, data) if has_split and not any(named) else named


def _source(
    recipe: Recipe, source: str | None, target: str | None, data: str | None, split: str, one_text: bool = False
) -> PairSource:
    """Return one part of the recipe's data; `data` that is no file or pattern below `data_dir` is left as it is."""
    source, target = (None if name is None else data_path(recipe, name) for name in (source, target))
    config = recipe.data_config
    if data is not None:
        config = None if _is_file(recipe, data) else config  # that of the other part of the data
        data = data_path(recipe, data) if config is None or data_path(recipe, data).exists() else data
    return pair_source(source, target, data, config, split, recipe.source_column, recipe.target_column, one_text)


def data_sources(recipe: Recipe, one_text: bool = False) -> tuple[PairSource, PairSource | None]:
    """Return training and validation text, not read yet; without the latter some training pairs are to be held out.

    `one_text`: the training text may be the same on both sides, since it is going to be translated.

    Raises:
        UserError: for a recipe without training data, and as `pair_source`, which looks at both before either is read.
    """
    for part in ("train", "validation"):
        options = [f"{part}_{side}" for side in ("source", "target")]
        missing = [name for name in options if getattr(recipe, name) is None]
        if getattr(recipe, f"{part}_data") is None and (len(missing) == 1 or (missing and part == "train")):
            problem = f"{missing[0]} is missing" if len(missing) == 1 else "there is no text to train on"
            raise UserError(f"{problem}: give both {options[0]} and {options[1]}, or {part}_data")
    train = _source(recipe, recipe.train_source, recipe.train_target, recipe.train_data, recipe.train_split, one_text)
    validation = validation_text(replace(recipe, validation_split=None) if one_text else recipe)  # not of that text
    return train, _source(recipe, *validation, recipe.validation_split or "validation") if any(validation) else None


def load_training_pairs(recipe: Recipe) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Load training text, with matches if any, and validation text; without the latter some pairs are held out."""
    train_source, validation_source = data_sources(recipe)
    train = train_source.load()
    if validation_source is not None:
        validation = validation_source.load()
    else:
        held_out = held_out_rows(len(train), recipe.validation_size, recipe.seed)
        validation, train = train.select(held_out), train.select(np.delete(np.arange(len(train)), held_out))
    return _with_matches(train) if recipe.fuzzy_matches else train, validation


def _with_matches(train: datasets.Dataset) -> datasets.Dataset:
    """Return the pairs, and those with a near other one again, with the target of the nearest behind their source."""
    memory = cache(lambda: Memory(pairs_of(train)))  # made where the result is not in the cache

    def add(batch: Mapping[str, list[str]]) -> dict[str, list[str]]:
        pairs = list(zip(batch["source"], batch["target"], strict=True))
        for (source, target), near in zip(list(pairs), memory().near(batch["source"], others=True), strict=True):
            pairs += [(f"{source.strip()} {Memory.TAG} {match}", target) for _, _, match in near]
        return {side: [pair[number] for pair in pairs] for number, side in enumerate(SIDES)}

    key = f"{train._fingerprint}-near-{CACHE_VERSION}"
    return train.map(add, batched=True, new_fingerprint=key, cache_file_name=cache_file(key), desc="finding matches")


def recipe_tokenizer(recipe: Recipe, train: datasets.Dataset, held_out: Sequence[int] = ()):
    """Return the tokenizer that the recipe names, or one trained on a sample of the text but for the rows held out."""
    if recipe.tokenizer_folder is not None:
        return load_tokenizer(recipe.tokenizer_folder)
    with reading(recipe.train_source or recipe.train_data):
        next(pair for pair in pairs_of(train) if any(map(str.strip, pair)))  # or it is reported as empty
    # At random: a corpus is often several, one after the other, and the first pairs would give the pieces of one.
    rows = random_rows(len(train) - len(held_out), TOKENIZER_PAIRS, [recipe.seed, 1])
    rows = rows + np.searchsorted(np.asarray(held_out, np.int64) - np.arange(len(held_out)), rows, "right")
    pairs = pairs_of(train.select(rows))
    if shares := augmentation_shares(recipe.augmentation):  # as in training, or capitals would be single characters
        changes = (choose_change(shares, recipe.seed, number) for number in range(len(rows)))
        pairs = (change(*pair) if change else pair for change, pair in zip(changes, pairs, strict=True))
    is_shown = not datasets.utils.are_progress_bars_disabled()
    options = {"vocab_size": recipe.vocab_size, "length": 2 * len(rows), "show_progress": is_shown}
    return train_tokenizer(chain.from_iterable(pairs), kind=recipe.tokenizer_kind, **options)
