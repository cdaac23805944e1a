"""Translation memories: pairs of segments of a TMX file, as CAT tools exchange them (TMX 1.4b, GALA, 2005).

Read as a stream: a variant is forgotten when it has ended, so that a file of any size takes little memory.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element, iterparse

from ..errors import UserError, reading
from .text_files import LONGEST_LINE, check_unchanged, file_stamp, open_bytes

logger = logging.getLogger(__name__)

_CODE = {"bpt", "ept", "it", "ph", "ut"}  # inline elements that hold codes of a format; the text in <hi> is a text's


def matches(language: str, range_: str) -> bool:
    """Return whether a language tag is of a language range: the basic filtering of RFC 4647 (en_GB is of en)."""
    language, range_ = (tag.lower().replace("_", "-") for tag in (language, range_))
    return language == range_ or language.startswith(range_ + "-")


def _units(stream, languages: tuple[str, str], found: set[str]) -> Iterator[list[str | None]]:
    """Yield each unit's texts in two languages, None where there is none; all languages that it has go to `found`."""
    above: list[Element] = []
    unit: list[str | None] = [None, None]
    for event, element in iterparse(stream, ("start", "end")):
        name = _name(element)
        if event == "start":
            if not above and name != "tmx":
                raise ValueError(f"not a translation memory: it begins with <{name:.100}> and not with <tmx>")
            above.append(element)
            if name == "tu":
                unit = [None, None]
            continue
        above.pop()
        if name == "tuv":
            language = element.get("{http://www.w3.org/XML/1998/namespace}lang") or element.get("lang") or ""
            found.add(language[:50])
            sides = [side for side in (0, 1) if matches(language, languages[side])]
            if sides and (segments := element.findall("{*}seg")):
                side = max(sides, key=lambda side: len(languages[side]))  # of en and en-GB the latter is meant
                lines = (line.strip() for segment in segments for line in _text(segment).split("\n"))
                unit[side] = unit[side] or " ".join(filter(None, lines))  # the first that has text
                if len(unit[side]) > LONGEST_LINE:
                    raise ValueError(f"a segment has more than {LONGEST_LINE:,} characters: {unit[side]:.60}")
        elif name == "tu":
            yield unit
        if above and _name(above[-1]) in ("tmx", "body", "tu"):
            above[-1].remove(element)


def _name(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _text(element: Element) -> str:
    inner = "".join(_text(child) + (child.tail or "" if _name(element) not in _CODE else "") for child in element)
    own = element.text or ""
    return ("\n" * own.lower().startswith(("<br>", "<br/", "<br ")) if _name(element) in _CODE else own) + inner


def read_tmx(path: Path, languages: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the texts of each unit of a TMX file, plain or `.gz`, that has segments in both languages.

    Of inline elements the codes are dropped and the text is kept. Of several segments in a language (``en-US`` and
    ``en-GB`` are both ``en``) the first that is not empty counts. Line breaks in a segment become spaces. The encoding
    is what the first bytes or the declaration name; languages are such as ``("en", "pt-BR")``.

    Raises:
        UserError: for a file that is unreadable, cut off, no TMX or changes meanwhile; if no unit has both languages.
    """
    units, pairs, found = 0, 0, set()
    with reading(path), open_bytes(path) as stream:
        stamp = file_stamp(path)
        for unit in _units(stream, languages, found):
            units += 1
            if None not in unit:
                pairs += 1
                yield tuple(unit)
        check_unchanged(path, stamp)
    if units and not pairs:
        options = "--source-column, --target-column; translate: --source-language, --target-language"
        fix = f"the languages are: {', '.join(sorted(found)):.400}; name two of them ({options}; serve: en-de=MODEL)"
        if all(any(matches(language, name) for language in found) for name in languages):
            fix = "both are there, but without a <seg>, or never in one <tu>"
        raise UserError(f"{path}: no unit has segments in both {languages[0]!r} and {languages[1]!r}; {fix}")
    if pairs < units:
        missing = f"{units - pairs:,} of {units:,} units"
        logger.info("%s: %s have no segments in both %s and %s: dropped", path, missing, *languages)
