"""The model card: facts about a model, its training and its scores, put into a template of `model_cards/`.

Every figure comes from the model, its run folder or evaluation files. A card ends in a seal, by which the next push
knows that nobody has edited it, and so may replace it; a card that someone wrote or edited stays.
"""

import contextlib
import hashlib
import html
import logging
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from markupsafe import Markup

from ..durations import duration
from ..errors import UserError, reading
from ..evaluation.records import tensors_sha256
from ..json_and_yaml import read_json, read_text
from ..model.configuration_vaswani import VaswaniConfig
from .card_facts import (
    METRICS,
    CardFacts,
    code_facts,
    datasets_of,
    facts_of,
    file_name,
    is_dataset,
    is_language,
    is_license,
    metadata,
    one_line_of_text,
)

logger = logging.getLogger(__name__)

KINDS = {"base": "base", "big": "big", "parser": "parsing"}  # template -> the paper's preset that it compares with
_SIZES = ("d_model", "d_ff", "num_heads", "encoder_layers", "decoder_layers", "d_k", "d_v")
# Label of a row -> its text, in which fields of the recipe and values that are computed from the log are put.
_TRAINING = {
    "started from": "{started_from}",
    "distilled from": "{distilled_from}",
    "training data": "{training_data}",
    "validation data": "{validation_data}",
    "longest pair": "{max_length:,} tokens on a side",
    "batch": "{tokens_per_batch:,} source tokens, and as many target tokens, at most",
    "optimizer steps": "{steps:,}{epochs}",
    "optimizer": "Adam, β₁ {adam_beta1}, β₂ {adam_beta2}, ε {adam_epsilon:g}",
    "learning rate": "Equation 3 of the paper{factor}, {warmup_steps:,} warmup steps",
    "dropout": "{dropout}",
    "label smoothing": "{label_smoothing:g}",
    "weights kept": "{weights_kept}",
    "duration": "{duration}",
    "seed": "{seed}",
}
_DECODING = {
    "num_beams": "beams",
    "length_penalty": "length penalty",
    "max_extra_tokens": "tokens more than the source, at most",
    "max_new_tokens": "tokens, at most",
}
_SEAL = re.compile(r"<!-- Written by `vaswani push`; SHA-256 of what is above: ([0-9a-f]{64}) -->\s*\Z")
_WEIGHTS = '<!-- For the next push: {{"weights": "{}"'
# The one sentence of transformers' default card that is not from huggingface_hub's template.
_DESCRIPTION = re.compile(r"^.*This model card has been automatically generated\.$", re.MULTILINE)


def escaped(value: Any) -> Any:
    """Return what a template puts into a card: texts stand for themselves in Markdown and HTML, on one line.

    All values of a card pass through here but `Markup`, since names of files, test sets and the like may hold anything.
    """
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = html.escape(one_line_of_text(value), quote=False)
    text = re.sub(r"[\\`*\[\]|~#!$@]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", text)
    return Markup(re.sub(r"(?i)\b(https?|ftp|mailto|www)([:.])", r"\1\\\2", text))  # GitHub's links without brackets


def check_metadata(languages: Sequence[str], license: str | None, datasets: Sequence[str]) -> None:
    """Check the form of what the front matter will hold; whether a licence or language exists, the Hub checks."""
    rules = {
        "language": (languages, is_language, "one of ISO 639, such as en or de"),
        "license": ([] if license is None else [license], is_license, "an identifier of the Hub, such as mit"),
        "dataset": (datasets, is_dataset, "a name on the Hub, such as wmt14"),
    }
    for option, (values, is_right, rule) in rules.items():
        if wrong := [value for value in values if not is_right(value)]:
            raise UserError(f"--{option} is {wrong[0]!r}: it must be {rule}")


def choose_kind(config: VaswaniConfig, recipe: Mapping) -> str:
    """Return the template for a model: `"parser"`, `"big"` or `"base"`."""
    if recipe.get("preset") == "parsing" or _has_sizes_of(config, "parsing"):
        return "parser"
    return "big" if config.d_model >= 1024 else "base"


