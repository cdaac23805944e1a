"""A card that is on the Hub already: whether it is ours and unedited, and which of its facts the next card keeps."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData, ModelInfo, SpaceInfo

from ..errors import UserError
from ..json_and_yaml import parse_json, parse_yaml
from .card_facts import METRICS, CardFacts, is_dataset, is_language, is_license, published_record

logger = logging.getLogger(__name__)

MOST_BYTES = 4 << 20  # of a file that is read; ours are far smaller, cards with evaluations of many test sets too
_MOST_METADATA = 100_000  # characters
_SEAL = re.compile(r"<!-- Written by `vaswani push`; SHA-256 of what is above: ([0-9a-f]{64}) -->\s*\Z")
_STATE = re.compile(r"^<!-- For the next push: (\{.*\}) -->$", re.MULTILINE)
# The one sentence of transformers' default card that is not from huggingface_hub's template.
_DESCRIPTION = re.compile(r"^.*This model card has been automatically generated\.$", re.MULTILINE)


def read_file(api: HfApi, head: ModelInfo | SpaceInfo, name: str, repo_type: str = "model") -> str | None:
    """Text of a file of a commit, or None if there is none; one too large to be ours is not fetched."""
    sizes = {sibling.rfilename: sibling.size for sibling in head.siblings or []}
    if name not in sizes:
        return None
    if (sizes[name] or 0) > MOST_BYTES:
        return "(someone else's: ours are never so large)"
    with tempfile.TemporaryDirectory() as folder:
        path = api.hf_hub_download(head.id, name, repo_type=repo_type, revision=head.sha, local_dir=folder)
        return Path(path).read_text(encoding="utf-8", errors="replace")


def _digest(text: str) -> str:
    return hashlib.sha256(text.replace("\r\n", "\n").rstrip().encode()).hexdigest()


def seal(text: str, weights: str | None = None, evaluations: Sequence[Mapping] = ()) -> str:
    """The card with comments at its end that `is_sealed` recognises it by and `read_card` gets the records from."""
    text = text.rstrip()
    if weights is not None:
        state = json.dumps({"weights": weights, "evaluations": list(evaluations)}, ensure_ascii=False)
        state = state.replace("<", "\\u003c").replace(">", "\\u003e")  # nothing in it ends the comment
        text += f"\n\n<!-- For the next push: {state} -->"
    return f"{text}\n\n<!-- Written by `vaswani push`; SHA-256 of what is above: {_digest(text)} -->\n"


def is_sealed(text: str) -> bool:
    """Whether a card is as `vaswani push` wrote it: not someone else's, and not edited since."""
    match = _SEAL.search(text)
    return match is not None and match.group(1) == _digest(text[: match.start()])


def _split(text: str) -> tuple[str, str]:
    """The metadata of a card, empty if it is no card or too much, and the text below it."""
    match = re.match(r"\s*---\n(.*?)\n---[ \t]*(?:\n|\Z)", text.replace("\r\n", "\n"), re.DOTALL)
    if match is None:
        return "", text
    return match[1] if len(match[1]) <= _MOST_METADATA else "", text[match.end() :]


def may_be_replaced(text: str) -> bool:
    """Whether nobody wrote or edited this card: it is sealed, or it is transformers' default one."""
    if is_sealed(text):
        return True
    text = text.replace("\r\n", "\n")
    sentence = _DESCRIPTION.search(text)
    if sentence is None:
        return False
    default = ModelCard.from_template(ModelCardData(), model_description=sentence.group())
    return _split(text)[1].split() == default.text.split()


def read_card(text: str) -> dict:
    """The facts of a sealed card that may be kept, by their names in `CardFacts`; empty for any other card.

    Anyone can seal a card, so nothing is taken over but what has the form that it must have.
    """
    if not is_sealed(text):
        return {}
    text = text.replace("\r\n", "\n")
    state = {}
    with contextlib.suppress(ValueError, IndexError):
        state = parse_json(_STATE.findall(text)[-1])
    state = state if isinstance(state, dict) else {}
    evaluations = []
    for record in _list(state.get("evaluations")):
        with contextlib.suppress(UserError, AttributeError):
            known = published_record(record)
            evaluations += [known] if "test_set" in known and METRICS.keys() & known.keys() else []
    facts = metadata(text)
    return facts | ({"weights": state.get("weights"), "evaluations": evaluations} if state else {})


def metadata(text: str) -> dict:
    """Languages, datasets and licence in the front matter of any card, by their names in `CardFacts`, or None each."""
    data = {}
    with contextlib.suppress(ValueError):
        data = parse_yaml(_split(text)[0])
    data = data if isinstance(data, dict) else {}
    license = data.get("license")
    language = data.get("language")
    # YAML reads the code of Norwegian as False.
    languages = ["no" if one is False else one for one in (language if isinstance(language, list) else [language])]
    return {
        "languages": list(filter(is_language, languages)) or None,
        "datasets": list(filter(is_dataset, _list(data.get("datasets")))) or None,
        "license": license if is_license(license) else None,
    }


def _list(value: Any) -> list:
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def describes(text: str, weights: str | None) -> bool:
    """Whether this is a sealed card about exactly these weights (`tensors_sha256`)."""
    return weights is not None and read_card(text).get("weights") == weights


def carry_over(facts: CardFacts, text: str, given: Collection[str] = ()) -> CardFacts:
    """The facts with those of the card on the Hub, if it is sealed, that are still true; logs in one line what is kept.

    Licence, languages and datasets are kept if they are not known otherwise, and for the same weights unless they are
    `given` by the user; scores are kept for the same weights only.
    """
    earlier, same = read_card(text), describes(text, facts.weights)
    kept, words = {}, []
    for name in ("license", "languages", "datasets"):
        value, now = earlier.get(name), getattr(facts, name)
        if value and value != now and name not in given and (same or not now):
            kept[name] = value
            words.append(f"{name} {', '.join(value) if isinstance(value, list) else value}")
    if earlier.get("evaluations") and not facts.evaluations:
        if same:
            kept["evaluations"] = earlier["evaluations"]
            words += [f"scores on {record['test_set']}" for record in kept["evaluations"]]
        else:
            logger.warning("the scores on the card on the Hub are of other weights and left out: evaluate these")
    if words:
        logger.info("kept from the card on the Hub: %s", "; ".join(words))
    return dataclasses.replace(facts, **kept)
