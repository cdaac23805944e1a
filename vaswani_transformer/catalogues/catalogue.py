"""What catalogues have in common: entries, their translations, and the file that they are in.

Filling an entry replaces spans of the text, so that all other bytes stay. Gettext, XLIFF and Qt files have
sources and targets. The others have one language: by the entries of the source language's file it is known what is
missing, which is added behind what is there; without them a file's own texts are translated in place.

In texts one character from `CODE` on stands for an inline element (`<g id="1">`, `<b>`, an entity of the document),
which `Entry.codes` has: a target must have those of its source.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from xml.parsers import expat

import regex

from ..errors import UserError, reading

logger = logging.getLogger(__name__)

CODE = 0x10F000  # the character of an entry's first inline element, of a private plane
CODES = re.compile(f"[{chr(CODE)}-\U0010fffd]")
MARK = "vaswani: "  # the start of our comments; a second filling replaces them
NUMBERS = (*range(2, 200), 1, 0)  # the first that takes a plural form is its example: Russian "one" is 21, not 1
CATEGORIES = ("zero", "one", "two", "few", "many", "other")  # of plural forms, in CLDR
LETTERS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}  # behind backslashes
IN_C = str.maketrans({"\\": "\\\\", '"': '\\"'} | {character: f"\\{letter}" for letter, character in LETTERS.items()})
# Accelerators of menus and buttons: a mark before the key, as in `&File`, `_File` or `~File`.
_MARKED = regex.compile(
    r"((?<![&\p{Lu}])(?!(?<=\p{Ll})&\p{Lu})&(?=\w)|(?<=\b\pL|\b\p{Lu}\p{Ll}+)[&_](?=\p{Ll}))(?!\w+;)"
    r"|~(?=\pL{2})|(?<![\w%])_(?=[^\W_])"
)
_NO_LABEL = regex.compile(r"[\\=]|/\S*[_&~]|\b\p{Ll}\w+_\w|\w\w_\p{Lu}|\b_[^\W_][^_\n]*\B_\b")  # paths, names, _so_
_NO_TEXT = re.compile(r"<[^<>]*>|%\(\w+\)|\$\w+|\{[^{}]*\}")  # which may have such marks: `target="_blank"`

Edit = tuple[int, int, str]  # start and end of a span, and what replaces it


class Filling(NamedTuple):
    """The translation of an entry: a text for each of its `texts()`, or none, and the reason why not."""

    targets: tuple[str, ...]
    confidence: float
    origin: str
    reason: str = ""

    @property
    def note(self) -> str:
        """Return the comment that goes with it."""
        if self.reason:
            return f"{MARK}as in the source, since {self.reason}"
        origin = re.sub(r"--+|\*/|\s+", " ", self.origin)  # what would end a comment
        return f"{MARK}machine translation by {origin}, confidence {self.confidence:.2f}"


@dataclass(frozen=True)
class Entry:
    """A message of a catalogue; for each plural form `counts` has an example of the numbers that take it."""

    id: str
    sources: tuple[str, ...] = ()  # of a plural the texts for one and for many; of an array its items
    targets: tuple[str, ...] = ()
    state: str = "untranslated"  # or fuzzy, translated, kept, refused (`notes` has the reason), header (always edited)
    line: int = 0
    context: str = ""
    flags: str = ""  # such as c-format
    notes: str = ""
    counts: tuple[int, ...] = ()
    codes: tuple[str, ...] = ()
    place: Any = field(default=None, repr=False, compare=False)  # in the text, of a header an edit; None: to be added

    def texts(self) -> list[tuple[str, int | None]]:
        """Return what is to be translated: texts, in plurals each with a number that it is for."""
        if not self.counts:
            return [(source, None) for source in self.sources]
        return [(self.sources[0 if count == 1 else -1], count) for count in self.counts]


class Catalogue:
    """A file that is read by a pattern each match of which may be an entry.

    A format is a subclass with `_entries(match)`, and `_edits(entry, filling)`: what changes in the `text`, with the
    filling's note. `source` has the source language's entries by their ids, for formats with one language;
    `language` is the code of the target language.
    """

    pattern: regex.Pattern  # an entry's line is that of its group `start`
    gap = re.compile(r"(?!)")  # what must not be between matches
    declaration = re.compile(rb"(?!)")  # of a file's encoding, in its first bytes
    encoding, errors = "utf-8", "surrogateescape"  # of a file that names none
    is_xml = False  # which expat checks

    def __init__(self, path: Path, source: Mapping[str, Entry] | None = None, language: str | None = None):
        self.path, self.source, self.language, self.line, self.counted = path, source, language, 1, 0
        self.missing = dict(source or {})  # entries that have not been found yet
        with reading(path):
            raw = path.read_bytes()
            named = match[1].decode() if (match := self.declaration.search(raw[: 1 << 16])) else self.encoding
            self.encoding = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}.get(raw[:2], named)
            self.text = raw.decode(self.encoding, "surrogateescape")
            if self.text.encode(self.encoding, "surrogateescape") != raw:
                raise UserError(f"{path}: it cannot be written again in {self.encoding}; convert it to UTF-8")
            if self.is_xml:
                expat.ParserCreate().Parse(raw, True)
        self.head = self.text[: 1 << 16]
        self.newline = "\r\n" if "\r\n" in self.head else "\n"

    def entries(self) -> Iterator[Entry]:
        """Yield the entries, at the end those that the file lacks."""
        with reading(self.path):
            yield from self._read()
            lacking = [each for each in self.missing.values() if each.state == "untranslated"]
            forms = tuple(self.plurals.values()) if any(each.counts for each in lacking) else ()
            yield from (replace(each, counts=forms if each.counts else (), place=None) for each in lacking)

    def fill(self, answer: Callable[[list[Entry]], Iterable[Filling | None]]) -> bytes:
        """Return the file with what is untranslated or fuzzy filled, unless `answer` has None; all else as it was."""
        entries = list(self.entries())
        asked = [entry for entry in entries if entry.state in ("untranslated", "fuzzy")]
        answers = zip(asked, answer(asked) if asked else (), strict=True)
        pairs = [pair for pair in answers if self.takes(*pair)]
        edits = [entry.place for entry in entries if entry.state == "header"] + self._all_edits(pairs)
        parts, place = [], 0
        for start, end, new in sorted(edits, key=lambda edit: edit[:2]):
            parts += [self.text[place:start], new]
            place = end
        return "".join([*parts, self.text[place:]]).encode(self.encoding, self.errors)

    def _all_edits(self, pairs: list[tuple[Entry, Filling]]) -> list[Edit]:
        return [edit for pair in pairs for edit in self._edits(*pair)]

    def takes(self, entry: Entry, filling: Filling | None) -> bool:
        """Return whether all texts are there, can be written, and have the inline elements of a source."""
        texts = entry.texts()
        if not filling or [not target for target in filling.targets] != [not source for source, _ in texts]:
            return False
        try:
            "".join([*filling.targets, filling.origin]).encode(self.encoding, self.errors)
        except UnicodeEncodeError:
            logger.warning("%s, line %d: not filled, %s cannot write it", self.path, entry.line, self.encoding)
            return False
        return all(any(_has_codes(source, target) for source in entry.sources) for target in filling.targets)

    def _read(self) -> Iterator[Entry]:
        place = 0
        for match in chain(self.pattern.finditer(self.text), [None]):
            start = match.start() if match else len(self.text)
            if wrong := self.gap.search(self.text, place, start):
                self._count_lines(wrong.end() - 1)
                yield Entry("", state="refused", line=self.line, notes="neither an entry nor a comment")
            if match:
                self._count_lines(max(start, match.start("start")))
                yield from self._entries(match)
                place = match.end()

    def _count_lines(self, end: int) -> None:
        self.line += self.text.count("\n", self.counted, end)
        self.counted = end

    def _own(self, key: str, texts: tuple[str, ...], place: Any, is_plural=False, codes=(), state="") -> Entry:
        """Return an entry of a format with one language."""
        is_own = self.source is None  # in the source language
        known, targets = (Entry(key, texts, codes=codes), ()) if is_own else (self.missing.pop(key, Entry(key)), texts)
        there = targets if is_plural else [t or not s for s, t in zip(known.sources, targets, strict=False)]
        state = state or ("kept" if not any(known.sources) else "translated" if all(there or [0]) else "untranslated")
        counts = tuple(self.plurals.values()) if is_plural else ()
        return replace(known, targets=targets, state=state, line=self.line, counts=counts, place=place)

    plurals = property(lambda self: plural_forms(self.language))  # of the target language


@cache
def plural_forms(language: str | None) -> dict[str, int]:
    """Return a language's plural categories with examples, 2 for those of fractions; `UserError` if it is unknown."""
    with reading("plural forms (pip install 'vaswani_transformer[documents]')"):
        from babel import Locale, localedata

        code = (language or "en").replace("-", "_")  # of a region that may have no rules of its own
        rule = Locale.parse(code if localedata.exists(code) else code.partition("_")[0]).plural_form
    examples = {rule(number): number for number in reversed(NUMBERS)}
    return {name: examples.get(name, 2) for name in CATEGORIES if name in {*rule.tags, "other"}}


