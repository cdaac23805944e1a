"""Word files, slides and OpenDocument texts: runs of text in paragraphs, by expat's parser; every other byte stays."""

import html
import io
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from typing import NamedTuple
from xml.etree import ElementTree
from xml.parsers import expat

from ..errors import UserError, reading
from .kept import STAND_IN
from .pieces import SLIDE_LINK, Document, Kind, Piece, text_piece

_PARTS = re.compile(r"(header|footer)\d*\.xml|(footnotes|endnotes|comments)\.xml")  # beside the main one
_MOST_BYTES = 1 << 28  # of a part
_DEEPEST, _MOST_FIELDS = 200, 50  # elements, and fields, within each other: time and memory grow with the square
_SLIDES = re.compile(r"ppt/(?:slides/slide|notesSlides/notesSlide|diagrams/(?:data|drawing))\d+\.xml")
_OPEN_DOCUMENT = {"content.xml", "styles.xml"}
# Namespaces of the elements that count; the runs of slides have the names of Word's.
_NAMESPACE = re.compile(r"http://\S+/(?:wordprocessingml|drawingml)/\S*main |urn:oasis:\S+:xmlns:text:1\.0 ")
_PARAGRAPHS, _INNER = {"p", "h"}, {"span", "a"}  # of OpenDocument
_SPANS = {"hyperlink", "ins", "smartTag"}
_POINTS = {"bookmarkStart", "bookmarkEnd", "commentRangeStart", "commentRangeEnd", "proofErr", "permStart", "permEnd"}
_FIELD, _TEXT_FIELD = re.compile('fldCharType="(begin|end)"'), re.compile("HYPERLINK|FORMTEXT")
_CITATION = re.compile(r"instrText[^<>]*>\s*(?:CITATION|ADDIN)\b|<w:tag [^<>]*CITATION|<w:citation/>")
_UNSEEN = re.compile("bookmark|page-break|mark-|change|annotation-end")
_RAISED = re.compile(r'vertAlign [^<>]*"su(?:b|per)script"')
# A run of one of them is a point, of pictures if no text box is in it.
_REFERENCES = {"footnoteReference", "endnoteReference", "commentReference", "noBreakHyphen", "softHyphen", "sym"}
_PICTURES = {"drawing", "pict", "object", "AlternateContent"}
_ASIDE, _NOTE = "\0\1"  # around the number of a note in a sentence; before each note behind all text: no XML has them


class _Event(NamedTuple):
    """A part of the XML: `"<"` and `">"` for an element's tags, `"text"`, or `""` for anything else."""

    raw: str
    kind: str
    name: str
    depth: int  # elements that it is in


def translate_office_file(data: bytes, translate: Callable[[list[Document]], list[str]]) -> bytes:
    """Return an office file with its paragraphs translated, those of headers, footers, notes and comments too."""
    with reading("not a Word file, slides (.pptx) or OpenDocument text"), zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = _parts(archive)
        parts = [entry for entry in archive.infolist() if entry.filename in names]
        if large := [entry for entry in parts if entry.file_size > _MOST_BYTES]:
            raise UserError(f"{large[0].filename} of the file has {large[0].file_size:,} bytes: divide the file")
        contents = {entry: _content(archive, entry) for entry in archive.infolist()}
    translated = translate([_read_part(contents[entry], entry.filename) for entry in parts])
    changed = contents | {entry: _put_back(xml).encode() for entry, xml in zip(parts, translated, strict=True)}
    if changed == contents:
        return data
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w") as archive:
        for entry, content in changed.items():
            archive.writestr(entry, content)  # in the same order: OpenDocument's mimetype comes first
    return result.getvalue()


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Return what is packed, no more bytes than it announces; only deflate unpacks so few."""
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UserError(f"{entry.filename} of the file is packed in a way that office files are not")
    with archive.open(entry) as stream:
        return stream.read(entry.file_size)


def _parts(archive: zipfile.ZipFile) -> set[str]:
    """Return the names of the parts with text; of Word's the main one is named by relations, others are beside it."""
    names, main = archive.namelist(), "word/document.xml"
    if slides := set(filter(_SLIDES.fullmatch, names)):
        return slides
    if "mimetype" in names:
        return _OPEN_DOCUMENT.intersection(names)
    if "_rels/.rels" in names:
        relations = ElementTree.fromstring(_content(archive, archive.getinfo("_rels/.rels")))
        kinds = {relation.get("Type").rpartition("/")[2]: relation.get("Target") for relation in relations}
        named = kinds.get("officeDocument", main).lstrip("/")
        main = main if named.startswith("xl/") else named  # a spreadsheet of Excel has none
    archive.getinfo(main)  # raises if there is none
    folder = main[: main.rfind("/") + 1]
    return {main, *(name for name in names if name.startswith(folder) and _PARTS.fullmatch(name[len(folder) :]))}


