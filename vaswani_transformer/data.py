"""Parallel text: one loader for every format, and tokenisation with length filters, cached on disk."""

import csv
import difflib
import glob
import gzip
import hashlib
import json
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from .errors import UserError

_CACHE_VERSION = 1  # part of every cache key: raise it when the meaning of the cached rows changes
_DEFAULT_COLUMNS = ("source", "target")
_PAIR_FEATURES = datasets.Features(dict.fromkeys(_DEFAULT_COLUMNS, datasets.Value("string")))
_TOKEN_FEATURES = datasets.Features(
    dict.fromkeys(("input_ids", "labels"), datasets.List(datasets.Value("int32")))
    | dict.fromkeys(("source_length", "target_length"), datasets.Value("int32"))
    | {"status": datasets.Value("int8")}
)
_KEPT, _EMPTY, _TOO_LONG, _RATIO = range(4)  # values of the status column


@dataclass(frozen=True)
class FilterCounts:
    """Pairs read, kept, and dropped for each reason; a dropped pair counts once, under the first reason that fits."""

    read: int
    kept: int
    empty: int  # a side is empty or blank
    too_long: int  # a side has more than max_length tokens
    ratio: int  # a side has more than max_length_ratio times the tokens of the other
    max_length: int  # tokens, </s> included
    max_length_ratio: float | None  # of token counts without </s>; None or 0: no limit

    def __str__(self) -> str:
        limits = f"{self.too_long:,} longer than {self.max_length:,} tokens"
        if self.max_length_ratio:
            limits += f", {self.ratio:,} with a length ratio above {self.max_length_ratio}"
        return f"{self.read:,} pairs read, {self.kept:,} kept; dropped: {self.empty:,} empty, {limits}"


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
    below ``HF_DATASETS_CACHE``, and an edited file is read again.

    Args:
        source: UTF-8 text file, plain or ``.gz``. Only a line feed ends a line; empty lines stay as empty strings.
        target: the translations, line for line.
        data: a ``.tsv``, ``.csv`` or ``.json(l)`` file (JSON lines), plain or ``.gz``, a ``.parquet`` file, a folder
            (from ``save_to_disk``, or of data files) or a dataset on the Hub. TSV has no quoting, and its first row is
            a header only if it holds both column names; otherwise the fields are source and target. CSV has both.
        config: configuration of the Hub dataset or folder, such as ``"de-en"``.
        split: split of the Hub dataset or folder, also a slice such as ``"train[:1000]"``. A file has only one split.
        source_column: column with the source text, or its key within a ``translation`` column, such as ``"en"``.
        target_column: the same for the target text.

    Raises:
        UserError: wrong arguments, or a file, column, value or Hub dataset that is missing or not as it should be.
    """
    columns = (source_column, target_column)
    if source_column == target_column:
        raise UserError(f"source and target column are both {source_column!r}; name two different columns")
    if (data is None) == (source is None) or (source is None) != (target is None):
        raise UserError(f"{source=}, {target=}, {data=}: give either both text files (source, target) or data")
    paths = [Path(name).expanduser().absolute() for name in ((source, target) if data is None else (data,))]
    path, where = paths[0], str(paths[0])
    kind = "text" if data is None else Path(path.name.lower().removesuffix(".gz")).suffix
    with _file_errors(path):
        is_folder, exists = data is not None and path.is_dir(), path.exists()
    # On the Hub a name is "dataset" or "owner/dataset"; anything else that is not here is a missing file.
    is_path = Path(str(data)).is_absolute() or str(data).startswith((".", "~")) or str(data).count("/") > 1
    if is_folder and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        dataset = _attempt(where, datasets.load_from_disk, where)
        if isinstance(dataset, datasets.DatasetDict):
            if split not in dataset:
                raise UserError(f"{path} has no split {split!r}; choose one of: {', '.join(dataset)}")
            dataset = dataset[split]
    elif is_folder:
        dataset = _attempt(where, datasets.load_dataset, where, config, split=split)
    elif not (exists or is_path or kind in (*_READERS, ".parquet", ".txt")):
        where = f"Hub dataset {str(data)!r} (there is no such file or folder here)"
        dataset = _attempt(where, datasets.load_dataset, str(data), config, split=split)
    elif config is not None or "[" in split:
        raise UserError(f"{config=}, {split=}: {path} is a file and has neither configs nor slices; leave them out")
    elif kind == ".parquet":
        with _file_errors(path), path.open("rb"):
            options = {"data_files": glob.escape(where), "split": "train"}  # brackets would be read as a pattern
        dataset = _attempt(where, datasets.load_dataset, "parquet", **options)
    else:
        return _load_files(kind, paths, columns)
    return _select_pairs(dataset, columns, where)


def tokenize_pairs(
    pairs: datasets.Dataset,
    tokenizer: Any,
    *,
    max_length: int = 256,
    max_length_ratio: float | None = 3.0,
    description: str = "Tokenising",
) -> tuple[datasets.Dataset, FilterCounts]:
    """Tokenise pairs once, and drop those that are empty, too long or of too unequal length.

    A later call with the same pairs, tokenizer and limits, in any process, reads the result from the cache.

    Args:
        pairs: dataset with the string columns ``source`` and ``target``, as from `load_pairs`.
        tokenizer: fast transformers tokenizer that appends ``</s>`` to every text.
        max_length: most tokens of a side, ``</s>`` included; longer pairs are dropped, never truncated.
        max_length_ratio: most tokens of a side per token of the other, without ``</s>``; None or 0: no limit.
        description: label of the progress bar.

    Returns:
        The memory-mapped dataset with the columns ``input_ids`` and ``labels`` (lists of int32), ``source_length`` and
        ``target_length`` (int32, tokens, ``</s>`` included), and the counts of the filter in pairs.

    Raises:
        UserError: an impossible limit, a tokenizer that does not append ``</s>``, no pairs, or none left.
    """
    if max_length < 2 or (max_length_ratio and not max_length_ratio >= 1):  # "not >=" catches NaN as well
        raise UserError(f"{max_length=}, {max_length_ratio=}: lengths start at 2 (with </s>), ratios at 1; raise it")
    if not len(pairs):
        raise UserError("there are no pairs to tokenise; give a dataset that is not empty")

    def tokenize(*texts: Iterable[str]) -> dict[str, list]:
        sides = [tokenizer(list(side))["input_ids"] for side in texts]
        if any(side[0][-1:] != [tokenizer.eos_token_id] for side in sides):
            raise UserError("the tokenizer does not append its end token to a text; use one with a </s> template")
        status = []
        for source, target, *ids in zip(*texts, *sides, strict=True):
            shorter, longer = sorted(len(side) - 1 for side in ids)
            if not (source.strip() and target.strip() and shorter):
                status.append(_EMPTY)
            elif longer >= max_length:
                status.append(_TOO_LONG)
            else:
                status.append(_RATIO if max_length_ratio and longer / shorter > max_length_ratio else _KEPT)
        lengths = [[len(ids) for ids in side] for side in sides]
        # Of a dropped pair only the status matters: do not store a line of a million tokens.
        stored = [[[] if code else ids for ids, code in zip(side, status, strict=True)] for side in sides]
        return dict(zip(_TOKEN_FEATURES, (*stored, *lengths, status), strict=True))

    # Padding and truncation are left behind by other calls, such as with padding=True, and reset by ours.
    state = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    key = json.dumps([_CACHE_VERSION, pairs._fingerprint, state, max_length, max_length_ratio or 0.0], sort_keys=True)
    key = hashlib.sha256(key.encode()).hexdigest()[:32]
    # Not beside the input, where `map` would put it: a folder from save_to_disk may be read-only.
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "vaswani_transformer"
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"input_columns": list(_DEFAULT_COLUMNS), "remove_columns": pairs.column_names}
    cache = {"new_fingerprint": key, "cache_file_name": str(folder / f"{key}.arrow")}
    tokenized = pairs.map(tokenize, batched=True, features=_TOKEN_FEATURES, desc=description, **columns, **cache)
    status = tokenized.data.column("status").to_numpy()
    counts = FilterCounts(len(status), *np.bincount(status, minlength=4).tolist(), max_length, max_length_ratio)
    if not counts.kept:
        raise UserError(f"no pair is left after filtering ({counts}); check the files or raise the limits")
    tokenized = tokenized.remove_columns("status")
    if counts.kept < counts.read:
        tokenized = tokenized.select(np.flatnonzero(status == _KEPT).tolist(), new_fingerprint=f"{key}-kept")
    return tokenized, counts


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a whole gzip file ({error}); copy or compress it again") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); check name and access") from error


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a UTF-8 text file, plain or ``.gz``; only a line feed (with or without a carriage return) ends one.

    Raises:
        UserError: a file that cannot be read, is not whole, or is not UTF-8, with the number of the line.
    """
    with _file_errors(path), path.open("rb") as raw:
        yield from decode_lines(gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw, str(path))


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
            names = fields if has_header or set(columns) != set(_DEFAULT_COLUMNS) else list(_DEFAULT_COLUMNS)
            needed = max(_position(column, names, f"{path}, line 1") for column in columns) + 1
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


