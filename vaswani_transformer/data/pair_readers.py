"""Pairs of sentences in files that our own readers read: line-aligned text, TSV, CSV, TMX and catalogues.

JSON, Parquet and everything else is read by `datasets` (`parallel_text`), which would fill up short rows of CSV.
"""

import csv
import locale
import logging
import re
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from ..catalogues.formats import pairs
from ..errors import UserError
from ..files import to_path
from .text_files import LONGEST_LINE, read_lines, with_lines_of
from .tmx import read_tmx

logger = logging.getLogger(__name__)

DEFAULT_COLUMNS = ("source", "target")
PAIR_FEATURES = datasets.Features(dict.fromkeys(DEFAULT_COLUMNS, datasets.Value("string")))
BROKEN = ", broken"  # after the kind of a text or table: U+FFFD stands for what is not UTF-8, rows lack a target
CATALOGUES = (".po", ".xlf", ".xliff", ".ts")
_ROWS = 10_000  # of a table that is written at once

Pairs = Iterator[tuple[str, str]]


def _read_text(source: Path, target: Path, columns: tuple[str, str], errors: str = "strict") -> Pairs:
    return with_lines_of(read_lines(source, errors=errors), str(source), target, errors=errors)


def _read_table(path: Path, columns: tuple[str, str], errors: str = "strict") -> Pairs:
    """Read TSV, without quoting and maybe without a header, or CSV, which has both."""
    lines, is_csv = read_lines(path, errors=errors), path.name.lower().removesuffix(".gz").endswith(".csv")
    csv.field_size_limit(LONGEST_LINE)
    rows, names = (line.split("\t") for line in lines), []
    if is_csv:
        head = []
        while not (head and head[-1]) and (line := next(lines, None)) is not None:
            head.append(line)
        marks = re.sub('"[^"]*"', "", "".join(head))
        mark = ";" if ";" in marks and "," not in marks else ","  # as spreadsheets write it where commas are decimal
        rows = csv.reader((line + "\n" for line in chain(head, lines)), delimiter=mark, strict=True)
    try:
        for number, fields in enumerate(rows, 1):
            if fields in ([], [""]):
                continue
            if not names:
                names, is_header = _header(fields, columns, is_csv)
                source, target = (column_position(column, names, f"{path}, line {number}") for column in columns)
                is_last = max(source, target) + 1 == len(fields)  # a tab in its text would cut it off
                most = len(fields) if is_csv or is_last or not columns[0].isdecimal() else LONGEST_LINE
                least = max(source, target) + 1 if most == LONGEST_LINE or (is_header and not is_csv) else most
                if is_header:
                    logger.info("%s: line %d names the columns: %.200s", path, number, ", ".join(fields))
                    continue
            if not least <= len(fields) <= most:
                if errors == "replace":
                    yield " ".join(fields), ""
                    continue
                counts = f"{len(fields)} field(s), where the first has {len(names)}"
                raise UserError(f"{path}, {'row' if is_csv else 'line'} {number}: {counts}; give it as many")
            yield fields[source], fields[target]
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.line_num}: {error}") from error


def _header(fields: list[str], columns: tuple[str, str], is_csv: bool) -> tuple[list[str], bool]:
    """Return the names of a table's columns, and whether its first row, `fields`, holds names and not a pair.

    Unless others are asked for, which may be numbers in TSV, two columns are source and target. More of them without
    these names keep those of the row, which then lack what was asked for: any two would be a guess.
    """
    lowered = [field.strip(" \"'").lower() for field in fields]
    if set(columns) == set(DEFAULT_COLUMNS):
        lowered = [{"src": "source", "tgt": "target", "trg": "target"}.get(name, name) for name in lowered]
    if set(columns) <= set(fields) or set(columns) <= set(lowered):
        return (fields if set(columns) <= set(fields) else lowered), True
    if set(columns) == set(DEFAULT_COLUMNS) and len(fields) == 2:
        names = list(DEFAULT_COLUMNS)
    elif not is_csv and all(column.isdecimal() for column in columns):
        names = [str(number) for number in range(1, len(fields) + 1)]
    else:
        return fields, True
    named = [lowered[names.index(column)] for column in columns if column in names]
    is_header = named[:1] != named[1:] and _words_of_headers().issuperset(re.split("[-_]", name)[0] for name in named)
    return (names, is_header) if is_header or not is_csv else (fields, True)


