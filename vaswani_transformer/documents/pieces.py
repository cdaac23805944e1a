"""The pieces of a document, and what of them is words, spans and points: the rules that all formats share."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, groupby

from ..data.words import is_inner
from .kept import INVISIBLE, STAND_IN, has_words, kept_places

_DEEPEST = 50  # of spans; more are made to be slow
_LINKS = {"a", "Link", "hyperlink"}
SLIDE_LINK = "hlinkClick"  # of one link there are several runs
_RUNS = {"r", SLIDE_LINK}
_ID = re.compile(r"[\s:]id\s*=", re.IGNORECASE)
_NOTE = re.compile(r"[\[(]*\d+(?:[,–-]\d+)*[\])]*")


class Kind(Enum):
    """The kind of a piece of a document."""

    FIXED = "stays where it is, and ends the sentence before it"
    TEXT = "is translated"
    OPEN = "the first tag of a span"
    CLOSE = "the second"
    POINT = "comes between words or within one"


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a document; the `raw` of all pieces together are the document."""

    raw: str
    kind: Kind = Kind.FIXED
    text: str = ""  # of a TEXT its characters; of a POINT `STAND_IN` if it is like a word, a space if it separates
    name: str = ""  # of the tags of a span, by which they find each other
    again: str | None = None  # how a translation has a tag of a span, if not as it is; of first tags only Word's runs

    @property
    def single(self) -> bool:
        """Return whether a span that begins with this is no mere style, and can be there only once."""
        return self.name in (*_LINKS, SLIDE_LINK, "q") or _ID.search(self.raw) is not None


@dataclass(frozen=True)
class Document:
    """A document as readers return it."""

    pieces: list[Piece]  # all of it
    escape: Callable[[str], str] = str  # writes text so that it means itself
    finish: Callable[[str], str] = str  # changes a sentence so that it means itself where a line begins with it


def text_piece(raw: str, text: str | None = None) -> Piece:
    """Return text as a piece; `text`: its characters if `raw` is an escape, empty for what is invisible."""
    return Piece(raw, Kind.POINT if text == "" else Kind.TEXT, raw if text is None else text)


def in_blocks(pieces: list[Piece]) -> Iterator[Piece | list[Piece]]:
    """Yield the fixed pieces, and the runs of others between them; a tag without its other one is fixed too."""
    for is_fixed, run in groupby(pieces, key=lambda piece: piece.kind is Kind.FIXED):
        run = list(run)
        closes = closes_of(run)
        unmatched = {p for p in run if p.kind in (Kind.OPEN, Kind.CLOSE)}.difference(closes, closes.values())
        if unmatched:
            yield from in_blocks([replace(p, kind=Kind.FIXED) if p in unmatched else p for p in run])
        elif is_fixed:
            yield from run
        else:
            separated = _separated(run)
            yield from [run] if len(separated) == len(run) else in_blocks(separated)


def closes_of(pieces: list[Piece]) -> dict[Piece, Piece]:
    """Return the second tag of each first one; tags of spans that do not end where they should are not there."""
    opened, closes, names = [], {}, Counter()
    for piece in pieces:
        if piece.kind is Kind.OPEN and len(opened) < _DEEPEST:
            opened.append(piece)
            names[piece.name] += 1
        elif piece.kind is Kind.CLOSE and names[piece.name]:
            while (last := opened.pop()).name != piece.name:
                names[last.name] -= 1
            names[piece.name] -= 1
            closes[last] = piece
    return closes


def _separated(run: list[Piece]) -> list[Piece]:
    """Return the pieces of a run, with empty fixed ones where the edge of an element separates words."""
    depths = accumulate((piece.name in _LINKS) * (1 if piece.kind is Kind.OPEN else -1) for piece in run)
    outside = "".join(piece.text for piece, depth in zip(run, depths, strict=True) if not depth)
    is_list = sum(piece.name in _LINKS for piece in run) > 2 and not has_words(outside)
    result: list[Piece] = []
    before, tags = " ", []  # the last character, and what is behind it
    for piece in run:
        result.append(piece)
        tags.append(piece)
        if piece.kind is Kind.TEXT:
            edge = max((number for number, tag in enumerate(tags, 1) if tag.kind is Kind.CLOSE), default=0)
            opened = [tag for tag in tags[edge:] if tag.kind is Kind.OPEN]
            is_edge = is_list and any(tag.name in _LINKS for tag in tags)
            if edge and opened and is_inner(before) and is_inner(piece.text):
                is_new = before.islower() and piece.text[0].isupper() and opened[-1].name not in _RUNS
                is_edge |= is_new or all(any(tag.name in _LINKS for tag in part) for part in (tags[:edge], opened))
            if is_edge and (place := len(result) - len(tags) + edge):
                result.insert(place, Piece(""))
            before, tags = piece.text[-1], []
    return result


