"""The model card: facts about a model, its training and its scores, put into a template of `model_cards/`.

Nothing here needs a network, and every figure comes from the model, its run folder or evaluation files.
"""

import contextlib
import html
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..durations import duration
from ..errors import UserError, one_line
from ..evaluation.records import tensors_sha256
from ..json_and_yaml import read_json
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
    is_number,
    one_line_of_text,
)
from .card_template import MOST_CHARACTERS, TemplateFault, render
from .existing_card import carry_over, describes, may_be_replaced, seal

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
_MOST_SHOWN = 200  # characters of a setting that a card shows whole


class Markdown(str):
    """Text that is Markdown already, such as a code span; `escaped` leaves it as it is."""


def escaped(value: Any) -> Any:
    """A value for a template, or a list, tuple or dictionary of them, whose texts mean themselves in Markdown and HTML.

    All values of a card pass through here, since names of files, test sets and the like may hold anything.
    """
    if isinstance(value, dict):
        return {name: escaped(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(escaped, value))
    if not isinstance(value, str) or isinstance(value, Markdown):
        return value
    text = html.escape(one_line_of_text(value), quote=False)
    text = re.sub(r"[\\`*\[\]|~#!$@]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", text)
    return Markdown(re.sub(r"(?i)\b(https?|ftp|mailto|www)([:.])", r"\1\\\2", text))  # GitHub's links without brackets


def check_metadata(languages: Sequence[str], license: str | None, datasets: Sequence[str]) -> None:
    """Check the form of what the front matter will hold; whether a licence or language exists, the Hub checks."""
    for language in languages:
        if not is_language(language):
            raise UserError(f"--language {language!r} is no language code: give one of ISO 639, such as en or de")
    if license is not None and not is_license(license):
        raise UserError(
            f"--license {license!r} is no licence identifier of the Hub: give one such as mit, apache-2.0 or cc-by-4.0"
        )
    for dataset in datasets:
        if not is_dataset(dataset):
            raise UserError(f"--dataset {dataset!r} is no dataset name of the Hub: give one such as wmt14")


def choose_kind(config: VaswaniConfig, recipe: Mapping) -> str:
    """The template for a model: `"parser"`, `"big"` or `"base"`."""
    if recipe.get("preset") == "parsing" or _has_sizes_of(config, "parsing"):
        return "parser"
    return "big" if config.d_model >= 1024 else "base"


def _has_sizes_of(config: VaswaniConfig, preset: str) -> bool:
    paper = VaswaniConfig.from_preset(preset)
    return all(getattr(config, name) == getattr(paper, name) for name in _SIZES)


def compare_with_paper(config: VaswaniConfig, kind: str) -> str:
    """A sentence that compares the model's sizes with those of the paper's model."""
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
    """Rows (label, value) of the table of sizes."""
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
    """Rows (label, value) of the training table, from recipe and log; those of unknown facts are left out."""
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
    """The data of `"train"` or `"validation"` in words; of paths only the last part, since folders are private."""
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
    """Which weights the run kept: those that its recipe names, or those that its log says are better."""
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
    """Rows (label, value) of the decoding table: the paper's settings in words, others by name, unset ones left out."""
    known = {name: number_in_words(value) for name, value in generation.items() if value is not None}
    names = [*(name for name in _DECODING if name in known), *sorted(known.keys() - _DECODING.keys())]
    return [(_DECODING.get(name, _code(name)), known[name]) for name in names]


def number_in_words(value) -> str:
    """A setting as cards show it: no more digits than needed, in groups of three; of a long list its length."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{len(value):,} entries" if isinstance(value, list) and len(text) > _MOST_SHOWN else text


def _scores(evaluation: Mapping) -> dict[str, float]:
    """The scores of a record that are in `METRICS`: at least one, and all of them finite numbers."""
    scores = {key: evaluation[key] for key in METRICS if key in evaluation}
    if not scores:
        raise UserError(f"the evaluation of {evaluation['test_set']!r} holds no score: evaluate again with --json")
    for key, value in scores.items():
        if not is_number(value):
            raise UserError(f"{key} of {evaluation['test_set']!r} is {value!r}: it must be a finite number")
    return scores


def evaluation_results(facts: CardFacts, kind: str) -> list[EvalResult]:
    """Every score for the front matter's `model-index`, exact, with the arguments it was obtained with."""
    task = ("other", "Constituency parsing") if kind == "parser" else ("translation", "Translation")
    results, types = [], _dataset_types(facts.evaluations)
    for evaluation in facts.evaluations:
        test_set = _test_set(evaluation)
        for key, value in _scores(evaluation).items():
            # Perplexity is that of the references: it depends on no search.
            arguments = dict(evaluation.get("generation") or {}) if key != "perplexity" else {}
            # YAML would refer from each list to the first that is the same, and what is long nobody reads.
            arguments = {
                name: number_in_words(each) if isinstance(each, list) else each for name, each in arguments.items()
            }
            if f"{key}_signature" in evaluation:
                arguments["signature"] = evaluation[f"{key}_signature"]
            result = EvalResult(
                task_type=task[0],
                task_name=task[1],
                dataset_type=types[test_set],
                dataset_name=test_set[0],
                metric_type=METRICS[key][0],
                metric_name=METRICS[key][1],
                metric_value=value,
                metric_args=arguments or None,
            )
            if result not in results:  # the perplexity of two searches
                results.append(result)
    return results


def _test_set(evaluation: Mapping) -> tuple[str, str | None, str | None]:
    """What distinguishes two test sets: the name and the files' content."""
    name = one_line_of_text(evaluation["test_set"])
    return name, evaluation.get("source_sha256"), evaluation.get("reference_sha256")


def _dataset_types(evaluations: Sequence[Mapping]) -> dict[tuple, str]:
    """A type for each test set: `huggingface_hub` merges the results of two with the same type."""
    types = {}
    for test_set in map(_test_set, evaluations):
        slug = re.sub(r"[^a-z0-9._]+", "-", test_set[0].lower()).strip("-") or "test"
        names = chain([slug], (f"{slug}-{number}" for number in count(2)))
        if test_set not in types:
            types[test_set] = next(name for name in names if name not in types.values())
    return types


def _fence(text: str, least: int) -> str:
    """At least `least` backticks, more than the text has in a row."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", text))])


def _code(text: str) -> Markdown:
    """Text as a Markdown code span, on one line."""
    text = one_line_of_text(text)
    fence, space = _fence(text, 1), " " if "`" in text else ""
    return Markdown(f"{fence}{space}{text}{space}{fence}")


def _list(rows: Mapping | Sequence[tuple[str, str]]) -> Markdown:
    """Rows as one line: name value, name value."""
    return Markdown(", ".join(" ".join(map(escaped, row)) for row in rows))


def _evaluation(evaluation: Mapping) -> dict:
    """A record as a template is given it."""
    how = [("sentences", number_in_words(evaluation["sentences"]))] if "sentences" in evaluation else []
    for side in ("source", "reference"):
        if f"{side}_file" in evaluation:
            digest = f", SHA-256 `{evaluation[f'{side}_sha256']}`" if f"{side}_sha256" in evaluation else ""
            how.append((side, Markdown(f"{_code(str(evaluation[f'{side}_file']))}{digest}")))
    how.append(("decoding", _list(decoding_rows(evaluation.get("generation") or {}))))
    for key, (_, label, _) in METRICS.items():
        if f"{key}_signature" in evaluation:
            how.append((f"{label} signature", _code(str(evaluation[f"{key}_signature"]))))
    how.append(("versions", _list((evaluation.get("versions") or {}).items())))
    how.append(("date", evaluation.get("date")))
    command = Markdown(one_line_of_text(evaluation.get("command") or ""))
    return {
        "test_set": _test_set(evaluation)[0],
        "scores": [(METRICS[key][1], f"{value:.{METRICS[key][2]}f}") for key, value in _scores(evaluation).items()],
        "how": [(label, value) for label, value in how if value],
        "command": command,
        "fence": Markdown(_fence(command, 3)),
    }


def front_matter(facts: CardFacts, kind: str) -> ModelCardData:
    """The card's metadata; what is not known is left out."""
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
    """Where the templates are: inside the package if it is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(folder for folder in (package / "model_cards", package.parent / "model_cards") if folder.is_dir())


def render_card(facts: CardFacts, card: str | None = None) -> str:
    """The text of the card, checked and sealed, by the template of one of `KINDS` or of a path.

    Raises:
        UserError: for a template that is missing or wrong, records without scores, or a template's own front matter
            that `huggingface_hub` cannot read.
    """
    kind = card if card in KINDS else choose_kind(facts.config, facts.recipe)
    config = facts.config
    values = {  # model_cards/README.md lists them
        "front_matter": Markdown(front_matter(facts, kind).to_yaml()),
        "repo_id": Markdown(facts.repo_id),  # of a form that the Hub prescribes; stands in code too
        "name": Markdown(facts.name),
        "size": compare_with_paper(config, kind),
        "sizes": size_rows(facts),
        "imported": dict(facts.imported) or None,
        "training": training_rows(facts),
        "decoding": decoding_rows(facts.generation),
        "evaluations": list(map(_evaluation, facts.evaluations)),
        "direction": facts.languages if len(facts.languages) == 2 else None,
        "license": facts.license,
        "longest": facts.recipe.get("max_length"),
        "positions": config.max_position_embeddings if config.position_encoding == "learned" else None,
        "remote_code": facts.remote_code,
        "pipeline": facts.pipeline,
    }
    ours = card is None or card in KINDS
    # `ModelCard.from_template` would run the code in a template.
    try:
        folder = template_folder()
        source = _read_template(folder / f"{kind}.md" if ours else card)
        text = render(str(folder), source, escaped(values))
    except TemplateFault as fault:
        raise UserError(f"card template {card or kind} cannot be used: {fault}") from fault
    if not text.lstrip().startswith("---"):
        text = f"---\n{values['front_matter']}\n---\n\n{text}"
    text = re.sub(r"\n{3,}", "\n\n", text.lstrip())
    try:
        ModelCard(text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"the card's front matter is not valid: {one_line(error, 300)}") from error
    return seal(text, facts.weights, facts.evaluations)


def _read_template(path: str | Path) -> str:
    try:
        with Path(path).open(encoding="utf-8") as file:
            source = file.read(MOST_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"cannot read card template {path} ({reason}): give {', '.join(KINDS)} or a file") from error
    if len(source) > MOST_CHARACTERS:
        raise UserError(f"card template {path} has more than {MOST_CHARACTERS:,} characters: shorten it")
    return source


def card_for_push(model, repo_id: str, card: str) -> str:
    """The card for `model.push_to_hub`: ours in place of transformers' default one or of an earlier one of ours.

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
    unchanged = bool(model.name_or_path) and weights is not None and tensors_sha256(model.name_or_path) == weights
    folder = model.name_or_path if unchanged else None
    facts = replace(facts_of(model, repo_id, folder, weights), **code)
    return render_card(carry_over(facts, card))