def _read_part(data: bytes, name: str) -> Document:
    with reading(f"{name} of the file is damaged"):
        data.decode()
        events = _events(data)
    pieces, number, in_text = [], 0, False
    if name in _OPEN_DOCUMENT:
        number, aside = len(events), []
        pieces = _open_document(events, aside)
        for note in aside:  # which grows by notes in notes
            pieces += [Piece(_NOTE), *_open_document(note, aside)]
    while number < len(events):
        taken, end = _run(events, number), _end_of_whole(events, number)
        if end:
            pieces.append(Piece(_raw(events[number : end + 1]), Kind.POINT, STAND_IN * (events[number].name != "del")))
            number = end + 1
            continue
        # One text comes in several events, at references and line ends.
        in_text = events[number][1:3] == ("<", "t") or (in_text and events[number].kind == "text")
        pieces += taken or [_piece(events[number], in_text)]
        number = _end(events, number) + 1 if taken else number + 1
    if name.startswith("ppt/"):  # where texts have no xml:space
        pieces = [replace(piece, again=piece.again and piece.raw) for piece in pieces]
    return Document(pieces, escape=lambda text: html.escape(text, quote=False))


def _put_back(xml: str) -> str:
    """Return the XML of a part with its notes in their sentences."""
    text, *notes = xml.split(_NOTE)
    while _ASIDE in text:  # again for notes in notes
        text = re.sub(rf"{_ASIDE}(\d+){_ASIDE}", lambda place: notes[int(place[1])], text)
    return text


def _open_document(events: list[_Event], aside: list[list[_Event]]) -> list[Piece]:
    """Return the pieces of an OpenDocument part; text is what is directly in paragraphs, headings, spans and links.

    What has paragraphs of its own within one, such as a note, is a point and is added to `aside`.
    """
    pieces, stack, number = [], [""], 0
    while number < len(events):
        event, end = events[number], number
        in_text = stack[-1] in _PARAGRAPHS | _INNER
        opens = event.kind == "<"
        is_inner = event.kind != "text" and event.name in _INNER
        if opens and in_text and not is_inner:
            end = _end(events, number)
            inner = {part.name for part in events[number:end] if part.kind == "<"}
        if end > number and inner & _PARAGRAPHS:
            separates = ":drawing:" in event.name  # a frame with text, or a shape
            pieces.append(Piece(f"{_ASIDE}{len(aside)}{_ASIDE}", Kind.POINT, " " * separates))
            aside.append(events[number : end + 1])
        elif end > number and not inner & _INNER:
            raw, name = _raw(events[number : end + 1]), event.name
            kind = Kind.FIXED if name in ("tab", "line-break") else Kind.POINT
            other = Piece(raw, kind, STAND_IN * (kind is Kind.POINT and not _UNSEEN.search(name)))
            pieces.append(text_piece(raw, " ") if name == "s" else other)  # spaces, which are one in a translation
        else:
            end = number
            if is_inner:
                pieces.append(Piece(event.raw, Kind.OPEN if opens else Kind.CLOSE, name=event.name))
            else:
                pieces.append(_piece(event, in_text))
            stack += [event.name] if opens else []
            if event.kind == ">":
                stack.pop()
        number = end + 1
    return pieces


def _events(data: bytes) -> list[_Event]:
    """Return the XML in parts, each with the name of its element, without the prefixes of `_NAMESPACE`."""
    starts: list[tuple[int, str, str, int]] = []
    depth, parser = 0, expat.ParserCreate(namespace_separator=" ")

    def add(kind: str, name: str = "") -> None:
        nonlocal depth
        depth -= kind == ">"
        starts.append((parser.CurrentByteIndex, kind, _NAMESPACE.sub("", name), depth))
        depth += kind == "<"
        if depth > _DEEPEST:
            refuse(f"more than {_DEEPEST} elements are within each other")

    def refuse(reason: str) -> None:
        raise expat.ExpatError(reason)

    parser.StartElementHandler, parser.EndElementHandler = lambda name, _: add("<", name), lambda name: add(">", name)
    parser.CharacterDataHandler = lambda text: add("text", text)
    parser.DefaultHandler = lambda text: add("")  # comments, processing instructions, signs of CDATA sections
    parser.StartDoctypeDeclHandler = lambda *_: refuse("it declares a document type, which is not read")
    parser.Parse(data, True)
    raws = (data[start:end].decode() for start, end in pairwise([0, *(place for place, *_ in starts[1:]), len(data)]))
    return [_Event(raw, *event) for raw, (_, *event) in zip(raws, starts, strict=True)]