def with_points(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces of a block with all that a model does not see as points."""
    pieces = _with_marks(pieces)
    kept = kept_places("".join(piece.text for piece in pieces))
    result: list[Piece] = []
    for number, part in enumerate(cut(pieces, [place for start, end, _ in kept for place in (start, end)])):
        text = kept[number // 2][2] if number % 2 else ""
        for piece in part:
            if number % 2 and piece.text:
                piece, text = Piece(piece.raw, Kind.POINT, text), ""
            result.append(piece)
    return result


def _with_marks(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces with characters without a width, spans without words, and marks at words as points."""
    number_of, closes = {piece: number for number, piece in enumerate(pieces)}, closes_of(pieces)
    result: list[Piece] = []
    end, before = 0, " "  # of the last mark; the last character
    for number, piece in enumerate(pieces):
        if number < end:
            continue
        parts = [piece]
        if piece.kind is Kind.OPEN:
            last = number_of[closes[piece]]
            text = _text_of_mark(piece.name, pieces[number + 1 : last], before, pieces[last + 1 : last + 9])
            if text is not None:
                end = last + 1
                raw = "".join(part.raw for part in pieces[number:end])
                parts = [text_piece(raw, text) if text.isalpha() else Piece(raw, Kind.POINT, text)]
        elif piece.kind is Kind.TEXT:
            raws = INVISIBLE.split(piece.raw) if piece.raw == piece.text else [piece.raw]
            parts = [text_piece(raw, INVISIBLE.sub("", raw if len(raws) > 1 else piece.text)) for raw in raws if raw]
        before = "".join(part.text for part in parts)[-1:] or before
        result += parts
    return result


def _text_of_mark(name: str, inner: list[Piece], before: str, behind: list[Piece]) -> str | None:
    """Return the text of the point that a span is, of a mark or of no words, or "th" of 20th; None for others."""
    text = "".join(piece.text for piece in inner if piece.kind is Kind.TEXT)
    if all(piece.kind in (Kind.OPEN, Kind.CLOSE) for piece in inner):
        return ""
    if text.isspace() and name not in _RUNS:
        return " "
    if not text or any(map(str.isspace, text)):
        return None
    if name == "sup" and before.isnumeric() and re.fullmatch("st|nd|rd|th|er|e|ème|º|ª", text):
        return text
    rest = re.match(r"\S*", "".join(piece.text for piece in behind))[0]
    if name in ("sub", "sup"):
        is_mark = not before.isspace() or rest or not any(map(str.isalpha, text))
    else:  # a note, or a figure in a name; Word's runs say nothing
        touches = (is_inner(before) and not before.isnumeric()) or (text[0] in "[(" and before in '.,;:!?…”’»")')
        is_mark = touches and name not in _RUNS and _NOTE.fullmatch(text)
    return (STAND_IN if rest[:1] != "[" and any(map(str.isalpha, rest)) else "") if is_mark else None


def cut(pieces: list[Piece], places: list[int]) -> list[list[Piece]]:
    """Return pieces cut at offsets of their text; what has no text there goes to the left, but first tags to the right.

    Escapes and points are not cut: they go to the left.
    """
    parts: list[list[Piece]] = [[]]
    ends, end = iter([*places, float("inf")]), 0
    cut = next(ends)
    for piece in pieces:
        start, end = end, end + len(piece.text)
        while start >= cut and not (piece.kind in (Kind.CLOSE, Kind.POINT) and start == cut and not piece.text):
            parts.append([])
            cut = next(ends)
        while piece.raw == piece.text and cut < end:
            if start < cut:
                parts[-1].append(text_piece(piece.raw[: cut - start]))
                piece, start = text_piece(piece.raw[cut - start :]), cut
            parts.append([])
            cut = next(ends)
        parts[-1].append(piece)
    return parts + [[] for _ in ends]
