"""Lines of UTF-8 text files, plain or gzipped."""

import gzip
import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..errors import UserError, reading
from ..files import is_local, to_path

LONGEST_LINE = 1_000_000  # characters, also of a field of a table; its tokens take about 100 times the memory
_MOST_BYTES = 4 * LONGEST_LINE + 6  # of a line, with a byte order mark and an end
_BLOCK = 1 << 22  # bytes that are fetched at once from elsewhere

# Size and time of the last change of a file on the disk; None of pipes and devices. Of a file elsewhere its size, None
# where a server does not state it, and what marks its content there.
Stamp = tuple[int | None, int | str] | None
_MARKS = ("ETag", "etag", "blob_id", "LastModified", "Last-Modified", "mtime")  # of S3, Google, the Hub, servers, ...


def home_path(name: str | Path) -> Path:
    """Return a path whose leading ``~`` is the home folder, as the shell would have it; of an unknown user it stays."""
    return to_path(os.path.expanduser(str(name)))  # noqa: PTH111 - Path.expanduser raises for an unknown user


def open_bytes(path: Path) -> BinaryIO:
    """Open a file, plain or ``.gz``, to read its (unpacked) bytes; of one elsewhere little is read ahead."""
    # fsspec's readline copies a block a line
    raw = path.open("rb") if is_local(path) else io.BufferedReader(path.open("rb", block_size=_BLOCK), _BLOCK // 4)
    return gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw


def file_stamp(path: Path) -> Stamp:
    """Return what shows that a file has changed: size and time, or what a store marks its content by."""
    if is_local(path):
        status = path.stat()
        return (status.st_size, status.st_mtime_ns) if path.is_file() else None
    facts = path.fs.info(path.path)
    return facts.get("size"), str(next((facts[mark] for mark in _MARKS if facts.get(mark)), ""))


def check_on_disk(path: Path) -> None:
    """Raise `UserError` for a file that cannot be opened, and for a pipe or device, which could not be read twice."""
    with reading(path):
        if file_stamp(path) is None and not path.is_dir():
            raise UserError(f"{path} is a pipe or a device, and is read more than once: give a file on the disk")
        if is_local(path):
            path.open("rb").close()


def read_lines(path: Path, digest: Any = None, stamp: Stamp = None, errors: str = "strict") -> Iterator[str]:
    """Yield the lines of a UTF-8 text file, plain or ``.gz``; only a line feed, also after a carriage return, ends one.

    Args:
        digest: of `hashlib`, fed with all bytes, unpacked.
        stamp: the `file_stamp` of an earlier reading, which the file must still have.
        errors: as in `decode_lines`.

    Raises:
        UserError: a file that cannot be read, is cut off, or is not UTF-8, with the number of the line; a line of more
            than `LONGEST_LINE` characters; a file that is changed before its last line is read, in the end.
    """
    with reading(path), open_bytes(path) as stream:
        stamp = stamp or file_stamp(path)
        check_unchanged(path, stamp)
        yield from decode_lines(stream, str(path), digest, errors)
        if path.exists():
            check_unchanged(path, stamp)


def with_lines_of(lines: Iterable[str], where: str, path: Path, **options) -> Iterator[tuple[str, str]]:
    """Yield each line, of `where`, with the same line of a file; `options` are of `read_lines`.

    Raises:
        UserError: as soon as one of them ends before the other.
    """
    for number, pair in enumerate(zip_longest(lines, read_lines(path, **options))):
        if None in pair:
            longer, shorter = (path, where) if pair[0] is None else (where, path)
            counts = f"{longer} has more lines than {shorter}, which has {number:,}"
            raise UserError(f"{counts}: line n of one must belong to line n of the other")
        yield pair


def check_unchanged(path: Path, stamp: Stamp) -> None:
    """Raise `UserError` for a file whose size or time differs from an earlier `file_stamp`."""
    if file_stamp(path) != stamp:
        raise UserError(f"{path} has changed while it was read: run the command again once nothing writes to it")


def decode_lines(stream: BinaryIO, where: str, digest: Any = None, errors: str = "strict") -> Iterator[str]:
    """Yield lines of UTF-8 bytes as text, without ends and byte order mark; `digest` as in `read_lines`.

    Lines are yielded as soon as they have come; with `errors` "replace" bytes that are not UTF-8 become U+FFFD.

    Raises:
        UserError: for a line that is not UTF-8 or too long, with its number and with `where` it is from.
    """
    # A small compressed file may hold a line that is larger than the memory.
    for number, line in enumerate(iter(lambda: stream.readline(_MOST_BYTES + 1), b""), 1):
        if digest is not None:
            digest.update(line)
        if number == 1 and re.match(rb"\x1f\x8b|\xfd7zXZ|\x28\xb5\x2f\xfd|BZh[1-9]1AY&SY|PK\x03\x04", line):
            raise UserError(f"{where} is compressed: unpack it, or pack it by gzip as .gz")
        text, is_too_long, problem = "", len(line) > _MOST_BYTES, None
        try:
            text = "" if is_too_long else line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", errors)
        except UnicodeDecodeError as error:
            problem = f"byte offset {error.start} of the line is not valid UTF-8 ({error.reason}): convert it"
            problem += f" first, as by iconv -f {'UTF-16' if bytes([0]) in line else 'WINDOWS-1252'} -t UTF-8"
        text = text.removeprefix("\ufeff") if number == 1 else text
        if is_too_long or len(text) > LONGEST_LINE:
            problem = f"more than {LONGEST_LINE:,} characters without a line feed"
        if problem:
            raise UserError(f"{where}, line {number}: {problem}")
        yield text


def has_undecoded(text: str) -> bool:
    """Return whether a text has halves of surrogate pairs: from JSON, or Python's form of bytes that were not UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in text)


class TextScan(NamedTuple):
    """Facts about a text file that was read whole."""

    lines: int
    sha256: str  # of its bytes, unpacked, in hexadecimal
    stamp: Stamp  # to notice a change before it is read again


def scan_text(path: Path) -> TextScan:
    """Read a whole text file as `read_lines`, in constant memory: before hours are spent, and to know it again."""
    digest = hashlib.sha256()
    with reading(path):
        stamp = file_stamp(path)
    lines = sum(1 for _ in read_lines(path, digest, stamp))
    return TextScan(lines, digest.hexdigest(), stamp)