_READERS = {"text": _read_text, ".tsv": _read_tsv, ".csv": _read_csv, ".jsonl": _read_json, ".json": _read_json}


def _generate(kind: str, files: tuple[str, ...], columns: tuple[str, str], **_key: Any) -> Iterator[dict[str, str]]:
    is_empty = True
    for where, row in _READERS[kind](*map(Path, files), columns):
        pair = [row[column] if column in row else _position(column, list(row), where) for column in columns]
        for column, text in zip(columns, pair, strict=True):
            if not isinstance(text, str):
                raise UserError(f"{where}: {column!r} holds {text!r:.40}, which is not a string; write it as text")
        yield dict(zip(_DEFAULT_COLUMNS, pair, strict=True))
        is_empty = False
    if is_empty:
        raise UserError(f"{' and '.join(files)}: empty, no pair; give at least one pair")


def _load_files(kind: str, paths: list[Path], columns: tuple[str, str]) -> datasets.Dataset:
    stamps = []
    for path in paths:
        with _file_errors(path), path.open("rb"):
            stamps.append((path.stat().st_size, path.stat().st_mtime_ns))
    if kind not in _READERS:
        raise UserError(f"{path}: not .tsv, .csv, .json(l) or .parquet; text files are given as source and target")
    # Hashed for the name of the cache; tuples, because `datasets` takes a list for shards.
    key = {"kind": kind, "files": tuple(map(str, paths)), "columns": columns, "stamps": tuple(stamps)}
    options = {"features": _PAIR_FEATURES, "gen_kwargs": key | {"version": _CACHE_VERSION}}
    return _attempt(" and ".join(key["files"]), datasets.Dataset.from_generator, _generate, **options)


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


