"""A text file read once through before hours of work on it: how many lines, which text, and that nothing is wrong."""

import gzip
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .text_files import decode_lines, file_errors


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
