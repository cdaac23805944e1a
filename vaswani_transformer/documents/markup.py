"""Markup that follows the words of a translation: spans around them, points between them.

Spans are copied from word to word, as Bergamot does for web pages: a target word is in the spans of the source word
that it is aligned with, so that a span whose words are torn apart appears twice; unless it is `single`, as links are,
which keeps the most words that are together. What is between two words of a span and no word itself is in it too.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise, takewhile
from typing import Any, NamedTuple

from ..data.words import word_places

#: Source word and target word, both counted from 0, as `vaswani_transformer.align` gives them.
Links = list[tuple[int, int]]
#: The spans around a position, as their first tags, the outermost first.
Stack = tuple[Any, ...]
#: What stands for a line break that is kept.
LINE_BREAK = "\u2028"
_WORD = re.compile(r"([\W_]*)(.*?)([\W_]*)", re.DOTALL)  # punctuation, the rest, punctuation


class Fragment(NamedTuple):
    """Written text, the spans that it is in, and the character or the word that it shows; a point shows none."""

    raw: str
    spans: Stack
    text: str = ""


@dataclass
class _Word:
    """A word of the source: the spans of its three parts, None for a part that it lacks."""

    stacks: list[Stack | None]
    inner: list[Stack]  # those of all its characters, which may be more
    line_break: str  # before it
    points: list[tuple[int, Fragment]] = field(default_factory=list)  # each with the number of its seam


def split_word(word: str) -> tuple[str, str, str]:
    """Return a word as punctuation, the rest, punctuation; punctuation alone is all rest."""
    before, core, after = _WORD.fullmatch(word).groups()
    return (before, core, after) if core else ("", word, "")


def project(
    atoms: Sequence[Fragment], translation: str, links: Links, document: Any, outside: Set[Any]
) -> list[Fragment]:
    """Return a translation in fragments, each in the spans and among the points that belong to its words.

    Args:
        atoms: the characters that were translated, without white space at the ends, and the points between them.
        translation: words and single spaces, at least a word.
        links: source word, target word; a target word without a link belongs where the one before it does.
        document: has `escape`, which writes text so that it means itself, and `in_spans`: all text, white space too,
            stands in innermost spans of one kind (runs), which may get lost.
        outside: spans that are around something beside these characters.
    """
    words = _words(atoms)
    places = word_places(translation)
    targets = [split_word(translation[start:end]) for start, end in places]
    linked = {target: source for source, target in reversed(links) if source < len(words)}  # else that before it
    sources = list(accumulate(range(len(targets)), lambda last, target: linked.get(target, last), initial=0))[1:]
    stacks = [[stack if stack is not None else words[s].stacks[1] for stack in words[s].stacks] for s in sources]
    if words[-1].stacks[2] is not None and words[sources[-1]].stacks[2] is None:
        stacks[-1][2] = words[-1].stacks[2]  # the full stop of a sentence, wherever its last word has gone
    _fill_missing_parts(targets, stacks)
    placed = _add_missing_spans(words, sources, stacks, outside, document.in_spans)
    _fill_missing_parts(targets, stacks)
    targets_of: dict[int, list[int]] = {}
    for target, source in enumerate(sources):
        targets_of.setdefault(source, []).append(target)
    line_breaks, behind = {}, (0, 0)  # the place behind the last word that a target word is linked with
    for number, word in enumerate(words):
        if word.line_break:  # at the same share of the sentence, and never at its ends
            line_breaks[max(1, min(number * len(targets) // len(words), len(targets) - 1))] = word.line_break
        own = targets_of.get(number, ())
        behind = (own[-1], 3) if own else behind
        for seam, point in word.points:
            placed.setdefault((own[0 if seam < 2 else -1], seam) if own else behind, []).append(point)
    fragments: list[Fragment] = []
    for place, parts in enumerate(targets):
        if place:
            left, right = stacks[place - 1][2], stacks[place][0]
            space = line_breaks.get(place) or translation[places[place - 1][1] : places[place][0]]
            fragments.append(Fragment(space, left if document.in_spans else left[: _shared(left, right)]))
        for seam in range(4):
            fragments += placed.get((place, seam), [])
            if seam < 3 and parts[seam]:
                fragments.append(Fragment(document.escape(parts[seam]), stacks[place][seam], parts[seam]))
    return fragments


def _words(atoms: Sequence[Fragment]) -> list[_Word]:
    characters, text = [atom for atom in atoms if atom.text], "".join(atom.text for atom in atoms)
    offsets = accumulate((len(atom.text) for atom in atoms), initial=0)
    points = deque((offset, atom) for offset, atom in zip(offsets, atoms, strict=False) if not atom.text)
    words, last = [], 0
    for begin, end in word_places(text):
        before, core, _ = split_word(text[begin:end])
        seams = (begin, middle := begin + len(before), middle + len(core), end)
        stacks = [_stack_of(characters[start:stop]) for start, stop in pairwise(seams)]
        line_break = "".join(atom.raw for atom in characters[last:begin] if atom.text == LINE_BREAK)
        word = _Word(stacks, list(dict.fromkeys(atom.spans for atom in characters[begin:end])), line_break)
        while points and points[0][0] <= end:
            place, point = points.popleft()
            is_first = place <= seams[1] or point.spans == characters[seams[1]].spans != characters[seams[2] - 1].spans
            seam = 0 if place <= begin else 3 if place == end else 1 if is_first and place < seams[2] else 2
            in_space = words and place < begin  # before it
            (words[-1] if in_space else word).points.append((3 if in_space else seam, point))
        words.append(word)
        last = end
    return words


def _stack_of(section: Sequence[Fragment]) -> Stack | None:
    """Return the spans of most characters, but of the innermost ones where a span ends within a word."""
    counts = Counter(atom.spans for atom in section)
    return max(counts, key=lambda stack: (len(stack), counts[stack]), default=None)


def _fill_missing_parts(targets: list[tuple[str, str, str]], stacks: list[list[Stack]]) -> None:
    """Put the missing parts of a target word into the spans of its core."""
    for (before, _, after), stack in zip(targets, stacks, strict=True):
        stack[::2] = stack[0] if before else stack[1], stack[2] if after else stack[1]


def _add_missing_spans(
    words: list[_Word], sources: list[int], stacks: list[list[Stack]], outside: Set[Any], in_spans: bool
) -> dict[tuple[int, int], list[Fragment]]:
    """Put each span that no target word got around the nearest one, by source words, that has none of its kind.

    Returns:
        those for which there is none, where tags around nothing can stand, as fragments at seams of target words.
    """
    present = {span for word in stacks for stack in word for span in stack}
    present.update(span for word in words for _, point in word.points for span in point.spans)
    first: dict[Any, tuple[int, Stack]] = {}  # of each span the source word that it begins with
    for number, word in enumerate(words):
        for stack in word.inner:
            for span in stack:
                first.setdefault(span, (number, stack))
    empty: dict[tuple[int, int], list[Fragment]] = {}
    for span, (number, stack) in first.items():
        if span in present or (in_spans and span is stack[-1]):
            continue
        targets = sorted(range(len(sources)), key=lambda t: (abs(sources[t] - number), abs(t - number)))
        names = [{other.name for other in chain(*(stacks[t] if in_spans else stacks[t][1:2]))} for t in targets]
        free = [t for t, taken in zip(targets, names, strict=True) if span.name not in taken]
        if free and in_spans:  # with the run that it is around
            outer = [part[:-1] for part in stacks[free[0]]]
            stacks[free[0]] = [tuple(dict.fromkeys(chain(*outer, stack)))] * 3
        elif free:
            stacks[free[0]][1] += (span,)
        elif span.raw[:1] in "<[" and span not in outside:  # Markdown's signs cannot stand around nothing
            nearest = stacks[targets[0]][1]
            around = takewhile(lambda other, name=span.name: other.name != name and not other.is_run, nearest)
            empty.setdefault((targets[0], 3), []).append(Fragment("", (*around, span)))
    return empty


def _shared(left: Stack, right: Stack) -> int:
    """Return the number of spans, from the outermost, that two stacks share."""
    return sum(1 for _ in takewhile(lambda spans: spans[0] is spans[1], zip(left, right, strict=False)))


def _joined(fragments: list[Fragment], in_spans: bool) -> list[Fragment]:
    """Return fragments with spans around what is no word between two of theirs, and single ones in one place.

    The first and the last are those before and behind the sentence: where a single span is there, it stays.
    """
    stacks = [fragment.spans for fragment in fragments]
    words = [0, *accumulate(any(map(str.isalnum, fragment.text)) for fragment in fragments)]  # before each
    last = len(fragments) - 1
    for span in dict.fromkeys(span for stack in stacks for span in stack if not (in_spans and span.is_run)):
        numbers = [number for number, stack in enumerate(stacks) if span in stack]
        runs = [[numbers[0], numbers[0]]]
        for number in numbers[1:]:
            gap = range(runs[-1][1] + 1, number)
            others = {other for between in gap for other in stacks[between] if other.single}
            is_bridged = words[number] == words[gap.start] and others.issubset(stacks[number])
            if is_bridged or (span.single and (numbers[0], numbers[-1]) == (0, last)):
                runs[-1][1] = number
            else:
                runs.append([number, number])
        best = max(runs, key=lambda run: (0 in run or last in run, words[run[1] + 1] - words[run[0]]))
        for first, end in runs:
            around = stacks[end if end == last else first]
            around = around[: around.index(span) + 1]
            for number in range(first, end + 1):
                if span.single and [first, end] != best:
                    stacks[number] = tuple(other for other in stacks[number] if other is not span)
                elif stacks[number][: len(around)] != around:
                    near = {*around, *chain(*stacks[first - 1 : first], *stacks[end + 1 : end + 2])}
                    stacks[number] = (*around, *(other for other in stacks[number] if other not in near))
    return [fragment._replace(spans=stack) for fragment, stack in zip(fragments, stacks, strict=True)]


def written(
    fragments: Sequence[Fragment], before: Stack, after: Stack, tags: Callable[[Any], tuple[str, str]], in_spans: bool
) -> str:
    """Return fragments with the tags between them, from the spans open before them to those open after them."""
    parts, stack = [], before
    for raw, wanted, _ in _joined([Fragment("", before), *fragments, Fragment("", after)], in_spans)[1:]:
        shared = _shared(stack, wanted)
        parts += [tags(span)[1] for span in reversed(stack[shared:])]
        parts += [tags(span)[0] for span in wanted[shared:]]
        parts.append(raw)
        stack = wanted
    return "".join(parts)
