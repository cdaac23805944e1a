"""Cleaning in this process, for tests: recipes of pairs, and the rows that are left."""

import dataclasses
import unicodedata

import pyarrow.parquet as pq

from vaswani_transformer.data.cleaning import clean
from vaswani_transformer.data.cleaning_options import CleaningRules
from vaswani_transformer.recipes.recipe import Recipe


def recipe_of(folder, pairs, **changes):
    """A recipe of these pairs, as text files."""
    for side, name in enumerate(("a.en", "a.de")):
        content = "".join(f"{pair[side]}\n" for pair in pairs).encode("utf-8", "surrogateescape")
        (folder / name).write_bytes(content)
    return Recipe(data_dir=str(folder), train_source="a.en", train_target="a.de", **{"seed": 3, **changes})


def make(recipe, folder, **options):
    """`clean` in this process, silently; fields of the rules are options too."""
    names = {field.name for field in dataclasses.fields(CleaningRules)}
    rules = CleaningRules(**{name: options.pop(name) for name in names & options.keys()})
    return clean(recipe, folder, rules, **{"workers": 1, "progress": False, **options})


def rows_of(folder, part="train"):
    """The pairs of a cleaned folder."""
    tables = [pq.read_table(path) for path in sorted(folder.glob(f"{part}-*.parquet"))]
    return [tuple(row.values()) for table in tables for row in table.to_pylist()]


def plainly(text):
    """A text as the rules compare it."""
    return " ".join(unicodedata.normalize("NFKC", text).split())
