"""Prepared data: pairs of token ids in memory-mapped shards, as `vaswani prepare` writes them and training reads them.

A folder holds `manifest.json`, written last; the tokenizer; and for each part (training, validation) its shards, Arrow
IPC files of one record batch with the columns `input_ids` and `labels`, and its index `PART.lengths.npy`, the numbers
of source and target tokens of every pair, `(2, pairs)`. Files of a folder in a store are copied to this machine's disk
when they are needed.
"""

import errno
import hashlib
import re
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from filelock import FileLock
from tqdm import tqdm

from ..errors import UserError, one_line
from ..files import check_path, file_sha256, is_inner, is_local, to_path, together, written_whole
from ..json_and_yaml import read_json
from ..recipes.recipe import Recipe
from .filtering import FilterCounts
from .text_files import file_errors, store_errors
from .tokenization import load_tokenizer, tokenizer_sha256, vocabulary_sizes
from .tokenized_pairs import TOKEN_FEATURES

FORMAT, VERSION = "vaswani prepared pairs", 1
MANIFEST, UNFINISHED, TOKENIZER = "manifest.json", "preparation.json", "tokenizer"
TRAIN, VALIDATION = "train", "validation"
_TRAIN_FIELDS = ("train_source", "train_target", "train_data")
_VALIDATION_FIELDS = ("validation_source", "validation_target", "validation_data", "validation_split")
# Recipe fields that decide what is in the folder, besides the limits and the tokenizer.
DATA_FIELDS = (
    *_TRAIN_FIELDS,
    *("data_config", "train_split", "source_column", "target_column"),
    *(*_VALIDATION_FIELDS, "validation_size"),
)
LIMIT_FIELDS = ("max_length", "max_length_ratio")
TOKENIZER_FIELDS = ("tokenizer_kind", "vocab_size")


def shard_name(part: str, number: int) -> str:
    """The file of a part's shard."""
    return f"{part}-{number:05d}.arrow"


def index_name(part: str) -> str:
    """The file of a part's lengths."""
    return f"{part}.lengths.npy"


def shard_schema(token_type: str) -> pa.Schema:
    """Columns of a shard: lists of token ids, uint16 for a vocabulary that allows it, else int32."""
    ids = pa.list_(pa.type_for_alias(token_type))
    return pa.schema([("input_ids", ids), ("labels", ids)])


