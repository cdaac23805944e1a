"""Changes to a pair's text that a translation should survive: training sees some of them, `--stress` measures them.

OpusTrainer's modifiers do much the same; `tests/data/test_augmentation.py` says where these differ.
"""

import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from random import Random
from typing import Any

import numpy as np
import regex

from ..model.language_codes_vaswani import typed_code
from .memory import Memory
from .tokenization import SIDES, side_of
from .words import LETTER, has_case, title_case

TAG = "<BT>"  # before each source that a model of the reverse direction wrote
_READ = 500  # pairs that are changed at once to learn their lengths
_SAME_PART = 0.15  # difference of two shares of a sentence up to which they are the same part of it
_KEYBOARD = " qwertyuiop asdfghjkl zxcvbnm "
# With one letter changed "on" is "in"; no placeholder, address or tag.
_LONG_WORD = regex.compile(rf"(?<![{{%@/<_\pL\pM]|%\()(?:(?!{LETTER})[\pL\pM]){{4,}}+(?!_|[\w.]{{0,60}}+[:@/]\S)")
_NOT_CASED = regex.compile(r"[{}<>@]|%\w|%\(|://|[ıİğşə\p{Greek}\p{Georgian}]")  # placeholders; own capitals
_LETTERS = regex.compile(rf"{LETTER}|\p{{L}}(?:(?!{LETTER})[\p{{L}}\p{{M}}])+")  # a word; not one of "a"
_FINAL_MARK = regex.compile(r"(?<![\p{Terminal_Punctuation}…\s]\s*)\s*\p{Sentence_Terminal}$")  # the only one
_CLAUSE_END = regex.compile(r"[,;:.!?،؛](?=\s)|[，、；：]")
_EMOJI = regex.findall(r"(?V1)[\p{Emoji}--\p{Emoji_Component}]", "".join(map(chr, range(0x2600, 0x1FB00))))


def _without_final_mark(source: str, target: str, random: Random) -> tuple[str, str]:
    """Remove the final full stop, question or exclamation mark of both sides, if both have one alone."""
    sides = _FINAL_MARK.sub("", source), _FINAL_MARK.sub("", target)
    return sides if sides[0] != source and sides[1] != target else (source, target)


def _typo(source: str, target: str, random: Random) -> tuple[str, str]:
    """Make one error in a word of the source: letters swapped, one missing, one double, or that of the next key."""
    if not (words := [match.span() for match in _LONG_WORD.finditer(source)]):
        return source, target
    start, end = random.choice(words)
    at = random.randrange(start, end - 1)
    first, second = source[at : at + 2]
    typed = {second + first, second, first + first + second}
    if (key := _KEYBOARD.find(first.lower())) > 0:
        near = random.choice((_KEYBOARD[key - 1] + _KEYBOARD[key + 1]).replace(" ", ""))
        typed.add((near.upper() if first.isupper() else near) + second)
    return source[:at] + random.choice(sorted(typed - {first + second})) + source[at + 2 :], target


def _insert(text_of: Callable[[Random], str], source: str, target: str, random: Random) -> tuple[str, str]:
    """Put a text before both sides or behind both."""
    form, text = random.choice(("{1} {0}", "{0} {1}")), text_of(random)
    return form.format(source, text), form.format(target, text)


def _fragment(source: str, target: str, random: Random) -> tuple[str, str]:
    """Return what is before a comma or another mark within both sides.

    Only where they have the same marks in the same order, and for about the same share of each side.
    """
    marks = [list(_CLAUSE_END.finditer(side)) for side in (source, target)]
    first, second = ([unicodedata.normalize("NFKC", mark[0]) for mark in side] for side in marks)
    if first and first == second:
        ends = [mark.start() for mark in random.choice(list(zip(*marks, strict=True)))]
        if abs(ends[0] / len(source) - ends[1] / len(target)) <= _SAME_PART:
            return source[: ends[0]].rstrip(), target[: ends[1]].rstrip()
    return source, target


#: Each takes source, target and random numbers and returns both sides changed alike, or as they were if there is
#: nothing to change. Whoever writes in lower case, or mistypes, wants a translation without that.
CHANGES = {
    "upper": lambda source, target, random: (source.upper(), target.upper()),
    "title": lambda source, target, random: (title_case(source), title_case(target)),
    "lower": lambda source, target, random: (source.lower(), target),
    "punctuation": _without_final_mark,
    "typos": _typo,
    "emoji": partial(_insert, lambda random: "".join(random.choices(_EMOJI, k=random.choice((1, 1, 2, 3))))),
    "numbers": partial(_insert, lambda random: str(int(10 ** random.uniform(0, 6)))),
    "fragments": _fragment,
    "repeat": lambda source, target, random: (f"{source} {source}", f"{target} {target}"),
    # Of the stress test alone, since nobody knows the reference.
    "word": lambda source, target, random: (random.choice(_LETTERS.findall(source) or [source]), ""),
}


