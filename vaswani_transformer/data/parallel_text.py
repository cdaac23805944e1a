"""Parallel text: one source for every format, loaded or streamed."""

import glob
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import UserError
from .text_files import DEFAULT_COLUMNS, READERS, column_position, file_errors, home_path, read_pairs
from .text_files import decode_lines as decode_lines
from .text_files import read_lines as read_lines

CACHE_VERSION = 1  # part of every cache key: raise it when the meaning of the cached rows changes
_PAIR_FEATURES = datasets.Features(dict.fromkeys(DEFAULT_COLUMNS, datasets.Value("string")))
_STREAM_ROWS = 1000  # rows of a table that are in memory at once
_FORMATS = {*READERS, ".parquet"} - {"text"}
_NO_ROWS = "{}: empty, no rows; give a dataset or split with at least one pair"


@dataclass(frozen=True)
class PairSource:
    """Where parallel text is: two text files, or one `data`; many files (shards) by a pattern such as ``a.*.en.gz``.

    Shards are read in the order of their names, and those of `source` and `target` are paired in that order.

    Args:
        source: UTF-8 text file, plain or ``.gz``, or a pattern. Only a line feed ends a line; empty lines stay as empty
            strings.
        target: the translations, line for line.
        data: a ``.tsv``, ``.csv`` or ``.json(l)`` file (JSON lines), plain or ``.gz``, a ``.parquet`` file, a pattern
            of such files, a folder (from ``save_to_disk``, or of data files, which are read as if named one by one) or
            a dataset on the Hub. TSV has no quoting, and its first row is a header only if it holds both column names;
            otherwise the fields are source and target. CSV has both.
        config: configuration of the Hub dataset or folder, such as ``"de-en"``.
        split: split of the Hub dataset or folder, also a slice such as ``"train[:1000]"``. A file has only one split.
        source_column: column with the source text, or its key within a ``translation`` column, such as ``"en"``.
        target_column: the same for the target text.

    Raises:
        UserError: wrong arguments, a pattern that no file matches, unlike numbers of shards of the two sides.
    """

    source: str | Path | None = None
    target: str | Path | None = None
    data: str | Path | None = None
    config: str | None = None
    split: str = "train"
    source_column: str = "source"
    target_column: str = "target"

    def __post_init__(self):
        source, target, data, config, split = self.source, self.target, self.data, self.config, self.split
        if self.source_column == self.target_column:
            raise UserError(f"source and target column are both {self.source_column!r}; name two different columns")
        if (data is None) == (source is None) or (source is None) != (target is None):
            raise UserError(f"{source=}, {target=}, {data=}: give either both text files (source, target) or data")
        sides = [find_shards(name) for name in ((source, target) if data is None else (data,))]
        if len({len(side) for side in sides}) > 1:
            counts = [f"{name} matches {len(side)} files" for name, side in zip((source, target), sides, strict=True)]
            raise UserError(f"{' and '.join(counts)}; every file of sources needs one of targets")
        if len(sides) == 2:
            _check_partners(source, target, sides)
        shards = tuple(zip(*sides, strict=True))
        kind = self._find_kind(shards)
        if kind not in ("saved", "folder", "hub") and (config is not None or "[" in split):
            what = shards[0][0]
            raise UserError(f"{config=}, {split=}: {what} is a file and has neither configs nor slices; leave them out")
        object.__setattr__(self, "shards", shards)  # tuples of one path, or of the source's and the target's
        object.__setattr__(self, "kind", kind)  # text, a suffix, saved, folder or hub

    def _find_kind(self, shards: tuple[tuple[Path, ...], ...]) -> str:
        if self.data is None:
            return "text"
        path = shards[0][0]
        kinds = {_suffix(path): path for (path,) in shards}
        if len(kinds) > 1:
            first, second = list(kinds.values())[:2]
            raise UserError(f"{self.data} matches files of several formats ({first}, {second}); name those of one")
        with file_errors(path):
            is_folder, exists = path.is_dir(), path.exists()
        if is_folder:
            is_saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
            return "saved" if is_saved else "folder"
        # On the Hub a name is "dataset" or "owner/dataset"; anything else that is not here is a missing file.
        name, kind = str(self.data), next(iter(kinds))
        is_path = Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
        return kind if exists or is_path or kind in (*_FORMATS, ".txt") else "hub"

    @property
    def columns(self) -> tuple[str, str]:
        """Names of the source's and the target's column."""
        return self.source_column, self.target_column

    def files(self) -> list[Path]:
        """The files that are read, none for a dataset on the Hub.

        Raises:
            UserError: for a file that cannot be read.
        """
        if self.kind == "hub":
            return []
        if self.kind in ("saved", "folder"):
            return sorted(path for path in self.shards[0][0].rglob("*") if path.is_file())
        files = [path for shard in self.shards for path in shard]
        for path in files:
            with file_errors(path), path.open("rb"):
                pass
        if self.kind not in ("text", *_FORMATS):
            what = files[0]
            raise UserError(f"{what}: not .tsv, .csv, .json(l) or .parquet; text files are given as source and target")
        return files

    def check(self) -> None:
        """Refuse what shows without reading the text; of a dataset on the Hub nothing is looked at.

        Raises:
            UserError: for a file that is missing, and a Parquet file or saved dataset that is cut off, empty or has not
                both columns of text, naming file and column.
        """
        if self.kind == "saved":
            _check_schema(self._load_saved().data.schema, self.columns, str(self.shards[0][0]))
        elif self.kind == "folder":
            self._folder_files()
        elif self.kind != "hub":
            self._checked(self.kind, self.files())

    def _checked(self, kind: str, files: list[Path]) -> list[Path]:
        """These files, once the footers of all of them, where they have one, were found right."""
        for path in files if kind == ".parquet" else ():
            metadata = _attempt(str(path), pq.read_metadata, path)
            if not metadata.num_rows:
                raise UserError(_NO_ROWS.format(path))
            _check_schema(_attempt(str(path), metadata.schema.to_arrow_schema), self.columns, str(path))
        return files

    def load(self) -> datasets.Dataset:
        """All pairs as a memory-mapped dataset; see `load_pairs`."""
        where = str(self.shards[0][0])
        if self.kind == "saved":
            return _select_pairs(self._load_saved(), self.columns, where)
        if self.kind == "folder" and (found := self._folder_files()):
            return self._load_splits(*found)
        if self.kind in ("folder", "hub"):
            name, where = self._dataset_name()
            dataset = _attempt(where, datasets.load_dataset, name, self.config, split=self.split)
            return _select_pairs(dataset, self.columns, where)
        self._checked(self.kind, self.files())
        return self._load_files(self.kind, self.shards)

    def _load_files(self, kind: str, shards: Iterable[tuple[Path, ...]]) -> datasets.Dataset:
        """Pairs of files that are read one by one, so that what is wrong is said of the file and its line or row."""
        if kind == ".parquet":
            parts = [_load_parquet(str(path), self.columns) for (path,) in shards]
            return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
        # Hashed for the name of the cache; tuples, because `datasets` takes a list for shards.
        stats = [path.stat() for shard in shards for path in shard]
        stamps = tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)
        names = tuple(tuple(map(str, shard)) for shard in shards)
        key = {"kind": kind, "files": names, "columns": self.columns, "stamps": stamps, "version": CACHE_VERSION}
        what = " and ".join(names[0]) + (" and the other shards" if len(names) > 1 else "")
        return _attempt(what, datasets.Dataset.from_generator, _generate, features=_PAIR_FEATURES, gen_kwargs=key)

    def _load_splits(self, kind: str, splits: dict[str, list[Path]]) -> datasets.Dataset:
        """What `split` asks for of a folder's files."""
        where = str(self.shards[0][0])
        loaded = {split: self._load_files(kind, [(path,) for path in files]) for split, files in splits.items()}
        if self.split in loaded:
            return loaded[self.split]
        instruction = _attempt(where, datasets.ReadInstruction.from_spec, self.split)
        wanted = _attempt(where, instruction.to_absolute, {split: len(part) for split, part in loaded.items()})
        wanted = [part for part in wanted if part.from_ < part.to]
        parts = [loaded[part.splitname].select(range(part.from_, part.to)) for part in wanted]
        if not parts:
            raise UserError(_NO_ROWS.format(where))
        return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)

    def stream(self) -> Iterator[tuple[str, str]]:
        """Pairs one after the other, in order; nothing is cached and little is in memory.

        A slice of a split that is streamed (folder, Hub) is counted in rows, ``"train[:1000]"``.

        Raises:
            UserError: as `load_pairs`; for what `check` finds at once, else when the place of the mistake is reached.
        """
        if self.kind == "folder" and (found := self._folder_files()):
            split, start, stop = self._rows_of_split()
            pairs = islice(self._stream_files(found[0], found[1].get(split, [])), start, stop)
        elif self.kind in ("saved", "folder", "hub"):
            dataset = self._load_saved() if self.kind == "saved" else self._streamed()
            tables = iter(dataset.with_format("arrow").iter(batch_size=_STREAM_ROWS))
            pairs = self._pairs_of_tables(self._dataset_name()[1], tables)
        else:
            files = self._checked(self.kind, self.files())
            pairs = self._stream_files(self.kind, files)
        is_empty = True
        for pair in pairs:
            is_empty = False
            yield pair
        if is_empty:
            raise UserError(_NO_ROWS.format(self._dataset_name()[1]))

    def _stream_files(self, kind: str, files: list[Path]) -> Iterator[tuple[str, str]]:
        if kind != ".parquet":
            shards = self.shards if kind == "text" else [(path,) for path in files]
            yield from read_pairs(kind, [tuple(map(str, shard)) for shard in shards], self.columns)
            return
        for path in files:
            file = _attempt(str(path), pq.ParquetFile, path, pre_buffer=False)
            is_flat = set(self.columns) <= set(file.schema_arrow.names)
            batches = file.iter_batches(_STREAM_ROWS, columns=list(self.columns) if is_flat else ["translation"])
            tables = (pa.Table.from_batches([batch]) for batch in batches)
            yield from self._pairs_of_tables(str(path), tables)

    def _pairs_of_tables(self, where: str, tables: Iterator[pa.Table]) -> Iterator[tuple[str, str]]:
        row = 1
        for table in _attempt_each(where, tables):
            yield from _pairs_of(table, self.columns, where, row)
            row += len(table)

    def count(self) -> int:
        """Number of pairs; reads all of them where no file says it."""
        if self.kind == "saved":
            return len(self._load_saved())
        found = self._folder_files() if self.kind == "folder" else None
        kind, splits = found or (self.kind, {self.split: self.files()})
        if kind == ".parquet" and self.split in splits:
            return sum(_attempt(str(path), pq.read_metadata, path).num_rows for path in splits[self.split])
        if self.kind == "hub" and "[" not in self.split:
            info = self._streamed().info.splits
            if info and self.split in info and info[self.split].num_examples:
                return info[self.split].num_examples
        return sum(1 for _ in self.stream())

    def _dataset_name(self) -> tuple[str, str]:
        if self.kind == "hub":
            return str(self.data), f"Hub dataset {str(self.data)!r} (there is no such file or folder here)"
        return str(self.shards[0][0]), str(self.shards[0][0])

    def _folder_files(self) -> tuple[str, dict[str, list[Path]]] | None:
        """Kind of a folder's files and those of the splits that are asked for, which are read one by one, as if named.

        None for what is left to `datasets`: a folder with a card that says how to read it, or with other formats.

        Raises:
            UserError: for files of several formats, of which `datasets` would take those of one without a word, for a
                split that is not there, and for Parquet files as `check`.
        """
        folder, card = self.shards[0][0], self.shards[0][0] / "README.md"
        has_card = card.is_file() and "\nconfigs:" in card.read_text("utf-8", "replace")
        if has_card or self.config is not None:
            return None
        try:
            found = datasets.data_files.DataFilesDict.from_patterns(
                datasets.data_files.get_data_patterns(str(folder)), base_path=str(folder)
            )
        except OSError:  # none; loading says so
            return None
        found = {str(split): [Path(file) for file in files] for split, files in found.items()}
        data = {split: [path for path in files if _format_of(path)] for split, files in found.items()}
        kinds = {_format_of(path).removesuffix("l"): path for files in data.values() for path in files}
        if len(kinds) > 1:
            first, second = sorted(map(str, kinds.values()))[:2]
            raise UserError(f"{folder} holds files of several formats ({first}, {second}); name those of one")
        names = [part.partition("[")[0].strip() for part in self.split.split("+")]
        if not kinds:
            return None
        missing = [name for name in names if name not in data]
        if missing:
            raise UserError(f"{folder} has no split {missing[0]!r}; choose one of: {', '.join(data)}")
        wanted = {name: data[name] for name in names}
        files = [path for split in wanted.values() for path in split]
        kind = _format_of(files[0]) if files else ".json"
        other = next((path for path in files if _suffix(path) != kind), None)
        if kind.startswith(".json") and (other or kind == ".json"):
            return None  # a ".json" may hold one array, which `datasets` reads; so it does other compressions
        if other:
            raise UserError(f"{other} is neither {kind} nor {kind}.gz; unpack, rename or remove it")
        self._checked(kind, files)
        return kind, wanted

    def _load_saved(self) -> datasets.Dataset:
        path = self.shards[0][0]
        dataset = _attempt(str(path), datasets.load_from_disk, str(path))
        if not isinstance(dataset, datasets.DatasetDict):
            return dataset
        if self.split not in dataset:
            raise UserError(f"{path} has no split {self.split!r}; choose one of: {', '.join(dataset)}")
        return dataset[self.split]

    def _rows_of_split(self) -> tuple[str, int, int | None]:
        """The split's name, first row and the one after the last."""
        parts = re.fullmatch(r"([^\[+]*)(?:\[(\d*):(\d*)\])?", self.split)
        if parts is None:
            raise UserError(f"split {self.split!r} cannot be streamed: give a split, or rows of one as train[:1000]")
        split, start, stop = parts.groups()
        return split.strip(), int(start or 0), int(stop) if stop else None

    def _streamed(self) -> datasets.IterableDataset:
        name, where = self._dataset_name()
        split, start, stop = self._rows_of_split()
        dataset = _attempt(where, datasets.load_dataset, name, self.config, split=split, streaming=True)
        dataset = dataset.skip(start) if start else dataset
        return dataset if stop is None else dataset.take(max(0, stop - start))


