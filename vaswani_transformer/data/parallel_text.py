"""Parallel text from files, folders and the Hub: loaded as a memory-mapped dataset, or streamed pair by pair.

`pair_source` looks at what is named: files of pairs become `PairFiles`, what `datasets` reads by itself `DatasetPairs`.
"""

import glob
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from ..errors import UserError
from ..files import is_local, to_path
from .pair_readers import (
    DEFAULT_COLUMNS,
    READERS,
    TABLE_ROWS,
    check_schema,
    check_values,
    load_errors,
    pairs_of_rows,
    parquet_file,
    read_pairs,
    rows_of_tables,
    with_pairs_only,
)
from .text_files import check_on_disk, file_errors, file_stamp, home_path

BYTES_OF_A_PAIR = 250  # of text in UTF-8, where pairs are estimated: about a news sentence in two languages
CACHE_VERSION = 1  # part of every cache key: raise it when the meaning of the cached rows changes
_PAIR_FEATURES = datasets.Features(dict.fromkeys(DEFAULT_COLUMNS, datasets.Value("string")))
_FORMATS = READERS.keys() - {"text"}


@dataclass(frozen=True)
class PairFiles:
    """Files of pairs, read one by one, so that mistakes are reported with the file and its line or row."""

    where: str  # the files or their folder, as messages name them
    kind: str  # their format, a key of `READERS`
    splits: dict[str, tuple[tuple[Path, ...], ...]]  # needed splits; of each shard the file, or source and target file
    split: str  # one of the splits or an expression such as "train[:90%]+test"
    columns: tuple[str, str]
    files: list[Path]  # all that may have a part in it

    def load(self) -> datasets.Dataset:
        """All pairs as a memory-mapped dataset; see `load_pairs`."""
        loaded = {name: self._load_shards(shards) for name, shards in self.splits.items()}
        if self.split in loaded:
            return loaded[self.split]
        with load_errors(self.where):
            counts = {name: len(part) for name, part in loaded.items()}
            parts = datasets.ReadInstruction.from_spec(self.split).to_absolute(counts)
        slices = [loaded[part.splitname].select(range(part.from_, part.to)) for part in parts if part.from_ < part.to]
        if not slices:
            raise _no_rows(self.where)
        return datasets.concatenate_datasets(slices)

    def stream(self) -> Iterator[tuple[str, str]]:
        """Pairs one after the other, in order; of a whole split nothing is cached and little is in memory.

        Raises:
            UserError: as `load_pairs`, where the place of the mistake is reached.
        """
        if self.split in self.splits:
            return read_pairs(self.kind, self.splits[self.split], self.columns)
        return pairs_of(self.load())

    def estimate(self) -> int:
        """About how many pairs there are in all splits: Parquet states it, others have it by their size in bytes."""
        if self.kind == ".parquet":
            return sum(parquet_file(file).metadata.num_rows for files in self.splits.values() for (file,) in files)
        return sum(path.stat().st_size * (3 if path.suffix == ".gz" else 1) for path in self.files) // BYTES_OF_A_PAIR

    def downloaded(self) -> "PairFiles":
        """As that of `DatasetPairs`: these files are here."""
        return self

    def _load_shards(self, shards: tuple[tuple[Path, ...], ...]) -> datasets.Dataset:
        # Hashed for the name of the cache; tuples, because `datasets` takes a list for shards.
        names = tuple(tuple(map(str, shard)) for shard in shards)
        stamps = tuple(file_stamp(path) for shard in shards for path in shard)
        key = {"kind": self.kind, "files": names, "columns": self.columns, "stamps": stamps, "version": CACHE_VERSION}
        with load_errors(self.where):
            return datasets.Dataset.from_generator(_generate, features=_PAIR_FEATURES, gen_kwargs=key)


def _generate(kind: str, files: tuple, columns: tuple[str, str], **_key: Any) -> Iterator[dict[str, str]]:
    for pair in read_pairs(kind, files, columns):
        yield dict(zip(DEFAULT_COLUMNS, pair, strict=True))