def _end_of_whole(events: list[_Event], number: int) -> int:
    """Return the last event of a field, a formula or deleted text that begins here; 0 for anything else."""
    kind, name = events[number][1:3]
    if kind != "<" or not (name in ("r", "fldSimple", "fld", "del", "sdt") or name.endswith(" oMath")):
        return 0
    first, last, depth = number, _end(events, number), 0
    while name == "r" and events[first].kind != ">":  # a field is of several runs
        last = _end(events, first) if events[first].kind == "<" else first
        ends = _FIELD.findall(_raw(events[first : last + 1]))
        depth, first = depth + ends.count("begin") - ends.count("end"), last + 1
        if not 0 < depth < _MOST_FIELDS:
            break
    raw = _raw(events[number : last + 1])
    is_whole = name not in ("r", "sdt") or (name == "r" and depth == 0 and _FIELD.search(raw))
    is_whole = _CITATION.search(raw) if name == "sdt" or (is_whole and _TEXT_FIELD.search(raw)) else is_whole
    return last if is_whole and all(event.name != "p" for event in events[number:last]) else 0  # "p": a text box


def _end(events: list[_Event], number: int) -> int:
    """Return the event that ends the element that this one starts."""
    return next(n for n in count(number + 1) if events[n].depth <= events[number].depth)


def _raw(events: list[_Event]) -> str:
    return "".join(event.raw for event in events)


def _run(events: list[_Event], number: int) -> list[Piece]:
    """Return the pieces of a run with one text, its hyphens, or one reference, and no more; none for anything else."""
    if events[number][1:3] != ("<", "r"):
        return []
    end, depth = _end(events, number), events[number].depth + 1
    children = [n for n in range(number, end) if events[n].depth == depth and events[n].kind == "<"]
    shown = [n for n in children if events[n].name not in ("rPr", "lastRenderedPageBreak")]
    names = [events[n].name for n in shown]
    name = names[0].rpartition(" ")[2] if len(names) == 1 else ""
    is_picture = name in _PICTURES and all(event.name != "p" for event in events[number:end])
    if is_picture or name in _REFERENCES:
        is_number = re.search(r"\d\s*(?:<[^<>]*>\s*)*$", _raw(events[max(0, number - 9) : number]))  # 1-24, no e-mail
        text = " " if is_picture else STAND_IN * (name == "noBreakHyphen" and is_number is not None)
        return [Piece(_raw(events[number : end + 1]), Kind.POINT, text)]
    is_empty = len(names) > 1 and any(events[n].raw.endswith("/>") for n in shown[::2])  # <w:t/>
    if len(names) % 2 == 0 or {*names[::2]} != {"t"} or {*names[1::2]} - {"noBreakHyphen"} or is_empty:
        return []
    first, last = shown[0], _end(events, shown[-1])
    before = _raw(events[number:first])
    tag = events[first].raw
    kept = tag if "xml:space" in tag or tag.endswith("/>") else f'{tag[:-1]} xml:space="preserve">'
    name = SLIDE_LINK if "hlinkClick" in before else "sup" if _RAISED.search(before) else "r"
    opening = Piece(before + tag, Kind.OPEN, name=name, again=before + kept)
    inner = []
    for text, following in zip(shown[::2], [*shown[2::2], None], strict=True):
        close = _end(events, text)
        inner += map(_piece, events[text + 1 : close])
        inner += [text_piece(_raw(events[close : following + 1]), "\u2011")] if following else []
    return [opening, *inner, Piece(_raw(events[last : end + 1]), Kind.CLOSE, name=name)]


def _piece(event: _Event, in_text: bool = True) -> Piece:
    """Return the piece of an event, one of text's perhaps a reference; `in_text`: in an element of text."""
    raw, kind, name, _ = event
    if kind == "text":
        return text_piece(raw, name) if in_text and (raw == name or raw.startswith("&")) else Piece(raw)
    if name in _SPANS and kind:
        return Piece(raw, Kind.OPEN if kind == "<" else Kind.CLOSE, name=name)
    return Piece(raw, Kind.POINT if name in _POINTS and kind else Kind.FIXED)
