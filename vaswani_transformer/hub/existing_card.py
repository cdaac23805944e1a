"""A card of ours on the Hub: the seal by which it is known again, and what of it the next one keeps."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import yaml
from huggingface_hub import ModelCard, ModelCardData

logger = logging.getLogger(__name__)

_SEAL = re.compile(r"\n*<!-- Written by `vaswani push`; SHA-256 of what is above: ([0-9a-f]{64}) -->\s*\Z")
_STATE = re.compile(r"^<!-- For the next push: (\{.*\}) -->$", re.MULTILINE)
# The one sentence of transformers' default card that is not of huggingface_hub's template.
_DESCRIPTION = re.compile(r"^.*This model card has been automatically generated\.$", re.MULTILINE)


@dataclass(frozen=True)
class EarlierCard:
    """What a card of ours says that no file of a model does.

    Args:
        languages: codes (ISO 639), source first.
        license: the Hub's identifier of the weights' licence.
        datasets: names of datasets on the Hub.
        weights: `tensors_sha256` of the weights that it describes.
        evaluations: records of `vaswani evaluate --json`.
    """

    languages: Sequence[str] = ()
    license: str | None = None
    datasets: Sequence[str] = ()
    weights: str | None = None
    evaluations: Sequence[Mapping] = ()


def _digest(text: str) -> str:
    return hashlib.sha256(text.replace("\r\n", "\n").rstrip().encode()).hexdigest()


def seal(text: str, weights: str | None = None, evaluations: Sequence[Mapping] = ()) -> str:
    """The card with last lines by which `is_sealed` knows it again and `read_card` what it was made from."""
    text = text.rstrip()
    if weights is not None:
        state = json.dumps({"weights": weights, "evaluations": list(evaluations)}, ensure_ascii=False)
        state = state.replace("<", "\\u003c").replace(">", "\\u003e")  # nothing in it ends the comment
        text += f"\n\n<!-- For the next push: {state} -->"
    return f"{text}\n\n<!-- Written by `vaswani push`; SHA-256 of what is above: {_digest(text)} -->\n"


def is_sealed(text: str) -> bool:
    """Whether a card is as `vaswani push` wrote it: not one of someone else's, and not edited since."""
    match = _SEAL.search(text)
    return match is not None and match.group(1) == _digest(text[: match.start()])


def may_be_replaced(text: str) -> bool:
    """Whether nobody wrote this card: it is ours as we wrote it, or transformers' default one, unedited."""
    if is_sealed(text):
        return True
    sentence = _DESCRIPTION.search(text.replace("\r\n", "\n"))
    if sentence is None:
        return False
    stub = ModelCard.from_template(ModelCardData(), model_description=sentence.group())
    with contextlib.suppress(ValueError, TypeError, KeyError, yaml.YAMLError):
        return ModelCard(text).text.split() == stub.text.split()
    return False


def read_card(text: str) -> EarlierCard | None:
    """What a sealed card says; None for any other."""
    if not is_sealed(text):
        return None
    text, state = text.replace("\r\n", "\n"), {}
    with contextlib.suppress(ValueError, IndexError):
        state = json.loads(_STATE.findall(text)[-1])
    try:
        data = ModelCard(text).data
    except (ValueError, TypeError, KeyError, yaml.YAMLError):
        data = ModelCardData()

    def names(value) -> list[str]:
        return [name for name in ([value] if isinstance(value, str) else value or []) if isinstance(name, str)]

    return EarlierCard(
        languages=names(data.language),
        license=data.license if isinstance(data.license, str) else None,
        datasets=names(data.datasets),
        weights=state.get("weights"),
        evaluations=state.get("evaluations") or [],
    )


def describes(text: str, weights: str | None) -> bool:
    """Whether this is a card of ours on just these weights."""
    earlier = read_card(text)
    return earlier is not None and weights is not None and earlier.weights == weights


def carry_over(facts, text: str, given: Collection[str] = ()):
    """The facts for a new card, with what stays true of a card of ours on the Hub; one line is logged that says so.

    Licence, languages and datasets stay where nothing else is known, and on the same weights unless they are given;
    scores stay on the same weights only.

    Args:
        facts: a [`CardFacts`].
        text: of the card on the Hub.
        given: names of the facts that the user gave.
    """
    earlier = read_card(text)
    if earlier is None:
        return facts
    same, kept = describes(text, facts.weights), {}
    for name in ("license", "languages", "datasets"):
        value, known = getattr(earlier, name), getattr(facts, name)
        if value and name not in given and (same or not known) and value != (known if name == "license" else [*known]):
            kept[name] = value
    if earlier.evaluations and not facts.evaluations:
        if same:
            kept["evaluations"] = earlier.evaluations
        else:
            logger.warning("the scores on the card on the Hub are of other weights and left out: evaluate these")
    if kept:
        words = [
            f"{name} {value if isinstance(value, str) else ', '.join(value)}"
            for name, value in kept.items()
            if name != "evaluations"
        ]
        words += [f"scores on {record['test_set']}" for record in kept.get("evaluations", ())]
        logger.info("kept from the card on the Hub: %s", "; ".join(words))
    return dataclasses.replace(facts, **kept)