def find_shards(name: str | Path) -> list[Path]:
    """The file of this name, or else the files that match it as a pattern (``*``, ``?``, ``[...]``), sorted by name.

    Raises:
        UserError: for a pattern that no file matches.
    """
    path = home_path(name).absolute()
    with file_errors(path):
        if path.exists() or not glob.has_magic(str(name)):
            return [path]
    found = sorted(match for match in map(Path, glob.glob(str(path))) if match.is_file())  # noqa: PTH207
    if not found:
        raise UserError(f"no file matches {path}; check folder and pattern")
    return found


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _format_of(path: Path) -> str:
    """The format in a file's name, whatever follows; empty for none of ours."""
    return next((suffix for suffix in reversed(Path(path.name.lower()).suffixes) if suffix in _FORMATS), "")


def _check_partners(source: str | Path, target: str | Path, sides: list[list[Path]]) -> None:
    """Refuse shards of which some have no partner: paired in order, what follows would be paired wrongly.

    Where the patterns' signs stand for other names on each side altogether, the order has to do.
    """
    names = []
    for pattern, files in zip((source, target), sides, strict=True):
        rule = re.escape(Path(pattern).name)
        for sign, group in ((r"\*", "(.*)"), (r"\?", "(.)")):
            rule = rule.replace(sign, group)
        matches = [re.fullmatch(rule, path.name) for path in files]
        names.append([match.groups() if match else None for match in matches])
    if len(sides[0]) > 1 and None not in chain(*names) and set(names[0]) & set(names[1]):
        for here, there, files, pattern in ((*names, sides[0], target), (*names[::-1], sides[1], source)):
            alone = [path for path, name in zip(files, here, strict=True) if name not in there]
            if alone:
                raise UserError(f"{alone[0]} has no partner among the files of {pattern}; bring it, or leave both out")


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

    Give `source` and `target`, or `data`; swap the files or the columns for the other direction. The result is cached
    below ``HF_DATASETS_CACHE``, and an edited file is read again. Arguments as for `PairSource`.

    Raises:
        UserError: wrong arguments, or a file, column, value or Hub dataset that is missing or not as it should be.
    """
    return PairSource(source, target, data, config, split, source_column, target_column).load()


def held_out_rows(number: int, size: int, seed: int) -> np.ndarray:
    """Which of `number` pairs are held out for validation: `size` rows at random, sorted, in memory of that size.

    Raises:
        UserError: where there are not more pairs than that, or none is to be held out.
    """
    if not 0 < size < number:
        raise UserError(
            f"cannot hold validation_size {size} pairs out of {number} training pairs: give validation data, or another"
            " validation_size"
        )
    return np.sort(np.random.default_rng(seed).choice(number, size, replace=False, shuffle=False))


def _generate(
    kind: str, files: tuple[tuple[str, ...], ...], columns: tuple[str, str], **_key: Any
) -> Iterator[dict[str, str]]:
    for pair in read_pairs(kind, files, columns):
        yield dict(zip(DEFAULT_COLUMNS, pair, strict=True))


def _check_schema(schema: pa.Schema, columns: tuple[str, str], where: str) -> None:
    """Refuse columns that are missing, also within `translation`, or not text."""
    fields = {field.name: field.type for field in schema}
    nested = fields.get("translation")
    if not set(columns) <= fields.keys() and nested is not None and pa.types.is_struct(nested):
        fields = {field.name: field.type for field in nested}
    for column in columns:
        column_position(column, list(fields), where)
        kind = fields[column]
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise UserError(f"{where}: column {column!r} is {kind}, not text; name or make a column of strings")


def _pairs_of(table: pa.Table, columns: tuple[str, str], where: str, first_row: int) -> Iterator[tuple[str, str]]:
    """The pairs of a table whose first row has this number."""
    _check_schema(table.schema, columns, where)
    if not set(columns) <= set(table.column_names):
        nested = table.column("translation").combine_chunks()
        table = pa.table([pc.struct_field(nested, column) for column in columns], columns)
    sides = []
    for column in columns:
        values = table.column(column)
        if values.null_count:
            row = first_row + values.is_null().index(True).as_py()
            raise UserError(f"{where}: column {column!r} is null, not a string, in row {row}; fill or remove the row")
        sides.append(values.to_pylist())
    return zip(*sides, strict=True)


def _load_parquet(path: str, columns: tuple[str, str]) -> datasets.Dataset:
    options = {"data_files": glob.escape(path), "split": "train"}  # brackets would be read as a pattern
    return _select_pairs(_attempt(path, datasets.load_dataset, "parquet", **options), columns, path)


def _attempt(what: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a loader of `datasets`, whose errors (network, Hub, split, format, disk) share no base class."""
    try:
        return function(*arguments, **options)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        if isinstance(cause, UserError):  # from our own generator
            raise cause from None
        reason = textwrap.shorten(str(cause or error), 200, placeholder=" ...") or type(cause or error).__name__
        raise UserError(f"{what} could not be loaded ({reason}); check name, content, config, split") from error


