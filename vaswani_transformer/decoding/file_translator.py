"""Translates lines of a file or a stream into an output, in order, window by window."""

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..data.text_files import Stamp, read_lines
from ..errors import UserError
from ..hardware import use_free_threads
from .output import ResumableOutput, StreamOutput
from .streaming import WINDOW_LINES, Window, WindowRecords, in_windows, over_processes, read_ahead
from .translator import Hypothesis, PreparedWindow, Translator

logger = logging.getLogger(__name__)

Aligner = Callable[[Sequence[str], Sequence[str]], list[str]]  # sources and targets to Pharaoh lines
_NAMED = 10  # lines translated in parts that are named one by one


@dataclass(frozen=True)
class Layout:
    """How translations are written."""

    numbered: bool = False  # number of the line TAB score TAB translation
    scores: bool = False  # score TAB translation
    json: bool = False  # instead, one JSON object for each line of input, with all that is known

    def record(self, number: int, hypotheses: list[Hypothesis], alignments: list[str] | None = None) -> str:
        """What is written for line `number`, line ends included; an alignment is the last field of its hypothesis."""
        pairs = list(zip(hypotheses, alignments or [None] * len(hypotheses), strict=True))
        if self.json:
            values = {"line": number, "hypotheses": [_as_json(*pair) for pair in pairs]}
            return json.dumps(values, ensure_ascii=False) + "\n"
        lines = []
        for hypothesis, alignment in pairs:
            fields = [str(number)] if self.numbered else []
            fields += [f"{hypothesis.score:.6f}"] if self.scores or self.numbered else []
            fields += [hypothesis.text] if alignment is None else [hypothesis.text, alignment]
            lines.append("\t".join(part.replace("\t", " ") if len(fields) > 1 else part for part in fields) + "\n")
        return "".join(lines)


def _as_json(hypothesis: Hypothesis, alignment: str | None) -> dict[str, Any]:
    values = {"text": hypothesis.text, "tokens": hypothesis.tokens}
    if hypothesis.score is not None:
        values |= {"score": hypothesis.score, "log_probability": hypothesis.log_probability}
    return values if alignment is None else values | {"alignment": alignment}


def with_prefixes(lines: Iterable[str], prefixes: Path, stamp: Stamp = None) -> Iterator[tuple[str, str]]:
    """Each line with the same line of the prefix file, which must still have the `stamp` of an earlier reading.

    Raises:
        UserError: as soon as one of them ends before the other.
    """
    for number, (line, prefix) in enumerate(zip_longest(lines, read_lines(prefixes, stamp=stamp))):
        if prefix is None or line is None:
            short, long = (prefixes, "the input") if prefix is None else ("the input", prefixes)
            raise UserError(f"{short} has {number:,} lines and {long} has more: give a prefix for each, empty for none")
        yield line, prefix


class FileTranslator:
    """Translates lines into an output, alone or as process `rank` of `world_size`, of which process 0 writes.

    `align` makes the alignments, if they are wanted; `window` lines are sorted by length and written together.
    """

    doing = "translating"  # label of the progress bar

    def __init__(
        self,
        translator: Translator,
        layout: Layout | None = None,
        align: Aligner | None = None,
        window: int = WINDOW_LINES,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.translator, self.layout, self.align = translator, layout or Layout(), align
        self.window, self.rank, self.world_size = window, rank, world_size

    def run(
        self,
        lines: Iterable[str | tuple[str, str]],
        output: StreamOutput | ResumableOutput | None,
        done: int = 0,
        total: int | None = None,
        ahead: bool = True,
        progress: bool = True,
    ) -> None:
        """Translate all lines: sources, or pairs of a source and the beginning of its translation.

        Args:
            lines: all lines, in every process.
            output: where to write; None in all processes but the first.
            done: number of lines whose translations are in the output already; they are skipped.
            total: number of lines, for the progress bar on standard error, if known.
            ahead: whether a thread reads and tokenises the next windows meanwhile.
            progress: whether to show the progress bar.

        Raises:
            UserError: for a mistake in a line, once the lines before it are written; in process 0 only.
        """
        windows = islice(in_windows(lines, self.window, done), self.rank, None, self.world_size)
        prepared: Iterator[PreparedWindow] = map(self.translator.prepare, windows)
        split: list[int] = []
        error = None
        with contextlib.ExitStack() as stack:
            if ahead:
                prepared = stack.enter_context(contextlib.closing(read_ahead(prepared)))
            # smoothing=0: lines of a window come longest first, so that the latest rate says little about the rest.
            bar = stack.enter_context(
                tqdm(
                    total=total, initial=done // self.window * self.window, desc=self.doing, unit=" sentences",
                    file=sys.stderr, disable=not (progress and self.rank == 0), smoothing=0,
                )
            )  # fmt: skip
            own = (self._records(window, bar) for window in prepared)
            for place, window in enumerate(own if self.world_size == 1 else over_processes(own)):
                if output is not None:
                    output.write("".join(window.records[max(0, done - window.first + 1) :]))
                if place % self.world_size != self.rank:
                    bar.update(len(window.records))
                split += window.split
                error = window.error  # only the last window has one
        if self.rank == 0:
            if split:
                named = ", ".join(f"{number:,}" for number in split[:_NAMED])
                more = f" and {len(split) - _NAMED:,} more" if len(split) > _NAMED else ""
                what = "1 line was" if len(split) == 1 else f"{len(split):,} lines were"
                logger.warning(f"{what} longer than the model takes and translated in parts: {named}{more}")
            if error is not None:
                raise error

    def _records(self, prepared: PreparedWindow, bar: tqdm) -> WindowRecords:
        window = prepared.window
        use_free_threads()
        records = self._format(window, self.translator.translate_prepared(prepared, bar))
        return WindowRecords(window.first, records, prepared.split, window.error)

    def _format(self, window: Window, hypotheses: list[list[Hypothesis]]) -> list[str]:
        """What is written for each line of a window."""
        alignments = [None] * len(hypotheses) if self.align is None else self._alignments(window.lines, hypotheses)
        return [
            self.layout.record(number, *line)
            for number, line in enumerate(zip(hypotheses, alignments, strict=True), window.first)
        ]

    def _alignments(self, lines: list, hypotheses: list[list[Hypothesis]]) -> list[list[str]]:
        """The alignment of each hypothesis of each line."""
        sources = [line if isinstance(line, str) else line[0] for line in lines]
        repeated = [source for source, row in zip(sources, hypotheses, strict=True) for _ in row]
        alignments = iter(self.align(repeated, [hypothesis.text for row in hypotheses for hypothesis in row]))
        return [list(islice(alignments, len(row))) for row in hypotheses]
