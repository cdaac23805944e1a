"""Files of any size, or streams, translated line by line: read ahead, in windows, written in order as it goes."""

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..data.text_files import read_lines
from ..errors import UserError
from .output import ResumableOutput, StreamOutput
from .streaming import WINDOW_LINES, Turns, WindowRecords, in_windows, read_ahead
from .translator import Hypothesis, PreparedWindow, Translator

logger = logging.getLogger(__name__)

Aligner = Callable[[Sequence[str], Sequence[str]], list[str]]  # sources and targets to Pharaoh lines


@dataclass(frozen=True)
class Layout:
    """How translations are written.

    Args:
        numbered: the number of the line and the score before each of several translations of a line, with tabs.
        scores: the score before a translation, with a tab.
        json: one JSON object a line instead, with all that is known.
    """

    numbered: bool = False
    scores: bool = False
    json: bool = False

    def record(self, number: int, hypotheses: list[Hypothesis], alignments: list[str] | None = None) -> str:
        """What is written for a line, line ends included; alignments, one a hypothesis, come last."""
        ends = alignments or [None] * len(hypotheses)
        if self.json:
            found = [_as_json(hypothesis, alignment) for hypothesis, alignment in zip(hypotheses, ends, strict=True)]
            return json.dumps({"line": number, "hypotheses": found}, ensure_ascii=False) + "\n"
        lines = []
        for hypothesis, alignment in zip(hypotheses, ends, strict=True):
            fields = [str(number)] if self.numbered else []
            fields += [f"{hypothesis.score:.6f}"] if self.scores or self.numbered else []
            fields += [hypothesis.text] + ([] if alignment is None else [alignment])
            lines.append("\t".join(" ".join(part.split("\t")) if len(fields) > 1 else part for part in fields) + "\n")
        return "".join(lines)

    def lines_per_record(self, hypotheses: int) -> int:
        """Lines that are written for one line of input."""
        return 1 if self.json else hypotheses


def _as_json(hypothesis: Hypothesis, alignment: str | None) -> dict[str, Any]:
    values = {"text": hypothesis.text, "tokens": hypothesis.tokens}
    if hypothesis.score is not None:
        values |= {"score": hypothesis.score, "log_probability": hypothesis.log_probability}
    return values if alignment is None else values | {"alignment": alignment}


def with_prefixes(lines: Iterable[str], prefixes: Path | None) -> Iterator[str | tuple[str, str]]:
    """Each line with the line of the prefix file beside it.

    Raises:
        UserError: as soon as one of both ends before the other.
    """
    if prefixes is None:
        yield from lines
        return
    others, number = read_lines(prefixes), 0
    for number, line in enumerate(lines, 1):
        prefix = next(others, None)
        if prefix is None:
            raise UserError(
                f"{prefixes} has {number - 1:,} lines and the input has more: give one for each line, empty for none"
            )
        yield line, prefix
    if next(others, None) is not None:
        raise UserError(f"{prefixes} has more lines than the input's {number:,}: give one for each line")


