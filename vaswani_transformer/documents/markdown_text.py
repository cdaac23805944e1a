"""Markdown (CommonMark with GitHub's tables, strikethrough, tasks and footnotes), by the parser pulldown-cmark."""

import re
from dataclasses import replace
from typing import Any

from ..errors import reading
from .kept import STAND_IN
from .pieces import Document, Kind, Piece, text_piece
from .web_page import read_web_page

_SYNTAX = ("TABLES", "STRIKETHROUGH", "TASKLISTS", "FOOTNOTES", "MATH", "GFM", "DEFINITION_LIST", "HEADING_ATTRIBUTES")
_OPAQUE = {"CodeBlock", "HtmlBlock", "Image"}
_DELIMITERS = {"Emphasis": 1, "Strong": 2, "Strikethrough": 2, "Link": 1}  # signs that begin such a span, at most
_POINTS = dict.fromkeys(("Code", "InlineMath", "DisplayMath", "Link"), STAND_IN)
_POINTS |= {"FootnoteReference": "", "Image": " "}
_TAG = re.compile(r"<(/?)([a-zA-Z][\w-]*)[^>]*>", re.DOTALL)
_SPECIAL = re.compile(r"[\\`*_\[\]<~|$]|&(?=#?(?:\w+;|$))")  # at the end, the rest of a reference may follow
_LINE_START = re.compile(r"^(\s*\d{0,9})((?<!\d)(?:[-+=#>]|:(?![\w+-]+:))|(?<=\d)[.)])")  # not of :tada:
_HEADING_END = re.compile(r"(?<=\s)#+\s*$")  # signs that it would lose
# A line that says what the next ones are (Python-Markdown, Docusaurus, Pandoc), perhaps with a title; and a template's.
# Where the title is not in quotation marks, and for what takes in another file, all of the line.
_MARKER = re.compile(
    rb"""(?:(?:!!!|\?\?\?\+?|===|::+)[ \t]*(?:[\w.={}\#-]++[ \t]*+){0,3}+(?:"([^"\n]*)"[ \t]*)?"""
    rb"""|(?:(?:\{\{(?:(?!\}\})[^\n])*\}+|\{%(?:(?!%\})[^\n])*%\}|\{/\*(?:(?!\*/|\n\s*\n)[\s\S])*\*/\}|\{(?::|/(?!\*))[^}\n]*\}+)\s*?)+"""
    rb"""|\{(?:%-?|\{[<%])\s*(?:katex|math|mermaid|highlight|comment|raw)\b[^\n]*"""
    rb"""|(?:(?<=---\n)|(?<=---\r\n))[a-z][\w-]*:(?=\s)[^\n]*(?:\n(?!---)[^\n]+)*?(?=\n(?:---|\.\.\.))"""  # metadata
    rb"""|(?::::|\[!\w+\]|--8<--)[^\n]*|\[TOC\]|\*\[[^\]\n]+\]:[^\n]*|(?:\A|(?<=\n\n)|(?<=\n\r\n))"""
    rb"""(?:import (?:.*['"]|\{)|export (?:const|default|function) ).*(?:\n[ \t]*\S.*)*)(?=\r?\n|\Z)"""
)
_PRICE, _COLON = b"\x1a", b"\x1b"  # in the place of a $ of no formula, and of the first : of :tada:


def read_markdown(source: str) -> Document:
    """Return the text of paragraphs, headings, lists and tables; code, HTML blocks, images and definitions stay."""
    with reading("Markdown needs the library pyromark (pip install 'vaswani_transformer[documents]')"):
        import pyromark
    options = pyromark.Options(0)
    for name in _SYNTAX:
        options |= getattr(pyromark.Options, f"ENABLE_{name}")
    reader, prices = _Reader(source.encode()), [0]
    parsed = bytearray(re.sub(rb"(?m)^( {0,3}):(?=:|[\w+-]+:)", rb"\1" + _COLON, reader.source))
    as_item = lambda match: match[1] + b"*   " + len(match[2]) * _COLON  # noqa: E731 (of a list: below is no code)
    notes = rb"(?:\A|(?<=\n\n)|(?<=\n\r\n))([ \t]*)(?:(?:!!!|\?\?\?)(?=\+? [\w\"])|===(?=\+? \"))(\+?) "
    parsed = bytearray(re.sub(notes, as_item, parsed))
    blank = lambda match: b"x" * len(match[0])  # noqa: E731
    parsed = bytearray(re.sub(rb"(?<=\]\()\{[{%][^\n{}]*[%}]\}", blank, parsed))
    braces = rb"(?<==)\{(?:[^{}]|\{[^{}]*\})*\}"  # values in tags of JSX
    jsx = rb"<[A-Za-z][A-Za-z0-9-]*(?=\s)(?:[^<>{}=]|=(?:" + braces + rb")?)*+>"
    parsed = bytearray(re.sub(jsx, lambda x: re.sub(rb"[\r\n](?=\n? *>)", b" ", re.sub(braces, blank, x[0])), parsed))
    while prices:  # between US$5 and US$10 is no formula
        events = list(pyromark.events_with_range(parsed.decode(), options=options))
        places = [place for event, place in events if isinstance(event, dict) and "InlineMath" in event]
        spans = [(place["start"], place["end"]) for place in places]
        prices = [a for a, b in spans if parsed[a - 1 : a].isalnum() or parsed[b : b + 1].isalnum()]
        for start in prices:
            parsed[start : start + 1] = _PRICE
    for event, place in events:
        name, value = next(iter(event.items())) if isinstance(event, dict) else (event, None)
        reader.read(name, value, place["start"], place["end"])
    reader.fix(len(reader.source))
    finish = lambda sentence: _LINE_START.sub(r"\1\\\2", _HEADING_END.sub(r"\\\g<0>", sentence))  # noqa: E731
    escaped = lambda sign: f"&#{ord(sign[0])};" if sign[0] in "<~$&" else f"\\{sign[0]}"  # noqa: E731 (for MkDocs)
    return Document(reader.pieces, lambda text: _SPECIAL.sub(escaped, text), finish)


