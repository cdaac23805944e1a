"""Markup that follows the words of a translation: spans around them, points between them.

Spans are copied from word to word, as Bergamot does for web pages: a target word is in the spans of the source word
that it is aligned with, and so is what is no word between two such words. A style whose words are torn apart comes in
pieces; of a span that is `single`, as links are, the piece with the most words remains. Spans that contain each other
or nothing in common in the source do so in the translation too, so that all of them nest.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import accumulate, chain, groupby, pairwise, takewhile
from typing import Any, NamedTuple

import regex

from ..data.words import ends_a_sentence, is_inner, word_places
from .pieces import SLIDE_LINK

Links = list[tuple[int, int]]  # source and target word, both from 0, as `vaswani_transformer.align` gives them
Stack = tuple[Any, ...]  # the spans around a position, as their first tags, the outermost first
LINE_BREAK = "\u2028"  # stands for a line break that is kept
_FLANKED = {"Emphasis", "Strong", "Strikethrough"}  # of Markdown
_SIGNS = r"([[\W_]--\p{N}]*)"
_WORD = regex.compile(rf"{_SIGNS}(.*?){_SIGNS}", regex.DOTALL | regex.V1)  # punctuation, the rest, punctuation


class Fragment(NamedTuple):
    """Written text, the spans that it is in, and the character or the word that it shows; a point shows none."""

    raw: str
    spans: Stack
    text: str = ""


def project(
    atoms: Sequence[Fragment], translation: str, links: Links, escape: Callable[[str], str], outside: Set[Any]
) -> list[Fragment]:
    """Return a translation in fragments, each in the spans and among the points that belong to its words.

    A span that no target word got is put around the nearest one, by source words, that has none of its kind. Atoms are
    the characters that were translated, without white space at the ends, and the points between them; a translation has
    words and single spaces, at least a word. A target word without a link belongs where the one before it does; spans
    `outside` are around something beside these characters.
    """
    words, starts, points, breaks = _words(atoms)
    places = word_places(translation)
    targets = [_split_word(translation[start:end]) for start, end in places]
    linked = {target: source for source, target in reversed(links) if source < len(words)}  # else that before it
    sources = list(accumulate(range(len(targets)), lambda last, target: linked.get(target, last), initial=0))[1:]
    stacks = [
        [words[s][n if part and words[s][n] is not None else 1] for n, part in enumerate(parts)]
        for parts, s in zip(targets, sources, strict=True)
    ]
    if targets[-1][2] and words[-1][2] is not None and words[sources[-1]][2] is None:
        stacks[-1][2] = words[-1][2]  # the full stop of a sentence, wherever its last word has gone
    present = {span for stack in (*chain(*stacks), *(point.spans for *_, point in points)) for span in stack}
    empty: list[Fragment] = []  # spans around nothing, which Markdown's signs cannot be
    for span, (number, stack) in starts.items():
        if span in present or (span.again and span.name != SLIDE_LINK):
            continue
        free = [t for t, parts in enumerate(stacks) if all(other.name != span.name for other in parts[1])]
        if free:
            word = stacks[min(free, key=lambda t: (abs(sources[t] - number), abs(t - number)))]
            word[1] = (*(other for other in word[1] if not other.again), *dict.fromkeys((span, *runs_of(stack))))
        elif span.raw[:1] in "<[" and span not in outside:
            empty.append(Fragment("", (*(s for s in stack if s in outside and not s.again), span)))
    first_of = {source: target for target, source in reversed([*enumerate(sources)])}
    last_of = {source: target for target, source in enumerate(sources)}
    # For each word the place behind the last one before it that a target word is linked with.
    behind = [*accumulate(range(len(words)), lambda p, n: (last_of[n], 3) if n in last_of else p, initial=(0, 0))]
    placed: dict[tuple[int, int], list[Fragment]] = {}
    last = len(targets) - 1, 2 if ends_a_sentence(translation) else 3  # the place before the full stop
    for number, seam, point in points:
        place = ((first_of if seam < 2 else last_of)[number], seam) if number in last_of else behind[number]
        placed.setdefault(min(place, last), []).append(point)
    if (first := placed.get((0, 0))) and first[0].raw.isspace():
        first.append(first.pop(0))  # the space before what is now at the beginning comes behind it
    # At the same share of the sentence, and never at its ends.
    line_breaks = {max(1, min(n * len(targets) // len(words), len(targets) - 1)): raw for n, raw in breaks}
    fragments: list[Fragment] = []
    for place, parts in enumerate(targets):
        if place:
            space = line_breaks.get(place) or translation[places[place - 1][1] : places[place][0]]
            fragments += [Fragment(space, runs_of(stacks[place - 1][2]))] if space else []
        for seam in range(4):
            fragments += placed.get((place, seam), [])
            if seam < 3 and parts[seam]:
                fragments.append(Fragment(escape(parts[seam]), stacks[place][seam], parts[seam]))
    return fragments + empty


def _words(atoms: Sequence[Fragment]) -> tuple[list[list[Stack | None]], dict, list, list]:
    """Return what the source has.

    Returns:
        of each word the spans of its three parts, None for a part that it lacks; of each span the word that it begins
        with and the spans there; of each point its word, seam and fragment; of each line break the word behind it.
    """
    characters, text = [atom for atom in atoms if atom.text], "".join(atom.text for atom in atoms)
    offsets = accumulate((len(atom.text) for atom in atoms), initial=0)
    waiting = deque((offset, atom) for offset, atom in zip(offsets, atoms, strict=False) if not atom.text)
    words, starts, points, breaks, last = [], {}, [], [], 0
    for number, (begin, end) in enumerate(word_places(text)):
        before, core, _ = _split_word(text[begin:end])
        seams = (begin, middle := begin + len(before), middle + len(core), end)
        words.append([])
        # Those of most characters, or the innermost where a span ends within a word.
        for start, stop in pairwise(seams):
            counts = Counter(atom.spans for atom in characters[start:stop])
            words[-1].append(max(counts, key=lambda stack: (len(stack), counts[stack]), default=None))
        starts |= {span: (number, c.spans) for c in characters[begin:end] for span in c.spans if span not in starts}
        breaks += [(number, atom.raw) for atom in characters[last:begin] if atom.text == LINE_BREAK]
        while waiting and waiting[0][0] <= end:
            place, point = waiting.popleft()
            seam = 0 if place <= begin else 3 if place == end else 1 if place <= middle else 2
            points.append((number - 1, 3, point) if number and place < begin else (number, seam, point))
        last = end
    return words, starts, points, breaks


def _split_word(word: str) -> tuple[str, str, str]:
    """Return a word as punctuation, the rest, punctuation; punctuation alone is all rest."""
    before, core, after = _WORD.fullmatch(word).groups()
    return (before, core, after) if core else ("", word, "")


def runs_of(stack: Stack) -> Stack:
    """Return the innermost span if it is a run of a Word file, in which white space has to be too."""
    return tuple(span for span in stack if span.again)


def _shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return the number of spans, from the outermost, that two stacks share."""
    return sum(1 for _ in takewhile(lambda spans: spans[0] is spans[1], zip(left, right, strict=False)))


