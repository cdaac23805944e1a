"""Translation memories: pairs of segments of a TMX file, as CAT tools exchange them.

Read as a stream, so that a file of any size takes little memory: a unit is forgotten when it has ended, and nothing
outside of the file is fetched. The format: TMX 1.4b Specification (GALA, 2005).
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from ..errors import UserError, reading
from .text_files import check_unchanged, file_stamp, open_bytes

logger = logging.getLogger(__name__)

_CHUNK = 1 << 16  # bytes that are parsed at once
_MOST_BYTES = 1 << 24  # of a unit, which is in memory as a whole
_CODE = {"bpt", "ept", "it", "ph", "ut"}  # inline elements that hold codes of a format; the text in <hi> is a text's


def matches(language: str, range_: str) -> bool:
    """Return whether a language tag is of a language range: the basic filtering of RFC 4647.

    >>> [matches(tag, "en") for tag in ("en", "EN-us", "en_GB", "eng")]
    [True, True, True, False]
    """
    language, range_ = (tag.lower().replace("_", "-") for tag in (language, range_))
    return language == range_ or language.startswith(range_ + "-")


def _parser(units: list[Element]) -> expat.XMLParserType:
    """Return a parser that appends each unit when it has ended."""
    builder, parents, parser = TreeBuilder(), [], expat.ParserCreate()

    def start(name: str, attributes: dict[str, str]) -> None:
        if not parents and name != "tmx":
            raise ValueError(f"not a translation memory: it begins with <{name:.100}> and not with <tmx>")
        parents.append(builder.start(name, attributes))

    def end(name: str) -> None:
        parents.pop()
        element = builder.end(name)
        if name == "tu":
            units.append(element)
            for parent in parents:
                parent.clear()

    def refuse(name: str, *_facts) -> None:
        raise ValueError(f"{name!r:.100} is an entity or a declaration, and TMX has none; write it as text")

    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, builder.data
    # A few lines of these can stand for more text than the memory holds.
    parser.EntityDeclHandler = parser.SkippedEntityHandler = parser.AttlistDeclHandler = refuse
    return parser


def _texts(element: Element, is_text: bool = True) -> Iterator[str]:
    """Yield the texts of a segment, those of codes left out; a <sub> in a code holds text."""
    if is_text:
        yield element.text or ""
    for inner in element:
        yield from _texts(inner, inner.tag not in _CODE and (inner.tag == "sub" or is_text))
        if is_text:
            yield inner.tail or ""


def _segments(unit: Element, languages: tuple[str, str], available: set[str]) -> list[str | None]:
    """Return the segments of a unit in two languages, None where there is none; adds its languages to `available`."""
    segments: list[str | None] = [None, None]
    for variant in unit.iter("tuv"):
        language = variant.get("xml:lang") or variant.get("lang") or ""
        available.add(language[:50])
        sides = [side for side in (0, 1) if matches(language, languages[side])]
        # Of English and British English the latter is meant by the longer tag.
        side = max(sides, key=lambda side: len(languages[side]), default=None)
        for segment in variant.iter("seg") if side is not None else ():
            lines = (line.strip() for line in "".join(_texts(segment)).split("\n"))
            segments[side] = segments[side] or " ".join(filter(None, lines))
    return segments


def read_tmx(path: Path, languages: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the texts of each unit of a TMX file, plain or `.gz`, that has segments in both languages.

    Of inline elements the codes are dropped and the text is kept. Of several segments in a language (``en-US`` and
    ``en-GB`` are both ``en``) the first that is not empty counts. Line breaks in a segment become spaces.

    Args:
        path: the file, in any encoding that its first bytes or its declaration name.
        languages: of source and target, such as ``("en", "pt-BR")``.

    Raises:
        UserError: for a file that cannot be read, is cut off, no TMX, declares entities or changes while it is read; if
            no unit has both languages, naming those that there are.
    """
    units: list[Element] = []
    parser, available, number, pairs, unread, chunk = _parser(units), set(), 0, 0, 0, b" "
    with reading(path), open_bytes(path) as stream:
        stamp = file_stamp(path)
        while chunk:
            chunk = stream.read(_CHUNK)
            parser.Parse(chunk, not chunk)
            unread = 0 if units else unread + len(chunk)
            if unread > _MOST_BYTES:
                raise UserError(f"{path}, line {parser.CurrentLineNumber}: more than {_MOST_BYTES:,} bytes in one unit")
            for unit in units:
                number, segments = number + 1, _segments(unit, languages, available)
                if None not in segments:
                    pairs += 1
                    yield tuple(segments)
            units.clear()
        check_unchanged(path, stamp)
    if number and not pairs:
        source, target = languages
        raise UserError(
            f"{path}: no unit has segments in both {source!r} and {target!r}; the languages are:"
            f" {', '.join(sorted(available)):.400}; name them by --source-column and --target-column"
        )
    if pairs < number:
        missing = f"{number - pairs:,} of {number:,} units"
        logger.info("%s: %s have no segments in both %s and %s: dropped", path, missing, *languages)