class PreparedPairs:
    """Pairs of one part of a prepared folder, read from memory-mapped shards when they are asked for.

    A row is a dict of arrays `input_ids` and `labels`, views into the file. `lengths` holds the source and the target
    tokens of all pairs, `(2, pairs)`, memory-mapped. An index that is missing, cut off or of another type is refused
    at once, a shard when a pair of it is read.
    """

    def __init__(self, folder: Path, part: str, manifest: dict):
        self._arguments = folder, part, manifest
        self.folder, self.part, self.facts = to_path(folder), part, manifest["parts"][part]
        self._schema = shard_schema(manifest["token_type"])
        self.starts = list(accumulate((shard["rows"] for shard in self.facts["shards"]), initial=0))
        self._columns: dict[int, tuple[np.ndarray, ...]] = {}
        index = self._checked_path(self.facts["index"])
        try:
            self.lengths = np.load(index, mmap_mode="r")
        except (ValueError, EOFError) as error:
            raise UserError(f"{index} is not an index of lengths ({error}): {_AGAIN}") from error
        if self.lengths.shape != (2, len(self)) or self.lengths.dtype != manifest["length_type"]:
            what = f"{self.lengths.dtype} numbers of shape {self.lengths.shape}"
            raise UserError(f"{index} holds {what}, not {manifest['length_type']} of {(2, len(self))}: {_AGAIN}")
        tokens = [int(side.sum(dtype=np.int64)) for side in self.lengths]  # read in full by every training anyway
        expected = [self.facts["source_tokens"], self.facts["target_tokens"]]
        if tokens != expected:
            raise UserError(f"{index} counts {tokens} source and target tokens, not {expected} as written: {_AGAIN}")

    def __reduce__(self):
        return PreparedPairs, self._arguments  # a worker process maps the files again instead of getting a copy

    def _checked_path(self, facts: dict) -> Path:
        path = self.folder / facts["file"]
        if not is_local(path):
            return _fetched(path, facts)
        try:
            size = path.stat().st_size
            if not path.is_file():
                raise UserError(f"{path} is not a regular file: {_AGAIN}")
        except OSError as error:
            raise UserError(f"{path} is missing ({error.strerror}): {_AGAIN}") from error
        if size != facts["bytes"]:
            rows = f" and {facts['rows']:,} rows" if "rows" in facts else ""
            raise UserError(f"{path} has {size:,} bytes, not {facts['bytes']:,}{rows} as it was written: {_AGAIN}")
        return path

    def sha256(self) -> str:
        """One SHA-256 for all pairs, of the checksums of their files."""
        checksums = [facts["sha256"] for facts in (self.facts["index"], *self.facts["shards"])]
        return hashlib.sha256("".join(checksums).encode()).hexdigest()

    def check_shards(self) -> None:
        """Check size, schema and number of rows of each shard on this disk; of its contents only the footer is read."""
        for number in range(len(self.facts["shards"]) if is_local(self.folder) else 0):
            self._open(number)

    def _open(self, number: int) -> tuple[np.ndarray, ...]:
        """Offsets and values of the sources' token ids, then of the targets', of a shard."""
        facts = self.facts["shards"][number]
        path = self._checked_path(facts)
        try:
            file = pa.ipc.open_file(pa.memory_map(str(path)))
            if file.schema != self._schema:
                actual, expected = (str(schema).replace("\n", ", ") for schema in (file.schema, self._schema))
                raise UserError(f"{path} has the columns {actual}; prepared pairs have {expected}: {_AGAIN}")
            batches = [file.get_batch(index) for index in range(file.num_record_batches)]
            for batch in batches:
                batch.validate()
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path} is not an Arrow file ({one_line(error)}): {_AGAIN}") from error
        if len(batches) != 1 or len(batches[0]) != facts["rows"]:
            raise UserError(f"{path} has {sum(map(len, batches)):,} rows, not {facts['rows']:,}: {_AGAIN}")
        columns = []
        for column in batches[0].columns:
            columns += [column.offsets.to_numpy(), column.values.to_numpy()]
        return tuple(columns)

    def __len__(self) -> int:
        """Number of pairs."""
        return self.starts[-1]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One pair."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Several pairs; a DataLoader asks for those of a batch at once.

        Raises:
            UserError: for a pair that has not the lengths of the index, with its file and row.
        """
        rows = []
        self._fetch_together(indices)
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"pair {index} of {len(self)}")
            number = bisect_right(self.starts, index) - 1
            if number not in self._columns:
                self._columns[number] = self._open(number)
            source_offsets, sources, target_offsets, targets = self._columns[number]
            row = index - self.starts[number]
            source = sources[source_offsets[row] : source_offsets[row + 1]]
            target = targets[target_offsets[row] : target_offsets[row + 1]]
            if len(source) != self.lengths[0, index] or len(target) != self.lengths[1, index]:
                where = f"{self.folder / self.facts['shards'][number]['file']}, row {row}"
                actual, expected = f"{len(source)} and {len(target)}", " and ".join(map(str, self.lengths[:, index]))
                raise UserError(f"{where}: {actual} tokens, but {expected} in the index: {_AGAIN}")
            rows.append({"input_ids": source, "labels": target})
        return rows

    def _fetch_together(self, indices: Sequence[int]) -> None:
        """Copy the shards of a store that these pairs are in, several at a time."""
        if not is_local(self.folder):
            numbers = set((np.searchsorted(self.starts, indices, "right") - 1).tolist())
            numbers &= set(range(len(self.facts["shards"]))) - self._columns.keys()
            self._columns |= zip(numbers, together(self._open, numbers), strict=True)

    def as_dataset(self) -> datasets.Dataset:
        """All pairs in memory, with the columns of `tokenize_pairs`; for a part that is small."""
        rows = self.__getitems__(range(len(self)))
        columns = {name: [row[name].astype(np.int32) for row in rows] for name in ("input_ids", "labels")}
        columns |= zip(("source_length", "target_length"), self.lengths.astype(np.int32), strict=True)
        return datasets.Dataset.from_dict(columns, features=TOKEN_FEATURES)

    def verify(self, vocab_sizes: tuple[int, int], progress: bool = True) -> None:
        """Read everything, in threads: checksums, ids within the vocabulary, lengths as in the index.

        At half a gigabyte a second, or the disk's speed; from two seconds on a terminal gets a bar of its `progress`.

        Raises:
            UserError: names the file, and the row where there is one.
        """
        numbers = [None, *range(len(self.facts["shards"]))]
        size = sum(facts["bytes"] for facts in (self.facts["index"], *self.facts["shards"]))
        disable = None if progress else True  # None: shown on a terminal only
        bar = tqdm(desc=f"checking {self.part} pairs", total=size, unit="B", unit_scale=True, disable=disable, delay=2)
        with bar, ThreadPoolExecutor() as executor:
            try:
                for checked in executor.map(lambda number: self._verify_file(number, vocab_sizes), numbers):
                    bar.update(checked)
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                raise

    def _verify_file(self, number: int | None, vocab_sizes: tuple[int, int]) -> int:
        """Read a shard, or without a number the index; returns its bytes."""
        facts = self.facts["index"] if number is None else self.facts["shards"][number]
        path, row = self.folder / facts["file"], None
        if is_local(path):
            self._checked_path(facts)
            row = None if number is None else self._first_wrong_row(number, vocab_sizes)
        with file_errors(path):
            is_same = file_sha256(path) == facts["sha256"]
        if row is not None or not is_same:
            where = str(path) if row is None else f"{path}, row {row}"
            raise UserError(f"{where}: the content has changed since it was prepared: {_AGAIN}")
        return facts["bytes"]

    def _first_wrong_row(self, number: int, vocab_sizes: tuple[int, int]) -> int | None:
        """First row of a shard whose ids or lengths cannot be right."""
        columns = self._open(number)
        lengths = self.lengths[:, self.starts[number] : self.starts[number + 1]]
        for offsets, values, side, vocab_size in zip(columns[::2], columns[1::2], lengths, vocab_sizes, strict=True):
            expected = np.concatenate([[0], np.cumsum(side, dtype=np.int64)])
            wrong = np.flatnonzero(offsets != expected)
            if len(wrong):
                return max(0, int(wrong[0]) - 1)
            outside = np.flatnonzero(values >= vocab_size)
            if len(outside):
                return int(np.searchsorted(expected, outside[0], "right")) - 1
        return None


_AGAIN = "copy the file again, or remove the folder and prepare it again"


def _fetched(path: Path, facts: dict) -> Path:
    """The copy on this disk of a file of a store, under the name of its SHA-256; all processes here share it."""
    if not re.fullmatch("[0-9a-f]{64}", facts["sha256"]):
        raise UserError(f"{path} has no SHA-256 in the manifest: {_AGAIN}")
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "vaswani_prepared"
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / facts["sha256"]
    with FileLock(f"{copy}.lock"):
        if not copy.exists():
            path = to_path(str(path))  # anew: a connection does not outlive a fork
            with file_errors(path), written_whole(copy) as new:
                try:
                    path.fs.get_file(path.path, str(new))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    raise UserError(f"{folder} is full: set HF_DATASETS_CACHE to a folder on a larger disk") from error
                if file_sha256(new) != facts["sha256"]:
                    raise UserError(f"{path} is not as it was written: {_AGAIN}")
    return copy


def load_prepared_tokenizer(folder: Path) -> Any:
    """The tokenizer of a prepared folder."""
    if is_local(folder):
        return load_tokenizer(folder / TOKENIZER)
    with tempfile.TemporaryDirectory() as copy:
        for path in (folder / TOKENIZER).iterdir():
            if is_inner(path.name):
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
        """Counts of the filter for `train` or `validation`."""
        return FilterCounts(**self.manifest["parts"][part]["counts"])

    def verify(self, progress: bool = True) -> None:
        """Read all of it, checksums included, and raise `UserError` for what has changed since it was prepared."""
        for part in (self.train, self.validation):
            part.verify(vocabulary_sizes(self.tokenizer), progress)


def read_manifest(folder: str | Path) -> dict:
    """The manifest of a prepared folder: JSON values.

    `parts` has `train` and `validation`, each with `pairs`, `source_tokens`, `target_tokens` (`</s>` included), the
    `counts` of `FilterCounts`, `shards` and `index`; `tokenizer` has `sha256` and `entries`; `recipe` the fields that
    decided the content.

    Raises:
        UserError: for a folder that is not there, not prepared, not finished, or of another version.
    """
    check_path(folder, "the prepared folder")
    folder = to_path(folder)
    if is_local(folder) and not folder.is_dir():
        raise UserError(f"prepared folder {folder} does not exist: make it with `vaswani prepare`")
    path = folder / MANIFEST
    if not path.exists() and (folder / UNFINISHED).exists():
        raise UserError(f"the preparation of {folder} is not finished: run the same `vaswani prepare` command again")
    try:
        manifest = read_json(path, _AGAIN)
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']!r}")
        if manifest.get("version") == VERSION:
            _check_fields(manifest)
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no {MANIFEST}: give a folder made by `vaswani prepare`") from error
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{path} is not a manifest of prepared pairs ({one_line(error)}): {_AGAIN}") from error
    if manifest.get("version") != VERSION:
        raise UserError(f"{path} has format version {manifest.get('version')}, not {VERSION}: prepare the folder again")
    return manifest


def _check_fields(manifest: dict) -> None:
    """Raise ValueError, KeyError or TypeError for a manifest, perhaps edited by hand, that lacks something."""
    if not {manifest["token_type"], manifest["length_type"]} <= {"uint16", "int32"}:
        raise ValueError(f"tokens of type {manifest['token_type']!r:.20}, lengths of {manifest['length_type']!r:.20}")
    missing = {*LIMIT_FIELDS, *TOKENIZER_FIELDS} - manifest["recipe"].keys()
    for part in (TRAIN, VALIDATION):
        facts = manifest["parts"][part]
        str(FilterCounts(**facts["counts"]))
        missing |= {"source_tokens", "target_tokens"} - facts.keys()
        for file in (facts["index"], *facts["shards"]):
            missing |= {"file", "bytes", "sha256"} - file.keys()
            is_name = re.fullmatch(rf"{part}(-\d{{5,9}}\.arrow|\.lengths\.npy)", file["file"])
            if not is_name or not _is_count(file["bytes"]) or not _is_count(file.get("rows", 0)):
                raise ValueError(f"{file['file']!r:.100} of {file['bytes']!r:.20} bytes")
        if sum(shard["rows"] for shard in facts["shards"]) != facts["pairs"]:
            raise ValueError(f"rows of the {part} shards are not its pairs")
    if not isinstance(manifest["tokenizer"]["sha256"], str) or missing:
        raise ValueError(f"without {', '.join(sorted(missing)) or 'the tokenizer'}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**63


def open_prepared(folder: str | Path) -> PreparedData:
    """Open a prepared folder; sizes and schemas are checked, contents are not read.

    Raises:
        UserError: for a folder or a file that is missing, not finished, cut off, or not as the manifest says.
    """
    check_path(folder, "the prepared folder")
    folder = to_path(folder)
    with store_errors(folder):
        manifest, tokenizer = read_manifest(folder), load_prepared_tokenizer(folder)
    if tokenizer_sha256(tokenizer) != manifest["tokenizer"]["sha256"]:
        raise UserError(f"{folder / TOKENIZER} is not the tokenizer that the pairs were prepared with: {_AGAIN}")
    parts = {part: PreparedPairs(folder, part, manifest) for part in (TRAIN, VALIDATION)}
    for part in parts.values():
        part.check_shards()
    return PreparedData(folder, manifest, tokenizer, **parts)


def check_recipe_matches(prepared: PreparedData, recipe: Recipe) -> None:
    """Refuse a recipe that would make other pairs; where the data lies may differ, and data that it does not name."""
    made_with = prepared.manifest["recipe"]
    fields = list(LIMIT_FIELDS)
    if any(getattr(recipe, name) for name in _TRAIN_FIELDS):
        fields += DATA_FIELDS
    elif any(getattr(recipe, name) for name in _VALIDATION_FIELDS):
        fields += _VALIDATION_FIELDS
    if (folder := recipe.tokenizer_folder) is not None:
        if tokenizer_sha256(load_tokenizer(folder)) != prepared.manifest["tokenizer"]["sha256"]:
            raise UserError(
                f"the tokenizer {folder} is not the one that {prepared.folder} was prepared with: leave it"
                " out, or prepare the data with it"
            )
    elif made_with["tokenizer_kind"] is not None:
        fields += TOKENIZER_FIELDS
    differing = [
        f"{name} is {getattr(recipe, name)!r}, prepared with {made_with[name]!r}"
        for name in fields
        if name in made_with and getattr(recipe, name) != made_with[name]
    ]
    if differing:
        raise UserError(
            f"{prepared.folder} was prepared with another recipe ({'; '.join(differing)}): give the same values, or"
            " prepare the data with these"
        )


def verify_prepared(folder: str | Path) -> PreparedData:
    """Open a prepared folder and read all of it, checksums included."""
    prepared = open_prepared(folder)
    prepared.verify()
    return prepared
