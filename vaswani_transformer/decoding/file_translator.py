"""Translates lines of a file or a stream into an output, in order, window by window."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TextIO

from tqdm.auto import tqdm

from ..data.text_files import Stamp, read_lines
from ..errors import UserError
from .confidence import Words, mean_confidence
from .output import ResumableOutput, StreamOutput
from .streaming import WINDOW_LINES, Remarks, Window, in_windows, read_ahead
from .translator import Hypothesis, Translator

Aligner = Callable[[Sequence[str], Sequence[str]], list[str]]  # sources and targets to Pharaoh lines


@dataclass(frozen=True)
class Layout:
    """How translations are written."""

    numbered: bool = False  # number of the line TAB score TAB translation
    scores: bool = False  # score TAB translation
    json: bool = False  # instead, one JSON object for each line of input, with all that is known

    def record(
        self,
        number: int,
        hypotheses: list[Hypothesis],
        alignments: list[str] | None = None,
        confidence: list[Words] | None = None,
    ) -> str:
        """Return the text of line `number`, line ends included; an alignment is the last field of its hypothesis."""
        nothing = [None] * len(hypotheses)
        rows = list(zip(hypotheses, alignments or nothing, confidence or nothing, strict=True))
        if self.json:
            values = {"line": number, "hypotheses": [_as_json(*row) for row in rows]}
            return json.dumps(values, ensure_ascii=False) + "\n"
        lines = []
        for hypothesis, alignment, words in rows:
            fields = [str(number)] if self.numbered else []
            fields += [f"{hypothesis.score:.6f}"] if self.scores or self.numbered else []
            fields += [] if words is None else [f"{mean_confidence(words):.3f}"]
            fields += [hypothesis.text] if alignment is None else [hypothesis.text, alignment]
            lines.append("\t".join(part.replace("\t", " ") if len(fields) > 1 else part for part in fields) + "\n")
        return "".join(lines)


def _as_json(hypothesis: Hypothesis, alignment: str | None, words: Words | None) -> dict[str, Any]:
    values = {"text": hypothesis.text, "tokens": hypothesis.tokens}
    if hypothesis.score is not None:
        values |= {"score": hypothesis.score, "log_probability": hypothesis.log_probability}
    if hypothesis.repeats:
        values["repeats"] = True
    if words is not None:
        values |= {"confidence": mean_confidence(words), "words": words}
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
    """Translates lines into an output.

    `align` makes the alignments, if they are wanted, and `confide` says how sure the model is of each word; both take
    sources and their translations. `window` lines are sorted by length and written together.
    """

    doing, unit = "translating", "sentences"  # of the progress bar

    def __init__(
        self,
        translator: Translator,
        layout: Layout | None = None,
        align: Aligner | None = None,
        window: int = WINDOW_LINES,
        confide: Callable[[list[str], list[str]], list[Words]] | None = None,
    ):
        self.translator, self.layout, self.align, self.confide = translator, layout or Layout(), align, confide
        self.window = window

    def run(
        self,
        lines: Iterable[str | tuple[str, str]],
        output: StreamOutput | ResumableOutput,
        done: int = 0,
        total: int | None = None,
        ahead: bool = True,
        progress: bool = True,
    ) -> None:
        """Translate all lines: sources, or pairs of a source and the prefix of its translation.

        Args:
            lines: all lines.
            output: where to write.
            done: number of lines whose translations are in the output already; they are skipped.
            total: number of lines, for the progress bar on standard error, if known.
            ahead: whether a thread reads and tokenises the next windows meanwhile.
            progress: whether to show the progress bar.

        Raises:
            UserError: for a mistake in a line, once the lines before it are written.
        """
        # smoothing=0: lines of a window come longest first, so that the latest rate says little about the rest.
        with tqdm(
            total=total, initial=done // self.window * self.window, desc=self.doing, unit=f" {self.unit}",
            file=sys.stderr, disable=not progress, smoothing=0,
        ) as bar:  # fmt: skip
            remarks = self.write(in_windows(lines, self.window, done), output, bar, done, ahead)
        remarks.report()

    def write(
        self,
        windows: Iterator[Window],
        output: StreamOutput | ResumableOutput | TextIO,
        bar: Any,
        done: int = 0,
        ahead: bool = True,
    ) -> Remarks:
        """Write the translations of windows, up to the first error; `bar` is updated as sentences are translated.

        The rest is as of `run`.
        """
        prepared, remarks = map(self.translator.prepare, windows), Remarks()
        with contextlib.ExitStack() as stack:
            if ahead:
                prepared = stack.enter_context(contextlib.closing(read_ahead(prepared)))
            for chunk in prepared:
                first, hypotheses = chunk.window.first, self.translator.translate_prepared(chunk, bar)
                records = self._format(chunk.window, hypotheses)
                output.write("".join(records[max(0, done - first + 1) :]))
                remarks.split += chunk.split
                remarks.cut += [line for line, row in enumerate(hypotheses, first) if any(h.repeats for h in row)]
                remarks.error = chunk.window.error
                if remarks.error is not None:
                    break
        return remarks

    def _format(self, window: Window, hypotheses: list[list[Hypothesis]]) -> list[str]:
        """Return the text of each line of a window."""
        extras = [self._of_each(function, window.lines, hypotheses) for function in (self.align, self.confide)]
        return [
            self.layout.record(number, *line)
            for number, line in enumerate(zip(hypotheses, *extras, strict=True), window.first)
        ]

    @staticmethod
    def _of_each(function: Callable | None, lines: list, hypotheses: list[list[Hypothesis]]) -> list[list | None]:
        """Apply a function of sources and targets to each hypothesis of each line."""
        if function is None:
            return [None] * len(hypotheses)
        sources = [line if isinstance(line, str) else line[0] for line in lines]
        repeated = [source for source, row in zip(sources, hypotheses, strict=True) for _ in row]
        results = iter(function(repeated, [hypothesis.text for row in hypotheses for hypothesis in row]))
        return [list(islice(results, len(row))) for row in hypotheses]
