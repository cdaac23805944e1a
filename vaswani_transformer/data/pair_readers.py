"""Pairs of sentences in files of one format: line-aligned text, TSV, CSV, JSON lines, Parquet, TMX."""

import csv
import difflib
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import UserError
from ..files import is_local, to_path
from ..json_and_yaml import unique_keys
from .text_files import LONGEST_LINE, has_undecoded, open_bytes, read_lines
from .tmx import read_tmx

DEFAULT_COLUMNS = ("source", "target")
UNDECODED = "text, undecoded"  # the reader of text in which U+FFFD stands for what is not UTF-8
TABLE_ROWS = 1000  # rows of a table that are in memory at once

# A reader gives the rows of one file, or of a source and a target file, each with its place for messages.
Rows = Iterator[tuple[str, dict[str, Any]]]


def _read_text(source: Path, target: Path, columns: tuple[str, str], errors: str = "strict") -> Rows:
    sources, targets = (read_lines(path, errors=errors) for path in (source, target))
    for number, pair in enumerate(zip_longest(sources, targets), 1):
        if None in pair:
            longer = number + sum(1 for _ in (targets if pair[0] is None else sources))
            check_numbers_of_lines((source, target), [number - 1 if text is None else longer for text in pair])
        yield "", dict(zip(columns, pair, strict=True))


def check_numbers_of_lines(files: tuple[Path, Path], lines: Sequence[int]) -> None:
    """Refuse a source and a target file of different numbers of lines."""
    if lines[0] != lines[1]:
        what = f"{files[0]} has {lines[0]:,} lines and {files[1]} has {lines[1]:,}"
        raise UserError(f"{what}; line n of one must be the translation of line n of the other")


def _read_tsv(path: Path, columns: tuple[str, str]) -> Rows:
    names: list[str] = []
    for number, line in enumerate(read_lines(path), 1):
        fields = line.split("\t")
        if not names:
            has_header = set(columns) <= set(fields)
            names = fields if has_header or set(columns) != set(DEFAULT_COLUMNS) else list(DEFAULT_COLUMNS)
            needed = max(column_position(column, names, f"{path}, line 1") for column in columns) + 1
            if has_header:
                continue
        if len(fields) < needed:
            rule = f"{len(fields)} field(s) separated by tabs, but {needed} are needed"
            raise UserError(f"{path}, line {number}: {rule}; give every line a source and a target")
        yield "", dict(zip(names, fields, strict=False))


def _read_csv(path: Path, columns: tuple[str, str]) -> Rows:
    # strict: otherwise one quote that is never closed swallows the rest of the file without a word.
    rows = csv.DictReader((line + "\n" for line in read_lines(path)), strict=True)
    try:
        for column in columns if rows.fieldnames else ():
            column_position(column, list(rows.fieldnames), f"{path}, line {rows.line_num}")
        for row in rows:
            if None in row or None in row.values():  # an unquoted comma would cut a sentence short
                raise csv.Error(f"not the {len(rows.fieldnames or ())} fields of the header")
            yield f"{path}, line {rows.line_num}", row
    except csv.Error as error:
        hint = "quote text with commas or quotes, or use .tsv, which has no quoting"
        raise UserError(f"{path}, line {rows.line_num}: not valid CSV ({error}); {hint}") from None


def _read_json(path: Path, columns: tuple[str, str]) -> Rows:
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                row = json.loads(line, object_pairs_hook=unique_keys)
                if not isinstance(row, dict):
                    raise ValueError(f"{type(row).__name__}, not an object")
            except (ValueError, RecursionError) as error:  # the latter: nested too deep
                raise UserError(f"{where}: not JSON lines ({error}); write one object per line") from None
            yield where, row


def parquet_file(path: Path) -> pq.ParquetFile:
    """Open a Parquet file; of one elsewhere no more is fetched than what is read."""
    return pq.ParquetFile(path if is_local(path) else open_bytes(path), pre_buffer=False)


def read_parquet(path: Path, columns: tuple[str, str], groups: Sequence[int] | None = None, before: int = 0) -> Rows:
    """Rows of a Parquet file, or of some of its row groups, which have so many rows before them."""
    # Not by `datasets`: its scan of a local file may abort the process at its end (apache/arrow issue 45214).
    with load_errors(str(path)):
        file = parquet_file(path)
        is_flat = set(columns) <= set(file.schema_arrow.names)
        columns = list(columns) if is_flat else ["translation"]
        tables = file.iter_batches(TABLE_ROWS, row_groups=groups and list(groups), columns=columns)
    return rows_of_tables(tables, str(path), before)


def _read_tmx(path: Path, columns: tuple[str, str]) -> Rows:
    for line, pair in read_tmx(path, columns):
        yield f"{path}, line {line}", dict(zip(columns, pair, strict=True))


READERS = {
    "text": _read_text,
    UNDECODED: partial(_read_text, errors="replace"),
    ".tsv": _read_tsv,
    ".csv": _read_csv,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": read_parquet,
    ".tmx": _read_tmx,
}


