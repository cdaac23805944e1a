"""How well translations stand what people type: those of a test set that is changed in the ways training may be."""

from collections.abc import Iterator, Sequence
from random import Random

import regex
from sacrebleu.metrics import CHRF

from ..data.augmentation import CHANGES, changed
from ..model.language_codes_vaswani import typed_code
from .translator import Hypothesis, Translator

_LOOP = regex.compile(r"\b(\w+(?:\W+\w+){0,5})(?:\W+\1\b){3}")  # up to six words, four times one after the other


def stress(
    translator: Translator, pairs: Sequence[tuple[str, str]], clean: Sequence[Hypothesis], progress=None
) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Translate a test set changed in each way, and compare with `clean`, the translations of it as it is.

    Neither side of a pair is blank; a `progress` bar moves by one for each sentence.

    Yields:
        `clean`, or each of `CHANGES` that some pair has a place for; and of the sentences that were changed
        their number, `sentences`; `chrf` against the references, changed in the same way; `chrf_kept`, that in percent
        of the chrF of the same sentences as they are; how many outputs have over three times the bytes, plus 20, of the
        longer of source and reference, or loop, `runs_on`, copy it, `copies`, or are `empty`; and `returned`, the
        percentage that have again what was inserted, or are the same twice for a `repeat`. What does not apply is None.
    """
    yield "clean", _row("clean", pairs, pairs, clean, clean)
    for kind in CHANGES:
        new = [changed(kind, *pair, Random(f"0 {kind} {place}")) for place, pair in enumerate(pairs)]
        places = [place for place, pair in enumerate(pairs) if new[place] != pair and new[place][0].strip()]
        if progress is not None:
            progress.update(len(pairs) - len(places))
        if places:
            sources = [new[place][0] for place in places]
            outputs = [ranked[0] for ranked in translator.hypotheses(sources, progress=progress)]
            columns = ([items[place] for place in places] for items in (pairs, new, clean))
            yield kind, _row(kind, *columns, outputs)


def _row(
    kind: str, pairs: Sequence[tuple], new: Sequence[tuple], clean: Sequence[Hypothesis], outputs: Sequence[Hypothesis]
) -> dict[str, float | None]:
    """Return what `stress` yields for pairs, as they are and as they are `new`, and the translations of both."""
    counts = {"runs_on": 0, "copies": 0, "empty": 0}
    for (source, reference), output in zip(new, outputs, strict=True):
        text, folded = output.text, typed_code(source)[1].strip().casefold()
        is_loop = output.repeats or (_LOOP.search(text) and not _LOOP.search(source))
        most = 3 * max(len(source.encode()), len(reference.encode())) + 20
        counts["runs_on"] += bool(is_loop or len(text.encode()) > most)
        counts["copies"] += text.strip().casefold() == folded != reference.strip().casefold()
        counts["empty"] += not text.strip()
    before, score = (
        CHRF().corpus_score([each.text for each in translations], [[reference for _, reference in references]]).score
        for references, translations in ((pairs, clean), (new, outputs))
    )
    scores = {"chrf": score, "chrf_kept": 100 * score / before if before else None}
    if kind == "word":  # has no reference
        scores = dict.fromkeys(scores)
    returned = [_is_returned(*row) for row in zip(pairs, new, outputs, strict=True)]
    is_apt = kind in ("emoji", "numbers", "repeat")
    return {"sentences": len(new)} | scores | counts | {"returned": 100 * sum(returned) / len(new) if is_apt else None}


def _is_returned(pair: tuple[str, str], new: tuple[str, str], output: Hypothesis) -> bool:
    """Return whether an output has what was added to its source, or is something twice if that is the source again."""
    source, changed_source = (typed_code(text)[1] for text, _ in (pair, new))
    if added := changed_source.removeprefix(source).removesuffix(source).strip():
        return output.text.count(added) >= new[1].count(added)
    text = "".join(output.text.split())
    return text[: len(text) // 2] == text[len(text) // 2 :] != ""
