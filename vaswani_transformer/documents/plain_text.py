"""Text without markup, a paragraph a line, and subtitles (SubRip, .srt)."""

import re

from ..errors import UserError
from .document import Document, Kind, Piece, point, text_piece

_TIME = re.compile(r"\s*\d+:\d\d:\d\d[,.]\d{1,3}\s*-->\s*\d+:\d\d:\d\d[,.]\d{1,3}")
# A dash at the start of a line, perhaps after tags or positions on the screen.
_DASH = re.compile(r"(?:(?:\s|</?(?:b|i|u|s|font)\b[^<>]*>|\{\\[^{}]*\})*[-–—]+\s*)?", re.IGNORECASE)
_TAG = re.compile(r"(</?(?:b|i|u|s|font)\b[^<>]*>)", re.IGNORECASE)


def read_paragraphs(text: str) -> Document:
    """Return text in which each line is a paragraph, whatever ends it."""
    pieces = []
    for line in text.splitlines(keepends=True):
        inner = "".join(line.splitlines())
        pieces += [text_piece(inner)] if inner else []
        pieces.append(Piece(line[len(inner) :]))
    return Document(pieces)


def read_subtitles(text: str) -> Document:
    """Return subtitles: each is a paragraph, and so is a line that begins with a dash; line breaks stay in a paragraph.

    Raises:
        UserError: no line has a subtitle's times.
    """
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    times = {number for number, line in enumerate(lines) if _TIME.match(line)}
    if lines and not times:
        raise UserError("this has no line such as 00:00:01,000 --> 00:00:02,000: give subtitles in the format SubRip")
    first = min(times, default=0)
    fixed = times | {number - 1 for number in times if number and lines[number - 1].strip().isdigit()}
    pieces, in_text = [], False
    for number, line in enumerate(lines):
        inner = line.rstrip("\r\n")
        if number in fixed or number < first or not inner.strip():
            pieces.append(Piece(line))
            in_text = False
            continue
        dash = _DASH.match(inner)[0]
        if in_text and not dash:
            pieces += [text_piece("", " "), point(pieces.pop().raw)]
        pieces += [Piece(dash)] if dash else []
        for part in filter(None, _TAG.split(inner[len(dash) :])):
            name = re.sub(r"\W.*", "", part.strip("</"), flags=re.DOTALL).lower()
            tag = Kind.CLOSE if part.startswith("</") else Kind.OPEN
            pieces.append(Piece(part, tag, name=name) if _TAG.fullmatch(part) else text_piece(part))
        pieces.append(Piece(line[len(inner) :]))
        in_text = True
    return Document(pieces)