@cache
def _words_of_headers() -> set[str]:
    """Return what columns may be called, in lower case: codes of languages (ISO 639-1, -3), and some English names."""
    from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES  # such as deu_Latn

    aliases = (re.split(r"[._@]", alias)[0] for alias in locale.locale_alias)
    return {"src", "tgt", "trg", *DEFAULT_COLUMNS, *aliases, *(code[:3] for code in FAIRSEQ_LANGUAGE_CODES)}


def column_position(column: str, available: list[str], where: str) -> int:
    """Return the index of a column among those of `where`, which must have it once."""
    if available.count(column) != 1:
        number, names = "several columns" if column in available else "no column", [name[:40] for name in available]
        fix = "name two by --source-column and --target-column, those of TSV without a header by their numbers"
        fix += " (of a --memory: call them source and target)"
        raise UserError(f"{where}: {number} {column!r}; the columns are: {', '.join(names):.300}; {fix}")
    return available.index(column)


def _read_catalogue(path: Path, columns: tuple[str, str]) -> Pairs:
    """Read translated entries, of which line breaks become spaces, like the segments of a TMX file."""
    sides = [column_position(column, [*DEFAULT_COLUMNS], str(path)) for column in columns]
    for pair in pairs(path):
        yield tuple(" ".join(filter(None, map(str.strip, pair[side].split("\n")))) for side in sides)


_LINES = {"text": _read_text, ".tsv": _read_table, ".csv": _read_table}
READERS = _LINES | {".tmx": read_tmx} | dict.fromkeys(CATALOGUES, _read_catalogue)
READERS |= {kind + BROKEN: partial(reader, errors="replace") for kind, reader in _LINES.items()}


def read_pairs(kind: str, shards: Sequence[tuple[str | Path, ...]], columns=DEFAULT_COLUMNS) -> Pairs:
    """Yield the pairs of shards, each one file, or a source and a target file, of a kind of `READERS`.

    Raises:
        UserError: naming file and line; also for a file without any pair, unless it is one of several catalogues.
    """
    for files in shards:
        pair = None
        for pair in READERS[kind](*map(to_path, files), columns):
            yield pair
        if pair is None and kind in CATALOGUES and len(shards) > 1:
            logger.warning("%s: nothing in it is translated", files[0])
        elif pair is None:
            raise UserError(f"{' and '.join(dict.fromkeys(map(str, files)))}: empty, no pair; give at least one pair")


class PairsBuilder(datasets.ArrowBasedBuilder):
    """Writes what `read_pairs` reads into a memory-mapped dataset, cached under the builder's `hash`."""

    def __init__(self, *arguments: Any, kind: str = "", shards: Any = (), columns: Any = DEFAULT_COLUMNS, **options):
        self.kind, self.shards, self.columns = kind, dict(shards), columns
        super().__init__(*arguments, **options)

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=PAIR_FEATURES)

    def _split_generators(self, _) -> list[datasets.SplitGenerator]:
        return [datasets.SplitGenerator(name, gen_kwargs={"shards": list(each)}) for name, each in self.shards.items()]

    def _generate_tables(self, shards: list) -> Iterator[tuple[int, pa.Table]]:
        pairs, number = read_pairs(self.kind, shards, self.columns), 0
        while rows := list(islice(pairs, _ROWS)):
            sides = [pa.array(side, pa.string()) for side in zip(*rows, strict=True)]
            yield number, pa.table(sides, DEFAULT_COLUMNS)
            number += 1