def _has_sizes_of(config: VaswaniConfig, preset: str) -> bool:
    paper = VaswaniConfig.from_preset(preset)
    return all(getattr(config, name) == getattr(paper, name) for name in _SIZES)


def compare_with_paper(config: VaswaniConfig, kind: str) -> str:
    """Return a sentence that compares the model's sizes with those of the paper's model."""
    words = f"{KINDS[kind]} model"
    if _has_sizes_of(config, KINDS[kind]):
        return f"Its sizes are those of the paper's {words}."
    # Parameters that vocabulary and kind of embeddings add are not compared.
    shared = (
        *("vocab_size", "decoder_vocab_size", "tie_word_embeddings", "share_encoder_decoder_embeddings", "output_bias"),
        *("position_encoding", "max_position_embeddings", "attention_bias"),
    )
    paper = VaswaniConfig.from_preset(KINDS[kind], **{name: getattr(config, name) for name in shared})
    ratio = config.num_parameters() / paper.num_parameters()
    if 1 / 1.1 < ratio < 1.1:
        return f"It has the architecture of the paper's {words} with other sizes."
    return f"It is a {'smaller' if ratio < 1 else 'larger'} model of the same architecture as the paper's {words}."


def size_rows(facts: CardFacts) -> list[tuple[str, str]]:
    """Return rows (label, value) of the table of sizes."""
    config = facts.config
    shared = {
        (True, True): "shared by source, target and output",
        (True, False): "shared by target and output",
        (False, True): "shared by source and target",
        (False, False): "three matrices of embeddings",
    }[config.tie_word_embeddings, config.shares_embeddings]
    entries = f"{config.vocab_size:,} entries"
    if config.target_vocab_size != config.vocab_size:
        entries = f"{config.vocab_size:,} source and {config.target_vocab_size:,} target entries"
    learned = config.position_encoding == "learned"
    return [
        ("parameters", f"{facts.parameters:,}"),
        ("layers", f"{config.encoder_layers} encoder, {config.decoder_layers} decoder"),
        ("d_model", f"{config.d_model:,}"),
        ("d_ff", f"{config.d_ff:,}"),
        ("attention heads", f"{config.num_heads}, d_k {config.d_k}, d_v {config.d_v}"),
        ("vocabulary", f"{entries}, {shared}"),
        ("positions", f"learned, {config.max_position_embeddings:,}" if learned else config.position_encoding),
        *([("activation", config.activation_function)] if config.activation_function != "relu" else []),
        *([("self-attention", f"{config.attention_window} neighbours")] if config.attention_window else []),
    ]


def training_rows(facts: CardFacts) -> list[tuple[str, str]]:
    """Return rows (label, value) of the training table, from recipe and log, without those of unknown facts."""
    recipe, config = facts.recipe, facts.config
    steps = [entry for entry in facts.log if not {"best_loss", "average_loss", "last_loss"} & entry.keys()]
    last = next((entry for entry in reversed(steps) if "step" in entry), {})
    scale, seconds = recipe.get("learning_rate_scale") or 1, last.get("seconds")
    dropouts = [f"{config.dropout:g}"]
    dropouts += [f"{config.attention_dropout:g} on attention weights"] if config.attention_dropout else []
    dropouts += [f"{config.activation_dropout:g} inside feed-forward layers"] if config.activation_dropout else []
    passes = last.get("epoch", 0)  # through the text
    rank = recipe.get("lora_rank")
    trained = "all weights" if rank is None else f"adapters of rank {rank}, merged"
    values = {
        **recipe,
        "started_from": f"{file_name(recipe['from_model'])}, {trained}" if recipe.get("from_model") else None,
        "distilled_from": f"translations of {' and '.join(facts.teachers)}" if facts.teachers else None,
        "training_data": _data(recipe, "train"),
        "validation_data": _data(recipe, "validation"),
        "steps": last.get("step"),
        "epochs": f", {passes:.1f} epochs" if passes else "",
        "factor": f" times {scale:g}" if scale != 1 else "",
        "dropout": ", ".join(dropouts) if recipe or facts.log else None,
        "weights_kept": _kept_weights(recipe, facts.log),
        "duration": None if seconds is None else duration(seconds),
    }
    known = {name: value for name, value in values.items() if value is not None}
    rows = []
    for label, text in _TRAINING.items():
        with contextlib.suppress(KeyError):
            rows.append((label, text.format_map(known)))
    return rows


