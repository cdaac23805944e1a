"""Text without markup, a paragraph a line, and subtitles (SubRip, WebVTT)."""

import html
import re

from ..errors import UserError
from .markup import LINE_BREAK
from .pieces import Document, Kind, Piece, text_piece
from .web_page import characters_of

_TIME = re.compile(r"\s*(?:\d+:)?\d\d?:\d\d[,.]\d{1,3}\s*-->\s*(?:\d+:)?\d\d?:\d\d[,.]\d{1,3}")
_TAG = re.compile(r"(?i)(<rt>[^<>]*</rt>|</?(?:b|i|u|s|c|v|font|lang|ruby|rt)\b[^<>]*>|<[\d:.]+>|\{\\[^{}]*\})")
# A dash at the start of a line, perhaps after tags or positions on the screen.
_DASH = re.compile(rf"(?i)(?:(?:\s|{_TAG.pattern[4:]})*(?:[-‐‑–—]+|(?:>|&gt;){{2,3}}(?![\w-]+<<))\s*)?")


def read_paragraphs(text: str) -> Document:
    """Return text in which each line is a paragraph, whatever ends it."""
    pieces = []
    for line in text.splitlines(keepends=True):
        inner = "".join(line.splitlines())
        pieces += [text_piece(inner), Piece(line[len(inner) :])] if inner else [Piece(line)]
    return Document(pieces)


def read_subtitles(text: str) -> Document:
    """Return subtitles: each is a paragraph, and so is a line that begins with a dash; line breaks stay in a paragraph.

    WebVTT, which its first line names, has character references, and texts from their times to the next empty line.
    """
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    times = {number for number, line in enumerate(lines) if _TIME.match(line)}
    is_vtt = text.startswith("WEBVTT")
    if lines and not times and not is_vtt:
        raise UserError("this has no line such as 00:00:01,000 --> 00:00:02,000: give subtitles of SubRip or WebVTT")
    heads = {n - 1 for n in times if n and (lines[n - 1].strip().isdigit() or (is_vtt and not lines[n - 2].strip()))}
    pieces, in_text, is_cue = [], False, False
    for number, line in enumerate(lines):
        inner = line.rstrip("\r\n")
        is_cue = number in times or (is_cue and not (is_vtt and not inner))
        if number in heads or number in times or not is_cue or not inner.strip():
            pieces.append(Piece(line))
            in_text = False
            continue
        dash = _DASH.match(inner)[0]
        if in_text and not dash:
            pieces.append(text_piece(pieces.pop().raw, LINE_BREAK))
        pieces += [Piece(dash)] if dash else []
        for part in filter(None, _TAG.split(inner[len(dash) :])):
            name = re.match(r"</?([a-z]*)|", part.lower())[1]
            if not _TAG.fullmatch(part):
                pieces += characters_of(part) if is_vtt else [text_piece(part)]
            elif name in ("", None, "rt", "v"):  # of two voices no sentence is made
                pieces.append(Piece(part) if name == "v" else Piece(part, Kind.POINT))
            else:
                pieces.append(Piece(part, Kind.CLOSE if part[1] == "/" else Kind.OPEN, name=name))
        pieces.append(Piece(line[len(inner) :]))
        in_text = True
    return Document(pieces, escape=(lambda part: html.escape(part, quote=False)) if is_vtt else str)
