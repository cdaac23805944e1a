"""Catalogues of keys and values: Apple's `.strings` and Java's `.properties`."""

import json
import re
from pathlib import Path

import regex

from ..errors import reading
from .catalogue import IN_C, Catalogue, Edit, Entry, Filling, unescaped


class StringsFile(Catalogue):
    """Apple's `.strings`, in UTF-8 or UTF-16; a comment before each text that is filled."""

    comment, assignment, gap = "/* {} */", "{} = {};", re.compile(r"[^\s\ufeff]")
    pattern = regex.compile(
        r'(?s)/\*(?:.*?\*/|.*+\Z)|//[^\n]*+|(?P<start>)(?:"(?P<key>(?:[^"\\]|\\.)*+)"|(?P<key>[\w.$-]++))\s*+=\s*+'
        r'(?P<written>"(?P<value>(?:[^"\\]|\\.)*+)"|(?P<value>[\w.$-]++))\s*+;'
    )

    def _entries(self, match: regex.Match) -> list[Entry]:
        value = match["value"]
        return [] if value is None else [self._own(unescaped(match["key"]), (unescaped(value),), match)]

    def _edits(self, entry: Entry, filling: Filling) -> list[Edit]:
        comment, value = self.comment.format(filling.note) + self.newline, self._escaped(filling.targets[0])
        if entry.place:
            return [(*entry.place.span("start"), comment), (*entry.place.span("written"), value)]
        line, end = self.assignment.format(self._key(entry.id), value), len(self.text.rstrip("\r\n"))
        return [(end, end, self.newline + comment + line)]

    def _escaped(self, text: str) -> str:
        return f'"{text.translate(IN_C)}"'

    _key = _escaped


class PropertiesFile(StringsFile):
    """Java's `.properties`, in UTF-8 or Latin-1; an ASCII file stays one."""

    comment, assignment = "# {}", "{} = {}"
    pattern = regex.compile(
        r"(?sma)^\ufeff?+(?P<start>)[ \t\f]*+(?:[#!][^\r\n]*+|(?P<key>(?:[^\s:=\\#!]|\\.)(?:[^\s:=\\]|\\.)*+)[ \t\f]*+"
        r"[:=]?+[ \t\f]*+(?P<written>(?P<value>(?:[^\\\r\n]|\\(?:\r\n|.))*+)))"
    )

    def __init__(self, path: Path, *arguments, **options):
        with reading(path):
            if re.search("[\udc80-\udcff]", path.read_text("utf-8", "surrogateescape")):  # bytes that are not UTF-8
                self.encoding, self.errors = "latin-1", "backslashreplace"
        super().__init__(path, *arguments, **options)

    def _escaped(self, text: str) -> str:
        is_ascii = self.head.isascii() or self.encoding == "latin-1"
        text = json.dumps(text, ensure_ascii=is_ascii)[1:-1].replace('\\"', '"')
        return "\\" + text if text[:1] == " " else text  # which would be lost

    def _key(self, text: str) -> str:
        return re.sub(r"[\s:=#!]", r"\\\g<0>", self._escaped(text))