def _data(recipe: Mapping, part: str) -> str | None:
    """Return the data of `"train"` or `"validation"` in words, without folders, which are private."""
    source, target = recipe.get(f"{part}_source"), recipe.get(f"{part}_target")
    if source and target:
        return f"{file_name(source)} and {file_name(target)}"
    if part == "validation" and not recipe.get("validation_data"):
        if recipe.get("validation_split") and recipe.get("train_data"):
            return f"split {file_name(recipe['validation_split'])} of the same dataset"
        return f"{recipe['validation_size']:,} pairs held out of them" if recipe.get("validation_size") else None
    if not recipe.get(f"{part}_data"):
        return None
    name = recipe["train_data"] if datasets_of(recipe) and part == "train" else file_name(recipe[f"{part}_data"])
    return f"{name} {file_name(recipe['data_config'])}" if recipe.get("data_config") else name


def _kept_weights(recipe: Mapping, log: Sequence[Mapping]) -> str | None:
    """Return which weights the run kept: those that its recipe names, or those that its log says are better."""
    metric = recipe.get("best_by")
    names = ("best", "average", "last")
    scores = {name: entry[f"{name}_{metric}"] for entry in log for name in names if f"{name}_{metric}" in entry}
    if not scores:
        return None
    kept = recipe.get("keep_weights")
    if kept not in scores:
        kept = (max if metric == "bleu" else min)(scores, key=scores.get)
    if kept == "best":
        return f"best checkpoint by validation {'BLEU' if metric == 'bleu' else metric}"
    count = recipe.get("average_checkpoints")
    average = f"average of the last checkpoints, {count} at most" if count else "average of the last checkpoints"
    return average if kept == "average" else "last checkpoint"


def decoding_rows(generation: Mapping) -> list[tuple[str, str]]:
    """Return rows (label, value) of the decoding table: the paper's settings in words, others by name."""
    known = {
        name: f"{value:,}" if type(value) is int else f"{value:g}" if type(value) is float else str(value)[:200]
        for name, value in generation.items()
        if value is not None
    }
    names = [*(name for name in _DECODING if name in known), *sorted(known.keys() - _DECODING.keys())]
    return [(_DECODING.get(name, _code(name)), known[name]) for name in names]


def evaluation_results(facts: CardFacts, kind: str) -> list[EvalResult]:
    """Return every score for the front matter's `model-index`, exact, with the arguments it was obtained with."""
    task = ("other", "Constituency parsing") if kind == "parser" else ("translation", "Translation")
    results = list(facts.results)
    for record in facts.evaluations:
        name = one_line_of_text(record["test_set"])
        for key in (key for key in METRICS if key in record):
            # Perplexity is that of the references: it depends on no search.
            arguments = dict(record.get("generation") or {}) if key != "perplexity" else {}
            arguments = {
                name: str(value) if isinstance(value, list) else value  # YAML would refer to equal lists
                for name, value in arguments.items()
            } | ({"signature": record[f"{key}_signature"]} if f"{key}_signature" in record else {})
            result = EvalResult(
                task_type=task[0],
                task_name=task[1],
                dataset_type=re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-") or "test",
                dataset_name=name,
                dataset_config=name,
                dataset_revision=record.get("source_sha256"),  # tells apart test sets of the same name
                metric_type=METRICS[key][0],
                metric_name=METRICS[key][1],
                metric_value=record[key],
                metric_args=arguments or None,
            )
            results += [] if result in results else [result]  # the perplexity of two searches
    return results