@dataclass(frozen=True)
class DatasetPairs:
    """Pairs that `datasets` reads: a folder from ``save_to_disk``, a dataset on the Hub, a folder with a card."""

    where: str  # the folder or the dataset, as messages name it
    open_dataset: Callable[[], datasets.Dataset]  # what is on the Hub is fetched first
    split: str  # a split or a slice such as "train[:1000]"
    columns: tuple[str, str]
    files: list[Path]  # all of a folder; none of the Hub

    def load(self) -> datasets.Dataset:
        """The pairs as a memory-mapped dataset; nothing is copied unless the type of string differs."""
        columns, dataset = self.columns, self.open_dataset()
        check_schema(dataset.features.arrow_schema, columns, self.where)
        if not set(columns) <= set(dataset.column_names):
            dataset = dataset.select_columns(["translation"]).flatten()
            dataset = dataset.rename_columns({name: name.removeprefix("translation.") for name in dataset.column_names})
        if not len(dataset):
            raise _no_rows(self.where)
        for column in columns:
            values = dataset.data.column(column)
            with load_errors(self.where):
                check_values(pa.table({column: values}), self.where)
            if values.null_count:
                row = values.is_null().index(True).as_py() + 1
                raise UserError(
                    f"{self.where}, row {row}: {column!r} holds None, which is not a string; write it as text"
                )
        dataset = dataset.select_columns(list(columns)).rename_columns(dict(zip(columns, DEFAULT_COLUMNS, strict=True)))
        return dataset if dataset.features == _PAIR_FEATURES else dataset.cast(_PAIR_FEATURES)

    def stream(self) -> Iterator[tuple[str, str]]:
        """Pairs one after the other, in order; nothing is cached and little is in memory."""
        tables = self.open_dataset().with_format("arrow").iter(TABLE_ROWS)
        tables = (with_pairs_only(table, self.columns) for table in tables)  # pictures and such stay as they are
        pair = None
        for pair in pairs_of_rows(rows_of_tables(tables, self.where), self.columns):
            yield pair
        if pair is None:
            raise _no_rows(self.where)

    def estimate(self) -> int:
        """Number of pairs."""
        return len(self.open_dataset())

    def downloaded(self) -> "DatasetPairs":
        """The same, fetched: then it needs no network."""
        dataset = self.open_dataset()
        return replace(self, open_dataset=lambda: dataset)


PairSource = PairFiles | DatasetPairs


def pairs_of(dataset: datasets.Dataset) -> Iterator[tuple[str, str]]:
    """The pairs of a loaded dataset, in order."""
    for batch in dataset.iter(batch_size=TABLE_ROWS):
        yield from zip(batch["source"], batch["target"], strict=True)


def pair_source(
    source: str | Path | None = None,
    target: str | Path | None = None,
    data: str | Path | None = None,
    config: str | None = None,
    split: str = "train",
    source_column: str = "source",
    target_column: str = "target",
) -> PairSource:
    """Find what these arguments name, which are those of `load_pairs`, without reading the text.

    Of files in Parquet and of saved datasets the columns are checked, of a dataset on the Hub nothing.

    Raises:
        UserError: wrong arguments, files that are missing, of unknown or several formats, a source file without target,
            a split that is not there, and a Parquet file or saved dataset that is cut off, empty or lacks a column.
    """
    columns = source_column, target_column
    if source_column == target_column:
        raise UserError(f"source and target column are both {source_column!r}; name two different columns")
    if (data is None) == (source is None) or (source is None) != (target is None):
        given = [name for name, value in (("source", source), ("target", target), ("data", data)) if value is not None]
        what = " and ".join(given) or "nothing"
        raise UserError(f"{what} was given: give either both text files (source, target) or data")
    paths = find_shards(source if data is None else data)
    if data is not None and is_local(paths[0]):
        with file_errors(paths[0]):
            is_folder, exists = paths[0].is_dir(), paths[0].exists()
        if is_folder:
            return _folder_source(paths[0], config, split, columns)
        if not exists and _is_hub_name(str(data)):  # anything else that is not here is a missing file
            return _named_dataset(str(data), config, split, columns)
    if config is not None or "[" in split:
        raise UserError(f"{config=}, {split=}: {paths[0]} is a file and has neither configs nor slices; leave them out")
    if data is None:
        kind, shards = "text", _paired_shards(source, target)
    else:
        kind, shards = _common_format(data, paths), tuple((path,) for path in paths)
    return _checked_files(str(paths[0]), kind, {split: shards}, split, columns)


def _checked_files(where: str, kind: str, splits: dict, split: str, columns: tuple[str, str]) -> PairFiles:
    """Files that can be opened; of Parquet files all have rows and both columns."""
    paths = [path for shards in splits.values() for shard in shards for path in shard]
    for path in paths:
        check_on_disk(path)
        if kind == ".parquet":
            with load_errors(str(path)):
                metadata = parquet_file(path).metadata
                if not metadata.num_rows:
                    raise _no_rows(path)
                check_schema(metadata.schema.to_arrow_schema(), columns, str(path))
    return PairFiles(where, kind, splits, split, columns, paths)


