"""Prepared data: pairs of token ids in memory-mapped shards, as `vaswani prepare` writes them and training reads them.

A folder holds `manifest.json`, written last; the tokenizer; and for each part (training, validation) its shards, Arrow
IPC files of one record batch with the columns `input_ids` and `labels`, and its index `PART.lengths.npy`, the numbers
of source and target tokens of every pair, `(2, pairs)`. `datasets` copies the files of a folder elsewhere, such as
`s3://bucket/folder`, into its cache.
"""

import hashlib
import tempfile
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from ..errors import UserError, reading
from ..files import file_sha256, is_local, to_path
from ..json_and_yaml import read_json
from ..recipes.recipe import Recipe
from .text_files import check_on_disk
from .tokenization import load_tokenizer, tokenizer_sha256
from .tokenized_pairs import TOKEN_FEATURES, FilterCounts

FORMAT, VERSION = "vaswani prepared pairs", 1
MANIFEST, UNFINISHED, TOKENIZER = "manifest.json", "preparation.json", "tokenizer"
PARTS = TRAIN, VALIDATION = "train", "validation"
SHARD, INDEX = "{}-{:05d}.arrow", "{}.lengths.npy"  # names of the files of a part
_TRAIN_FIELDS = ("train_source", "train_target", "train_data")
_VALIDATION_FIELDS = ("validation_source", "validation_target", "validation_data", "validation_split")
# Recipe fields that decide what is in the folder, besides the limits and the tokenizer.
_PARTS_OF_DATA = ("data_config", "train_split", "source_column", "target_column", "validation_size")
DATA_FIELDS = (*_TRAIN_FIELDS, *_PARTS_OF_DATA, *_VALIDATION_FIELDS)
LIMIT_FIELDS = ("max_length", "max_length_ratio")
TOKENIZER_FIELDS = ("tokenizer_kind", "vocab_size", "augmentation")
_AGAIN = "copy the file again, or remove the folder and prepare it again"


