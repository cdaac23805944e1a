"""Translation memories: pairs of segments of a TMX file, as CAT tools exchange them.

Read by expat as a stream, so that a file of any size takes little memory: no tree is built, a segment is forgotten when
its unit has ended, and nothing outside of the file is fetched. The format: TMX 1.4b Specification (GALA, 2005).
"""

import io
import logging
from collections.abc import Iterator
from pathlib import Path
from xml.parsers import expat

from ..errors import UserError, reading
from .text_files import LONGEST_LINE, check_unchanged, file_stamp, open_bytes

logger = logging.getLogger(__name__)

_CHUNK = 1 << 16  # bytes that are parsed at once
_MOST_BYTES = 1 << 20  # of a tag or a comment, which expat holds as a whole
_CODE = {"bpt", "ept", "it", "ph", "ut"}  # inline elements that hold codes of a format; the text in <hi> is a text's


def matches(language: str, range_: str) -> bool:
    """Return whether a language tag is of a language range: the basic filtering of RFC 4647.

    >>> [matches(tag, "en") for tag in ("en", "EN-us", "en_GB", "eng")]
    [True, True, True, False]
    """
    language, range_ = (tag.lower().replace("_", "-") for tag in (language, range_))
    return language == range_ or language.startswith(range_ + "-")


class _Reader:
    """Collects, as the handlers of expat, the segments in two languages, unit by unit."""

    def __init__(self, languages: tuple[str, str]):
        self.languages = languages
        self.pairs: list[tuple[str, str]] = []  # of units that have ended
        self.found_languages: set[str] = set()
        self.units = 0
        self._depth = 0
        self._unit: list[str | None] = [None, None]
        self._side: int | None = None  # of the variant that is read
        self._inside: list[bool] = []  # whether text counts, of the segment and each element in it
        self._text = io.StringIO()
        self.parser = parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartElementHandler, parser.EndElementHandler = self._start, self._end
        parser.CharacterDataHandler = self._data
        # A few lines of these can stand for more text than the memory holds.
        parser.EntityDeclHandler = parser.SkippedEntityHandler = parser.AttlistDeclHandler = self._declaration

    def _declaration(self, name: str, *_facts) -> None:
        raise UserError(f"{name!r:.100} is an entity or a declaration, and TMX has none; write it as text")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if not self._depth and name != "tmx":
            raise UserError(f"not a translation memory: it begins with <{name:.100}> and not with <tmx>")
        self._depth += 1
        if self._inside:
            self._inside.append(name not in _CODE and (name == "sub" or self._inside[-1]))
        elif name == "tu":
            self.units += 1
            self._unit = [None, None]
        elif name == "tuv":
            language = attributes.get("xml:lang") or attributes.get("lang") or ""
            sides = [side for side in (0, 1) if matches(language, self.languages[side])]
            # Of English and British English the latter is meant by the longer tag.
            self._side = max(sides, key=lambda side: len(self.languages[side]), default=None)
            if len(self.found_languages) < 50:
                self.found_languages.add(language[:50])
        elif name == "seg":
            self._inside, self._text = [self._side is not None], io.StringIO()

    def _data(self, text: str) -> None:
        if self._inside and self._inside[-1]:
            self._text.write(text)
            if self._text.tell() > LONGEST_LINE:
                raise UserError(f"a segment of more than {LONGEST_LINE:,} characters; split it")

    def _end(self, name: str) -> None:
        self._depth -= 1
        if self._inside:
            self._inside.pop()
            if not self._inside and self._side is not None and not self._unit[self._side]:  # the first that has text
                lines = (line.strip() for line in self._text.getvalue().split("\n"))
                self._unit[self._side] = " ".join(filter(None, lines))
        elif name == "tuv":
            self._side = None
        elif name == "tu" and None not in self._unit:
            self.pairs.append(tuple(self._unit))


def read_tmx(path: Path, languages: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the texts of each unit of a TMX file, plain or `.gz`, that has segments in both languages.

    Of inline elements the codes are dropped and the text is kept. Of several segments in a language (``en-US`` and
    ``en-GB`` are both ``en``) the first that is not empty counts. Line breaks in a segment become spaces. The encoding
    is what the first bytes or the declaration name; languages are such as ``("en", "pt-BR")``.

    Raises:
        UserError: for a file that cannot be read, is cut off, no TMX, declares entities or changes while it is read,
            with the line; if no unit has both languages, naming those that there are.
    """
    reader, parsed, pairs, chunk = _Reader(languages), 0, 0, b" "
    with reading(path), open_bytes(path) as stream:
        stamp = file_stamp(path)
        while chunk:
            chunk = stream.read(_CHUNK)
            parsed += len(chunk)
            try:
                reader.parser.Parse(chunk, not chunk)
                if parsed - reader.parser.CurrentByteIndex > _MOST_BYTES:
                    raise UserError(f"a tag or comment of more than {_MOST_BYTES:,} bytes; remove it")
            except (UserError, expat.ExpatError, ValueError, LookupError) as error:  # the latter: an unknown encoding
                raise UserError(f"{path}, line {reader.parser.CurrentLineNumber}: {error}") from None
            pairs += len(reader.pairs)
            yield from reader.pairs
            reader.pairs.clear()
        check_unchanged(path, stamp)
    if reader.units and not pairs:
        source, target = languages
        fix = f"the languages are: {', '.join(sorted(reader.found_languages)):.400}; name them by --source-column and"
        fix += " --target-column"
        if all(any(matches(language, name) for language in reader.found_languages) for name in languages):
            fix = "both are there, but without a <seg>, or never in one <tu>"
        raise UserError(f"{path}: no unit has segments in both {source!r} and {target!r}; {fix}")
    if pairs < reader.units:
        missing = f"{reader.units - pairs:,} of {reader.units:,} units"
        logger.info("%s: %s have no segments in both %s and %s: dropped", path, missing, *languages)
