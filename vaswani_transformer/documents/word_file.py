"""Word files (.docx): the runs of text in their paragraphs, by the XML parser expat; every other byte stays."""

import html
import io
import re
import zipfile
from collections.abc import Callable
from itertools import count, pairwise
from typing import NamedTuple
from xml.etree import ElementTree
from xml.parsers import expat

from ..errors import UserError, reading
from .pieces import Document, Kind, Piece, text_piece

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
    depth: int  # elements that it is in


def translate_word_file(data: bytes, translate: Callable[[list[Document]], list[str]]) -> bytes:
    """Return a Word file with the texts of its paragraphs, headers, footers, notes and comments translated."""
    with reading("not a Word file (.docx)"), zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = _parts(archive)
        parts = [entry for entry in archive.infolist() if entry.filename in names]
        if large := [entry for entry in parts if entry.file_size > _MOST_BYTES]:
            raise UserError(f"{large[0].filename} of the Word file has {large[0].file_size:,} bytes: divide the file")
        contents = {entry: archive.read(entry) for entry in archive.infolist()}
    translated = translate([_read_part(contents[entry], entry.filename) for entry in parts])
    changed = contents | {entry: xml.encode() for entry, xml in zip(parts, translated, strict=True)}
    if changed == contents:
        return data
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w") as archive:
        for entry, content in changed.items():
            archive.writestr(entry, content)
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
        in_text = events[number][1:3] == ("<", "t") or (in_text and events[number].kind == "text")
        pieces += taken or [_piece(events[number], in_text)]
        number = _end(events, number) + 1 if taken else number + 1
    return Document(pieces, escape=lambda text: html.escape(text, quote=False))


def _events(data: bytes) -> list[_Event]:
    """Return the XML in parts, each with the name of its element, without a prefix if it is of Word's language."""
    starts: list[tuple[int, str, str, int]] = []
    depth, parser = 0, expat.ParserCreate(namespace_separator=" ")

    def add(kind: str, name: str = "") -> None:
        nonlocal depth
        depth -= kind == ">"
        starts.append((parser.CurrentByteIndex, kind, _WORD.sub("", name), depth))
        depth += kind == "<"

    def refuse(*_) -> None:
        raise expat.ExpatError("it declares a document type, which Word files do not have")

    parser.StartElementHandler = lambda name, attributes: add("<", name)
    parser.EndElementHandler = lambda name: add(">", name)
    parser.CharacterDataHandler = lambda text: add("text", text)
    parser.DefaultHandler = lambda text: add("")  # comments, processing instructions, signs of CDATA sections
    parser.StartDoctypeDeclHandler = refuse
    parser.Parse(data, True)
    places = [0, *(place for place, *_ in starts[1:]), len(data)]
    return [
        _Event(data[start:end].decode(), *event)
        for (start, end), (_, *event) in zip(pairwise(places), starts, strict=True)
    ]


def _end(events: list[_Event], number: int) -> int:
    """Return the event that ends the element that this one starts."""
    return next(n for n in count(number + 1) if events[n].depth <= events[number].depth)


def _raw(events: list[_Event]) -> str:
    return "".join(event.raw for event in events)


def _run(events: list[_Event], number: int) -> list[Piece]:
    """Return the pieces of a run with one text or one reference and nothing else visible; none for anything else."""
    if events[number][1:3] != ("<", "r"):
        return []
    end, depth = _end(events, number), events[number].depth + 1
    children = [n for n in range(number, end) if events[n].depth == depth and events[n].kind == "<"]
    shown = [n for n in children if events[n].name not in ("rPr", "lastRenderedPageBreak")]
    names = [events[n].name for n in shown]
    if len(names) == 1 and names[0] in _REFERENCES:
        return [Piece(_raw(events[number : end + 1]), Kind.POINT)]
    if names != ["t"]:
        return []
    first, last = shown[0], _end(events, shown[0])
    before, tag = _raw(events[number:first]), events[first].raw
    kept = tag if "xml:space" in tag or tag.endswith("/>") else f'{tag[:-1]} xml:space="preserve">'
    name = "sup" if _RAISED.search(before) else "r"
    opening = Piece(before + tag, Kind.OPEN, name=name, again=before + kept)
    return [opening, *map(_piece, events[first + 1 : last]), Piece(_raw(events[last : end + 1]), Kind.CLOSE, name=name)]


def _piece(event: _Event, in_text: bool = True) -> Piece:
    """Return the piece of an event, one of text's perhaps a reference; `in_text`: in an element of text."""
    raw, kind, name, _ = event
    if kind == "text":
        return text_piece(raw, name) if in_text and (raw == name or raw.startswith("&")) else Piece(raw)
    if name in _SPANS and kind:
        return Piece(raw, Kind.OPEN if kind == "<" else Kind.CLOSE, name=name)
    return Piece(raw, Kind.POINT if name in _POINTS and kind else Kind.FIXED)
