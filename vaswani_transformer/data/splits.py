"""Text cut into splits, which tasks read themselves, each without the others and on any machine.

Plain text is cut by bytes, both sides at the same lines; Parquet by row groups; a compressed file, or one in which a
line is not a row, is one split, or if it is large as many pieces of a copy that the first of them makes. What the
splits are depends on the files alone, not on who reads them.
"""

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path

import datasets
import numpy as np

from ..files import is_local, write_text
from .pair_readers import (
    UNDECODED,
    check_numbers_of_lines,
    no_pair,
    pairs_of_rows,
    parquet_file,
    read_pairs,
    read_parquet,
)
from .parallel_text import PairFiles, PairSource, pairs_of
from .text_files import decode_lines, file_errors, open_bytes

SPLIT_BYTES = 2**24  # of a source text; about 130,000 sentences
COPIED_PAIRS = 50_000  # of a file of a copy
_KEPT = 1000  # pairs in a line of such a file: a call of `json` for each pair takes three times as long
SPLIT_ROWS = 100_000  # of a table, at least: its row groups stay whole
_MARKED = 1000  # lines from one known place to the next
_READ = 2**22  # bytes in memory at once
_CONTINUATION = bytes(range(0x80, 0xC0))  # of a character in UTF-8, whose first byte is none of these


@dataclass(frozen=True)
class Place:
    """Where the pairs of a split are, which is known when those of all have been counted."""

    pairs: int
    first: int = 0  # row of the first one in its file
    starts: tuple[tuple[int, int], ...] = ()  # of source and target text: a byte, and the lines to skip from there


