"""The model card: facts about a model, its training and its scores, put into a template of `model_cards/`.

Every figure comes from the model, its run folder or evaluation files. A card ends in a seal, by which the next push
knows that nobody has edited it, and so may replace it; a card that someone wrote or edited stays.
"""

import hashlib
import html
import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from markupsafe import Markup

from ..evaluation.records import weights_sha256
from ..model.configuration_vaswani import VaswaniConfig
from ..recipes.recipe import DROPOUTS
from .card_facts import METRICS, CardFacts, datasets_of, facts_of, file_name, metadata, one_line_of_text

logger = logging.getLogger(__name__)

# Fields of the configuration and the recipe that a card shows by their names.
_SIZES = ("encoder_layers", "decoder_layers", "d_model", "d_ff", "num_heads", "d_k", "d_v")
_CONFIG = (*_SIZES, "vocab_size", "decoder_vocab_size", "tie_word_embeddings", "share_encoder_decoder_embeddings",
           "position_encoding", "activation_function", "attention_window")  # fmt: skip
_RECIPE = ("from_model", "lora_rank", "distilled from", "train_source", "train_target", "train_data", "data_config",
           "validation_source", "validation_target", "validation_data", "validation_split", "optimizer steps",
           "max_length", "tokens_per_batch", "learning_rate_scale", "warmup_steps", "decline_steps", "adam_beta1",
           "adam_beta2", "adam_epsilon", "max_gradient_norm", "label_smoothing", "augmentation", "augmentation_start",
           "initialization", "seed", *DROPOUTS)  # fmt: skip
_SEAL = re.compile(r"<!-- Written by `vaswani push`; SHA-256 of what is above: ([0-9a-f]{64}) -->\s*\Z")
# What transformers puts into huggingface_hub's template for its default card.
_DEFAULT = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been"
    " automatically generated."
)


def escaped(value: Any) -> Any:
    """Return what a template puts into a card: texts stand for themselves in Markdown and HTML, on one line.

    All values of a card pass through here but `Markup`, since names of files, test sets and the like may hold anything.
    """
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = html.escape(one_line_of_text(value), quote=False)
    text = re.sub(r"[\\`*\[\]|~#!$@]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", text)
    return Markup(re.sub(r"(?i)\b(https?|ftp|mailto|www)([:.])", r"\1\\\2", text))  # GitHub's links without brackets


