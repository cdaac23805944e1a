"""A document as pieces, its sentences, and their translation: what all formats share.

A piece of markup within a sentence is one of two things. A span has two tags around words: in the translation they are
around the words aligned with these. A point is between words or in one (an image, code, a URL, a placeholder): the
model does not see it, and in the translation it follows the word that it followed. A sentence stays byte for byte as it
is where its translation is empty or the sentence itself.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, groupby, zip_longest

from ..model.language_codes_vaswani import typed_code
from ..model.sentence_splitting_vaswani import sentence_parts
from .markup import Character, Links, Point, Stack, project, written

#: What is never translated: URLs, e-mail addresses, placeholders ({name}, {{x}}, ${x}, %s, %(name)d).
_KEPT = re.compile(
    r"""(?:https?://|\bwww\.)[^\s<>"]*[^\s<>"'.,;:!?)\]}*_]
    | (?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+
    | \{\{.{0,100}?\}\} | [#$]?\{[^{}\s]{0,100}\}
    | %\(\w{1,60}\)[a-zA-Z] | (?<![\w%])(?:%(?:\d+\$)?[-+\#0]?\d*(?:\.\d+)?[sdifgxXuc@](?!\w))+""",
    re.VERBOSE,
)
# The longest sentence in characters, and the deepest spans; beyond it is text without full stops, or made to be slow.
_SHORT = re.compile(r".{1,2000}(?!\S)\s*|.{2000}", re.DOTALL)
_DEEPEST = 50
_STAND_IN = "Xxxx"  # for such a thing where sentences are split: a word, perhaps the first of a sentence


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
    text: str = ""  # of a TEXT its characters; of a POINT a stand-in, if it is like a word
    name: str = ""  # of the tags of a span, by which they find each other
    again: str | None = None  # of a tag of a span: how a translation has it, if not as it is


@dataclass(frozen=True)
class Document:
    """A document as readers return it.

    Attributes:
        pieces: all of it.
        escape: writes text so that it means itself.
        finish: changes a translated sentence so that it means itself where a line begins with it.
        in_spans: text and white space have to be in spans, as in Word's runs.
    """

    pieces: list[Piece]
    escape: Callable[[str], str] = str
    finish: Callable[[str], str] = str
    in_spans: bool = False


def text_piece(raw: str, text: str | None = None) -> Piece:
    """Return text as a piece; `text`: its characters if `raw` is an escape, empty for what is invisible."""
    return Piece(raw, Kind.POINT if text == "" else Kind.TEXT, raw if text is None else text)


def point(raw: str, is_word: bool = False) -> Piece:
    """Return a point; `is_word`: for the splitting of sentences it is like a word."""
    return Piece(raw, Kind.POINT, _STAND_IN if is_word else "")


class _Sentence:
    """The pieces of a sentence, the text of it that the model reads, and how a translation is written."""

    def __init__(self, pieces: list[Piece], before: Stack, document: Document):
        self.pieces, self.before, self.after, self.document = pieces, before, before, document
        self.is_plain = all(piece.raw == piece.text for piece in pieces)
        self.characters: list[Character] = []
        self.points: list[Point] = []
        self.takes_punctuation = False  # whether the last point does
        if self.is_plain:
            self.text = " ".join("".join(piece.raw for piece in pieces).split())
        else:
            self._read()
            self.start, self.end = self._ends()
            inner = self.characters[self.start : self.end]
            self.text = " ".join("".join(character for character, _, _ in inner).split())

    def _read(self) -> None:
        followers = [" "]  # the first character behind each piece, from the last piece on
        for piece in reversed(self.pieces):
            followers.append(piece.text[:1] if piece.kind is Kind.TEXT else followers[-1])
        for piece, follower in zip(self.pieces, followers[-2::-1], strict=True):
            if piece.kind is Kind.OPEN:
                self.after = (*self.after, piece)
            elif piece.kind is Kind.CLOSE:
                self.after = self.after[:-1]
            elif piece.kind is Kind.POINT:
                self._read_point(piece, follower)
            else:
                raws = piece.text if piece.raw == piece.text else [piece.raw, *[""] * (len(piece.text) - 1)]
                for character, raw in zip(piece.text, raws, strict=True):
                    self._read_character(character, raw)

    def _read_point(self, piece: Piece, follower: str) -> None:
        """Add a point, and the white space before it where none or punctuation follows, so that nothing is left."""
        space, last = "", self.points[-1][0] if self.points else 0
        is_loose = follower.isspace() or (piece.text and not follower.isalnum())
        if is_loose and (piece.text or not self.document.in_spans):
            while len(self.characters) > max(last, 1) and self.characters[-1][0].isspace():
                space = self.characters.pop()[1] + space
        self.points.append((len(self.characters), space + piece.raw, self.after))
        before = self.characters[-1][0] if self.characters else " "
        self.takes_punctuation = bool(piece.text) and not before.isalnum() and not before.isspace()

    def _read_character(self, character: str, raw: str) -> None:
        """Add a character; punctuation goes with a point before it that itself follows punctuation."""
        if character.isalnum() or character.isspace() or (self.points and self.points[-1][2] != self.after):
            self.takes_punctuation = False
        if self.takes_punctuation:
            place, before, spans = self.points[-1]
            self.points[-1] = place, before + raw, spans
        else:
            self.characters.append((character, raw, self.after))

    def _ends(self) -> tuple[int, int]:
        """Return where the characters that are translated begin and end."""
        filled = [place for place, (character, _, _) in enumerate(self.characters) if not character.isspace()]
        if not filled:
            return 0, 0
        start = filled[0]
        if self.points and self.points[0][0] <= start:  # punctuation behind a point stays with it
            start = next((place for place in filled if self.characters[place][0].isalnum()), start)
        return start, filled[-1] + 1

    def unchanged(self, rewritten: bool = False) -> str:
        """Return the sentence as it is; `rewritten`: with its tags as translations have them."""
        return "".join((rewritten and piece.again) or piece.raw for piece in self.pieces)

    def render(self, translation: str, links: Links, tags: Callable[[Piece], tuple[str, str]]) -> str:
        """Return a translation, with the sentence's markup at the words that it belongs to."""
        document = self.document
        if self.is_plain:
            raw = self.unchanged()
            start, end = raw[: len(raw) - len(raw.lstrip())], raw[len(raw.rstrip()) :]
            return document.finish(start + document.escape(translation) + end)
        inner = [(place - self.start, *rest) for place, *rest in self.points if self.start < place < self.end]
        body = project(
            self.characters[self.start : self.end], inner, translation, links, document.escape, document.in_spans
        )
        head, tail = self._edge(0, self.start), self._edge(self.end, len(self.characters))
        return document.finish(written([*head, *body, *tail], self.before, self.after, tags))

    def _edge(self, start: int, end: int) -> list[tuple[str, Stack]]:
        """Return white space and points from one offset to another, both ends included."""
        points = [(place, 0, point) for place, *point in self.points if start <= place <= end]
        characters = [(place, 1, self.characters[place][1:]) for place in range(start, end)]
        return [tuple(fragment) for _, _, fragment in sorted([*points, *characters], key=lambda item: item[:2])]


class _Block:
    """Sentences without a fixed piece between them; spans begin and end within."""

    def __init__(self, pieces: list[Piece], document: Document, language: str):
        self.closes = _closes(pieces)
        self.sentences: list[_Sentence] = []
        stack: Stack = ()
        for part in _sentences(_with_kept(pieces), language):
            self.sentences.append(_Sentence(part, stack, document))
            stack = self.sentences[-1].after

    def tags(self, span: Piece) -> tuple[str, str]:
        """Return the two tags of a span in a translation."""
        second = self.closes[span]
        return span.again or span.raw, second.again or second.raw

    def render(self, translated: dict["_Sentence", tuple[str, Links]]) -> str:
        """Return the block with the sentences that have changed."""
        rewritten = any(sentence in translated for sentence in self.sentences)
        return "".join(
            s.render(*translated[s], self.tags) if s in translated else s.unchanged(rewritten) for s in self.sentences
        )


class Translation:
    """Documents that are being translated: `sentences` first, then `take` their translations, then all is `written`.

    Args:
        documents: as readers return them.
        language: code of their language, for the splitting of sentences.
        codes: for each document the code of its target language, which `sentences` begin with, up to one that begins
            with another of its own.
    """

    def __init__(self, documents: Sequence[Document], language: str = "en", codes: Sequence[str] = ()):
        self._blocks = [
            [piece if isinstance(piece, Piece) else _Block(piece, document, language)
             for piece in _blocks(document.pieces)]
            for document in documents
        ]  # fmt: skip
        self._coded: dict[_Sentence, str] = {}  # what is translated, with codes
        current = ""
        for blocks, code in zip_longest(self._blocks, codes):
            current = current if code is None else code  # parts of one file share that of the first
            flat = (sentence for block in blocks if isinstance(block, _Block) for sentence in block.sentences)
            for sentence in (sentence for sentence in flat if any(map(str.isalpha, sentence.text))):
                typed, _ = typed_code(sentence.text)
                current = typed or current
                self._coded[sentence] = sentence.text if typed else current + sentence.text
        self.sentences = list(self._coded.values())  # white space is single spaces
        self._translations: dict[_Sentence, str] = {}  # of those that change

    def take(self, translations: Iterable[str]) -> tuple[list[str], list[str]]:
        """Take the translations of `sentences`; returns the sentences and translations that are to be aligned."""
        for sentence, translation in zip(self._coded, translations, strict=True):
            if (text := " ".join(translation.split())) not in ("", sentence.text):
                self._translations[sentence] = text
        self._marked = [sentence for sentence in self._translations if not sentence.is_plain]
        return [self._coded[s] for s in self._marked], [self._translations[s] for s in self._marked]

    def written(self, links: Iterable[Links]) -> list[str]:
        """Return the documents, with the alignments of what `take` returned."""
        of_marked = dict(zip(self._marked, links, strict=True))
        for s in (s for s in of_marked if typed_code(s.text)[0]):  # its code is no word for the alignment
            of_marked[s] = [(source + 1, target) for source, target in of_marked[s]]
        translated = {s: (text, of_marked.get(s, [])) for s, text in self._translations.items()}
        return [
            "".join(block.raw if isinstance(block, Piece) else block.render(translated) for block in blocks)
            for blocks in self._blocks
        ]


def _blocks(pieces: list[Piece]) -> Iterator[Piece | list[Piece]]:
    """Yield the fixed pieces, and the runs of others between them; a tag without its other one is fixed too."""
    for is_fixed, run in groupby(pieces, key=lambda piece: piece.kind is Kind.FIXED):
        run = list(run)
        closes = _closes(run)
        unmatched = {p for p in run if p.kind in (Kind.OPEN, Kind.CLOSE)}.difference(closes, closes.values())
        if unmatched:
            yield from _blocks([replace(p, kind=Kind.FIXED) if p in unmatched else p for p in run])
        elif is_fixed:
            yield from run
        else:
            yield run


def _closes(pieces: list[Piece]) -> dict[Piece, Piece]:
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


def _with_kept(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces with what is not translated, and spans around nothing, as points."""
    result: list[Piece] = []
    for is_text, group in groupby(pieces, key=lambda piece: piece.kind is Kind.TEXT):
        run = list(group)
        if is_text:
            matches = list(_KEPT.finditer("".join(piece.text for piece in run)))
            places = [place for match in matches for place in match.span()]
            for number, part in enumerate(_cut(run, places)):
                raw = "".join(piece.raw for piece in part)
                result += [point(raw, is_word=True)] if number % 2 and raw else part
            continue
        for piece in run:
            if piece.kind is Kind.CLOSE and result[-1].kind is Kind.OPEN:
                piece = point(result.pop().raw + piece.raw)
            result.append(piece)
    return result


def _sentences(pieces: list[Piece], language: str) -> list[list[Piece]]:
    """Return the pieces of each sentence."""
    parts = sentence_parts("".join(piece.text for piece in pieces), language)
    parts = [short for part in parts for short in _SHORT.findall(part)]
    return _cut(pieces, list(accumulate(map(len, parts)))[:-1])


def _cut(pieces: list[Piece], places: list[int]) -> list[list[Piece]]:
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
        while piece.kind is Kind.TEXT and piece.raw == piece.text and cut < end:
            if start < cut:
                parts[-1].append(text_piece(piece.raw[: cut - start]))
                piece, start = text_piece(piece.raw[cut - start :]), cut
            parts.append([])
            cut = next(ends)
        parts[-1].append(piece)
    return parts + [[] for _ in ends]
