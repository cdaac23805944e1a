"""Contents of a model card: facts about a model, the recipe and log of its training run, and its scores."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from ..errors import UserError, reading
from ..exported import FACTS
from ..json_and_yaml import read_json, read_text, read_yaml
from ..model.settings_vaswani import LENGTH_NORMALIZATIONS
from ..output_folder import RECIPE
from ..recipes.recipe import Recipe, convert, languages_of

# Score in an evaluation file -> metric on the Hub, its label, decimals shown (the front matter has all of them).
METRICS = {
    "bleu": ("sacrebleu", "BLEU", 2),
    "chrf": ("chrf", "chrF", 2),
    "perplexity": ("perplexity", "perplexity per target token", 3),
    "paper_bleu": ("bleu", "BLEU, tokenised as in the paper", 2),
    "exact_match": ("exact_match", "outputs equal to their reference (trees: in all brackets), in percent", 1),
    "bracket_f1": ("f1", "labelled bracket F1", 2),
    "bracket_precision": ("precision", "labelled bracket precision", 2),
    "bracket_recall": ("recall", "labelled bracket recall", 2),
}
_STRESS = dict.fromkeys(("sentences", "runs_on", "copies", "empty"), "count")  # columns of its stress test, the same
_STRESS |= {"chrf_kept": "accuracy", "returned": "accuracy"}
# Texts of a record that are published.
_TEXTS = ("test_set", "source_file", "source_sha256", "reference_file", "reference_sha256", "bleu_signature",
          "chrf_signature", "date", "command")  # fmt: skip


@dataclass(frozen=True)
class CardFacts:
    """Facts on a model card; what is empty or None is not known and not mentioned."""

    repo_id: str  # owner/name
    config: "VaswaniConfig"  # noqa: F821 (imported where it is used)
    parameters: int  # tied ones counted once
    generation: Mapping = field(default_factory=dict)  # `search_settings` of its generation configuration
    recipe: Mapping = field(default_factory=dict)  # of its training run, by `read_run`
    imported: Mapping = field(default_factory=dict)  # toolkit, source and notes of a model that `vaswani import` wrote
    results: "Sequence[EvalResult]" = ()  # noqa: F821, of `results_of_record`
    languages: Sequence[str] = ()  # ISO 639 codes, source first
    license: str | None = None  # the Hub's identifier
    datasets: Sequence[str] = ()  # names on the Hub


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def is_language(value: Any) -> bool:
    """Return whether this has the form of a language code on the Hub."""
    return isinstance(value, str) and bool(re.fullmatch(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|multilingual|code", value))


def is_name(value: Any) -> bool:
    """Return whether this has the form of a licence's identifier or a dataset's name on the Hub."""
    return isinstance(value, str) and bool(re.fullmatch(r"\w[\w.+-]{0,99}(/[\w.-]{1,99})?", value, re.ASCII))


def is_search_setting(name: str, value: Any) -> bool:
    """Return whether this is a setting of a search that strangers may see: numbers, lists of numbers, known words.

    Other texts and tables may hold anything, such as the paths of someone's machine.
    """
    from transformers import GenerationConfig

    names = {*vars(GenerationConfig()), "length_normalization", "max_extra_tokens", "constrained", "fuzzy_matches"}
    return name in names and _is_plain(value)


def _is_plain(value: Any, depth: int = 3) -> bool:
    if isinstance(value, list):  # of lists of lists, in `sequence_bias`
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return value in (None, True, False, "never", *LENGTH_NORMALIZATIONS) or is_number(value)


def one_line_of_text(text: str) -> str:
    """Return a text on one line, without characters that control a terminal or the direction of writing."""
    return "".join(filter(str.isprintable, " ".join(text.split())))


def file_name(path: str) -> str:
    """Return the last part of a path of any operating system, or of a URL without its query, which may be a key."""
    return PureWindowsPath(re.split(r"[?#]", path)[0] if re.match(r"[\w+.-]+://", path) else path).name


def results_of_record(record: Mapping, path: str | Path) -> "list[huggingface_hub.EvalResult]":  # noqa: F821
    """Return a record's exact scores, each with how it was obtained, in known texts; `UserError` for other values."""
    from huggingface_hub import EvalResult

    from ..data.augmentation import CHANGES

    with reading(path):
        numbers = {name: record[name] for name in (*METRICS, "sentences") if name in record}
        for kind, row in record.get("stress", {}).items():
            columns = _STRESS if kind in CHANGES else ()
            numbers |= {f"{kind}: {name}": row[name] for name in columns if row.get(name) is not None}
        numbers |= {one_line_of_text(f"checked {name}"): value for name, value in record.get("checked", {}).items()}
        if not METRICS.keys() & numbers.keys() or not all(map(is_number, numbers.values())):
            raise UserError(f"{path} must hold a score, and finite numbers only: evaluate again with --json")
        how = {"sentences": numbers.pop("sentences", None)}
        how |= {name: one_line_of_text(record[name]) for name in _TEXTS if name in record}
        test_set, source_sha256 = how.pop("test_set"), how.pop("source_sha256", None)
        settings = {name: x for name, x in record.get("generation", {}).items() if is_search_setting(name, x)}
        # Lists as text: YAML would refer to equal ones.
        how |= {name: str(x) if isinstance(x, list) else x for name, x in settings.items()}
        how |= {str(name): str(value) for name, value in record.get("versions", {}).items()}
    is_parser = "bracket_f1" in numbers
    return [
        EvalResult(
            task_type="other" if is_parser else "translation",
            task_name="Constituency parsing" if is_parser else "Translation",
            dataset_type=re.sub(r"[^a-z0-9._]+", "-", test_set.lower()).strip("-") or "test",
            dataset_name=test_set,
            dataset_config=test_set,
            dataset_revision=source_sha256,  # tells apart test sets of the same name
            metric_type=METRICS[name][0] if name in METRICS else _STRESS.get(name.rpartition(": ")[2], "custom"),
            metric_name=METRICS[name][1] if name in METRICS else name,
            metric_value=score,
            metric_args=dict(how),  # YAML would refer to the same one
        )
        for name, score in numbers.items()
    ]