def source_parts(source: str) -> tuple[str, str, str]:
    """Return what is before a source, a language's code or `TAG` or both, the text, and what is behind it, a match."""
    code, text = typed_code(source)
    if text.startswith(f"{TAG} "):
        code, text = f"{code}{TAG} ", text[len(TAG) + 1 :]
    text, mark, match = text.partition(f" {Memory.TAG} ")
    return code, text, mark + match


def changed(kind: str, source: str, target: str, random: Random, to_train: bool = False) -> tuple[str, str]:
    """Return a pair changed in one way; a language's tag before a side stays, as `TAG` and a match of the source do.

    If it is `to_train` on, letters of a text with placeholders, or of a language with capitals of its own, stay too.
    """
    (code, source, match), (mark, target) = source_parts(source), typed_code(target)
    new = CHANGES[kind](source, target, random)
    is_same = new[0] == source or (kind in ("upper", "title") and not has_case(source))
    is_same |= to_train and kind in ("upper", "title", "lower") and _NOT_CASED.search(source + target) is not None
    source, target = (source, target) if is_same and new[1] else new
    return code + source + match, mark + target


def choose_change(shares: Mapping[str, float], seed: int, number: int) -> Callable[[str, str], tuple[str, str]] | None:
    """Return how the pair of this number is changed, by the shares of each kind; None for not at all."""
    random = Random(seed << 64 | number)
    [kind] = random.choices([*shares, None], [*shares.values(), max(0.0, 1 - sum(shares.values()))])
    return kind and partial(changed, kind, random=random, to_train=True)


@dataclass
class AugmentedPairs:
    """Tokenized pairs, a share of which is changed as they are read; other ones in each epoch.

    Batches are read by numbers that count on from epoch to epoch, `epoch * len(pairs) + index`. The text that tokens
    stand for is changed. A pair stays as it is where its number is negative, where its tokens do not come back from its
    text, where nothing would be left of a side, and where a limit would be exceeded.
    """

    pairs: Any  # rows with `input_ids` and `labels`, lists or arrays
    tokenizer: Any  # the one that made them
    shares: Mapping[str, float]  # of the pairs, by the kind of change
    seed: int = 0  # with the number of a pair, determines its change
    limits: Sequence[float] = (math.inf, math.inf, math.inf)  # tokens of a sentence; tokens and positions of a side

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitems__(self, numbers: Sequence[int]) -> list[Mapping[str, Sequence[int]]]:
        read = getattr(self.pairs, "__getitems__", lambda indices: [self.pairs[index] for index in indices])
        rows = [(row["input_ids"], row["labels"]) for row in read([number % len(self) for number in numbers])]
        changes = {row: choose_change(self.shares, self.seed, each) for row, each in enumerate(numbers) if each >= 0}
        if changes := {row: change for row, change in changes.items() if change}:
            sides = zip(SIDES, zip(*map(rows.__getitem__, changes), strict=True), strict=True)
            texts = [side_of(self.tokenizer, side).batch_decode(ids, skip_special_tokens=True) for side, ids in sides]
            new = zip(*map(lambda change, *pair: change(*pair), changes.values(), *texts), strict=True)
            encoded = [self.tokenizer(list(x), text_target=list(y)) for x, y in (texts, new)]
            restored, new = (zip(each["input_ids"], each["labels"], strict=True) for each in encoded)
            lengths = np.array([[*map(len, row)] for row in rows])
            for row, same, pair in zip(changes, restored, new, strict=True):
                after = lengths.copy()
                after[row] = [*map(len, pair)]
                sizes = after.max(), after.sum(axis=0).max(), after.max() * len(rows)
                is_text = same == tuple(map(list, rows[row])) and min(after[row]) > 1
                if is_text and np.less_equal(sizes, self.limits).all():
                    rows[row], lengths = pair, after
        return [{"input_ids": source, "labels": target} for source, target in rows]

    def changed_lengths(self, epoch: int) -> np.ndarray:
        """Return the tokens of each pair's sides in an epoch if batches have no limits, int32 `(2, pairs)`."""
        pairs = replace(self, limits=(self.limits[0], math.inf, math.inf))
        numbers = range(epoch * len(self), (epoch + 1) * len(self))
        reads = (pairs.__getitems__(numbers[start : start + _READ]) for start in range(0, len(self), _READ))
        lengths = ([len(ids) for ids in row.values()] for row in chain.from_iterable(reads))
        return np.fromiter(lengths, np.dtype((np.int32, 2)), len(self)).T
