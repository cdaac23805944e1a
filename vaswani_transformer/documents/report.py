"""A page about a catalogue that was filled: what was refused, what the model was least sure of, near matches."""

import difflib
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import NamedTuple

import jinja2

from ..catalogues.catalogue import Entry, Filling, with_codes


class Row(NamedTuple):
    """An entry and what was made of it."""

    entry: Entry
    filling: Filling
    near: tuple[float, str, str] | None = None  # of the memory's nearest entry the similarity, source, target

    @property
    def difference(self) -> list[tuple[str, str]]:
        """Return the words of the near match's source and of this one: each `del`, `ins` or empty, and the text."""
        source = with_codes(self.entry.sources[0], self.entry.codes)
        before, after = (re.findall(r"\w+|\W", text) for text in (self.near[1], source))
        parts = []
        for kind, start, end, first, last in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            removed, added = "".join(before[start:end]), "".join(after[first:last])
            parts += [("", added)] if kind == "equal" else [("del", removed), ("ins", added)]
        return [part for part in parts if part[1]]


def catalogue_report(rows: Iterable[Row], name: str, summary: str) -> str:
    """Return the page as HTML, in one file that needs no network; refused entries first, then the least confident."""
    rows: Sequence[Row] = sorted(rows, key=lambda row: (not row.filling.reason, row.filling.confidence))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = (resources.files(__package__) / "report.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(rows=rows, name=name, summary=summary, shown=with_codes)
