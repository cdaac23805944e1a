"""The verdict on a finished training, in words: what its text was, how well the model does, what is likely wrong."""

from collections import Counter
from collections.abc import Mapping
from typing import Any
from unicodedata import normalize

import datasets

from ..data.parallel_text import pairs_of
from ..data.tokenization import SIDES, encoder
from ..model.language_codes_vaswani import typed_code

OVERLAP, COPIES, UNKNOWN = 0.05, 0.2, 0.001  # shares above which there is a warning


def of_text(counts: str, train: datasets.Dataset, validation: datasets.Dataset, tokenizer: Any) -> list[str]:
    """Describe the text of a training; `counts` are of its filter, in words, the others include what that drops.

    An unknown character is one that the training text does not have, or for which the tokenizer has no token.
    """
    composed = lambda text: normalize("NFC", text.strip())  # noqa: E731 (as text is encoded)
    sources, characters, different = Counter(map(composed, validation["source"])), set(), set()
    copied = overlap = unknown = number = 0
    for source, target in (map(composed, pair) for pair in pairs_of(train)):
        copied += typed_code(source)[1] == typed_code(target)[1] != ""
        overlap += sources.pop(source, 0)
        different.add(hash((source, target)))  # texts would take the memory of all of them
        characters.update(source, target)
    for side in SIDES:
        used = Counter("".join(map(composed, validation[side])))
        number += used.total()
        for (character, times), ids in zip(used.items(), encoder(tokenizer, side)(list(used)), strict=True):
            unknown += times * (character not in characters or tokenizer.unk_token_id in ids)
    share = unknown / max(1, number)
    repeated, copied = 1 - len(different) / len(train), copied / len(train)
    copies = f"of the pairs read {repeated:.1%} repeat another, {copied:.1%} have two equal sides"
    copies = warned(copies, copied > COPIES, "models of such text learn to copy")
    same = f"of {len(validation):,} validation sources {overlap:,} are in the training text word for word"
    same = warned(same, overlap > OVERLAP * len(validation), "new text will score lower")
    new = f"of the characters to validate on {share:.2%} are unknown"
    new = warned(new, share > UNKNOWN, "train on text that has them")
    return [f"training text: {counts}", copies, same, new]


def of_scores(metrics: Mapping[str, float], what: str = "validation") -> list[str]:
    """Describe a validation, called `what`, by BLEU and chrF, if its pairs were translated, with 95% intervals."""
    shown = []
    for name, label in (("bleu", "BLEU"), ("chrf", "chrF")) if "eval_bleu" in metrics else ():
        score, half = metrics[f"eval_{name}"], 1.96 * metrics[f"eval_{name}_error"]
        interval = f" (95% interval: {max(0, score - half):.1f} to {min(100, score + half):.1f})"
        shown.append(f"{label} {score:.1f}{interval if half else ''}")  # of one sentence there is none
    warning = "the model has learned nothing, give it more minutes or text"
    return [warned(f"{what}: {', '.join(shown)}", has_learned_nothing(metrics), warning)] if shown else []


def has_learned_nothing(metrics: Mapping[str, float]) -> bool:
    """Return whether BLEU and chrF are those of one sentence for all sources; of single words BLEU says little."""
    return metrics["eval_bleu"] < 2 and metrics["eval_chrf"] < 20


def warned(fact: str, is_wrong: bool, warning: str) -> str:
    """Return a fact, with a warning where something is likely wrong."""
    return f"{fact} (warning: {warning})" if is_wrong else fact
