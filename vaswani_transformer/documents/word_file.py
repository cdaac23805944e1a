"""Word files (.docx): the runs of text in their paragraphs, by the XML parser expat; every other byte stays."""

import html
import io
import re
import zipfile
from collections.abc import Callable
from itertools import accumulate, islice
from typing import NamedTuple
from xml.etree import ElementTree
from xml.parsers import expat

from ..errors import UserError, reading
from .pieces import Document, Kind, Piece, point, text_piece

_PARTS = re.compile(r"(header|footer)\d*\.xml|(footnotes|endnotes|comments)\.xml")  # beside the main one
_MOST_BYTES = 1 << 28  # of a part
_WORD = re.compile(r"http://\S+/wordprocessingml/\S*main ")
_SPANS = {"hyperlink", "ins", "smartTag"}
_POINTS = {
    "bookmarkStart", "bookmarkEnd", "commentRangeStart", "commentRangeEnd", "proofErr", "permStart", "permEnd",
}  # fmt: skip
_RAISED = re.compile(r'vertAlign [^<>]*"su(?:b|per)script"')
_REFERENCES = {"footnoteReference", "endnoteReference", "commentReference"}  # a run of one of them is a point


class _Event(NamedTuple):
    """A part of the XML: `"<"` and `">"` for an element's tags, `"text"`, or `""` for anything else."""

    raw: str
    kind: str
    name: str


def translate_word_file(data: bytes, translate: Callable[[list[Document]], list[str]]) -> bytes:
    """Return a Word file with the texts of its paragraphs, headers, footers, notes and comments translated."""
    with reading("not a Word file (.docx)"), zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        names = _parts(archive)
        if large := [entry for entry in entries if entry.filename in names and entry.file_size > _MOST_BYTES]:
            raise UserError(f"{large[0].filename} of the Word file has {large[0].file_size:,} bytes: divide the file")
        contents = [archive.read(entry) for entry in entries]
    numbers = [number for number, entry in enumerate(entries) if entry.filename in names]
    translated = translate([_read_part(contents[number], entries[number].filename) for number in numbers])
    changed = {n: xml.encode() for n, xml in zip(numbers, translated, strict=True) if xml.encode() != contents[n]}
    if not changed:
        return data
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w") as archive:
        for number, (entry, content) in enumerate(zip(entries, contents, strict=True)):
            archive.writestr(entry, changed.get(number, content))
    return result.getvalue()


def _parts(archive: zipfile.ZipFile) -> set[str]:
    """Return the names of the parts with text: the main one, which the relations name, and others beside it."""
    names, main = archive.namelist(), "word/document.xml"
    if "_rels/.rels" in names:
        relations = ElementTree.fromstring(archive.read("_rels/.rels"))
        kinds = {relation.get("Type").rpartition("/")[2]: relation.get("Target") for relation in relations}
        main = kinds.get("officeDocument", main).lstrip("/")
    archive.getinfo(main)  # raises if there is none
    folder = main[: main.rfind("/") + 1]
    return {main, *(name for name in names if name.startswith(folder) and _PARTS.fullmatch(name[len(folder) :]))}


def _read_part(data: bytes, name: str) -> Document:
    with reading(f"{name} of the Word file is damaged"):
        data.decode()
        events = _events(data)
    pieces, number, in_text = [], 0, False
    while number < len(events):
        taken = _run(events, number)
        # One text comes in several events, at references and line ends.
        in_text = events[number][1:] == ("<", "t") or (in_text and events[number].kind == "text")
        pieces += taken or [_piece(events[number], in_text)]
        number = _end(events, number) + 1 if taken else number + 1
    return Document(pieces, escape=lambda text: html.escape(text, quote=False), in_spans=True)


def _events(data: bytes) -> list[_Event]:
    """Return the XML in parts, each with the name of its element, without a prefix if it is of Word's language."""
    starts: list[tuple[int, str, str]] = []
    parser = expat.ParserCreate(namespace_separator=" ")

    def add(kind: str, name: str = "") -> None:
        starts.append((parser.CurrentByteIndex, kind, _WORD.sub("", name)))

    def refuse(*_) -> None:
        raise expat.ExpatError("it declares a document type, which Word files do not have")

    parser.StartElementHandler = lambda name, attributes: add("<", name)
    parser.EndElementHandler = lambda name: add(">", name)
    parser.CharacterDataHandler = lambda text: add("text", text)
    parser.DefaultHandler = lambda text: add("")  # comments, processing instructions, signs of CDATA sections
    parser.StartDoctypeDeclHandler = refuse
    parser.Parse(data, True)
    places = [0, *(place for place, _, _ in starts[1:]), len(data)]
    return [
        _Event(data[start:end].decode(), kind, name)
        for start, end, (_, kind, name) in zip(places, places[1:], starts, strict=False)
    ]


def _end(events: list[_Event], number: int) -> int:
    """Return the event that ends the element that this one starts."""
    depths = accumulate((event.kind == "<") - (event.kind == ">") for event in islice(events, number, None))
    return next(index for index, depth in enumerate(depths, number) if depth == 0)


def _raw(events: list[_Event]) -> str:
    return "".join(event.raw for event in events)


def _run(events: list[_Event], number: int) -> list[Piece]:
    """Return the pieces of a run with one text or one reference and nothing else visible; none for anything else."""
    if events[number][1:] != ("<", "r"):
        return []
    end = _end(events, number)
    children, place = {}, number + 1  # the first event of each
    while place < end:
        if events[place].kind == "<":
            if events[place].name in children:
                return []
            children[events[place].name] = place
            place = _end(events, place)
        place += 1
    names = set(children) - {"rPr", "lastRenderedPageBreak"}
    if len(names) == 1 and names <= _REFERENCES:
        return [point(_raw(events[number : end + 1]))]
    if names != {"t"}:
        return []
    first = children["t"]
    last = _end(events, first)
    before, tag = _raw(events[number:first]), events[first].raw
    kept = tag if "xml:space" in tag or tag.endswith("/>") else f'{tag[:-1]} xml:space="preserve">'
    content = [_text(event) for event in events[first + 1 : last]]
    name = "sup" if _RAISED.search(before) else "r"
    opening = Piece(before + tag, Kind.OPEN, name=name, again=before + kept)
    return [opening, *content, Piece(_raw(events[last : end + 1]), Kind.CLOSE, name=name)]


def _text(event: _Event) -> Piece:
    """Return text of a run; characters may be references."""
    is_text = event.kind == "text" and (event.raw == event.name or event.raw.startswith("&"))
    return text_piece(event.raw, event.name) if is_text else Piece(event.raw)


def _piece(event: _Event, in_text: bool) -> Piece:
    """Return the piece of an event outside of such runs; `in_text`: in an element of text."""
    raw, kind, name = event
    if kind == "text":
        return _text(event) if in_text else Piece(raw)
    if name in _SPANS and kind:
        return Piece(raw, Kind.OPEN if kind == "<" else Kind.CLOSE, name=name)
    return point(raw) if name in _POINTS and kind else Piece(raw)
