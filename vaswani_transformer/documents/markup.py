"""Markup that follows the words of a translation: spans around them, points between them.

Spans are copied from word to word, as Bergamot does for web pages: a target word is in the spans of the source word
that it is aligned with, so that a span whose words are torn apart appears twice.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

from ..data.words import word_places

#: Source word and target word, both counted from 0, as `vaswani_transformer.align` gives them.
Links = list[tuple[int, int]]
#: The spans around a position, as their first tags, the outermost first.
Stack = tuple[Any, ...]
#: Written text, and the spans that it is in.
Fragment = tuple[str, Stack]
#: A character, how it is written in the document, and the spans around it.
Character = tuple[str, str, Stack]
#: Number of characters before a point, how it is written, and the spans around it.
Point = tuple[int, str, Stack]

_WORD = re.compile(r"([\W_]*)(.*?)([\W_]*)", re.DOTALL)  # punctuation, the rest, punctuation


@dataclass
class _Word:
    """A word of the source: its seams and the spans of its three parts, None for a part that it lacks."""

    seams: tuple[int, int, int, int]  # before it, behind its first punctuation, before its last, behind it
    stacks: list[Stack | None]
    inner: list[Stack]  # those of all its characters, which may be more
    points: list[tuple[int, Fragment]] = field(default_factory=list)  # each with the number of its seam


def split_word(word: str) -> tuple[str, str, str]:
    """Return a word as punctuation, the rest, punctuation; punctuation alone is all rest."""
    before, core, after = _WORD.fullmatch(word).groups()
    return (before, core, after) if core else ("", word, "")


def project(
    characters: Sequence[Character],
    points: Sequence[Point],
    translation: str,
    links: Links,
    escape: Callable[[str], str],
    in_spans: bool,
) -> list[Fragment]:
    """Return a translation in fragments, each in the spans and among the points that belong to its words.

    Args:
        characters: those that were translated, without white space at the ends.
        points: in the order of their places; those of white space are line breaks.
        translation: words and single spaces, at least a word.
        links: source word, target word; a target word without a link belongs where the one before it does.
        escape: writes text so that it means itself.
        in_spans: all text, white space too, stands in innermost spans of one kind (runs), which may get lost.
    """
    words = _words(characters, points)
    places = word_places(translation)
    targets = [split_word(translation[start:end]) for start, end in places]
    sources = _sources(links, len(targets), len(words))
    stacks = [[stack if stack is not None else words[s].stacks[1] for stack in words[s].stacks] for s in sources]
    if words[-1].stacks[2] is not None and words[sources[-1]].stacks[2] is None:
        stacks[-1][2] = words[-1].stacks[2]  # the full stop of a sentence, wherever its last word has gone
    _fill_missing_parts(targets, stacks)
    _add_missing_spans(words, sources, stacks, in_spans)
    _fill_missing_parts(targets, stacks)
    placed: dict[tuple[int, int], list[Fragment]] = {}
    targets_of: dict[int, list[int]] = {}
    for target, source in enumerate(sources):
        targets_of.setdefault(source, []).append(target)
    line_breaks: dict[int, str] = {}
    for number, word in enumerate(words):
        for seam, point in word.points:
            if point[0].isspace():  # at the same share of the sentence, and never at its ends
                line_breaks[max(1, min(number * len(targets) // len(words), len(targets) - 1))] = point[0]
            else:
                placed.setdefault(_target_seam(number, seam, targets_of), []).append(point)
    fragments: list[Fragment] = []
    for place, parts in enumerate(targets):
        if place:
            left, right = stacks[place - 1][2], stacks[place][0]
            space = line_breaks.get(place) or translation[places[place - 1][1] : places[place][0]]
            fragments.append((space, left if in_spans else left[: _shared(left, right)]))
        for seam in range(4):
            fragments += placed.get((place, seam), [])
            if seam < 3 and parts[seam]:
                fragments.append((escape(parts[seam]), stacks[place][seam]))
    return fragments


def _words(characters: Sequence[Character], points: Sequence[Point]) -> list[_Word]:
    text, words = "".join(character[0] for character in characters), []
    remaining = list(reversed(points))
    for begin, end in word_places(text):
        before, core, _ = split_word(text[begin:end])
        seams = (begin, middle := begin + len(before), middle + len(core), end)
        sections = [characters[first:last] for first, last in pairwise(seams)]
        inner = dict.fromkeys(stack for _, _, stack in characters[begin:end])
        word = _Word(seams, [_stack_of(section) for section in sections], list(inner))
        while words and remaining and remaining[-1][0] < begin:  # in the white space before it
            words[-1].points.append((3, remaining.pop()[1:]))
        while remaining and remaining[-1][0] <= end:
            place, *point = remaining.pop()
            seam = 0 if place <= seams[0] else 3 if place == seams[3] else 1 if place <= seams[1] else 2
            word.points.append((seam, tuple(point)))
        words.append(word)
    return words


def _stack_of(section: Sequence[Character]) -> Stack | None:
    """Return the spans of most characters, but of the innermost ones where a span ends within a word."""
    counts = Counter(stack for _, _, stack in section)
    return max(counts, key=lambda stack: (len(stack), counts[stack]), default=None)


def _sources(links: Links, targets: int, words: int) -> list[int]:
    """Return the source word of each target word."""
    linked = {target: source for source, target in reversed(links) if source < words}
    sources: list[int] = []
    for target in range(targets):
        sources.append(linked.get(target, sources[-1] if sources else 0))
    return sources


def _fill_missing_parts(targets: list[tuple[str, str, str]], stacks: list[list[Stack]]) -> None:
    """Put the missing parts of a target word into the spans of its core."""
    for (before, _, after), stack in zip(targets, stacks, strict=True):
        stack[::2] = stack[0] if before else stack[1], stack[2] if after else stack[1]


def _add_missing_spans(words: list[_Word], sources: list[int], stacks: list[list[Stack]], in_spans: bool) -> None:
    """Put each span that no target word got around the nearest one, by source words, that has none of its kind."""
    present = {span for word in stacks for stack in word for span in stack}
    first: dict[Any, tuple[int, Stack]] = {}  # of each span the source word that it begins with
    for number, word in enumerate(words):
        for stack in word.inner:
            for span in stack:
                first.setdefault(span, (number, stack))
    for span, (number, stack) in first.items():
        if span in present or (in_spans and span is stack[-1]):
            continue
        free = [t for t in range(len(sources)) if all(other.name != span.name for other in stacks[t][1])]
        if free:
            nearest = min(free, key=lambda t: (abs(sources[t] - number), abs(t - number)))
            before, core, after = stacks[nearest]
            stacks[nearest] = [stack] * 3 if in_spans else [before, (*core, span), after]


def _target_seam(number: int, seam: int, targets_of: dict[int, list[int]]) -> tuple[int, int]:
    """Return target word and seam for a point at the seam of a source word."""
    if number in targets_of:
        return targets_of[number][0 if seam < 2 else -1], seam
    earlier = next((source for source in range(number - 1, -1, -1) if source in targets_of), None)
    return (0, 0) if earlier is None else (targets_of[earlier][-1], 3)


def _shared(left: Stack, right: Stack) -> int:
    """Return the number of spans, from the outermost, that two stacks share."""
    return sum(1 for _ in takewhile(lambda spans: spans[0] is spans[1], zip(left, right, strict=False)))


def written(fragments: Sequence[Fragment], before: Stack, after: Stack, tags: Callable[[Any], tuple[str, str]]) -> str:
    """Return fragments with the tags between them, from the spans open before them to those open after them."""
    parts, stack = [], before
    for raw, wanted in [*(fragment for fragment in fragments if fragment[0]), ("", after)]:
        shared = _shared(stack, wanted)
        parts += [tags(span)[1] for span in reversed(stack[shared:])]
        parts += [tags(span)[0] for span in wanted[shared:]]
        parts.append(raw)
        stack = wanted
    return "".join(parts)
