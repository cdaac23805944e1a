"""The model card: facts of a model, its training and its scores, put into a template of `model_cards/`.

Nothing here needs a network, and no figure comes from anywhere but the model, its run folder and evaluation files.
"""

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path

import jinja2
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id

from ..durations import duration
from ..errors import UserError
from ..evaluation.records import tensors_sha256
from ..model.configuration_vaswani import VaswaniConfig
from .card_facts import CardFacts, datasets_of, facts_of
from .existing_card import carry_over, describes, may_be_replaced, seal


def size_rows(facts: CardFacts) -> list[tuple[str, str]]:
    """Rows of the table of sizes."""
    config = facts.config
    shared = "shared by source, target and output" if config.tie_word_embeddings else "three matrices of embeddings"
    learned = config.position_encoding == "learned"
    return [
        ("parameters", f"{facts.parameters:,}"),
        ("layers", f"{config.encoder_layers} encoder, {config.decoder_layers} decoder"),
        ("d_model", f"{config.d_model:,}"),
        ("d_ff", f"{config.d_ff:,}"),
        ("attention heads", f"{config.num_heads}, d_k {config.d_k}, d_v {config.d_v}"),
        ("vocabulary", f"{config.vocab_size:,} entries, {shared}"),
        ("positions", f"learned, {config.max_position_embeddings:,}" if learned else "sinusoidal"),
        *([("self-attention", f"{config.attention_window} neighbours")] if config.attention_window else []),
    ]


def _data(recipe: Mapping, part: str) -> str | None:
    """The data of one part of a run in words; of paths only the last part, which is no secret of the machine."""
    source, target = recipe.get(f"{part}_source"), recipe.get(f"{part}_target")
    if source and target:
        return f"{Path(source).name} and {Path(target).name}"
    if part == "validation" and not recipe.get("validation_data"):
        if recipe.get("validation_split") and recipe.get("train_data"):
            return f"split {recipe['validation_split']} of the same dataset"
        return f"{recipe['validation_size']:,} pairs held out of them" if recipe.get("validation_size") else None
    if not recipe.get(f"{part}_data"):
        return None
    name = recipe["train_data"] if datasets_of(recipe) and part == "train" else Path(recipe[f"{part}_data"]).name
    return f"{name} {recipe['data_config']}" if recipe.get("data_config") else name


def _kept_weights(recipe: Mapping, log: Sequence[Mapping]) -> str | None:
    """Which weights the run kept, as its recipe says, or as its log tells where that says the better ones."""
    by = recipe.get("best_by")
    best, average = (
        next((entry[f"{name}_{by}"] for entry in reversed(log) if f"{name}_{by}" in entry), None)
        for name in ("best", "average")
    )
    if best is None and average is None:
        return None
    keep = recipe.get("keep_weights", "better")
    if keep == "last":
        return "last checkpoint"
    if best is None or average is None or keep in ("best", "average"):
        kept_best = average is None or (best is not None and keep == "best")
    else:
        kept_best = average <= best if by == "bleu" else average >= best
    if kept_best:
        return f"best checkpoint by validation {'BLEU' if by == 'bleu' else by}"
    count = recipe.get("average_checkpoints")
    return f"average of the last checkpoints, {count} at most" if count else "average of the last checkpoints"


def training_rows(facts: CardFacts) -> list[tuple[str, str]]:
    """Rows of the training table, from recipe and log; a row whose facts are absent is left out."""
    recipe, config = facts.recipe, facts.config
    steps = [
        entry
        for entry in facts.log
        if "step" in entry and not {"best_loss", "average_loss", "last_loss"} & entry.keys()
    ]
    last = steps[-1] if steps else {}

    def known(*names) -> bool:
        return all(recipe.get(name) is not None for name in names)

    rows = [("training data", _data(recipe, "train")), ("validation data", _data(recipe, "validation"))]
    if known("max_length"):
        rows.append(("longest pair", f"{recipe['max_length']:,} tokens on a side"))
    if known("tokens_per_batch"):
        rows.append(("batch", f"{recipe['tokens_per_batch']:,} source tokens, and as many target tokens, at most"))
    if last:
        epochs = f", {last['epoch']:.1f} epochs" if "epoch" in last else ""
        rows.append(("optimizer steps", f"{last['step']:,}{epochs}"))
    if known("adam_beta1", "adam_beta2", "adam_epsilon"):
        betas = f"β₁ {recipe['adam_beta1']}, β₂ {recipe['adam_beta2']}, ε {float(recipe['adam_epsilon']):g}"
        rows.append(("optimizer", f"Adam, {betas}"))
    if known("warmup_steps"):
        scale = recipe.get("learning_rate_scale")
        factor = f" times {scale:g}" if scale is not None and scale != 1 else ""
        rows.append(("learning rate", f"Equation 3 of the paper{factor}, {recipe['warmup_steps']:,} warmup steps"))
    if recipe or facts.log:
        parts = [f"{config.dropout:g}"]
        parts += [f"{value:g} on attention weights"] if (value := config.attention_dropout) else []
        parts += [f"{value:g} inside feed-forward layers"] if (value := config.activation_dropout) else []
        rows.append(("dropout", ", ".join(parts)))
    if known("label_smoothing"):
        rows.append(("label smoothing", f"{recipe['label_smoothing']:g}"))
    rows.append(("weights kept", _kept_weights(recipe, facts.log)))
    if "seconds" in last:
        rows.append(("duration", duration(last["seconds"])))
    if known("seed"):
        rows.append(("seed", str(recipe["seed"])))
    return [(label, value) for label, value in rows if value is not None]


