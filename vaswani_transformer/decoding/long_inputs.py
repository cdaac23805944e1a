"""Lines that are longer than a model takes, divided where it hurts least."""

import re
from collections.abc import Callable

from ..model.sentence_splitting_vaswani import split_into_sentences

_CLAUSE_END = re.compile(r"(?<=[,;:–—])\s+|(?<=[，；：、])")


def split_line(text: str, limit: int, count: Callable[[str], int]) -> list[str]:
    """A text in pieces of at most `limit` tokens: its sentences, and of those too long the clauses, words or letters.

    Sentences stay alone, as a model knows them from training; smaller pieces are put together as far as they fit.

    Args:
        text: any text.
        limit: tokens that a piece may have, as `count` counts them.
        count: gives a text's tokens.

    Returns:
        the pieces in order; joined by spaces (letters by nothing) they are the text but for its white space. A single
        letter is a piece even if it has more tokens.
    """
    pieces = []
    for sentence in split_into_sentences(text):
        pieces += _divide(sentence, limit, count, 0)
    return pieces


# How a sentence is divided, the mildest way first, and what joins such parts again.
_WAYS: tuple[tuple[Callable[[str], list[str]], str], ...] = (
    (lambda text: [part for part in _CLAUSE_END.split(text) if part], " "),
    (str.split, " "),
    (list, ""),
)


def _divide(text: str, limit: int, count: Callable[[str], int], way: int) -> list[str]:
    if count(text) <= limit or way == len(_WAYS):
        return [text]
    divide, joint = _WAYS[way]
    parts = divide(text)
    if len(parts) == 1:
        return _divide(text, limit, count, way + 1)
    pieces, start = [], 0
    while start < len(parts):
        end = _furthest(parts, start, limit, count, joint)
        pieces += _divide(joint.join(parts[start:end]), limit, count, way + 1)
        start = end
    return pieces


def _furthest(parts: list[str], start: int, limit: int, count: Callable[[str], int], joint: str) -> int:
    """The end of the longest run of parts from `start` that fits; one part at least.

    A run that grows has more tokens, nearly always, so its end is looked for in steps that double, then halve.
    """

    def fits(end: int) -> bool:
        return count(joint.join(parts[start:end])) <= limit

    step = 1
    while start + 2 * step <= len(parts) and fits(start + 2 * step):
        step *= 2
    low, high = start + step, min(start + 2 * step, len(parts) + 1)  # the end of one that fits, of one that does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
