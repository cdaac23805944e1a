"""HTML, by Python's parser, of whose events only the offsets count: what is not text is copied from the source."""

import html
import re
from collections import Counter
from functools import partialmethod
from html.parser import HTMLParser
from itertools import accumulate
from xml.etree.ElementTree import HTML_EMPTY

from .kept import STAND_IN
from .pieces import Document, Kind, Piece, text_piece

# Elements that are spans in a sentence; those that are points, with all that is in them; those that are left alone.
SPANS = {
    "a", "abbr", "b", "bdi", "bdo", "big", "cite", "del", "dfn", "em", "font", "i", "ins", "mark", "q", "ruby", "s",
    "small", "span", "strike", "strong", "sub", "sup", "time", "u",
}  # fmt: skip
_PICTURES = {"img", "input", "svg", "meter", "progress"}
_POINTS = {"code", "kbd", "samp", "var", "tt", "math", "data", "output", "rp", "rt", "wbr", *_PICTURES}
_OPAQUE = {
    "script", "style", "pre", "textarea", "iframe", "noembed", "noframes", "noscript", "xmp", "plaintext", "template",
    "object", "audio", "video", "canvas", "applet", "listing", *_POINTS,
}  # fmt: skip
# Elements whose end tags may be left out: the tags that end them, as the end of what they are in does; where not.
_TABLE = {"td", "th", "tr", "tbody", "tfoot", "thead"}
_ENDED_BY = {
    "p": {
        "address", "article", "aside", "blockquote", "details", "dialog", "div", "dl", "fieldset", "figcaption",
        "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hgroup", "hr", "main", "menu", "nav",
        "ol", "p", "pre", "search", "section", "table", "ul",
    },
    "li": {"li"}, "dt": {"dt", "dd"}, "dd": {"dt", "dd"}, "option": {"option", "optgroup"}, "tr": _TABLE - {"td", "th"},
    "td": _TABLE, "th": _TABLE, "rt": {"rt", "rp"}, "rp": {"rt", "rp"},
}  # fmt: skip
_CONTAINERS = {"ul", "ol", "menu", "dl", "table", "select", "datalist", "button", "object"}
_CHARACTERS = re.compile(r"&#?\w+;?|[^&]+|&")
_is_omegat = re.compile(r"(?!h[1-6]$)[a-z]+\d+").fullmatch  # `<b0>`, `</b0>` and `<g1/>` stand for a file's own tags


class _Events(HTMLParser):
    """The offsets where tags, text and the rest begin: `(offset, kind, name, attributes)`."""

    def __init__(self, source: str):
        super().__init__(convert_charrefs=False)
        self.lines = [0, *accumulate(len(line) + 1 for line in source.split("\n"))]
        self.events: list[tuple[int, str, str, dict]] = []
        self.is_xml = "http://www.w3.org/1999/xhtml" in source[:2000]
        # After this nothing ends, and the parser would look for ends again and again, in quadratic time.
        bare = re.sub("(?is)<script(?:(?!<script).)*?</script", lambda code: code[0].replace("<!--", "xxxx"), source)
        comment = bare.find("<!--", bare.rfind("-->") + 1)
        end = min(place for place in (source.rfind(">") + 1, comment) if place >= 0)
        self.feed(re.sub("(?s)<%.{0,1000}?%>", lambda tag: re.sub(r"[^\n]", "x", tag[0]), source[:end]))  # of ERB
        self.close()
        self.events.append((end, "text", "", {}))

    def _add(self, kind: str, name: str = "", attributes=()) -> None:
        if kind == "text" and self.events and self.events[-1][1] == "text":
            return  # it is one text: what starts like a tag and is not one would else be cut off from its end
        line, column = self.getpos()
        self.events.append((self.lines[line - 1] + column, kind, name, dict(attributes)))

    def parse_marked_section(self, i, report=1):  # as browsers do; Python's own ends with an AssertionError at most
        return self.parse_bogus_comment(i)

    def handle_startendtag(self, tag, attrs):
        alone = tag in ("svg", "math") or _is_omegat(tag)
        self._add("alone" if alone else "start", tag, attrs)
        if self.is_xml and not alone and tag not in HTML_EMPTY:
            self._add("end", tag)

    handle_starttag, handle_endtag = partialmethod(_add, "start"), partialmethod(_add, "end")
    handle_data = handle_entityref = handle_charref = partialmethod(_add, "text")
    handle_comment = partialmethod(_add, "comment")
    handle_decl = unknown_decl = handle_pi = partialmethod(_add, "other")


def read_web_page(source: str) -> Document:
    """Return the text between the tags; attributes, scripts, styles, code and what is marked `translate="no"` stay."""
    events = _Events(source).events
    places = [place for place, *_ in events] + [len(source)]
    pieces, number = [Piece(source[: places[0]])], 0
    while number < len(events):
        start, kind, name, attributes = events[number]
        kept = re.search(r"notranslate|(?<!\S)material-(?:icons|symbols-\w+)(?!\S)", attributes.get("class") or "")
        kept = kept or (attributes.get("translate") or "").lower() == "no"
        is_opaque = kind == "start" and name not in HTML_EMPTY and (kept or name in _OPAQUE)
        last = _end_of_opaque(events, number) if is_opaque else number
        raw, number = source[start : places[last + 1]], last + 1
        if kind == "text":
            pieces += characters_of(raw)
        elif kind in ("comment", "alone") or (kind == "start" and name in _POINTS) or (is_opaque and name in SPANS):
            is_seen = kind != "comment" and name not in ("rp", "rt", "wbr") and not _is_omegat(name)
            pieces.append(Piece(raw, Kind.POINT, is_seen * (" " if name in _PICTURES else STAND_IN)))
        elif name in SPANS or _is_omegat(name):
            pieces.append(Piece(raw, Kind.OPEN if kind == "start" else Kind.CLOSE, name=name))
        else:
            pieces.append(Piece(raw))
    return Document(pieces, escape=lambda text: html.escape(text, quote=False))


def _end_of_opaque(events: list, number: int) -> int:
    """Return the last event of the element that this one starts; the last of all if nothing ends it."""
    name = events[number][2]
    opened = Counter()
    for place in range(number, len(events)):
        _, kind, other, _ = events[place]
        if kind == "start":
            if opened and other in _ENDED_BY.get(name, ()) and not any(opened[container] for container in _CONTAINERS):
                return place - 1
            opened[other] += other not in HTML_EMPTY
        elif kind == "end" and opened[other]:
            opened[other] -= 1
            if not opened[name]:
                return place
        elif kind == "end" and name in _ENDED_BY and other not in SPANS - {"ruby"} | {"p", "br"}:
            return place - 1
    return len(events) - 1


def characters_of(raw: str) -> list[Piece]:
    """Return text in pieces, character references apart; what could be half a tag is not touched."""
    if re.search(r"<[a-zA-Z/!?]", re.sub("(?s)<%.{0,1000}?%>", "", raw)):
        return [Piece(raw)]
    return [text_piece(match[0], html.unescape(match[0])) for match in _CHARACTERS.finditer(raw)]