def decoding_rows(generation: Mapping) -> list[tuple[str, str]]:
    """Rows of the decoding table: the paper's settings in words, others by name; what is not set is left out."""
    words = {
        "num_beams": "beams",
        "length_penalty": "length penalty",
        "max_extra_tokens": "tokens more than the source, at most",
        "max_new_tokens": "tokens, at most",
    }
    names = [*words, *sorted(generation.keys() - words.keys())]
    return [
        (words.get(name, f"`{name}`"), number_in_words(generation[name]))
        for name in names
        if generation.get(name) is not None
    ]


def number_in_words(value) -> str:
    """A setting as cards show it: thousands apart, no more digits than are needed.

    >>> number_in_words(1000), number_in_words(0.6), number_in_words("early")
    ('1,000', '0.6', 'early')
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


KINDS = {"base": "base", "big": "big", "parser": "parsing"}  # template -> preset of the paper it speaks of
# Score in an evaluation file -> metric on the Hub, words for it, decimals shown (the front matter has all of them).
METRICS = {
    "bleu": ("sacrebleu", "BLEU", 2),
    "chrf": ("chrf", "chrF", 2),
    "perplexity": ("perplexity", "perplexity a target token", 3),
    "exact_match": ("exact_match", "sentences equal to their reference, in percent", 1),
    "bracket_f1": ("f1", "labelled bracket F1", 2),
    "bracket_precision": ("precision", "labelled bracket precision", 2),
    "bracket_recall": ("recall", "labelled bracket recall", 2),
}
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|multilingual|code")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_SIZES = ("d_model", "d_ff", "num_heads", "encoder_layers", "decoder_layers")


def card_for_push(model, repo_id: str, card: str) -> str:
    """The card for `model.push_to_hub`: ours in place of transformers' default one or of an earlier one of ours.

    A card of ours on these very weights stays as it is. Otherwise the run that the model was loaded from is told of
    only if the weights are still those of its folder, in values and precision.

    Args:
        model: as for `facts_of`.
        repo_id: `owner/name`.
        card: what transformers would push: its default, or the card that is on the Hub.
    """
    if not may_be_replaced(card):
        return card
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        weights = tensors_sha256(saved)
    if describes(card, weights):
        return card
    folder = Path(model.name_or_path) if model.name_or_path else None
    known = folder is not None and folder.is_dir() and weights is not None and tensors_sha256(folder) == weights
    return render_card(carry_over(facts_of(model, repo_id, folder if known else None, weights), card))


def check_metadata(languages: Sequence[str], license: str | None, datasets: Sequence[str]) -> None:
    """Check the form of what the front matter will hold; whether a licence is known, the Hub itself says on a push.

    Raises:
        UserError: naming the value and the rule.
    """
    for language in languages:
        if not _LANGUAGE.fullmatch(language):
            raise UserError(f"--language {language!r} is no language code: give one of ISO 639, such as en or de")
    if license is not None and not _LICENSE.fullmatch(license):
        raise UserError(
            f"--license {license!r} is no licence identifier of the Hub: give one such as mit, apache-2.0 or cc-by-4.0"
        )
    for dataset in datasets:
        try:
            validate_repo_id(dataset)
        except ValueError as error:
            raise UserError(f"--dataset {dataset!r} is no dataset name of the Hub: give one such as wmt14") from error


def choose_kind(config: VaswaniConfig, recipe: Mapping) -> str:
    """The template for a model: `"parser"`, `"big"` or `"base"`."""
    if recipe.get("preset") == "parsing" or _has_sizes_of(config, "parsing"):
        return "parser"
    return "big" if config.d_model >= 1024 else "base"


def _has_sizes_of(config: VaswaniConfig, preset: str) -> bool:
    paper = VaswaniConfig.from_preset(preset)
    return all(getattr(config, name) == getattr(paper, name) for name in (*_SIZES, "d_k", "d_v"))


def compare_with_paper(config: VaswaniConfig, kind: str) -> str:
    """A sentence that says how the model's sizes relate to those of the paper's model."""
    words = {"base": "base model", "big": "big model", "parser": "parsing model"}[kind]
    if _has_sizes_of(config, KINDS[kind]):
        return f"Its sizes are those of the paper's {words}."
    # What the vocabulary and the form of the embeddings add is not what is compared.
    shared = ("vocab_size", "tie_word_embeddings", "position_encoding", "max_position_embeddings", "attention_bias")
    paper = VaswaniConfig.from_preset(KINDS[kind], **{name: getattr(config, name) for name in shared})
    ratio = config.num_parameters() / paper.num_parameters()
    if 1 / 1.1 < ratio < 1.1:
        return f"It has the architecture of the paper's {words} with other sizes."
    return f"It is a {'smaller' if ratio < 1 else 'larger'} model of the same architecture as the paper's {words}."


def _scores(evaluation: Mapping) -> dict[str, float]:
    """The scores that a record holds and the card knows, by their keys.

    Raises:
        UserError: for a record without any, or with one that is no number.
    """
    scores = {key: evaluation[key] for key in METRICS if key in evaluation}
    if not scores:
        raise UserError(f"the evaluation of {evaluation['test_set']!r} holds no score: evaluate again with --json")
    for key, value in scores.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"{key} of {evaluation['test_set']!r} is {value!r}: it must be a finite number")
    return scores


def evaluation_results(facts: CardFacts, kind: str) -> list[EvalResult]:
    """What the front matter's `model-index` says: every score, exact, with the arguments it was obtained with.

    Raises:
        UserError: as the records demand.
    """
    task = ("other", "Constituency parsing") if kind == "parser" else ("translation", "Translation")
    results, slugs = [], _dataset_types(facts.evaluations)
    for evaluation in facts.evaluations:
        for key, value in _scores(evaluation).items():
            metric, words, _ = METRICS[key]
            # Perplexity is of the references: nothing is searched for.
            arguments = dict(evaluation.get("generation") or {}) if key != "perplexity" else {}
            if f"{key}_signature" in evaluation:
                arguments["signature"] = evaluation[f"{key}_signature"]
            result = EvalResult(
                task_type=task[0],
                task_name=task[1],
                dataset_type=slugs[_test_set(evaluation)],
                dataset_name=" ".join(evaluation["test_set"].split()),
                metric_type=metric,
                metric_name=words,
                metric_value=value,
                metric_args=arguments or None,
            )
            if result not in results:  # the perplexity of two searches
                results.append(result)
    return results


def _test_set(evaluation: Mapping) -> tuple:
    """What tells two test sets apart: the name and the files' content."""
    digests = (evaluation.get(f"{side}_sha256") for side in ("source", "reference"))
    return (" ".join(evaluation["test_set"].split()), *digests)


