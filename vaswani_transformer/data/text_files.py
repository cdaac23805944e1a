"""Lines of UTF-8 text files, plain or gzipped."""

import gzip
import hashlib
import io
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, BinaryIO, NamedTuple

from ..errors import UserError, one_line
from ..files import is_local, to_path

LONGEST_LINE = 1_000_000  # characters, also of a field of a table; its tokens take about 100 times the memory
_BLOCK = 2**22  # bytes that are fetched at once from elsewhere
_MOST_BYTES = 4 * LONGEST_LINE + 6  # with a byte order mark, an end, and one more

# Size and time of the last change of a file on the disk; None of pipes and devices. Of a file elsewhere its size, None
# where a server does not state it, and what marks its content there.
Stamp = tuple[int | None, int | str] | None
_MARKS = ("ETag", "etag", "blob_id", "LastModified", "Last-Modified", "mtime")  # of S3, Google, the Hub, servers, ...


def home_path(name: str | Path) -> Path:
    """A path whose leading ``~`` is the home folder, as the shell would have it; of an unknown user it stays.

    Raises:
        UserError: as `to_path`.
    """
    return to_path(os.path.expanduser(str(name)))  # noqa: PTH111 - Path.expanduser raises for an unknown user


def open_bytes(path: Path) -> BinaryIO:
    """Open a file to read its bytes; of one elsewhere no more than a few megabytes are read ahead."""
    if is_local(path):
        return path.open("rb")
    return io.BufferedReader(path.open("rb", block_size=_BLOCK), _BLOCK // 4)  # fsspec's readline copies a block a line


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn what an object store or a server refuses into `UserError`; of a path on this machine nothing is changed.

    The library that reaches it has tried several times by then. Each raises errors of kinds of its own, so they are
    known by the way they came.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        passed = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
        if is_local(path) or not passed & {"fsspec", "upath", "huggingface_hub"}:
            raise
        cause = error.__cause__ or error
        reason = one_line(cause) or type(cause).__name__
        if isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) == 404:
            reason = "there is no such file"
        raise UserError(f"{path}: {reason}; check the URL, your access and the network") from error


@contextmanager
def file_errors(path: Path, lines_read: Callable[[], int] | None = None) -> Iterator[None]:
    """Turn what goes wrong with a file into `UserError`; `lines_read` tells how far a cut-off gzip file was read."""
    try:
        with store_errors(path):
            yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        place = f", it ends after line {lines_read()}" if lines_read else ""
        raise UserError(f"{path} is not a whole gzip file ({error}{place}); copy or compress it again") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); check name and access") from error


def file_stamp(path: Path, file: BinaryIO | None = None) -> Stamp:
    """What shows whether a file has changed since; of one on the disk the open `file` counts, if it is given."""
    if not is_local(path):
        facts = path.fs.info(path.path)
        return facts["size"], next((str(facts[mark]) for mark in _MARKS if facts.get(mark)), "")
    facts = path.stat() if file is None else os.fstat(file.fileno())
    return (facts.st_size, facts.st_mtime_ns) if stat.S_ISREG(facts.st_mode) else None


def check_on_disk(path: Path) -> None:
    """Refuse what cannot be read more than once, before it is opened: a pipe would lose its content, or wait for ever.

    Raises:
        UserError: for a pipe, a device or a folder, and for a file that is missing or must not be read.
    """
    with file_errors(path):
        if file_stamp(path) is None and not path.is_dir():
            raise UserError(f"{path} is a pipe or a device, and is read more than once: give a file on the disk")
        with path.open("rb"):
            pass


def read_lines(
    path: Path, digest: Any = None, stamp: Stamp = None, start: int = 0, first: int = 1, errors: str = "strict"
) -> Iterator[str]:
    """Lines of a UTF-8 text file, plain or ``.gz``; only a line feed (with or without a carriage return) ends one.

    Args:
        path: the file.
        digest: of `hashlib`, fed with all bytes, unpacked.
        stamp: what the file must still have, from an earlier reading.
        start: the byte, unpacked, with which line `first` begins; of a packed file those before are unpacked too.
        first: number of the first line.
        errors: as of `decode_lines`.

    Raises:
        UserError: a file that cannot be read, is not whole, or is not UTF-8, with the number of the line; a line of
            more than `LONGEST_LINE` characters; a file that is changed before its last line is read, in the end.
    """
    number = first - 1
    with file_errors(path, lambda: number), open_bytes(path) as raw:
        stamp = stamp or file_stamp(path, raw)
        check_unchanged(path, raw, stamp)
        stream = gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw
        if start:  # a pipe has no place to seek
            stream.seek(start)
        for number, line in enumerate(decode_lines(stream, str(path), digest, first, errors), first):  # noqa: B007
            yield line
        check_unchanged(path, raw, stamp)


def check_unchanged(path: Path, file: BinaryIO | None, stamp: Stamp) -> None:
    """Raise `UserError` for a file, open if `file` is given, that has not the size and time any more that it had."""
    if file_stamp(path, file) != stamp:
        raise UserError(f"{path} has changed while it was read: run the command again once nothing writes to it")


def decode_lines(
    stream: BinaryIO, where: str, digest: Any = None, first: int = 1, errors: str = "strict"
) -> Iterator[str]:
    """Lines of UTF-8 bytes as text, without their ends and without a byte order mark; `digest` as of `read_lines`.

    `first` is the number of the line with which the stream begins; with `errors` "replace" bytes that are not UTF-8
    become U+FFFD.

    Raises:
        UserError: for a line that is not UTF-8 or too long, with its number and with `where` it is from.
    """
    # Not all of a line at once: a small compressed file may hold one that is larger than the memory.
    for number, line in enumerate(iter(partial(stream.readline, _MOST_BYTES), b""), first):
        place = f"{where}, line {number}"
        if digest is not None:
            digest.update(line)
        try:
            text = (
                None
                if len(line) == _MOST_BYTES
                else line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", errors)
            )
        except UnicodeDecodeError as error:
            problem = f"byte offset {error.start} of the line: not valid UTF-8 ({error.reason})"
            raise UserError(f"{place}, {problem}; convert it to UTF-8 (of compressed files, .gz is read)") from None
        if text is not None and number == 1:
            text = text.removeprefix("\ufeff")
        if text is None or len(text) > LONGEST_LINE:
            rule = f"more than {LONGEST_LINE:,} characters without a line feed"
            raise UserError(f"{place}: {rule}; put one after each sentence, or remove the line")
        yield text


def has_undecoded(text: str) -> bool:
    """Whether a text holds halves of surrogate pairs: from JSON, or Python's form of bytes that were not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


class TextScan(NamedTuple):
    """What reading a whole text file has shown."""

    lines: int
    sha256: str  # of its bytes, unpacked, in hexadecimal
    stamp: Stamp  # to notice a change before it is read again


def scan_text(path: Path) -> TextScan:
    """Read a whole text file as `read_lines`, in constant memory: before hours are spent, and to know it again."""
    digest = hashlib.sha256()
    with file_errors(path):
        stamp = file_stamp(path)
    lines = sum(1 for _ in read_lines(path, digest, stamp))
    return TextScan(lines, digest.hexdigest(), stamp)