def _attempt_each(what: str, rows: Iterator[Any]) -> Iterator[Any]:
    while (row := _attempt(what, next, rows, None)) is not None:
        yield row


def _select_pairs(dataset: datasets.Dataset, columns: tuple[str, str], where: str) -> datasets.Dataset:
    """Reduce a dataset to its two text columns, renamed; nothing is copied unless the type of string differs."""
    if not set(columns) <= set(dataset.column_names) and "translation" in dataset.column_names:
        dataset = dataset.select_columns(["translation"]).flatten()
        dataset = dataset.rename_columns({name: name.removeprefix("translation.") for name in dataset.column_names})
    for column in columns:
        column_position(column, dataset.column_names, where)
        feature = dataset.features[column]
        if not isinstance(feature, datasets.Value) or feature.dtype not in ("string", "large_string"):
            raise UserError(f"{where}: column {column!r} is {feature}, not text; name or make a column of strings")
        values = dataset.data.column(column)
        if values.null_count:
            row = values.is_null().index(True).as_py() + 1
            raise UserError(f"{where}: column {column!r} is null, not a string, in row {row}; fill or remove the row")
    if not len(dataset):
        raise UserError(_NO_ROWS.format(where))
    dataset = dataset.select_columns(list(columns)).rename_columns(dict(zip(columns, DEFAULT_COLUMNS, strict=True)))
    return dataset if dataset.features == _PAIR_FEATURES else dataset.cast(_PAIR_FEATURES)