def _code(text: str) -> Markup:
    """Return text as a Markdown code span, on one line."""
    text = one_line_of_text(text)
    fence, space = _fence(text, 1), " " if "`" in text else ""
    return Markup(f"{fence}{space}{text}{space}{fence}")


def _fence(text: str, least: int) -> Markup:
    """Return at least `least` backticks, more than the text has in a row."""
    return Markup("`" * max([least, *(len(run) + 1 for run in re.findall("`+", text))]))


def _evaluation(record: Mapping) -> dict:
    """Return a record as templates read it."""

    def in_words(rows) -> Markup:
        return Markup(", ".join(" ".join(str(escaped(part)) for part in row) for row in rows))

    how = [("sentences", record.get("sentences"))]
    for side in ("source", "reference"):
        digest = (
            f", SHA-256 `{record[f'{side}_sha256']}`"
            if re.fullmatch("[0-9a-f]{64}", record.get(f"{side}_sha256", ""))
            else ""
        )
        how.append((side, Markup(f"{_code(record[f'{side}_file'])}{digest}") if f"{side}_file" in record else None))
    how.append(("decoding", in_words(decoding_rows(record.get("generation") or {}))))
    for key, (_, label, _) in METRICS.items():
        if signature := record.get(f"{key}_signature"):
            how.append((f"{label} signature", _code(signature)))
    how += [("versions", in_words((record.get("versions") or {}).items())), ("date", record.get("date"))]
    command = Markup(one_line_of_text(record.get("command", "")))
    return {
        "test_set": record["test_set"],
        "scores": [
            (label, f"{record[key]:.{digits}f}") for key, (_, label, digits) in METRICS.items() if key in record
        ],
        "how": [(label, f"{value:,}" if isinstance(value, int) else value) for label, value in how if value],
        "command": command,
        "fence": _fence(command, 3),
    }


def front_matter(facts: CardFacts, kind: str) -> ModelCardData:
    """Return the card's metadata, without what is not known."""
    results = evaluation_results(facts, kind)
    return ModelCardData(
        language=list(facts.languages) or None,
        license=facts.license,
        library_name="transformers",
        pipeline_tag=None if kind == "parser" else "translation",
        tags=["vaswani", "transformer", "attention-is-all-you-need"],
        datasets=list(facts.datasets) or None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        model_name=facts.name if results else None,
        eval_results=results or None,
    )


def template_folder() -> Path:
    """Return the folder of the templates: inside the package if it is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(folder for folder in (package / "model_cards", package.parent / "model_cards") if folder.is_dir())


def render_card(facts: CardFacts, card: str | None = None) -> str:
    """Return the text of the card, sealed, by the template of one of `KINDS` or of a path.

    Raises:
        UserError: for a template that is missing or wrong, or front matter of its own that cannot be read.
    """
    kind = card if card in KINDS else choose_kind(facts.config, facts.recipe)
    config, folder = facts.config, template_folder()
    path = folder / f"{kind}.md" if card in (None, *KINDS) else Path(card)
    data = Markup(front_matter(facts, kind).to_yaml())
    # `ModelCard.from_template` would run the code in a stranger's template.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        finalize=escaped,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    with reading(path):
        text = environment.from_string(read_text(path, f"give {', '.join(KINDS)} or a file")).render(
            front_matter=data,
            repo_id=Markup(facts.repo_id),  # of a form that the Hub prescribes; it is in code too
            name=Markup(facts.name),
            size=compare_with_paper(config, kind),
            sizes=size_rows(facts),
            imported=facts.imported,
            training=training_rows(facts),
            decoding=decoding_rows(facts.generation),
            evaluations=list(map(_evaluation, facts.evaluations)),
            scores=Markup(facts.scores),
            direction=facts.languages if len(facts.languages) == 2 else None,
            license=facts.license,
            longest=facts.recipe.get("max_length"),
            positions=config.max_position_embeddings if config.position_encoding == "learned" else None,
            remote_code=facts.remote_code,
            pipeline=facts.pipeline,
        )
        text = re.sub(r"\n{3,}", "\n\n", text.lstrip())
        text = text if text.startswith("---") else f"---\n{data}\n---\n\n{text}"
        ModelCard(text)  # raises for front matter that cannot be read
    return seal(f"{text.rstrip()}\n\n{_WEIGHTS.format(facts.weights)}}} -->" if facts.weights else text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.replace("\r\n", "\n").rstrip().encode()).hexdigest()


def seal(text: str) -> str:
    """Return the card with a comment at its end that `is_sealed` recognises."""
    text = text.rstrip()
    return f"{text}\n\n<!-- Written by `vaswani push`; SHA-256 of what is above: {_digest(text)} -->\n"


def is_sealed(text: str) -> bool:
    """Return whether a card is as `vaswani push` wrote it: not someone else's, and not edited since."""
    match = _SEAL.search(text)
    return match is not None and match[1] == _digest(text[: match.start()])