@dataclass(frozen=True)
class LineSplit:
    """One of `parts` pieces of a source and a target file with a sentence on each line."""

    files: tuple[Path, Path]
    number: int
    parts: int
    errors: str = "strict"  # as of `decode_lines`

    def count(self) -> dict:
        """Lines that end in this piece of each file, and places behind some of them, the last included.

        Raises:
            UserError: for bytes that are not UTF-8, with the first such line of the file, so that it is mended before
                there is anything that would have to be made anew; three bytes where pieces meet are not looked at.
        """
        sides = [self._count(path) for path in self.files]
        return {"lines": [lines for lines, _ in sides], "marks": [marks for _, marks in sides]}

    def _count(self, path: Path) -> tuple[int, list[tuple[int, int]]]:
        lines, marks, decode = 0, [], codecs.getincrementaldecoder("utf-8")(self.errors).decode
        with file_errors(path), open_bytes(path) as file:
            size = path.stat().st_size
            place, stop = (size * number // self.parts for number in (self.number, self.number + 1))
            file.seek(place)
            data = b"\n"
            is_inside = place > 0  # perhaps of a character, whose other bytes the piece before has
            while place < stop and (data := file.read(min(_READ, stop - place))):
                try:
                    text = data[:3].lstrip(_CONTINUATION) + data[3:] if is_inside else data
                    decode(text, final=place + len(data) == size)
                except UnicodeDecodeError:
                    file.seek(0)
                    for _ in decode_lines(file, str(path)):  # which ends at the line that it names
                        pass
                is_inside = False
                ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
                known = range(-(lines + 1) % _MARKED, len(ends), _MARKED)
                marks += [(lines + index + 1, place + int(ends[index]) + 1) for index in known]
                if len(ends):
                    last = lines + len(ends), place + int(ends[-1]) + 1
                    marks += [last] if marks[-1:] != [last] else []
                lines, place = lines + len(ends), place + len(data)
            if place == size and self.number == self.parts - 1 and size and not _ends_with_line_feed(path):
                lines += 1
        return lines, marks

    def pairs(self, place: Place) -> Iterator[tuple[str, str]]:
        """The pairs.

        Raises:
            UserError: as `read_lines`.
        """
        sides = [self._lines(path, place, *start) for path, start in zip(self.files, place.starts, strict=True)]
        return zip(*sides, strict=True)

    def _lines(self, path: Path, place: Place, start: int, skipped: int) -> Iterator[str]:
        with file_errors(path), open_bytes(path) as file:
            file.seek(start)
            lines = decode_lines(file, str(path), first=place.first - skipped + 1, errors=self.errors)
            yield from islice(lines, skipped, skipped + place.pairs)


@dataclass(frozen=True)
class FileSplit:
    """A file of pairs, or a source and a target file, or row groups of a Parquet file."""

    kind: str  # a key of `READERS`
    files: tuple[Path, ...]
    columns: tuple[str, str]
    groups: tuple[int, ...] = ()
    first: int = 0  # row of the first pair of the groups

    def count(self) -> dict:
        """The number of pairs, which Parquet states and others are read for."""
        if self.groups:
            metadata = parquet_file(self.files[0]).metadata
            return {"pairs": sum(metadata.row_group(group).num_rows for group in self.groups)}
        return {"pairs": sum(1 for _ in self.pairs())}

    def pairs(self, place: Place | None = None) -> Iterator[tuple[str, str]]:
        """The pairs.

        Raises:
            UserError: as `read_pairs`.
        """
        if not self.groups:
            return read_pairs(self.kind, [self.files], self.columns)
        return pairs_of_rows(read_parquet(self.files[0], self.columns, self.groups, self.first), self.columns)


@dataclass(frozen=True)
class PieceSplit:
    """One of `parts` pieces of a file that cannot be cut: the first counts its pairs and copies them for the others."""

    whole: FileSplit
    folder: Path  # where the copies lie, which all tasks share
    name: str  # what their names begin with
    number: int
    parts: int

    @property
    def files(self) -> tuple[Path, ...]:
        """What is copied."""
        return self.whole.files

    def count(self) -> dict:
        """The number of pairs of all pieces, by the first of them, and the facts of the copies."""
        if self.number:
            return {"pairs": 0}
        pairs, number, facts = self.whole.pairs(), 0, []
        while chunk := list(islice(pairs, COPIED_PAIRS)):
            facts.append(keep_pairs(self._copy(len(facts)), chunk))
            number += len(chunk)
        return {"pairs": number, "files": facts}

    def _copy(self, number: int) -> Path:
        return self.folder / f"{self.name}-{number:05d}.jsonl"

    def pairs(self, place: Place) -> Iterator[tuple[str, str]]:
        """The pairs."""
        first, skipped = divmod(place.first, COPIED_PAIRS)
        stop = -(-(place.first + place.pairs) // COPIED_PAIRS)
        copies = chain.from_iterable(kept_pairs(self._copy(number)) for number in range(first, stop))
        return islice(copies, skipped, skipped + place.pairs)


def keep_pairs(path: Path, pairs: Iterable[tuple[str, str]]) -> dict:
    """Write pairs into a file for a later task; returns the facts of the file."""
    rest, blocks = iter(pairs), []
    while block := list(islice(rest, _KEPT)):
        blocks.append(json.dumps(block, ensure_ascii=False) + "\n")
    text = "".join(blocks)
    if is_local(path):
        path.parent.mkdir(exist_ok=True)
    write_text(path, text)
    content = text.encode("utf-8")
    return {
        "file": f"{path.parent.name}/{path.name}",
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def kept_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """The pairs of such a file."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for block in map(json.loads, file):
            yield from [block] if isinstance(block[0], str) else block  # an earlier version has a pair in each line


@dataclass(frozen=True)
class RowSplit:
    """Rows of a dataset that `datasets` has on the disk."""

    dataset: datasets.Dataset
    first: int
    stop: int
    files: tuple[Path, ...] = ()

    def count(self) -> dict:
        """The number of rows."""
        return {"pairs": self.stop - self.first}

    def pairs(self, place: Place | None = None) -> Iterator[tuple[str, str]]:
        """The pairs."""
        return pairs_of(self.dataset.select(range(self.first, self.stop)))


Split = LineSplit | FileSplit | PieceSplit | RowSplit


def text_splits(source: PairSource) -> list[Split]:
    """The splits of a text, in its order."""
    if not isinstance(source, PairFiles) or source.split not in source.splits:
        dataset = source.load()
        starts = range(0, len(dataset), SPLIT_ROWS)
        return [RowSplit(dataset, start, min(start + SPLIT_ROWS, len(dataset))) for start in starts]
    splits: list[Split] = []
    for files in source.splits[source.split]:
        if source.kind == ".parquet":
            splits += _group_splits(files, source.columns)
        elif source.kind == "text" and all(map(_can_be_cut, files)):
            with file_errors(files[0]):
                parts = max(1, -(-files[0].stat().st_size // SPLIT_BYTES))
            splits += [LineSplit(files, number, parts) for number in range(parts)]
        else:
            splits.append(FileSplit(source.kind, files, source.columns))
    return splits


def _can_be_cut(path: Path) -> bool:
    """Whether a file of lines can be read from its middle: not a compressed one, nor what a server only streams."""
    if path.suffix.lower() == ".gz":
        return False
    with file_errors(path):
        facts = {"size": 0} if is_local(path) else path.fs.info(path.path)
    return facts["size"] is not None and facts.get("partial", True)


def in_pieces(splits: Sequence[Split], folder: Path, first: int = 0) -> list[Split]:
    """Splits with large files, which one task would read again at each stage, in pieces; `first` is the first's number.

    The copies of these files lie in `folder`.
    """
    pieces: list[Split] = []
    for number, split in enumerate(splits, first):
        parts = 1
        if isinstance(split, FileSplit) and not split.groups:
            size = sum((path.stat().st_size or 0) * (3 if path.suffix.lower() == ".gz" else 1) for path in split.files)
            parts = max(1, -(-size // (2 * SPLIT_BYTES)))  # of both sides
        name = f"text-{number:05d}"
        pieces += [split] if parts == 1 else [PieceSplit(split, folder, name, part, parts) for part in range(parts)]
    return pieces


def undecoded(split: Split) -> Split:
    """The same split, with U+FFFD for bytes of plain text that are not UTF-8, where they would be refused."""
    if isinstance(split, LineSplit):
        return replace(split, errors="replace")
    return replace(split, kind=UNDECODED) if isinstance(split, FileSplit) and split.kind == "text" else split


def _group_splits(files: tuple[Path, ...], columns: tuple[str, str]) -> Iterator[FileSplit]:
    groups, first, row, metadata = [], 0, 0, parquet_file(files[0]).metadata
    for group in range(metadata.num_row_groups):
        groups.append(group)
        row += metadata.row_group(group).num_rows
        if row - first >= SPLIT_ROWS or group == metadata.num_row_groups - 1:
            yield FileSplit(".parquet", files, columns, tuple(groups), first)
            groups, first = [], row


def places(splits: Sequence[Split], counts: Sequence[dict]) -> list[Place]:
    """Where the pairs of each split are, from what all their `count` gave.

    Raises:
        UserError: for source and target text of different lengths, and a file without any line.
    """
    found, number = [], 0
    while number < len(splits):
        split = splits[number]
        if isinstance(split, LineSplit):
            found += _places_in_lines(split.files, counts[number : number + split.parts])
            number += split.parts
        elif isinstance(split, PieceSplit):
            starts = [counts[number]["pairs"] * part // split.parts for part in range(split.parts + 1)]
            found += [Place(stop - start, start) for start, stop in pairwise(starts)]
            number += split.parts
        else:
            found.append(Place(counts[number]["pairs"]))
            number += 1
    return found


def _places_in_lines(files: tuple[Path, Path], counts: Sequence[dict]) -> list[Place]:
    source, target = (
        _Lines([count["lines"][side] for count in counts], [count["marks"][side] for count in counts])
        for side in (0, 1)
    )
    check_numbers_of_lines(files, [source.rows[-1], target.rows[-1]])
    if not source.rows[-1]:
        raise no_pair(files)
    return [
        Place(stop - first, first, (source.find(first), target.find(first))) for first, stop in pairwise(source.rows)
    ]


class _Lines:
    """Where lines of a file begin, as far as it is known."""

    def __init__(self, lines: Sequence[int], marks: Sequence[Sequence[tuple[int, int]]]):
        self.rows = list(accumulate(lines, initial=0))
        known = [(first + row, place) for first, own in zip(self.rows, marks, strict=False) for row, place in own]
        self._known = np.array([(0, 0), *known], np.int64)

    def find(self, row: int) -> tuple[int, int]:
        """A place at or before a row, and how many lines later the row begins."""
        known, place = self._known[np.searchsorted(self._known[:, 0], row, "right") - 1].tolist()
        return place, row - known


def _ends_with_line_feed(path: Path) -> bool:
    with open_bytes(path) as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
