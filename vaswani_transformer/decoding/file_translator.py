"""Translates lines of a file or a stream into an output, in order, window by window."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from .scoring import mean_confidence
from .streaming import CUT, SPLIT, WINDOW_LINES, LineWorker, Remarks, Window
from .translator import Hypothesis, Translator


def record(
    number: int, hypotheses: list[Hypothesis], numbered: bool = False, scores: bool = False, as_json: bool = False
) -> str:
    """Return the text of line `number`, line ends included; an alignment is the last field of its hypothesis.

    `numbered`: number of the line TAB score TAB translation; `scores`: score TAB translation; `as_json`: instead, one
    JSON object for each line of input, with all that is known.
    """
    if as_json:
        known = []
        for each in hypotheses:
            confidence = None if each.words is None else mean_confidence(each.words)
            values = vars(each) | {"repeats": each.repeats or None, "confidence": confidence}
            known.append({name: value for name, value in values.items() if value is not None})
        return json.dumps({"line": number, "hypotheses": known}, ensure_ascii=False) + "\n"
    lines = []
    for each in hypotheses:
        fields = [str(number)] if numbered else []
        fields += ["nan" if each.score is None else f"{each.score:.6f}"] if scores or numbered else []
        fields += [] if each.words is None else [f"{mean_confidence(each.words):.3f}"]
        fields += [each.text] if each.alignment is None else [each.text, each.alignment]
        lines.append("\t".join(part.replace("\t", " ") if len(fields) > 1 else part for part in fields) + "\n")
    return "".join(lines)


class FileTranslator(LineWorker):
    """Translates lines, or pairs of a line and the prefix of its translation, into an output.

    Args:
        layout: returns what is written of a line, from its number and hypotheses, as `record` does.
        **extras: further fields of a `Hypothesis`, `words` or `alignment`: functions of sources and translations.
    """

    def __init__(
        self,
        translator: Translator,
        layout: Callable[[int, list[Hypothesis]], str] = record,
        window: int = WINDOW_LINES,
        **extras: Callable[[list[str], list[str]], Iterable[Any]],
    ):
        self.translator, self.layout, self.window, self.extras = translator, layout, window, extras
        self.prepare = translator.prepare

    def records(self, window: Window, bar: Any, remarks: Remarks) -> list[str]:
        """Translate a window; see `LineWorker`."""
        hypotheses = self.translator.translate_prepared(window, bar)
        remarks[SPLIT] += window.split
        repeating = (any(each.repeats for each in row) for row in hypotheses)
        remarks[CUT] += [line for line, repeats in enumerate(repeating, window.first) if repeats]
        return self._format(window, hypotheses)

    def _format(self, window: Window, hypotheses: list[list[Hypothesis]]) -> list[str]:
        """Return the text of each line of a window."""
        lines = (line if isinstance(line, str) else line[0] for line in window.lines)
        sources = [self.translator.codes.coded(line.strip()) for line in lines]
        repeated = [source for source, row in zip(sources, hypotheses, strict=True) for _ in row]
        texts = [each.text for row in hypotheses for each in row]
        for name, function in self.extras.items():
            values = iter(function(repeated, texts))
            hypotheses = [[replace(each, **{name: next(values)}) for each in row] for row in hypotheses]
        return [self.layout(number, row) for number, row in enumerate(hypotheses, window.first)]