def _joined(fragments: Sequence[Fragment]) -> list[Stack]:
    """Return the spans of fragments, also around what is no word between two of theirs, and single ones in one piece.

    The first and the last are those before and behind the sentence: where a single span is there, it stays.
    """
    words = [0, *accumulate(any(map(is_inner, fragment.text)) for fragment in fragments)]  # before each
    stacks = [[span for span in fragment.spans if not span.again] for fragment in fragments]
    for span in dict.fromkeys(chain(*stacks)):
        numbers = [number for number, stack in enumerate(stacks) if span in stack]
        for number, following in pairwise(numbers):
            gap, around = stacks[number + 1 : following], stacks[number][: stacks[number].index(span) + 1]
            is_near = words[number + 1] == words[following] and stacks[following][: len(around)] == around
            # No other one of its kind is between them.
            if is_near and all(span.name != other.name or other in around for stack in gap for other in stack):
                for stack in gap:
                    stack.insert(_shared(stack, around), span)
        if span.single:
            within = range(numbers[0], numbers[-1] + 1)
            ways = {n: stacks[n][: stacks[n].index(span) + 1] for n in within if span in stacks[n]}
            pieces, ends = [[*piece] for way, piece in groupby(within, ways.get) if way], {0, len(stacks) - 1}
            best = max(pieces, key=lambda piece: (not ends.isdisjoint(piece), words[piece[-1] + 1] - words[piece[0]]))
            for number in ways.keys() - best:
                stacks[number].remove(span)
    return [(*stack, *runs_of(fragment.spans)) for stack, fragment in zip(stacks, fragments, strict=True)]


def written(fragments: Sequence[Fragment], before: Stack, after: Stack, closes: Mapping[Any, Any]) -> str:
    """Return fragments with the tags between them, from the spans open before them to those open after them."""
    parts, stack, last = [], before, ""
    fragments = [Fragment("", before), *fragments, Fragment("", after)]
    for fragment, wanted in zip(fragments, _joined(fragments), strict=True):
        shared = _shared(stack, wanted)
        ends, starts, text = stack[shared:], wanted[shared:], fragment.text
        parts += [closes[span].again or closes[span].raw for span in reversed(ends)]
        signs = [span.raw[0] for span in (*ends, *starts) if span.name in _FLANKED]
        if signs and last and text and is_inner(text[0] if ends else last):
            parts += " " * ("_" in signs or not is_inner(last if ends else text[0]))
        parts += [*(span.again or span.raw for span in starts), fragment.raw]
        stack, last = wanted, (text or fragment.raw)[-1:] or last
    return "".join(parts)
