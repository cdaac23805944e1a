"""Terms that a translation has to have: a glossary, followed by a beam search that counts what is still missing.

Hypotheses are kept apart by how many tokens of terms they lack, and each of these groups keeps its best (dynamic beam
allocation: Post and Vilar, 2018, "Fast Lexically Constrained Decoding with Dynamic Beam Allocation"). A hypothesis may
not end before it has all its terms, and where its limit leaves no more room than they need, nothing else may follow: so
a term is in every output, however many beams there are.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from ..data.text_files import read_lines
from ..errors import UserError
from ..model.search_vaswani import NO_SCORE, BeamSentence, SearchSettings

MOST_BEAMS = 16  # that a search takes by itself to keep hypotheses with different terms apart
_SEPARATOR = "|"  # between the forms of a target term
_WORD = re.compile(r"\w+|[^\w\s]")  # or a sign


@dataclass(frozen=True)
class Term:
    """A term of a glossary: one of the targets has to be in the translation of a text that has the source."""

    source: str
    targets: tuple[str, ...]


class Glossary:
    """Terms by their sources, which count as whole words; one in small letters is found in any letters."""

    def __init__(self, terms: Iterable[Term]):
        self.terms = {term.source: term for term in terms}
        # By first words the lengths of terms, the longest first: of overlapping terms it is the one that counts.
        lengths: dict[str, set[int]] = {}
        for source in self.terms:
            lengths.setdefault(_WORD.search(source)[0].lower(), set()).add(len(source))
        self._lengths = {word: sorted(own, reverse=True) for word, own in lengths.items()}

    def __bool__(self) -> bool:
        return bool(self.terms)

    def of(self, text: str) -> tuple[Term, ...]:
        """The terms that occur in a text, each once, in their order there."""
        text, found, end = " ".join(text.split()), {}, 0
        for word in _WORD.finditer(text):
            start = word.start()
            if start < end or (start and _is_inner(text[start - 1])):
                continue
            for length in self._lengths.get(word[0].lower(), ()):
                piece = text[start : start + length]
                term = self.terms.get(piece) or self.terms.get(piece.lower())
                if term and not _is_inner(text[start + length : start + length + 1]):
                    found[term.source], end = term, start + length
                    break
        return tuple(found.values())


def _is_inner(character: str) -> bool:
    """Whether a word continues with this character; a mark belongs to the letter before it."""
    return character.isalnum() or character == "_" or unicodedata.category(character or " ").startswith("M")


def make_glossary(entries: Iterable[tuple[str, str, Sequence[str]]]) -> Glossary:
    """A glossary from entries: what a line about a mistake calls it, its source, its targets.

    Without targets the source is never translated.

    Raises:
        UserError: for an empty term, and for a source that an earlier entry has.
    """
    terms: dict[str, Term] = {}
    for name, *texts in entries:
        source, targets = " ".join(texts[0].split()), tuple(" ".join(target.split()) for target in texts[1])
        if not source or not all(targets):
            raise UserError(f"{name} has an empty term: give source and target, or a word alone")
        if source in terms:
            raise UserError(f"{name} has {source!r:.100} again: give all forms of its target in one")
        terms[source] = Term(source, targets or (source,))
    return Glossary(terms.values())


def read_glossary(path: str | Path) -> Glossary:
    """A glossary from a file of lines `source TAB target`; several forms of a target are separated by `|`.

    A line of one word or words, without a tab, is never translated. Blank lines do not count.

    Raises:
        UserError: for a file that cannot be read, and for a line with an empty term, too many columns, or a source that
            an earlier line has, naming the line.
    """

    def entries() -> Iterator[tuple[str, str, Sequence[str]]]:
        for number, line in enumerate(read_lines(Path(path)), start=1):
            source, *rest = line.split("\t")
            if len(rest) > 1:
                raise UserError(f"line {number} of {path} has {len(rest) + 1} columns: give source TAB target")
            if line.strip():
                yield f"line {number} of {path}", source, [form for column in rest for form in column.split(_SEPARATOR)]

    return make_glossary(entries())


class Progress(NamedTuple):
    """How far a hypothesis is with its terms."""

    met: frozenset[int] = frozenset()  # terms that it has
    ending: frozenset[int] = frozenset()  # those that it has if its last word goes no further
    begun: frozenset[tuple[int, int, int]] = frozenset()  # term, form, tokens of it that the hypothesis ends with


class Terms:
    """The forms of the terms that one translation has to have, in token ids.

    Args:
        forms: for each term its forms, none of them empty.
        continuing: tokens that continue a word, before which a form has not come to its end.
    """

    def __init__(self, forms: Sequence[Sequence[Sequence[int]]], continuing: frozenset[int] = frozenset()):
        self.forms = [[tuple(form) for form in own] for own in forms]
        self.continuing = continuing
        self._all = frozenset(range(len(self.forms)))
        self._shortest = [min(map(len, own)) for own in self.forms]
        self._firsts: dict[int, list[tuple[int, int]]] = {}  # the forms that a token begins
        for term, own in enumerate(self.forms):
            for form, ids in enumerate(own):
                self._firsts.setdefault(ids[0], []).append((term, form))

    @property
    def size(self) -> int:
        """Tokens of all forms of all terms."""
        return sum(len(ids) for own in self.forms for ids in own)

    def after(self, progress: Progress, token: int) -> Progress:
        """The progress of a hypothesis with one more token."""
        met = progress.met if token in self.continuing else progress.met | progress.ending
        begun = {
            (term, form, done + 1)
            for term, form, done in progress.begun
            if term not in met and self.forms[term][form][done] == token
        }
        begun |= {(term, form, 1) for term, form in self._firsts.get(token, ()) if term not in met}
        ending = frozenset(term for term, form, done in begun if done == len(self.forms[term][form]))
        begun = frozenset(one for one in begun if one[2] < len(self.forms[one[0]][one[1]]))
        return Progress(met, ending, begun)

    def lacks(self, progress: Progress) -> int:
        """The least number of tokens that make a hypothesis whole."""
        lacking = {term: self._shortest[term] for term in self._all - progress.met - progress.ending}
        for term, form, done in progress.begun:
            if term in lacking:
                lacking[term] = min(lacking[term], len(self.forms[term][form]) - done)
        return sum(lacking.values())

    def lacks_in(self, ids: Iterable[int]) -> int:
        """The same of a whole output."""
        return self.lacks(reduce(self.after, ids, Progress()))

    def wanted(self, progress: Progress) -> set[int]:
        """The tokens that bring a hypothesis on."""
        missing = self._all - progress.met - progress.ending
        wanted = {self.forms[term][form][done] for term, form, done in progress.begun if term in missing}
        return wanted | {ids[0] for term in missing for ids in self.forms[term]}


class TermsSentence(BeamSentence):
    """A sentence in a beam search whose outputs have its terms."""

    def __init__(self, terms: Terms, limit: int, settings: SearchSettings):
        super().__init__(max(limit, terms.lacks(Progress()) + 1), settings)
        self._terms = terms
        self._progress = [Progress()] * settings.num_beams

    def wanted(self) -> list[tuple[int, int]]:
        """Continuations that have to be looked at, however unlikely: beams and tokens."""
        wanted = []
        for beam, own in enumerate(self._progress):
            tokens = self._terms.wanted(own) or (self.settings.end_ids if own.ending else ())
            wanted += [(beam, token) for token in sorted(tokens)]
        return wanted

    def extend(self, values, scores, bounds, beams, tokens):
        """As in `BeamSentence`, of any number of continuations in any order."""
        settings, terms = self.settings, self._terms
        count, left = settings.num_beams, self.limit - self.length - 1  # tokens that may follow
        order, groups, finishing = sorted(range(len(values)), key=lambda rank: -values[rank]), {}, 0
        seen, step = set(), self.length
        self.length += 1
        for rank in order:
            value, beam, token = values[rank], int(beams[rank]), int(tokens[rank])
            if value <= NO_SCORE or (beam, token) in seen:
                continue
            seen.add((beam, token))
            before = self._progress[beam]
            if token in settings.end_ids:
                after, lacking = before, terms.lacks(before)
                if lacking:
                    continue
            else:
                after = terms.after(before, token)
                lacking = terms.lacks(after)
                if lacking > left:
                    continue
            if token in settings.end_ids or not left:
                if finishing < count:
                    self._finished.append((scores[rank], step, beam, token))
                    finishing += 1
            else:
                groups.setdefault(lacking, []).append((value, bounds[rank], beam, token, after))
        self._finished.sort(key=lambda hypothesis: -hypothesis[0])
        del self._finished[count:]
        kept = _share_out(sorted(groups.values(), key=lambda group: -group[0][0]), count)
        kept += [(-1.0e9, -1.0e9, 0, min(settings.end_ids, default=0), Progress())] * (count - len(kept))
        finished = [hypothesis[0] for hypothesis in self._finished]
        best, bound = (max(continuation[place] for continuation in kept) for place in (0, 1))
        self.is_done = not left or not settings.may_improve(best, bound, finished)
        self._progress = [continuation[4] for continuation in kept]
        self._tokens.append([continuation[3] for continuation in kept])
        self._beams.append([continuation[2] for continuation in kept])
        return [continuation[0] for continuation in kept], self._beams[-1], self._tokens[-1]


def _share_out(groups: list[list], places: int) -> list:
    """The best of each group, the second best of each, and so on, as far as there are places."""
    kept, rank = [], 0
    while len(kept) < places and any(len(group) > rank for group in groups):
        kept += [group[rank] for group in groups if len(group) > rank]
        rank += 1
    return kept[:places]


def beams_for(terms: Terms, num_beams: int) -> int:
    """The beams of a search for these terms, if `num_beams` are asked for: one for each group, within reason."""
    return max(num_beams, min(MOST_BEAMS, terms.lacks(Progress()) + 2))