def _dataset_types(evaluations: Sequence[Mapping]) -> dict[tuple, str]:
    """A type for each test set, which the Hub's client would merge with another of the same type."""
    types = {}
    for test_set in map(_test_set, evaluations):
        slug = re.sub(r"[^a-z0-9._]+", "-", test_set[0].lower()).strip("-") or "test"
        names = chain([slug], (f"{slug}-{number}" for number in count(2)))
        if test_set not in types:
            types[test_set] = next(name for name in names if name not in types.values())
    return types


def _fence(text: str, least: int) -> str:
    """Backticks, `least` or more, that nothing in the text closes."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", text))])


def _code(text: str) -> str:
    """Text as a Markdown code span, which shows it as it is."""
    fence, space = _fence(text, 1), " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def _evaluation(evaluation: Mapping) -> dict:
    """One record in the template's terms."""
    how, command = [], evaluation.get("command")
    if "sentences" in evaluation:
        how.append(("sentences", number_in_words(evaluation["sentences"])))
    for side in ("source", "reference"):
        if f"{side}_file" in evaluation:
            digest = f", SHA-256 `{evaluation[f'{side}_sha256']}`" if f"{side}_sha256" in evaluation else ""
            how.append((side, f"{_code(evaluation[f'{side}_file'])}{digest}"))
    decoding = ", ".join(f"{label} {value}" for label, value in decoding_rows(evaluation.get("generation") or {}))
    how += [("decoding", decoding)] if decoding else []
    how += [
        (f"{METRICS[key][1]} signature", _code(evaluation[f"{key}_signature"]))
        for key in METRICS
        if f"{key}_signature" in evaluation
    ]
    versions = ", ".join(f"{name} {version}" for name, version in (evaluation.get("versions") or {}).items())
    how += [("versions", versions)] if versions else []
    how += [("date", evaluation["date"])] if "date" in evaluation else []
    return {
        "test_set": " ".join(evaluation["test_set"].split()),
        "scores": [(METRICS[key][1], f"{value:.{METRICS[key][2]}f}") for key, value in _scores(evaluation).items()],
        "how": how,
        "command": command,
        "fence": _fence(command or "", 3),
    }


