"""Terms that earlier translations have in one way, found by what occurs together (Gale and Church, 1991)."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..data.words import LETTERS_OR_SIGN, stands_alone
from .messages import pattern_of

_WORDS, _CHARACTERS = 3, 8  # of a term, and of its translation where these are words by themselves
_LETTERS = 4  # of a term's first and last word: shorter ones are rarely terms
_LEAST = 3  # translations that have it
_SHARE = 0.9  # of them have it in one way
_OWN = 0.5  # of all texts with this translation have the term
_MOST = 20_000  # earlier translations that are looked at, the latest


class FoundTerm(NamedTuple):
    """A term in small letters, the forms of its translation, and how many of the texts with the term have it."""

    source: str
    targets: tuple[str, ...]
    count: int
    total: int


def find_terms(pairs: Iterable[tuple[str, str]]) -> list[FoundTerm]:
    """Return the terms, of one to three words, that nearly all of at least three translations have in one way.

    Placeholders and tags are no words. Of a translation and the longer ones that it always occurs in, the longest
    counts, and of terms too. A term that is translated as a part of it or another one is left out. Frequent ones first.
    """
    pairs = list(dict.fromkeys(tuple(pattern_of("").sub("|", text) for text in pair) for pair in pairs))[-_MOST:]
    targets = [frozenset(phrase.casefold() for phrase in _phrases(target)) for _, target in pairs]
    of_all, rows = Counter(phrase for phrases in targets for phrase in phrases), defaultdict(set)
    having = defaultdict(set)
    targets = [[phrase for phrase in phrases if of_all[phrase] >= _LEAST] for phrases in targets]
    for row, (source, _) in enumerate(pairs):
        for phrase in targets[row]:
            having[phrase].add(row)
        for phrase in _phrases(source):
            words = phrase.lower().split()
            if min(len(words[0]), len(words[-1])) >= _LETTERS:
                rows[" ".join(words)].add(row)
    found: dict[str, FoundTerm] = {}
    likely = (pair for pair in rows.items() if len(pair[1]) >= _LEAST)
    for source, places in sorted(likely, key=lambda pair: len(pair[0])):
        least, most = max(_LEAST, _SHARE * len(places)), len(places) / _OWN
        some = list(places)[: int(len(places) - least) + 1]  # of which one has what so many of them have
        often = {phrase for row in some for phrase in targets[row] if least <= of_all[phrase] <= most}
        own = [(2 * n / (len(places) + of_all[phrase]), len(phrase), phrase, n) for phrase in often
               if (n := len(places & having[phrase])) >= max(least, _OWN * of_all[phrase])]  # fmt: skip
        known = [found[part] for part in set(_phrases(source if own else "")) - {source} if part in found]
        if not own or any(max(own)[2] == term.targets[0].casefold() and term.total > len(places) for term in known):
            continue
        for term in known:
            if term.total == len(places):  # it occurs in this one only
                del found[term.source]
        *_, best, count = max(own)
        forms = Counter(phrase for row in places for phrase in _phrases(pairs[row][1]) if phrase.casefold() == best)
        found[source] = FoundTerm(source, tuple(dict(forms.most_common())), count, len(places))
    claims = Counter(term.targets[0].casefold() for term in found.values())  # words of one text that comes often
    return sorted((t for t in found.values() if claims[t.targets[0].casefold()] == 1), key=lambda term: -term.count)


def _phrases(text: str) -> Iterator[str]:
    """Yield the words of a text and rows of words beside each other."""
    words = [match.span() for match in LETTERS_OR_SIGN.finditer(text) if match[0].isalpha()]
    for start in range(len(words)):
        most = _CHARACTERS if stands_alone(text[words[start][0] :]) else _WORDS
        for end in range(start, min(start + most, len(words))):
            if end > start and text[words[end - 1][1] : words[end][0]].strip():
                break
            yield text[words[start][0] : words[end][1]]
