"""Lines that are longer than a model takes, divided where it hurts least."""

import re
from bisect import bisect_right
from collections.abc import Callable

from ..model.sentence_splitting_vaswani import split_into_sentences

_CLAUSE_END = re.compile(r"(?<=[,;:–—])\s+|(?<=[，；：、])")
_TOKEN_CHARACTERS = 20  # of a token, at most; where one has more, pieces are shorter than they could be

# How a sentence is divided, the mildest way first, and what joins such parts again.
_WAYS: tuple[tuple[Callable[[str], list[str]], str], ...] = (
    (lambda text: [clause for clause in _CLAUSE_END.split(text) if clause], " "),
    (str.split, " "),
    (list, ""),
)


def split_line(text: str, limit: int, count: Callable[[str], int], language: str = "en") -> list[str]:
    """Divide a text into pieces of at most `limit` tokens: sentences, or clauses, words, characters of those too long.

    Sentences stay alone, as a model knows them from training; smaller pieces are joined as far as they fit. Joined by
    spaces (characters by nothing) the pieces are the text but for its white space. A single character is a piece even
    if it has more tokens. `count` counts the tokens of a text, `language` is the code of its language.
    """
    return [piece for sentence in split_into_sentences(text, language) for piece in _divide(sentence, limit, count)]


def _divide(text: str, limit: int, count: Callable[[str], int], way: int = 0) -> list[str]:
    if count(text) <= limit or way == len(_WAYS):
        return [text]
    divide, joint = _WAYS[way]
    parts = divide(text)
    pieces, start = [], 0
    while start < len(parts):
        # The most parts that fit, one at least. More of them have more tokens, nearly always, and each has one or more.
        most = start + limit * (1 if joint else _TOKEN_CHARACTERS)
        ends = range(start + 2, min(most, len(parts)) + 1)
        end = start + 1 + bisect_right(ends, limit, key=lambda end: count(joint.join(parts[start:end])))
        pieces += _divide(joint.join(parts[start:end]), limit, count, way + 1)
        start = end
    return pieces