def read_run(folder: str | Path) -> dict:
    """Return a run's recipe with the `optimizer steps` of its log and the teachers that it was `distilled from`.

    What is not known is missing. A log without a recipe is another program's, whose steps may differ in kind.
    """
    from ..training.callbacks import read_training_log
    from ..training.run_folder import LOG

    if not (recipe := read_run_recipe(folder)):
        return {}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        recipe["optimizer steps"] = max(entry["step"] for entry in read_training_log(Path(folder) / LOG))
    with contextlib.suppress(OSError, UserError, KeyError, TypeError):
        values = read_json(Path(folder) / "distillation.json")
        if file_name(str(recipe.get("train_target"))) in values["files"] and "parallel text" not in values["settings"]:
            recipe["distilled from"] = " and ".join(file_name(str(name)) for name in values["teachers"])
    return recipe


def read_run_recipe(folder: str | Path) -> dict:
    """Return the known fields of a run's recipe; empty if a value is not of its field's type. Imports no torch."""
    with contextlib.suppress(UserError, TypeError):
        values = read_yaml(Path(folder) / RECIPE)
        return {name: convert(name, values[name]) for name in Recipe.__dataclass_fields__ if name in values}
    return {}


def read_import(folder: str | Path) -> dict:
    """Return where an imported model comes from: `toolkit`, `source`, `notes`, `license` and `languages`.

    Empty for a model that was not imported, and for a record that is damaged.
    """
    with contextlib.suppress(OSError, UserError, KeyError, TypeError):
        values = read_json(Path(folder) / "import.json")
        texts = {name: str(values[name]) for name in ("toolkit", "source")}
        notes, languages = values.get("notes", ()), filter(is_language, values.get("languages", ()))
        license = values["license"] if is_name(values.get("license")) else None
        return texts | {"notes": list(map(str, notes)), "languages": list(languages), "license": license}
    return {}


def metadata(text: str) -> dict[str, Any]:
    """Return licence, languages and datasets in the front matter of a card, as far as they have that form."""
    from huggingface_hub import ModelCard

    data = {}
    with contextlib.suppress(Exception):  # whatever a stranger's front matter makes the libraries raise
        data = ModelCard(text).data.to_dict()
    languages, datasets = (x if isinstance(x, list) else [x] for x in (data.get("language"), data.get("datasets")))
    languages = ["no" if code is False else code for code in languages]  # Norwegian, which is False in YAML
    known = {"languages": list(filter(is_language, languages)), "datasets": list(filter(is_name, datasets))}
    return known | {"license": data["license"] if is_name(data.get("license")) else None}


def known_languages(folder: str | Path) -> list[str]:
    """Return source, perhaps blank, and target language that an import, training, export or card noted, or none."""
    # An import's are not those of what it was trained further on.
    noted, folder = languages_of(read_run_recipe(folder)) or read_import(folder).get("languages", []), Path(folder)
    for name in ("verdict.json", "started_from.json", FACTS):
        with contextlib.suppress(OSError, UserError, KeyError, TypeError):
            noted = noted or list(map(str, read_json(folder / name)["languages"]))
    with contextlib.suppress(OSError, UserError):
        card = "" if noted else read_text(folder / "README.md")
        noted = metadata(card)["languages"] if "Written by `vaswani push`" in card else noted  # in our order
    return noted


def longest_source(folder: str | Path) -> int | None:
    """Return the most tokens of a sentence in training, as a run, its export or its card noted them, or None."""
    with contextlib.suppress(OSError, UserError, AttributeError, IndexError):
        facts = Path(folder) / FACTS
        known = (read_json(facts) if facts.exists() else read_run_recipe(folder)).get("max_length")
        return known or int(re.findall(r"pairs with more than (\d+) tokens", read_text(Path(folder) / "README.md"))[0])
    return None


def datasets_of(recipe: Mapping, part: str = "train_data") -> list[str]:
    """Return the Hub dataset of one part of the recipe's data; empty for files, and where it is not certain."""
    data = recipe.get(part)
    is_certain = is_name(data) and recipe.get("data_config")  # only datasets of the Hub have configurations
    return [data] if is_certain and not (Path(recipe.get("data_dir") or "") / data).exists() else []


def facts_of(model, repo_id: str, folder: str | Path | None) -> CardFacts:
    """Return the facts in a model that was loaded, and in the folder of its run, if any."""
    from ..evaluation.records import search_settings

    settings = search_settings(model.generation_config).items()
    recipe, imported = (read_run(folder), read_import(folder)) if folder else ({}, {})
    return CardFacts(
        repo_id=repo_id,
        config=model.config,
        parameters=model.num_parameters(),
        generation={name: value for name, value in settings if is_search_setting(name, value)},
        recipe=recipe,
        imported=imported,
        languages=[*filter(is_language, known_languages(folder))] if folder else [],
        license=imported.get("license"),
        datasets=datasets_of(recipe),
    )