def may_be_replaced(text: str) -> bool:
    """Return whether nobody wrote or edited this card: it is sealed, or it is transformers' default one."""
    sentence = _DESCRIPTION.search(text := text.replace("\r\n", "\n"))
    if sentence is None:
        return is_sealed(text)
    default = ModelCard.from_template(ModelCardData(), model_description=sentence.group())
    return re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL).split() == default.text.split()


def describes(text: str, weights: str | None) -> bool:
    """Return whether this is a sealed card about exactly these weights (`tensors_sha256`)."""
    return weights is not None and is_sealed(text) and _WEIGHTS.format(weights) in text


def carry_over(facts: CardFacts, text: str, options: Collection[str] = ()) -> CardFacts:
    """Return the facts with those of the sealed card on the Hub; logs in one line what is kept.

    Licence, languages and datasets are kept if they are not known otherwise, and for the same weights unless they are
    among the user's `options`; scores, and what the card says of them, for the same weights only.
    """
    if not is_sealed(text):
        return facts
    text, is_same = text.replace("\r\n", "\n"), describes(text, facts.weights)
    earlier = metadata(text)
    if section := re.search(r"^## Evaluation\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL):
        earlier["scores"] = section[1]
    kept = {
        name: value
        for name, value in earlier.items()
        if value and name not in options and (is_same or not (getattr(facts, name) or name in ("results", "scores")))
    }
    if "evaluations" in options or not is_same:
        if kept.pop("scores", None) is None and earlier["results"] and "evaluations" not in options:
            logger.warning("the scores on the card on the Hub are of other weights and left out: evaluate these")
        kept.pop("results", None)
    news = {name: value for name, value in kept.items() if value != getattr(facts, name) and name != "scores"}
    if news:
        sets = dict.fromkeys(result.dataset_name for result in news.pop("results", ()))
        words = [f"{name} {', '.join(value) if isinstance(value, list) else value}" for name, value in news.items()]
        logger.info("kept from the card on the Hub: %s", "; ".join([*words, *(f"scores on {each}" for each in sets)]))
    return replace(facts, **kept)


def card_for_push(model, repo_id: str, card: str) -> str:
    """Return the card for `model.push_to_hub`: ours in place of transformers' default one or of an earlier one of ours.

    `card` is what transformers would push: its default, or the card that is on the Hub. A card of ours about exactly
    these weights stays as it is. Otherwise it describes the run that the model was loaded from only if the weights are
    still those of its folder, in values and precision.
    """
    if not may_be_replaced(card):
        return card
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        weights, code = tensors_sha256(saved), code_facts(read_json(Path(saved) / "config.json", "save it again"))
    if describes(card, weights):
        return card
    is_unchanged = bool(model.name_or_path) and weights is not None and tensors_sha256(model.name_or_path) == weights
    facts = replace(facts_of(model, repo_id, model.name_or_path if is_unchanged else None, weights), **code)
    return render_card(carry_over(facts, card))
