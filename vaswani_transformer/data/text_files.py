"""Pairs of sentences in text files of our own: line-aligned text, TSV, CSV, JSON lines, plain or gzipped."""

import csv
import difflib
import gzip
import hashlib
import json
import os
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..errors import UserError

DEFAULT_COLUMNS = ("source", "target")


def home_path(name: str | Path) -> Path:
    """A path whose leading ``~`` is the home folder, as the shell would have it; of an unknown user it stays."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises for an unknown user


@contextmanager
def file_errors(path: Path, lines_read: Callable[[], int] | None = None) -> Iterator[None]:
    """Turn what goes wrong with a file into `UserError`; `lines_read` tells how far a cut-off gzip file was read."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        place = f", it ends after line {lines_read()}" if lines_read else ""
        raise UserError(f"{path} is not a whole gzip file ({error}{place}); copy or compress it again") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); check name and access") from error


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a UTF-8 text file, plain or ``.gz``; only a line feed (with or without a carriage return) ends one.

    Raises:
        UserError: a file that cannot be read, is not whole, or is not UTF-8, with the number of the line.
    """
    number = 0
    with file_errors(path, lambda: number), path.open("rb") as raw:
        lines = decode_lines(gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw, str(path))
        for number, line in enumerate(lines, 1):  # noqa: B007
            yield line


def decode_lines(lines: Iterable[bytes], where: str) -> Iterator[str]:
    """Lines of UTF-8 bytes as text, without their ends and without a byte order mark.

    Raises:
        UserError: for a line that is not UTF-8, with its number and with `where` it is from.
    """
    for number, line in enumerate(lines, 1):
        try:
            text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            place = f"{where}, line {number}, byte offset {error.start} of the line"
            raise UserError(f"{place}: not valid UTF-8 ({error.reason}); convert it to UTF-8") from None
        yield text.removeprefix("\ufeff") if number == 1 else text


def has_undecoded(text: str) -> bool:
    """Whether a text holds bytes that were not UTF-8, which Python reads as halves of surrogate pairs."""
    return not text.isprintable() and any("\ud800" <= character <= "\udfff" for character in text)


def _read_text(source: Path, target: Path, columns: tuple[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    sources, targets = read_lines(source), read_lines(target)
    for number, pair in enumerate(zip_longest(sources, targets), 1):
        if None in pair:
            longer = number + sum(1 for _ in (targets if pair[0] is None else sources))
            counts = [number - 1 if text is None else longer for text in pair]
            what = f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}"
            raise UserError(f"{what}; line n of one must be the translation of line n of the other")
        yield "", dict(zip(columns, pair, strict=True))


def _read_tsv(path: Path, columns: tuple[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
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


def _read_csv(path: Path, columns: tuple[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    # strict: otherwise one quote that is never closed swallows the rest of the file without a word.
    rows = csv.DictReader((line + "\n" for line in read_lines(path)), strict=True)
    try:
        for row in rows:
            if None in row or None in row.values():  # an unquoted comma would cut a sentence short
                raise csv.Error(f"not the {len(rows.fieldnames or ())} fields of the header")
            yield f"{path}, line {rows.line_num}", row
    except csv.Error as error:
        hint = "quote text with commas or quotes, or use .tsv, which has no quoting"
        raise UserError(f"{path}, line {rows.line_num}: not valid CSV ({error}); {hint}") from None


def _read_json(path: Path, columns: tuple[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"{type(row).__name__}, not an object")
            except ValueError as error:
                raise UserError(f"{where}: not JSON lines ({error}); write one object per line") from None
            is_nested = isinstance(row.get("translation"), dict) and not set(columns) <= row.keys()
            yield where, row["translation"] if is_nested else row


READERS = {"text": _read_text, ".tsv": _read_tsv, ".csv": _read_csv, ".jsonl": _read_json, ".json": _read_json}


def read_pairs(kind: str, shards: Iterable[tuple[str, ...]], columns: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Pairs of shards, one after the other.

    Args:
        kind: a key of `READERS`.
        shards: the file, or source and target, of each.
        columns: names of source and target column.

    Raises:
        UserError: naming file and line; also for a file without any pair.
    """
    for files in shards:
        is_empty = True
        for where, row in READERS[kind](*map(Path, files), columns):
            pair = tuple(
                row[column] if column in row else column_position(column, list(row), where) for column in columns
            )
            for column, text in zip(columns, pair, strict=True):
                if not isinstance(text, str):
                    raise UserError(f"{where}: {column!r} holds {text!r:.40}, which is not a string; write it as text")
            yield pair
            is_empty = False
        if is_empty:
            raise UserError(f"{' and '.join(files)}: empty, no pair; give at least one pair")


def column_position(column: str, available: list[str], where: str) -> int:
    """Index of a column among those of `where`.

    Raises:
        UserError: if it is not there, with the columns that are and the nearest.
    """
    if column in available:
        return available.index(column)
    near = difflib.get_close_matches(column, available, 1)
    hint = f"did you mean {near[0]!r}?" if near else "name one of these"
    there = textwrap.shorten(", ".join(available), 200, placeholder=" ...")
    raise UserError(f"{where}: there is no column {column!r}; the columns are: {there}; {hint}")


@dataclass(frozen=True)
class Survey:
    """What a whole file was found to be.

    Args:
        lines: how many it has.
        sha256: of its text, unpacked.
    """

    lines: int
    sha256: str


def survey(path: Path) -> Survey:
    """Read a text file, plain or ``.gz``, in constant memory.

    Raises:
        UserError: a file that cannot be read, is not whole, or is not UTF-8, with the number of the line.
    """
    digest, number = hashlib.sha256(), 0

    def hashed(lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            digest.update(line)
            yield line

    with file_errors(path, lambda: number), path.open("rb") as raw:
        lines = gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw
        for number, _ in enumerate(decode_lines(hashed(lines), str(path)), 1):  # noqa: B007
            pass
    return Survey(number, digest.hexdigest())