def front_matter(facts: CardFacts, kind: str) -> ModelCardData:
    """The card's metadata; what is not known is left out.

    Raises:
        UserError: as `evaluation_results`.
    """
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
    """Where the templates are: beside the modules when installed, beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(folder for folder in (package / "model_cards", package.parent / "model_cards") if folder.is_dir())


def _values(facts: CardFacts, kind: str, data: ModelCardData) -> dict:
    """What a template is given; model_cards/README.md lists it."""
    return {
        "front_matter": data.to_yaml(),
        "repo_id": facts.repo_id,
        "name": facts.name,
        "size": compare_with_paper(facts.config, kind),
        "sizes": size_rows(facts),
        "training": training_rows(facts),
        "decoding": decoding_rows(facts.generation),
        "evaluations": [_evaluation(evaluation) for evaluation in facts.evaluations],
        "direction": facts.languages if len(facts.languages) == 2 else None,
        "license": facts.license,
        "longest": facts.recipe.get("max_length"),
        "positions": (facts.config.max_position_embeddings if facts.config.position_encoding == "learned" else None),
        "remote_code": facts.remote_code,
        "pipeline": facts.pipeline,
    }


def render_card(facts: CardFacts, card: str | None = None) -> str:
    """The text of the card, checked and sealed.

    Args:
        facts: what it says.
        card: `"base"`, `"big"`, `"parser"`, or the path of a template; chosen by the model if None.

    Raises:
        UserError: for a template that is missing or wrong, records without scores, or metadata that `huggingface_hub`
            does not read back as they were written.
    """
    kind = card if card in KINDS else choose_kind(facts.config, facts.recipe)
    data = front_matter(facts, kind)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown
    )
    environment.filters["cell"] = lambda value: str(value).replace("|", "\\|")
    values = _values(facts, kind, data)
    own = card is not None and card not in KINDS
    try:
        template = environment.from_string(_read_template(card)) if own else environment.get_template(f"{kind}.md")
        text = template.render(values)
    except jinja2.TemplateError as error:
        where = f", line {error.lineno}" if getattr(error, "lineno", None) else ""
        raise UserError(f"card template {card}{where} cannot be used: {error}") from error
    if not text.lstrip().startswith("---"):
        text = f"---\n{values['front_matter']}\n---\n\n{text}"
    text = re.sub(r"\n{3,}", "\n\n", text.lstrip())
    check_card(text, None if own else data)
    return seal(text, facts.weights, facts.evaluations)


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read card template {path} ({error.strerror}): give {', '.join(KINDS)} or a file"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"card template {path} is not UTF-8 text: save it as UTF-8") from error


def check_card(text: str, data: ModelCardData | None = None) -> None:
    """The part of the Hub's card checks that needs no network: `huggingface_hub` parses the card.

    Args:
        text: the whole card.
        data: metadata that it has to give back unchanged; not compared if None.

    Raises:
        UserError: saying what is wrong.
    """
    try:
        parsed = ModelCard(text).data
    except (ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise UserError(f"the card's front matter is not valid: {' '.join(str(error).split())[:300]}") from error

    def results(card_data: ModelCardData) -> list[str]:  # `to_dict` alone merges, on both sides, what it takes for one
        return sorted(map(repr, card_data.eval_results or []))

    if data is not None and (parsed.to_dict() != data.to_dict() or results(parsed) != results(data)):
        raise UserError("the card's front matter reads back other than it was written: check names for odd characters")
