"""The report of `vaswani clean`: what each rule has dropped, with samples."""

import math
from collections.abc import Sequence

from .cleaning_rules import BOTH, KEPT, NAMES, CleaningRules, LengthRatio

SHOWN = 5  # samples of each rule


def report_text(
    rules: CleaningRules,
    counts: Sequence[int],
    samples: Sequence[list],
    ratio: LengthRatio | None,
    has_tests: bool,
) -> str:
    """Return the report in Markdown.

    Args:
        rules: what was dropped.
        counts: pairs by rule, as `NAMES`.
        samples: of the pairs that each rule has dropped: its name, hash, row, source, target and reason.
        ratio: the distribution of length ratios, if a rule is on it.
        has_tests: whether the text was compared with other text.
    """
    total = left = sum(counts)
    lines = [
        "# Cleaned text", "",
        f"{total:,} pairs read, {counts[KEPT]:,} ({counts[KEPT] / total:.2%}) kept. A pair is dropped by the first rule"
        " that fits; `seen` are those that the rules before have left.", "",
        "| rule | drops | seen | dropped | share of seen |", "| --- | --- | ---: | ---: | ---: |",
    ]  # fmt: skip
    for name, meaning in _meanings(rules, has_tests).items():
        dropped = counts[NAMES.index(name)]
        lines.append(f"| {name} | {meaning} | {left:,} | {dropped:,} | {dropped / max(left, 1):.3%} |")
        left -= dropped
    if ratio and ratio.medians:
        groups = zip(ratio.lengths, ratio.medians, ratio.deviations, strict=True)
        lines += [
            "", "Targets are expected to have so many times the characters of their sources, by the length of the"
            " source; pairs below the least ratio or above the most are dropped:", "",
            "| characters of the source | ratio | least | most |", "| ---: | ---: | ---: | ---: |",
            *("| " + " | ".join(_ratios(*group, rules.length_ratio)) + " |" for group in groups),
        ]  # fmt: skip
    for name in NAMES:
        texts = [
            f"    pair {row + 1:,}{reason and ': '}{reason}\n    {_shown(source)}\n    {_shown(target)}"
            for rule, _, row, source, target, reason in samples
            if rule == name
        ]
        lines += ["", f"## Dropped: {name}", "", "\n    \n".join(texts)] if texts else []
    return "\n".join(lines) + "\n"


def _meanings(rules: CleaningRules, has_tests: bool) -> dict[str, str]:
    """Return what the rules that were applied drop, in their order."""
    limits = [("below", rules.minimum_score), ("above", rules.maximum_score)]
    scores = " or ".join(f"{where} {limit:g}" for where, limit in limits if limit is not None)
    side = "pair" if rules.near_side == BOTH else rules.near_side
    meanings = {
        "empty": "a side without text",
        "undecodable": "a character that stands for bytes nobody could decode",
        "identical": None if rules.keep_identical else "source and target are the same",
        "length": f"a side of more than {rules.max_characters:,} characters or {rules.max_words:,} words",
        "length ratio": f"more than {rules.length_ratio:g} robust deviations from the expected ratio",
        "test text": "a side that is a line of a test or validation text" if has_tests else None,
        "score": f"a score {scores}" if scores else None,
        "language": "a source not in {} or a target not in {}".format(*rules.languages) if rules.languages else None,
        "duplicate": None if rules.keep_duplicates else "a copy of an earlier pair",
        "near duplicate": f"a {side} like an earlier one, similarity about {rules.near_duplicates} or more",
    }
    meanings["length ratio"] = meanings["length ratio"] if rules.length_ratio else None
    meanings["near duplicate"] = meanings["near duplicate"] if rules.near_duplicates else None
    return {name: meaning for name, meaning in meanings.items() if meaning}


def _ratios(length: float, median: float, deviation: float, limit: float) -> list[str]:
    ratios = [median, median - limit * deviation, median + limit * deviation]
    return [f"{math.exp(length):.0f}", *(f"{math.exp(ratio):.2f}" for ratio in ratios)]


def _shown(text: str) -> str:
    """Return a text on one line, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in " ".join(text.split()))