def _has_codes(source: str, target: str) -> bool:
    """Return whether a target has a source's inline elements; in ICU's plurals and choices those of some cases."""
    wanted, there = CODES.findall(source), CODES.findall(target)
    is_icu = re.search(r"\{\s*\w+\s*,\s*(plural|select)\s*,", source)
    return {*there} <= {*wanted} if is_icu else sorted(there) == sorted(wanted)


def with_codes(text: str, codes: tuple[str, ...]) -> str:
    """Return a text with its inline elements as a file has them."""
    return CODES.sub(lambda match: dict(enumerate(codes)).get(ord(match[0]) - CODE, match[0]), text)


def read_label(text: str) -> tuple[str, str, str]:
    """Return a text without its accelerator, the mark and the letter; these are empty unless it has a single one."""
    plain = _NO_TEXT.sub(lambda match: " " * len(match[0]), text)
    places = [match.start() for match in _MARKED.finditer(plain)]
    if len(places) != 1 or _NO_LABEL.search(plain):
        return text, "", ""
    place = places[0]
    return text[:place] + text[place + 1 :], text[place], text[place + 1]


def without_mark(text: str, mark: str) -> tuple[str, int]:
    """Return a translation without the marks of accelerators, wherever in a word, and how many there are."""
    return re.subn(rf"\s?\({mark}\w\)|{mark}(?=\w)(?!\w+;)", "", text) if mark else (text, 0)


def unescaped(text: str) -> str:
    """Return text without backslashes, as C, Java, Apple and Android have them."""

    def character(match: re.Match) -> str:
        code = int(match[1] or match[2] or "0", 16) or int(match[3] or "0", 8)
        return chr(code) if code else LETTERS.get(match[4], match[4] or "")

    text = re.sub(r"\\(?:[uU]([\da-fA-F]{4})|x([\da-fA-F]{1,2})|([0-7]{1,3})|\r?\n[ \t]*|(.))", character, text)
    # Pairs of surrogates are joined; single ones are bytes that are not UTF-8.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
