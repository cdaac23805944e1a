"""Lines of UTF-8 text files, plain or gzipped."""

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError


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


def read_lines(path: Path, digest: Any = None) -> Iterator[str]:
    """Lines of a UTF-8 text file, plain or ``.gz``; only a line feed (with or without a carriage return) ends one.

    Args:
        path: the file.
        digest: of `hashlib`, fed with all bytes, unpacked.

    Raises:
        UserError: a file that cannot be read, is not whole, or is not UTF-8, with the number of the line.
    """
    number = 0
    with file_errors(path, lambda: number), path.open("rb") as raw:
        lines = gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw
        if digest is not None:
            lines = (digest.update(line) or line for line in lines)
        for number, line in enumerate(decode_lines(lines, str(path)), 1):  # noqa: B007
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


class TextScan(NamedTuple):
    """What reading a whole text file has shown: lines, and SHA-256 of its bytes, unpacked, in hexadecimal."""

    lines: int
    sha256: str


def scan_text(path: Path) -> TextScan:
    """Read a whole text file as `read_lines`, in constant memory: before hours are spent, and to know it again."""
    digest = hashlib.sha256()
    lines = sum(1 for _ in read_lines(path, digest))
    return TextScan(lines, digest.hexdigest())