class _Reader:
    """Makes pieces of the parser's events, whose offsets are in bytes."""

    def __init__(self, source: bytes):
        self.source, self.pieces, self.place = source, [], 0
        self.block_end = 0  # of the last block that has begun
        self.opaque_end = -1  # of the last element whose content is not read
        self.is_broken = False  # whether a line break has been read that is not among the pieces yet
        self.opened: list[tuple[str, int]] = []  # of each open span the kind of link, and where its text begins

    def take(self, end: int) -> str:
        """Return the source from the last offset to this one, which is the last from then on."""
        raw, self.place = self.source[self.place : end].decode(), max(self.place, end)
        return raw

    def fix(self, end: int) -> None:
        """Make a piece of what precedes this offset: fixed, unless it belongs to a line break in a sentence."""
        if raw := self.take(end):
            self.pieces.append(text_piece(raw, " ") if self.is_broken else Piece(raw))
        self.is_broken = False

    def read(self, name: str, value: Any, start: int, end: int) -> None:
        element = next(iter(value)) if isinstance(value, dict) else value if name in ("Start", "End") else ""
        if end <= self.opaque_end:
            return
        if name == "Text":
            self.text(value, start, end)
        elif name == "SoftBreak":
            self.is_broken = bool(self.pieces) and self.pieces[-1].kind is not Kind.FIXED
        elif name == "End" and element in _DELIMITERS:
            (link_type, start), again = self.opened.pop(), None
            if link_type in ("Shortcut", "Collapsed"):  # found by its text, which a translation changes
                again = f"][{self.source[start : self.place].decode()}]"
                end += 2 * (link_type == "Collapsed")
            self.pieces.append(Piece(self.take(end), Kind.CLOSE, name=element, again=again))
            self.is_broken = False
        else:
            self.fix(start)
            self.pieces.append(self.element(name, element, value, start, end))

    def element(self, name: str, element: Any, value: Any, start: int, end: int) -> Piece:
        """Return the piece of what is no text: all of what is not read, a tag, or what ends the sentence."""
        link_type = value[element]["link_type"] if element == "Link" else ""
        if name == "InlineHtml":
            return self.tag(self.take(end), end)
        if element in _OPAQUE or link_type in ("Autolink", "Email"):
            name, self.opaque_end = element, end
        elif element in _DELIMITERS:
            length = _DELIMITERS[element] - (element == "Strikethrough" and self.source[start + 1 : start + 2] != b"~")
            opening = Piece(self.take(start + length), Kind.OPEN, name=element)
            self.opened.append((link_type, self.place))
            return opening
        elif name in ("Start", "End"):
            self.block_end = end if name == "Start" else self.block_end
            return Piece("")
        raw = self.take(end)
        return Piece(raw, Kind.POINT, _POINTS[name]) if name in _POINTS else Piece(raw)

    def text(self, value: str, start: int, end: int) -> None:
        """Read text, before which there may be a sign that takes its first character's meaning away."""
        first = self.source[start : start + 1].decode("latin-1")
        value = value.replace(_PRICE.decode(), "$").replace(_COLON.decode(), first, first in (":", " "))
        is_first = self.is_broken or (self.pieces and self.pieces[-1].kind is Kind.FIXED)
        is_item = self.source[start - 4 : start - 1] in (b"!!!", b"???", b"===")
        if is_first and (marker := _MARKER.match(self.source, start - 4 * is_item)):
            self.is_broken, self.opaque_end = False, marker.end()
            self.fix(start if marker[1] is None else marker.start(1))
            self.pieces.append(text_piece(self.take(marker.end(1))) if marker[1] else Piece(""))
            self.fix(marker.end())
            return
        if self.source[self.place : start].endswith(b"\\"):
            self.fix(start - 1)
            self.pieces.append(text_piece(f"\\{value[0]}", value[0]))
            self.place, value = start + len(value[0].encode()), value[1:]
        self.fix(start)
        if raw := self.take(end):
            self.pieces.append(text_piece(raw, value))

    def tag(self, raw: str, end: int) -> Piece:
        """Return the piece of a tag in a sentence, which is the whole element where that is a point of HTML."""
        match = _TAG.fullmatch(raw)
        piece = read_web_page(raw).pieces[1] if match else Piece(raw, Kind.POINT)
        if match and piece.kind is Kind.POINT:
            last = re.compile(rf"</{match[2]}\s*>".encode(), re.IGNORECASE).search(self.source, end, self.block_end)
            self.opaque_end = last.end() if last else end
            piece = replace(piece, raw=raw + self.take(self.opaque_end))
        return piece
