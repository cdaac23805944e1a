"""A document as pieces, its sentences, and their translation: what all formats share.

A piece of markup within a sentence is one of two things. A span has two tags around words: in the translation they are
around the words aligned with these. A point is between words or in one (an image, code, a comment): the model does not
see it, and in the translation it follows the word that it followed. Four rules hold for all formats:

- Never shown to the model: what `kept_places` finds, marks in or behind a word (H2O's 2, notes), sentences without
  letters. They become points, so that each is there again exactly once.
- A point that letters touch on both sides is part of a word that only stands there: all of it is kept. Pictures and
  emoji separate words instead.
- Elements separate words where they are a list: links with nothing but signs around them or that touch each other,
  and spans between which the case says that a word begins.
- Spans surround whole words and what is between two of theirs. No span is lost. A style whose words are torn apart is
  there in pieces; anything else (links, quotations, what has an id) is there once.

A sentence stays byte for byte as it is where its translation is empty or the sentence itself.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise, zip_longest

from ..data.cleaning_rules import language_of
from ..data.words import is_inner
from ..model.language_codes_vaswani import typed_code
from ..model.sentence_splitting_vaswani import sentence_parts, space_behind
from .kept import STAND_IN
from .markup import Fragment, Links, Stack, project, runs_of, written
from .pieces import Document, Kind, Piece, closes_of, cut, in_blocks, with_points

# The longest sentence in characters; beyond it is text without full stops, or made to be slow.
_SHORT = re.compile(r".{1,2000}(?!\S)\s*|.{2000}", re.DOTALL)


class _Sentence:
    """The pieces of a sentence, the text of it that the model reads, and how a translation is written."""

    def __init__(self, pieces: list[Piece], before: Stack, document: Document):
        self.pieces, self.before, self.after, self.document = pieces, before, before, document
        self.is_plain = all(piece.raw == piece.text for piece in pieces)
        self.has_next = False  # whether another one follows in the paragraph
        self.atoms: list[Fragment] = []  # characters and points
        self.last = self.solid = " "  # the last character, and the last that is no white space
        self.takes_punctuation = False  # whether the last point does
        text = "".join(piece.raw for piece in pieces)
        if not self.is_plain:
            self._read()
            filled = [number for number, atom in enumerate(self.atoms) if atom.text.strip()]
            if filled and not all(atom.text for atom in self.atoms[: filled[0]]):  # punctuation stays with a point
                filled = [n for n in filled if is_inner(self.atoms[n].text)][:1] + filled[-1:] or filled
            self.start, self.end = (filled[0], filled[-1] + 1) if filled else (0, 0)  # of what is translated
            text = "".join(atom.text for atom in self.atoms[self.start : self.end])
        self.text = " ".join(text.split())

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
        is_loose = follower.isspace() or (piece.text and unicodedata.category(follower) in ("Po", "Pe", "Pf"))
        place = len(self.atoms) - 1
        while is_loose and place > 0 and self.atoms[place].text.isspace():
            self.atoms[place], self.last = self.atoms[place]._replace(text=""), self.solid
            place -= 1
        self.atoms.append(Fragment(piece.raw, self.after))
        may_take = bool(piece.text) or self.takes_punctuation
        self.takes_punctuation = may_take and not (is_inner(self.last) or self.last.isspace())
        if piece.text == " " and is_inner(self.last) and is_inner(follower):
            self._read_character(" ", "")

    def _read_character(self, character: str, raw: str) -> None:
        """Add a character; punctuation goes with a point before it that itself follows punctuation."""
        self.takes_punctuation = self.takes_punctuation and not (is_inner(character) or character.isspace())
        self.atoms.append(Fragment(raw, self.after, "" if self.takes_punctuation else character))
        self.last, self.solid = character, self.solid if character.isspace() else character

    def unchanged(self, rewritten: bool = False) -> str:
        """Return the sentence as it is; `rewritten`: with its tags as translations have them."""
        return "".join((rewritten and piece.again) or piece.raw for piece in self.pieces)

    def render(self, translation: str, links: Links, closes: dict[Piece, Piece]) -> str:
        """Return a translation, with the sentence's markup at the words that it belongs to."""
        document = self.document
        if self.is_plain:
            raw = self.unchanged()
            start, end = raw[: len(raw) - len(raw.lstrip())], raw[len(raw.rstrip()) :]
            end = space_behind(translation, end) if self.has_next else end
            return document.finish(start + document.escape(translation) + end)
        head, body, tail = self.atoms[: self.start], self.atoms[self.start : self.end], self.atoms[self.end :]
        if self.has_next:
            gap = "".join(atom.text + atom.raw for atom in tail if atom.text)
            if not (space := space_behind(translation, gap)):
                tail = [atom for atom in tail if atom.raw.strip(" ")]
            elif not gap:
                tail.insert(0, Fragment(space, runs_of(self.atoms[self.end - 1].spans)))
        outside = {*self.before, *self.after, *(span for atom in head + tail for span in atom.spans)}
        body = project(body, translation, links, document.escape, outside)
        return document.finish(written([*head, *body, *tail], self.before, self.after, closes))


class _Block:
    """Sentences without a fixed piece between them; spans begin and end within."""

    def __init__(self, pieces: list[Piece], document: Document, language: str):
        self.closes = closes_of(pieces)
        self.sentences: list[_Sentence] = []
        stack: Stack = ()
        pieces = with_points(pieces)
        text = "".join(piece.text for piece in pieces).replace(STAND_IN, "Xxxx")
        parts = sentence_parts(text, language_of(text, language))
        for part in cut(pieces, [*accumulate(len(short) for text in parts for short in _SHORT.findall(text))][:-1]):
            self.sentences.append(_Sentence(part, stack, document))
            stack = self.sentences[-1].after
        for sentence, following in pairwise(self.sentences):
            sentence.has_next = following.text != ""

    def render(self, translated: dict["_Sentence", tuple[str, Links]]) -> str:
        """Return the block with the sentences that have changed."""
        new = {s: s.render(*translated[s], self.closes) for s in self.sentences if s in translated}
        return "".join(new[s] if s in new else s.unchanged(rewritten=bool(new)) for s in self.sentences)


class Translation:
    """Documents that are being translated: `sentences` first, then `take` their translations, then all is `written`.

    `language` is the code of theirs, for the splitting of sentences; `codes` has for each document the code of its
    target language, which `sentences` begin with, up to one that begins with another of its own.
    """

    def __init__(self, documents: Sequence[Document], language: str = "en", codes: Sequence[str] = ()):
        self._blocks = [
            [_Block(part, each, language) if isinstance(part, list) else part for part in in_blocks(each.pieces)]
            for each in documents
        ]
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
            if (text := re.sub(r"[ \t\r\n]+", " ", translation).strip()) not in ("", sentence.text):
                self._translations[sentence] = text
        self._marked = [sentence for sentence in self._translations if not sentence.is_plain]
        return [self._coded[s] for s in self._marked], [self._translations[s] for s in self._marked]

    def written(self, links: Iterable[Links]) -> list[str]:
        """Return the documents, with the alignments of what `take` returned."""
        of_marked = dict(zip(self._marked, links, strict=True))
        for s in (s for s in of_marked if typed_code(s.text)[0]):  # its code is no word for the alignment
            of_marked[s] = [(source + 1, target) for source, target in of_marked[s]]
        translated = {s: (text, of_marked.get(s, [])) for s, text in self._translations.items()}
        rendered = lambda block: block.raw if isinstance(block, Piece) else block.render(translated)  # noqa: E731
        return ["".join(map(rendered, blocks)) for blocks in self._blocks]