def _select_pairs(dataset: datasets.Dataset, columns: tuple[str, str], where: str) -> datasets.Dataset:
    """Reduce a dataset to its two text columns, renamed; nothing is copied unless the type of string differs."""
    if not set(columns) <= set(dataset.column_names) and "translation" in dataset.column_names:
        dataset = dataset.select_columns(["translation"]).flatten()
        dataset = dataset.rename_columns({name: name.removeprefix("translation.") for name in dataset.column_names})
    for column in columns:
        _position(column, dataset.column_names, where)
        feature = dataset.features[column]
        if not isinstance(feature, datasets.Value) or feature.dtype not in ("string", "large_string"):
            raise UserError(f"{where}: column {column!r} is {feature}, not text; name or make a column of strings")
        values = dataset.data.column(column)
        if values.null_count:
            row = values.is_null().index(True).as_py() + 1
            raise UserError(f"{where}: column {column!r} is null, not a string, in row {row}; fill or remove the row")
    if not len(dataset):
        raise UserError(f"{where}: empty, no rows; give a dataset or split with at least one pair")
    dataset = dataset.select_columns(list(columns)).rename_columns(dict(zip(columns, _DEFAULT_COLUMNS, strict=True)))
    return dataset if dataset.features == _PAIR_FEATURES else dataset.cast(_PAIR_FEATURES)


def _position(column: str, available: list[str], where: str) -> int:
    if column in available:
        return available.index(column)
    near = difflib.get_close_matches(column, available, 1)
    hint = f"did you mean {near[0]!r}?" if near else "name one of these"
    there = textwrap.shorten(", ".join(available), 200, placeholder=" ...")
    raise UserError(f"{where}: there is no column {column!r}; the columns are: {there}; {hint}")