class FileTranslator:
    """Translates lines into an output.

    Args:
        translator: does the work.
        layout: how the translations are written.
        align: gives the alignments of sources and targets, if they are wanted.
        window: lines that are sorted by length together, and written together.
        turns: of several processes.
    """

    doing = "translating"  # label of the progress bar

    def __init__(
        self,
        translator: Translator,
        layout: Layout | None = None,
        align: Aligner | None = None,
        window: int = WINDOW_LINES,
        turns: Turns | None = None,
    ):
        self.translator, self.layout, self.align = translator, layout or Layout(), align
        self.window, self.turns = window, turns or Turns()

    def run(
        self,
        lines: Iterable[str | tuple[str, str]],
        output: StreamOutput | ResumableOutput | None,
        done: int = 0,
        total: int | None = None,
        ahead: bool = True,
        progress: bool = True,
    ) -> int:
        """Translate all lines.

        Args:
            lines: sources, or pairs of a source and the beginning of its translation.
            output: where to; None in all of several processes but the first.
            done: lines whose translations are there already; whole windows of them are passed over.
            total: how many lines there are, if known; needed for several processes.
            ahead: whether the next windows are read and tokenised in a thread meanwhile.
            progress: whether to show a bar on standard error.

        Returns:
            lines that were translated now, by all processes.

        Raises:
            UserError: for a mistake in a line, once the lines before it are written.
        """
        start = done // self.window
        passed = start * self.window
        windows = (window for window in in_windows(lines, self.window, start) if self.turns.is_mine(window.index))
        prepared = map(self.translator.prepare, windows)
        show = progress and self.turns.rank == 0
        with contextlib.ExitStack() as stack:
            if ahead:
                prepared = stack.enter_context(read_ahead(prepared))
            bar = stack.enter_context(_bar(self.doing, total, passed, show))
            if self.turns.rank:
                for one in prepared:
                    self.turns.give(self._records(one, None))
                return 0
            return self._write_all(self._results(prepared, start, total, bar), output, done)

    def _results(self, prepared: Iterator[PreparedWindow], start: int, total: int | None, bar) -> Iterator:
        """Records of all windows in order, from whichever process."""
        if self.turns.world_size == 1:
            yield from (self._records(one, bar) for one in prepared)
            return
        for index in range(start, -(-total // self.window)):
            if self.turns.is_mine(index):
                yield self._records(next(prepared), bar)
            else:
                window = self.turns.take(index)
                bar.update(len(window.records))
                yield window

    def _records(self, prepared: PreparedWindow, bar) -> WindowRecords:
        hypotheses = self.translator.translate_prepared(prepared, bar)
        window = prepared.window
        alignments = self._alignments(window.lines, hypotheses)
        records = [
            self.layout.record(number, *found)
            for number, found in enumerate(zip(hypotheses, alignments, strict=True), window.first)
        ]
        if window.error is not None and not isinstance(window.error, UserError):
            raise window.error
        return WindowRecords(window.index, records, prepared.split, str(window.error) if window.error else None)

    def _alignments(self, lines: list, hypotheses: list[list[Hypothesis]]) -> list[list[str] | None]:
        if self.align is None:
            return [None] * len(lines)
        sources = [line if isinstance(line, str) else line[0] for line in lines]
        flat = [(source, found.text) for source, row in zip(sources, hypotheses, strict=True) for found in row]
        filled = [pair for pair in flat if all(side.strip() for side in pair)]
        found = iter(self.align(*map(list, zip(*filled, strict=True))) if filled else [])
        aligned = iter([next(found) if all(side.strip() for side in pair) else "" for pair in flat])
        return [[next(aligned) for _ in row] for row in hypotheses]

    def _write_all(self, results: Iterable[WindowRecords], output, done: int) -> int:
        written, split = 0, []
        for window in results:
            records = window.records[max(0, done - window.index * self.window) :]
            output.write("".join(records))
            self.turns.wrote(window.index)
            written += len(records)
            split += window.split
            if window.error is not None:
                _report_split(split)
                raise UserError(window.error)
        _report_split(split)
        return written


def _bar(doing: str, total: int | None, initial: int, show: bool) -> tqdm:
    # smoothing=0: lines of a window come longest first, so that the latest rate says little about the rest.
    return tqdm(
        total=total,
        initial=initial,
        desc=doing,
        unit=" sentences",
        file=sys.stderr,
        disable=not show,
        smoothing=0,
    )


_NAMED = 10  # lines that are named one by one


def _report_split(split: list[int]) -> None:
    if split:
        named = ", ".join(f"{number:,}" for number in split[:_NAMED])
        more = f" and {len(split) - _NAMED:,} more" if len(split) > _NAMED else ""
        what = "1 line was" if len(split) == 1 else f"{len(split):,} lines were"
        logger.warning(f"{what} longer than the model takes and translated in parts: {named}{more}")


__all__ = ["FileTranslator", "Layout", "with_prefixes"]
