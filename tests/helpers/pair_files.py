"""Three pairs of sentences, files of them, and what is read back."""

import gzip

import datasets

from vaswani_transformer.data.parallel_text import load_pairs
from vaswani_transformer.errors import UserError

PAIRS = [("a dog runs", "ein Hund läuft"), ("two cats", "zwei Katzen"), ('he said "no', "er sagte „nein'")]
SWAPPED = [(target, source) for source, target in PAIRS]
REVERSED = {"source_column": "target", "target_column": "source"}
GERMAN = {"source_column": "en", "target_column": "de"}


def write(path, content):
    """Text or bytes into a file, compressed where its name says so; returns its path."""
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_two(folder, source, target, suffix=""):
    """A file of each side; the arguments that name them."""
    return {"source": write(folder / f"a.en{suffix}", source), "target": write(folder / f"a.de{suffix}", target)}


def in_memory(pairs, names=("source", "target")):
    """The pairs as a dataset without a file."""
    return datasets.Dataset.from_dict({name: [pair[side] for pair in pairs] for side, name in enumerate(names)})


def rows(dataset):
    """The pairs of a dataset, which must be mapped from disk and have two columns of text."""
    assert dataset.features == {"source": datasets.Value("string"), "target": datasets.Value("string")}
    assert dataset.column_names == ["source", "target"]
    assert dataset.cache_files, "not memory-mapped"
    return list(zip(dataset["source"], dataset["target"], strict=True))


def read(**arguments):
    """The pairs that these arguments name, or the one line of the error."""
    try:
        return rows(load_pairs(**arguments))
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