def _common_format(data: str | Path, paths: list[Path]) -> str:
    """The format of the files that `data`, a name or a pattern, stands for."""
    formats = {_suffix(path): path for path in paths}
    if len(formats) > 1:
        first, second = list(formats.values())[:2]
        raise UserError(f"{data} matches files of several formats ({first}, {second}); name those of one")
    kind, path = formats.popitem()
    if kind not in _FORMATS:
        check_on_disk(path)  # one that is missing is reported as such
        raise UserError(
            f"{path}: not .tsv, .csv, .json(l), .parquet or .tmx; text files are given as source and target"
            + ("" if is_local(path) else ", the files of a folder as FOLDER/*.SUFFIX")
        )
    return kind


def _folder_source(folder: Path, config: str | None, split: str, columns: tuple[str, str]) -> PairSource:
    """A folder whose files are read as if they were named, or one that `datasets` reads."""
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        return _saved_dataset(folder, split, columns)
    by_datasets, card = _named_dataset(str(folder), config, split, columns), folder / "README.md"
    if config is not None or (card.is_file() and "\nconfigs:" in card.read_text("utf-8", "replace")):
        return by_datasets
    try:
        patterns = datasets.data_files.get_data_patterns(str(folder))
        named = datasets.data_files.DataFilesDict.from_patterns(patterns, base_path=str(folder))
    except OSError:  # there is no file; loading reports it
        return by_datasets
    splits = {str(name): [path for path in map(Path, files) if _format_of(path)] for name, files in named.items()}
    splits = {name: paths for name, paths in splits.items() if paths}
    formats = {_format_of(path).removesuffix("l"): path for paths in splits.values() for path in paths}
    if len(formats) > 1:  # `datasets` would take those of one and say nothing
        first, second = sorted(map(str, formats.values()))[:2]
        raise UserError(f"{folder} holds files of several formats ({first}, {second}); name those of one")
    if not formats:
        return by_datasets
    names = [part.partition("[")[0].strip() for part in split.split("+")]
    for name in names:
        if name not in splits:
            raise _no_split(folder, name, splits)
    wanted = {name: tuple((path,) for path in splits[name]) for name in names}
    kind = _format_of(splits[names[0]][0])
    other = next((path for shards in wanted.values() for (path,) in shards if _suffix(path) != kind), None)
    if kind.startswith(".json") and (other or kind == ".json"):
        return by_datasets  # a ".json" may hold one array, which `datasets` reads; so it does other compressions
    if other:
        raise UserError(f"{other} is neither {kind} nor {kind}.gz; unpack, rename or remove it")
    return _checked_files(str(folder), kind, wanted, split, columns)


def _saved_dataset(folder: Path, split: str, columns: tuple[str, str]) -> DatasetPairs:
    """A folder from ``save_to_disk``."""
    with load_errors(str(folder)):
        dataset = datasets.load_from_disk(str(folder))
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise _no_split(folder, split, dataset)
        dataset = dataset[split]
    check_schema(dataset.features.arrow_schema, columns, str(folder))
    return DatasetPairs(str(folder), lambda: dataset, split, columns, _files_below(folder))


def _named_dataset(name: str, config: str | None, split: str, columns: tuple[str, str]) -> DatasetPairs:
    """What ``datasets.load_dataset`` reads by its name: a dataset on the Hub, or a folder."""
    is_here = Path(name).is_dir()
    where = name if is_here else f"Hub dataset {name!r} (there is no such file or folder here)"

    def open_dataset() -> datasets.Dataset:
        with load_errors(where):
            return datasets.load_dataset(name, config, split=split)

    return DatasetPairs(where, open_dataset, split, columns, _files_below(Path(name)) if is_here else [])


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _is_hub_name(name: str) -> bool:
    """Whether a name of which nothing is here can be one on the Hub: ``dataset`` or ``owner/dataset``."""
    is_path = Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    return not is_path and _suffix(Path(name)) not in (*_FORMATS, ".txt")


def _no_rows(where: str | Path) -> UserError:
    return UserError(f"{where}: empty, no rows; give a dataset or split with at least one pair")


def _no_split(where: str | Path, split: str, splits: Iterable[str]) -> UserError:
    return UserError(f"{where} has no split {split!r}; choose one of: {', '.join(splits)}")


