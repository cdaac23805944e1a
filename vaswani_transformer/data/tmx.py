"""Translation memories: pairs of segments of a TMX file, as CAT tools exchange them.

Read by expat as a stream, so that a file of any size takes little memory: no tree is built, a segment is forgotten when
its unit has ended, and nothing outside of the file is fetched. The format: TMX 1.4b Specification (GALA, 2005).
"""

import gzip
import logging
from collections.abc import Iterator
from pathlib import Path
from xml.parsers import expat

from ..errors import UserError
from .text_files import LONGEST_LINE, check_unchanged, file_errors, file_stamp, open_bytes

logger = logging.getLogger(__name__)

_CHUNK = 1 << 16  # bytes that are parsed at once
_MOST_BYTES = 1 << 20  # of a tag or a comment, which expat holds as a whole
_MOST_LANGUAGES = 50  # that a message names
_DEEPEST = 100  # elements within elements; expat and `_Reader` remember all of them
_CODE = {"bpt", "ept", "it", "ph", "ut"}  # inline elements that hold codes of a format; the text in <hi> is a text's


def matches(language: str, wanted: str) -> bool:
    """Whether a language tag is the wanted one or a more special one: the basic filtering of RFC 4647.

    >>> [matches(tag, "en") for tag in ("en", "EN-us", "en_GB", "eng")]
    [True, True, True, False]
    """
    language, wanted = (tag.lower().replace("_", "-") for tag in (language, wanted))
    return language == wanted or language.startswith(wanted + "-")


class _Reader:
    """What expat calls: collects the segments in two languages, unit by unit."""

    def __init__(self, path: Path, languages: tuple[str, str]):
        self.path, self.wanted = path, languages
        self.pairs: list[tuple[int, tuple[str, str]]] = []  # of units that have ended, with their lines
        self.languages: dict[str, None] = {}  # in the order in which they come
        self.units = 0
        self._depth = 0
        self._unit: list[str | None] = [None, None]
        self._side: int | None = None  # of the variant that is read
        self._inside: list[bool] = []  # whether text counts, of the segment and each element in it
        self._text: list[str] = []
        self._length = 0
        self.parser = parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartElementHandler, parser.EndElementHandler = self._start_root, self._end
        parser.CharacterDataHandler = self._data
        parser.EntityDeclHandler, parser.SkippedEntityHandler = self._entity, self._entity
        parser.AttlistDeclHandler = self._default

    def error(self, problem: str) -> UserError:
        """An error with file and line."""
        return UserError(f"{self.path}, line {self.parser.CurrentLineNumber}: {problem}")

    def _entity(self, name: str, *_facts) -> None:
        # A few lines of them can stand for more text than the memory holds.
        raise self.error(f"the entity {name!r:.100}, and TMX has none; write it as text or as a number such as &#160;")

    def _default(self, element: str, *_facts) -> None:
        # A few bytes for each element could stand for a megabyte of a default value.
        raise self.error(f"a declaration of attributes of <{element:.100}>, and TMX files have none; remove it")

    def _start_root(self, name: str, attributes: dict[str, str]) -> None:
        if name != "tmx":
            raise self.error(f"not a translation memory: it begins with <{name:.100}> and not with <tmx>")
        self.parser.StartElementHandler = self._start

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self.error(f"elements nested deeper than {_DEEPEST} levels; export the memory again")
        if self._inside:
            self._inside.append(name not in _CODE and (name == "sub" or self._inside[-1]))
        elif name == "tu":
            self.units += 1
            self._unit = [None, None]
        elif name == "tuv":
            language = attributes.get("xml:lang") or attributes.get("lang") or ""
            if len(self.languages) < _MOST_LANGUAGES:
                self.languages[language[:50]] = None
            sides = [side for side in (0, 1) if matches(language, self.wanted[side])]
            # Of English and British English the latter is meant by the longer tag.
            self._side = max(sides, key=lambda side: len(self.wanted[side]), default=None)
        elif name == "seg":
            self._inside, self._text, self._length = [self._side is not None], [], 0

    def _data(self, text: str) -> None:
        if self._inside and self._inside[-1]:
            self._text.append(text)
            self._length += len(text)
            if self._length > LONGEST_LINE:
                raise self.error(f"a segment of more than {LONGEST_LINE:,} characters; split it")

    def _end(self, name: str) -> None:
        self._depth -= 1
        if self._inside:
            self._inside.pop()
            if not self._inside and self._side is not None and not self._unit[self._side]:  # the first that has text
                lines = (line.strip() for line in "".join(self._text).split("\n"))
                self._unit[self._side] = " ".join(filter(None, lines))
        elif name == "tuv":
            self._side = None
        elif name == "tu" and None not in self._unit:
            self.pairs.append((self.parser.CurrentLineNumber, tuple(self._unit)))


def read_tmx(path: Path, languages: tuple[str, str]) -> Iterator[tuple[int, tuple[str, str]]]:
    """Line and texts of each unit of a TMX file, plain or `.gz`, that has segments in both languages.

    Of inline elements the codes are dropped and the text is kept. Of several segments in a language (``en-US`` and
    ``en-GB`` are both ``en``) the first that is not empty counts. Line breaks in a segment become spaces.

    Args:
        path: the file, in any encoding that its first bytes or its declaration name.
        languages: of source and target, such as ``("en", "pt-BR")``.

    Raises:
        UserError: for a file that cannot be read, is cut off, no TMX, declares entities or changes while it is read,
            with the line; if no unit has both languages, naming those that there are.
    """
    reader, parsed, pairs = _Reader(path, languages), 0, 0
    with file_errors(path, lambda: reader.parser.CurrentLineNumber), open_bytes(path) as raw:
        stamp = file_stamp(path, raw)
        stream = gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw
        while True:
            chunk = stream.read(_CHUNK)
            parsed += len(chunk)
            try:
                reader.parser.Parse(chunk, not chunk)
            except UserError:
                raise
            except (expat.ExpatError, ValueError, LookupError) as error:  # the latter: an encoding that is not known
                raise reader.error(f"not well-formed XML ({error}); export the memory again") from None
            if parsed - reader.parser.CurrentByteIndex > _MOST_BYTES:
                raise reader.error(f"a tag or comment of more than {_MOST_BYTES:,} bytes; remove it")
            pairs += len(reader.pairs)
            yield from reader.pairs
            reader.pairs.clear()
            if not chunk:
                break
        check_unchanged(path, raw, stamp)
    if not pairs:
        raise UserError(_no_pairs(reader))
    if pairs < reader.units:
        missing = f"{reader.units - pairs:,} of {reader.units:,} units"
        logger.info("%s: %s have no segments in both %s and %s: dropped", path, missing, *languages)


def _no_pairs(reader: _Reader) -> str:
    source, target = reader.wanted
    if not reader.languages:
        return f"{reader.path}: empty, no translation units; give a memory with at least one"
    there = ", ".join(language or "(none named)" for language in reader.languages)
    return (
        f"{reader.path}: no unit has segments in both {source!r} and {target!r}; the languages are: {there:.400};"
        " name them by --source-column and --target-column"
    )