def read_pairs(
    kind: str, shards: Iterable[tuple[str | Path, ...]], columns: tuple[str, str] = DEFAULT_COLUMNS
) -> Iterator[tuple[str, str]]:
    """Pairs of shards, each one file, or a source and a target file, of a kind that `READERS` has.

    Raises:
        UserError: naming file and line; also for a file without any pair.
    """
    for files in shards:
        pair = None
        for pair in pairs_of_rows(READERS[kind](*map(to_path, files), columns), columns):
            yield pair
        if pair is None:
            raise no_pair(files)


def no_pair(files: Sequence[str | Path]) -> UserError:
    """The error for files without any pair."""
    return UserError(f"{' and '.join(dict.fromkeys(map(str, files)))}: empty, no pair; give at least one pair")


def pairs_of_rows(rows: Rows, columns: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """The two columns of each row, looked up within its column `translation` where they are not its own."""
    for where, row in rows:
        values = row
        if not set(columns) <= row.keys() and isinstance(row.get("translation"), dict):
            values = row["translation"]
        if "translation" in row and row["translation"] is None:
            raise UserError(f"{where}: 'translation' is null; fill or remove the row")
        pair = tuple(
            values[column] if column in values else column_position(column, list(values), where) for column in columns
        )
        for column, text in zip(columns, pair, strict=True):
            if text is None:
                raise UserError(f"{where}: {column!r} is null; fill or remove the row")
            if not isinstance(text, str):
                raise UserError(f"{where}: {column!r} holds {text!r:.40}, which is not a string; write it as text")
            if len(text) > LONGEST_LINE:
                raise UserError(f"{where}: {column!r} has {len(text):,} characters, at most {LONGEST_LINE:,}; split it")
            if has_undecoded(text):
                raise UserError(f"{where}: {column!r} holds half of a surrogate pair; write the whole letter")
        yield pair


def with_pairs_only(table: pa.Table | pa.RecordBatch, columns: tuple[str, str]) -> pa.Table | pa.RecordBatch:
    """A table without columns that hold neither side; with all of them where a side is missing."""
    names = table.schema.names
    if set(columns) <= set(names):
        return table.select(list(columns))
    return table.select(["translation"]) if "translation" in names else table


def rows_of_tables(tables: Iterable[pa.Table | pa.RecordBatch], where: str, before: int = 0) -> Rows:
    """The rows of Arrow tables that follow each other, with their numbers, from 1 after the rows `before` them.

    Raises:
        UserError: also for strings that are not UTF-8, which neither Parquet nor Arrow rule out, with the row.
    """
    number = before
    with load_errors(where):
        for table in tables:
            check_values(table, where, number)
            for number, row in enumerate(table.to_pylist(), number + 1):  # noqa: B020
                yield f"{where}, row {number}", row


def check_values(table: pa.Table | pa.RecordBatch, where: str, before: int = 0) -> None:
    """Refuse a table whose bytes are not what its columns say, naming the first row; `before` are the rows before it.

    pyarrow reads such strings as they are and raises when Python asks for them, or crashes where offsets are wrong.
    """
    start, end = 0, len(table)  # the first bad row is among these
    try:
        table.validate(full=True)
        return
    except pa.ArrowInvalid:
        pass
    while end - start > 1:
        middle = (start + end) // 2
        try:
            table.slice(start, middle - start).validate(full=True)
            start = middle
        except pa.ArrowInvalid:
            end = middle
    raise UserError(f"{where}, row {before + start + 1}: damaged, or not valid UTF-8; write it again, as UTF-8")


@contextmanager
def load_errors(what: str) -> Iterator[None]:
    """Turn errors of `datasets` and pyarrow, which share no base class (Hub, format, disk), into `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = error.__cause__ or error  # `datasets` wraps what is raised while it generates
        if isinstance(cause, UserError):
            raise cause from None
        reason = textwrap.shorten(str(cause), 200, placeholder=" ...") or type(cause).__name__
        raise UserError(f"{what} could not be loaded ({reason}); check name, content, config, split") from error


def column_position(column: str, available: list[str], where: str) -> int:
    """Index of a column among those of `where`; one that is not there, or not alone, is refused."""
    if available.count(column) > 1:
        raise UserError(f"{where}: there are several columns {column!r}; rename or remove all but one")
    if column in available:
        return available.index(column)
    near = difflib.get_close_matches(column, available[:1000], 1)
    hint = f"did you mean {near[0]!r}?" if near else "name one of these"
    there = textwrap.shorten(", ".join(available), 200, placeholder=" ...")
    raise UserError(f"{where}: there is no column {column!r}; the columns are: {there}; {hint}")


def check_schema(schema: pa.Schema, columns: tuple[str, str], where: str) -> None:
    """Refuse a table whose columns are missing, also within `translation`, or not text."""
    fields = list(schema)
    nested = [field.type for field in fields if field.name == "translation"]
    if not set(columns) <= set(schema.names) and nested and pa.types.is_struct(nested[0]):
        fields = list(nested[0])
    names = [field.name for field in fields]
    for column in columns:
        kind = fields[column_position(column, names, where)].type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise UserError(f"{where}: column {column!r} is {kind}, not text; name or make a column of strings")