def find_shards(name: str | Path) -> list[Path]:
    """The file of this name, or else the files that match it as a pattern (``*``, ``?``, ``[...]``), sorted by name.

    Raises:
        UserError: for a pattern that no file matches.
    """
    path = home_path(name).absolute()
    with file_errors(path):
        if not glob.has_magic(str(name)) or path.exists():
            return [path]
        if is_local(path):
            matches = [match for match in map(Path, glob.glob(str(path))) if match.is_file()]  # noqa: PTH207
        else:
            listed = path.fs.glob(path.path, detail=True)
            matches = [to_path(path.fs.unstrip_protocol(name)) for name in listed if listed[name]["type"] == "file"]
    matches = sorted(matches, key=lambda match: match.parts)
    if not matches:
        raise UserError(f"no file matches {path}; check folder and pattern")
    return matches


def _paired_shards(source: str | Path, target: str | Path) -> tuple[tuple[Path, Path], ...]:
    """Source and target file of each shard, in the order of their names.

    A file without a partner is refused, since what follows would be paired wrongly. Where the wildcards stand for other
    text on each side throughout, only the order counts.
    """
    sides = [find_shards(name) for name in (source, target)]
    if len(sides[0]) != len(sides[1]):
        counts = [f"{name} matches {len(side)} files" for name, side in zip((source, target), sides, strict=True)]
        raise UserError(f"{' and '.join(counts)}; every file of sources needs one of targets")
    sources, targets = (
        {_wildcard_text(name, path): path for path in side} for name, side in zip((source, target), sides, strict=True)
    )
    if len(sides[0]) > 1 and None not in sources | targets and sources.keys() & targets.keys():
        for side, partners, pattern in ((sources, targets, target), (targets, sources, source)):
            for text, path in side.items():
                if text not in partners:
                    raise UserError(f"{path} has no partner among the files of {pattern}; bring it, or leave both out")
    return tuple(zip(*sides, strict=True))


def _wildcard_text(pattern: str | Path, path: Path) -> tuple[str, ...] | None:
    """What the ``*`` and ``?`` of a pattern stand for in a file's path; None for a pattern with other wildcards."""
    rule = re.escape(str(home_path(pattern).absolute())).replace(r"\*", "([^/]*)").replace(r"\?", "([^/])")
    match = re.fullmatch(rule, str(path))
    return match.groups() if match else None


def _suffix(path: Path) -> str:
    """A file's suffix, that of compression left out."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _format_of(path: Path) -> str:
    """The format in a file's name, whatever follows; empty for none of ours."""
    return next((suffix for suffix in reversed(Path(path.name.lower()).suffixes) if suffix in _FORMATS), "")


def load_pairs(
    *,
    source: str | Path | None = None,
    target: str | Path | None = None,
    data: str | Path | None = None,
    config: str | None = None,
    split: str = "train",
    source_column: str = "source",
    target_column: str = "target",
) -> datasets.Dataset:
    """Load parallel text as a memory-mapped dataset with the string columns ``source`` and ``target``.

    Give `source` and `target`, or `data`, each a name, a pattern such as ``a.*.en.gz`` or a URL such as
    ``s3://bucket/a.*.en.gz``, of what fsspec reaches; swap the files or the columns for the other direction. Files that
    match are read in the order of their names, and those of `source` and `target` are paired in that order. The result
    is cached below ``HF_DATASETS_CACHE``, and an edited file is read again.

    Args:
        source: UTF-8 text file, plain or ``.gz``. Only a line feed ends a line; empty lines stay as empty strings.
        target: the translations, line for line.
        data: a ``.tsv``, ``.csv``, ``.json(l)`` (JSON lines) or ``.tmx`` file, plain or ``.gz``, a ``.parquet`` file, a
            folder (from ``save_to_disk``, or of data files, which are read as if named one by one) or a dataset on the
            Hub. TSV has no quoting, and its first row is a header only if it holds both column names; otherwise the
            fields are source and target. CSV has both.
        config: configuration of the Hub dataset or folder, such as ``"de-en"``.
        split: split of the Hub dataset or folder, also a slice such as ``"train[:1000]"``. A file has only one split.
        source_column: column with the source text, its key within a ``translation`` column, or its language in a TMX
            file, such as ``"en"`` (which there stands for ``en-US`` too).
        target_column: the same for the target text.

    Raises:
        UserError: wrong arguments, or a file, column, value or Hub dataset that is missing or not as it should be.
    """
    return pair_source(source, target, data, config, split, source_column, target_column).load()


def held_out_rows(number: int, size: int, seed: int) -> np.ndarray:
    """Which of `number` pairs are held out for validation: `size` rows at random, sorted, in memory of that size."""
    if not 0 < size < number:
        raise UserError(
            f"cannot hold validation_size {size} pairs out of {number} training pairs: give validation data, or another"
            " validation_size"
        )
    return np.sort(np.random.default_rng(seed).choice(number, size, replace=False, shuffle=False))