class PreparedPairs:
    """Pairs of one part of a prepared folder, read from memory-mapped shards when they are asked for.

    A row is a dict of arrays `input_ids` and `labels`, views into the file. `lengths` holds the source and the target
    tokens of all pairs, `(2, pairs)`, memory-mapped; `starts` the first pair of each shard, and the number of pairs.
    """

    def __init__(self, folder: Path, part: str, manifest: dict):
        self._arguments = folder, part, manifest
        self.facts = manifest["parts"][part]
        self.starts = list(accumulate((shard["rows"] for shard in self.facts["shards"]), initial=0))
        self._shard = cache(self._open)
        with reading(folder):
            files = [folder / facts["file"] for facts in (self.facts["index"], *self.facts["shards"])]
            if not is_local(folder):
                files = map(Path, datasets.DownloadManager().download(list(map(str, files))))
            index, *self._paths = files
        for path in (index, *self._paths):
            check_on_disk(path)  # a pipe would be waited for
        with reading(index):
            self.lengths = np.load(index, mmap_mode="r")

    def __reduce__(self):
        return PreparedPairs, self._arguments  # a worker process maps the files again instead of getting a copy

    def sha256(self) -> str:
        """Return one SHA-256 for all pairs, of the checksums of their files."""
        checksums = [facts["sha256"] for facts in (self.facts["index"], *self.facts["shards"])]
        return hashlib.sha256("".join(checksums).encode()).hexdigest()

    def _open(self, number: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return offsets and values of a shard, by column."""
        with reading(self._paths[number]):
            batch = pa.ipc.open_file(pa.memory_map(str(self._paths[number]))).get_batch(0)
            batch.validate()
            columns = zip(batch.column_names, batch.columns, strict=True)
            return {name: (column.offsets.to_numpy(), column.values.to_numpy()) for name, column in columns}

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        number = bisect_right(self.starts, index) - 1
        row = index - self.starts[number]
        shard = self._shard(number).items()
        return {name: values[offsets[row] : offsets[row + 1]] for name, (offsets, values) in shard}

    def as_dataset(self, numbers: np.ndarray | None = None) -> datasets.Dataset:
        """Return the pairs of these numbers in memory, or all of a small part, with the columns of `tokenize_pairs`."""
        numbers = np.arange(len(self)) if numbers is None else numbers
        rows = [self[index] for index in numbers]
        columns = {name: [row[name].astype(np.int32) for row in rows] for name in ("input_ids", "labels")}
        columns |= zip(("source_length", "target_length"), self.lengths[:, numbers].astype(np.int32), strict=True)
        return datasets.Dataset.from_dict(columns, features=TOKEN_FEATURES)


def load_prepared_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a prepared folder."""
    if is_local(folder):
        return load_tokenizer(folder / TOKENIZER)
    with tempfile.TemporaryDirectory() as copy, reading(folder / TOKENIZER):
        for path in (folder / TOKENIZER).iterdir():
            (Path(copy) / path.name).write_bytes(path.read_bytes())
        return load_tokenizer(copy)


@dataclass(frozen=True)
class PreparedData:
    """An opened prepared folder: its manifest, its tokenizer, and the pairs to train and to validate on."""

    folder: Path
    manifest: dict
    tokenizer: Any
    train: PreparedPairs
    validation: PreparedPairs

    def counts(self, part: str) -> FilterCounts:
        """Return the counts of the filter for `train` or `validation`."""
        with reading(self.folder / MANIFEST):
            return FilterCounts(**self.manifest["parts"][part]["counts"])

    def verify(self) -> None:
        """Raise `UserError` for a file that has changed since it was prepared, by SHA-256, at the disk's speed."""
        with reading(self.folder / MANIFEST):
            files = [facts for part in self.manifest["parts"].values() for facts in (part["index"], *part["shards"])]
        for facts in files:
            with reading(path := self.folder / facts["file"]):
                if file_sha256(path) != facts["sha256"]:
                    raise UserError(f"{path}: the content has changed since it was prepared: {_AGAIN}")


def open_prepared(folder: str | Path) -> PreparedData:
    """Open a prepared folder; its shards are not read. Its manifest has JSON values.

    `parts` has `train` and `validation`, each with `pairs`, `source_tokens`, `target_tokens` (`</s>` included), the
    `counts` of `FilterCounts`, `shards` and `index`; `tokenizer` has `sha256` and `entries`; `recipe` what decided it.

    Raises:
        UserError: for a folder or a file that is missing, not finished, or not as the manifest says.
    """
    folder = to_path(folder)
    with reading(folder / MANIFEST):  # which is written last
        manifest = read_json(folder / MANIFEST)
        if (manifest["format"], manifest["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {manifest['format']}, version {manifest['version']}: prepare the folder again")
        tokenizer = load_prepared_tokenizer(folder)
        if tokenizer_sha256(tokenizer) != manifest["tokenizer"]["sha256"]:
            raise UserError(f"{folder / TOKENIZER} is not the tokenizer that the pairs were prepared with: {_AGAIN}")
        parts = {part: PreparedPairs(folder, part, manifest) for part in PARTS}
        return PreparedData(folder, manifest, tokenizer, **parts)


def check_recipe_matches(prepared: PreparedData, recipe: Recipe) -> None:
    """Refuse a recipe that would make other pairs; the data's location may differ, and data that it does not name."""
    fields, differing = [*LIMIT_FIELDS, "fuzzy_matches"], []
    if any(getattr(recipe, name) for name in _TRAIN_FIELDS):
        fields += DATA_FIELDS
    elif any(getattr(recipe, name) for name in _VALIDATION_FIELDS):
        fields += _VALIDATION_FIELDS
    else:  # its text is the folder's, whatever is left out of what it was made with
        fields += [name for name in _PARTS_OF_DATA if getattr(recipe, name) != getattr(Recipe, name)]
    with reading(prepared.folder / MANIFEST):
        made_with = {"fuzzy_matches": False} | prepared.manifest["recipe"]
        if (folder := recipe.tokenizer_folder) is not None:
            if tokenizer_sha256(load_tokenizer(folder)) != prepared.manifest["tokenizer"]["sha256"]:
                differing.append(f"tokenizer is {folder}, prepared with another")
        elif made_with["tokenizer_kind"] is not None:
            fields += TOKENIZER_FIELDS
        changed = [name for name in fields if name in made_with and getattr(recipe, name) != made_with[name]]
        differing += [f"{name} is {getattr(recipe, name)!r}, prepared with {made_with[name]!r}" for name in changed]
    if differing:
        fix = "give the same values, or prepare the data with these"
        raise UserError(f"{prepared.folder} was prepared with another recipe ({'; '.join(differing)}): {fix}")
