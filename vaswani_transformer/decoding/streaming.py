"""Stream lines through a model in constant memory: in windows, read ahead, and in pieces where a line is too long.

The lines of a window are sorted by length and translated together, and written in their own order when all are done.
"""

import logging
import re
import sys
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

from tqdm.auto import tqdm

from ..data.cleaning_rules import language_of
from ..errors import items_of, texts_in
from ..model.sentence_splitting_vaswani import split_into_sentences

logger = logging.getLogger(__name__)

WINDOW_LINES = 2000  # more lines need less padding, fewer lines are written sooner
WINDOW_CHARACTERS = 10_000_000  # a window of longer lines has fewer of them: its tokens need about 1 GB
_NAMED = 10  # lines of which something is reported that are named one by one
_END = object()
_CLAUSE_END = re.compile(r"(?<=[,;:–—])(?=\s)|(?<=[，；：、])")
_TOKEN_CHARACTERS = 20  # of a token, at most; where one has more, pieces are shorter than they could be

# How a sentence is divided, the mildest way first, and what joins such parts again.
_WAYS: tuple[tuple[Callable[[str], list[str]], str], ...] = (
    (lambda text: [clause for clause in _CLAUSE_END.split(text) if clause], ""),
    (str.split, " "),
    (list, ""),
)


@dataclass
class Window:
    """Lines that follow each other."""

    index: int  # of the window, from 0
    first: int  # number of its first line, from 1
    lines: list[Any]
    error: Exception | None = None  # what ended the reading after these lines
    pieces: Sequence = ()  # what a `Translator` that has prepared it translates, in the order of the lines
    split: Sequence[int] = ()  # and numbers of the lines that were too long

    def check(self) -> None:
        """Raise what ended the reading, if anything, once these lines are written."""
        if self.error is not None:
            raise self.error


Remarks = defaultdict[str, list[int]]  # the numbers of lines to report once all are written, by what is reported
SPLIT = "longer than the model can take, and translated in parts"
CUT = "translated into endless repetition, which was cut off"


def report(remarks: Remarks) -> None:
    """Log the first numbers of each kind, and how many there are."""
    for remark, numbers in remarks.items():
        named = ", ".join(f"{number:,}" for number in numbers[:_NAMED])
        more = f" and {len(numbers) - _NAMED:,} more" if len(numbers) > _NAMED else ""
        lines = "1 line was" if len(numbers) == 1 else f"{len(numbers):,} lines were"
        if numbers:
            logger.warning(f"{lines} {remark}: {named}{more}")


class LineWorker:
    """Does lines, such as translating them, window by window into an output.

    A subclass has `records(window, bar, remarks)`, which returns the text to write of each line.
    """

    doing, unit = "translating", "sentences"  # of the progress bar
    window = WINDOW_LINES  # lines that are sorted by length and written together

    def run(
        self, lines: Iterable[str | tuple[str, str]], output: Any, total: int | None = None, progress: bool = True
    ) -> None:
        """Do all lines: sources, or pairs of a source and its translation or the prefix of it.

        Args:
            output: where to write, a `StreamOutput` or `ResumableOutput`; lines that it has already are skipped.
            total: number of lines, for the progress bar on standard error, if known.

        Raises:
            UserError: for a mistake in a line, once the lines before it are written.
        """
        remarks, windows = defaultdict(list), in_windows(lines, self.window, output.done)
        # smoothing=0: lines of a window come longest first, so that the latest rate says little about the rest.
        try:
            with tqdm(
                total=total, initial=output.done // self.window * self.window, desc=self.doing, unit=f" {self.unit}",
                file=sys.stderr, disable=not progress, smoothing=0,
            ) as bar:  # fmt: skip
                self.write(windows, output, bar, remarks, output.done)
        finally:
            report(remarks)

    def write(self, windows: Iterator[Window], output: Any, bar: Any, remarks: Remarks, done: int) -> None:
        """Write the records of windows, up to the first error, as `run`; updates `bar` and `remarks`."""
        for window in read_ahead(map(self.prepare, windows)):
            records = self.records(window, bar, remarks)
            output.write("".join(records[max(0, done - window.first + 1) :]))
            window.check()

    def prepare(self, window: Window) -> Window:
        """Return the window as `records` takes it, in the thread that reads ahead."""
        return window


def batches_by_length(lengths: list[int], tokens: int) -> list[list[int]]:
    """Return indices in batches of at most `tokens` tokens with padding, longest first; one that is longer alone."""
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches, start = [], 0
    while start < len(longest_first):
        size = max(1, tokens // lengths[longest_first[start]])
        batches.append(longest_first[start : start + size])
        start += size
    return batches


def in_windows(lines: Iterable[Any], size: int, done: int = 0) -> Iterator[Window]:
    """Yield lines in windows of `size`, or of fewer with `WINDOW_CHARACTERS`; an error of reading is in the last one.

    The windows are those of all lines, but without the first ones that hold nothing beyond the `done` lines.
    """
    lines, first, is_last = iter(items_of(lines)), 1, False
    for index in count():
        window, characters = Window(index, first, []), 0
        try:
            while len(window.lines) < size and characters < WINDOW_CHARACTERS:
                line, number = next(lines), first + len(window.lines)
                for part in line if isinstance(line, tuple | list) else [line]:
                    characters += len(texts_in([part], "line", number)[0])
                window.lines.append(line)
        except StopIteration:
            is_last = True
        except Exception as error:
            window.error, is_last = error, True
        first += len(window.lines)
        if window.error is not None or (window.lines and first - 1 > done):
            yield window
        if is_last:
            return


def read_ahead(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the same items, the next one made in a thread meanwhile; an error of `items` is raised in its place.

    The threads are daemons, unlike those of an executor: one that waits for input does not keep a program alive.
    """
    items = iter(items)

    def fetch(future: Future) -> None:
        try:
            future.set_result(next(items, _END))
        except BaseException as error:
            future.set_exception(error)

    def start() -> Future:
        threading.Thread(target=fetch, args=(future := Future(),), daemon=True).start()
        return future

    future = start()
    while (item := future.result()) is not _END:
        future = start()
        yield item


def split_line(text: str, limit: int, count: Callable[[str], int], language: str = "en") -> list[str]:
    """Divide a text into pieces of at most `limit` tokens: sentences, or clauses, words, characters of those too long.

    Sentences stay alone, as a model knows them from training; smaller pieces are joined as far as they fit. Joined by
    spaces (characters by nothing) the pieces are the text but for its white space. A single character is a piece even
    if it has more tokens. `count` counts the tokens of a text, `language` is the code of its language, or `"auto"`.
    """
    language = language_of(text, language)
    return [piece.strip() for part in split_into_sentences(text, language) for piece in _divide(part, limit, count)]


def _divide(text: str, limit: int, count: Callable[[str], int], way: int = 0) -> list[str]:
    if count(text) <= limit or way == len(_WAYS):
        return [text]
    divide, joint = _WAYS[way]
    parts = divide(text)
    pieces, start = [], 0
    while start < len(parts):
        # The most parts that fit, one at least. More of them have more tokens, nearly always, and each has one or more.
        most = start + limit * (1 if joint else _TOKEN_CHARACTERS)
        ends = range(start + 2, min(most, len(parts)) + 1)
        end = start + 1 + bisect_right(ends, limit, key=lambda end: count(joint.join(parts[start:end])))
        pieces += _divide(joint.join(parts[start:end]), limit, count, way + 1)
        start = end
    return pieces