def rows_of(values: Mapping, names: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """Return rows (name, value) of a table, of `names` or of all values, without those that are unknown."""
    formats = {int: "{:,}", float: "{:g}"}
    known = ((name, values.get(name)) for name in names or values)
    return [(name, formats.get(type(x), "{!s:.1000}").format(x)) for name, x in known if x not in (None, "")]


def training_rows(facts: CardFacts) -> list[tuple[str, str]]:
    """Return rows (name, value) of the training table: fields of the recipe, paths without their private folders."""
    if not facts.recipe:
        return []
    on_hub = [*facts.datasets, *datasets_of(facts.recipe), *datasets_of(facts.recipe, "validation_data")]
    shown = {name: file_name(x) for name, x in facts.recipe.items() if isinstance(x, str) and x not in on_hub}
    return rows_of({**facts.recipe, **shown} | {name: getattr(facts.config, name) for name in DROPOUTS}, _RECIPE)


def evaluations_of(results: Sequence[EvalResult]) -> list[dict]:
    """Return scores as templates read them: those of an evaluation together, with how they were obtained."""
    decimals, evaluations = {"count": 0} | {metric: digits for metric, _, digits in METRICS.values()}, {}
    for result in results:
        how = rows_of({"source_sha256": result.dataset_revision} | result.metric_args)
        evaluation = {"test_set": result.dataset_name, "scores": [], "how": how}
        score = result.metric_name, f"{result.metric_value:.{decimals.get(result.metric_type, 2)}f}"
        evaluations.setdefault((result.dataset_name, *how), evaluation)["scores"].append(score)
    return list(evaluations.values())


def render_card(facts: CardFacts) -> str:
    """Return the text of the card, sealed; a model of the parser's preset or of its sizes has the parser's template."""
    config, parser = facts.config, VaswaniConfig.from_preset("parsing")
    has_its_sizes = all(getattr(config, name) == getattr(parser, name) for name in _SIZES)
    has_trees = file_name(str(facts.recipe.get("train_target"))) == "train.brackets"  # as `parse train` writes them
    is_parser = has_its_sizes or has_trees or facts.recipe.get("preset") == "parsing"
    name, package = facts.repo_id.rpartition("/")[2], Path(__file__).resolve().parents[1]
    data = ModelCardData(  # without what is not known
        language=list(facts.languages) or None,
        license=facts.license,
        library_name="transformers",
        pipeline_tag=None if is_parser else "translation",
        tags=["vaswani", "transformer", "attention-is-all-you-need"],
        datasets=list(facts.datasets) or None,
        metrics=list(dict.fromkeys(result.metric_type for result in facts.results)) or None,
        model_name=name if facts.results else None,
        eval_results=list(facts.results) or None,
    )
    environment = jinja2.Environment(
        # Inside the package if it is installed, beside it in a checkout.
        loader=jinja2.FileSystemLoader([package / "model_cards", package.parent / "model_cards"]),
        undefined=jinja2.StrictUndefined,
        finalize=escaped,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("parser.md" if is_parser else "base.md").render(
        front_matter=Markup(data.to_yaml()),
        repo_id=Markup(facts.repo_id),  # of a form that the Hub prescribes; it is in code too
        name=Markup(name),
        sizes=[("parameters", f"{facts.parameters:,}"), *rows_of(config.to_dict(), _CONFIG)],
        imported=facts.imported,
        training=training_rows(facts),
        decoding=rows_of(facts.generation),
        evaluations=evaluations_of(facts.results),
        direction=facts.languages if len(facts.languages) == 2 else None,
        license=facts.license,
        longest=facts.recipe.get("max_length"),
        positions=config.max_position_embeddings if config.position_encoding == "learned" else None,
    )
    return seal(re.sub(r"\n{3,}", "\n\n", text.lstrip()))


def _digest(text: str) -> str:
    return hashlib.sha256(text.replace("\r\n", "\n").rstrip().encode()).hexdigest()


def seal(text: str) -> str:
    """Return the text of a card with a comment at its end that `is_sealed` recognises."""
    return f"{text.rstrip()}\n\n<!-- Written by `vaswani push`; SHA-256 of what is above: {_digest(text)} -->\n"


def is_sealed(text: str) -> bool:
    """Return whether a card is as `vaswani push` wrote it: not someone else's, and not edited since."""
    match = _SEAL.search(text)
    return match is not None and match[1] == _digest(text[: match.start()])


def may_be_replaced(text: str) -> bool:
    """Return whether nobody wrote or edited this card: it is sealed, or transformers' default."""
    default = ModelCard.from_template(ModelCardData(), model_description=_DEFAULT).text
    body = re.sub(r"\A---\n.*?\n---\n", "", text.replace("\r\n", "\n"), flags=re.DOTALL)
    return is_sealed(text) or body.split() == default.split()


def carry_over(facts: CardFacts, text: str) -> CardFacts:
    """Return the facts, with licence, languages and datasets of the sealed card on the Hub where they are not known.

    Its scores may be of other weights: a card has those that are given with its model.
    """
    if not is_sealed(text):
        return facts
    if not facts.results and "## Evaluation" in text.splitlines():
        logger.warning("the scores on the card on the Hub were left out: give --evaluation to have them again")
    return replace(facts, **{name: x for name, x in metadata(text).items() if x and not getattr(facts, name)})


def card_for_push(model, repo_id: str, card: str) -> str:
    """Return the card for `model.push_to_hub`: ours in place of transformers' default one or of an earlier one of ours.

    `card` is what transformers would push: its default, or the card that is on the Hub. Ours describes the run that the
    model was loaded from only if the weights are still those of its folder, byte for byte.
    """
    if not may_be_replaced(card):
        return card
    folder = model.name_or_path
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        is_unchanged = bool(folder) and weights_sha256(folder) == weights_sha256(saved)
    return render_card(carry_over(facts_of(model, repo_id, folder if is_unchanged else None), card))
