"""What a model card states: facts about a model, the recipe and log of its training run, and its scores."""

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id
from transformers import GenerationConfig

from ..errors import UserError, one_line
from ..evaluation.records import search_settings
from ..json_and_yaml import read_json, read_yaml
from ..model.configuration_vaswani import VaswaniConfig
from ..model.generation_vaswani import LENGTH_NORMALIZATIONS
from ..recipes.recipe import Recipe, convert
from ..training.callbacks import read_training_log
from ..training.run_folder import DISTILLATION, IMPORT, LOG, RECIPE

# Score in an evaluation file -> metric on the Hub, its label, decimals shown (the front matter has all of them).
METRICS = {
    "bleu": ("sacrebleu", "BLEU", 2),
    "chrf": ("chrf", "chrF", 2),
    "perplexity": ("perplexity", "perplexity per target token", 3),
    "exact_match": ("exact_match", "sentences equal to their reference, in percent", 1),
    "bracket_f1": ("f1", "labelled bracket F1", 2),
    "bracket_precision": ("precision", "labelled bracket precision", 2),
    "bracket_recall": ("recall", "labelled bracket recall", 2),
}
# Settings of a search: transformers', the model's own, and those of `vaswani evaluate` and `vaswani parse evaluate`,
# with "exact", which older records have.
_SETTINGS = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
_SETTINGS |= {"length_normalization", "max_extra_tokens", "exact", "constrained"}
_MOST_CHARACTERS = 5000  # of a text in a record; a path has 4,096 at most
_WORDS = {"length_normalization": LENGTH_NORMALIZATIONS, "early_stopping": ("never",)}  # those that may be words


@dataclass(frozen=True)
class CardFacts:
    """What a model card states; what is empty or None is not known and left out."""

    repo_id: str  # owner/name
    config: VaswaniConfig
    parameters: int  # tied ones counted once
    generation: Mapping = field(default_factory=dict)  # `search_settings` of its generation configuration
    recipe: Mapping = field(default_factory=dict)  # of its training run
    log: Sequence[Mapping] = ()  # entries of its training log
    imported: Mapping = field(default_factory=dict)  # toolkit, source and notes of a model that `vaswani import` wrote
    teachers: Sequence[str] = ()  # models whose translations it was trained on
    evaluations: Sequence[Mapping] = ()  # records of `vaswani evaluate --json`
    languages: Sequence[str] = ()  # ISO 639 codes, source first
    license: str | None = None  # the Hub's identifier
    datasets: Sequence[str] = ()  # names on the Hub
    remote_code: bool = False  # whether the model's code is saved beside the weights
    pipeline: str | None = None  # a pipeline task whose code is saved with the model
    weights: str | None = None  # `tensors_sha256`

    @property
    def name(self) -> str:
        """The repository's name without its owner."""
        return self.repo_id.rpartition("/")[2]


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def is_language(value: Any) -> bool:
    """Whether this has the form of a language code on the Hub."""
    return isinstance(value, str) and bool(re.fullmatch(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|multilingual|code", value))


def is_license(value: Any) -> bool:
    """Whether this has the form of a licence's identifier on the Hub."""
    return isinstance(value, str) and bool(re.fullmatch(r"[a-z0-9][a-z0-9.+-]{0,99}", value))


def is_dataset(value: Any) -> bool:
    """Whether this has the form of a dataset's name on the Hub."""
    with contextlib.suppress(ValueError):
        validate_repo_id(value)
        return True
    return False


def is_search_setting(name: str, value: Any, depth: int = 3) -> bool:
    """Whether this is a setting of a search that strangers may see: numbers, lists of numbers, and known words.

    Other texts and tables may hold anything, such as the paths of someone's machine.
    """
    if name not in _SETTINGS:
        return False
    if isinstance(value, list):  # in lists of lists, of `sequence_bias`
        return depth > 0 and all(is_search_setting(name, item, depth - 1) for item in value)
    return value is None or isinstance(value, bool) or is_number(value) or value in _WORDS.get(name, ())


def one_line_of_text(text: str) -> str:
    """A text on one line, without characters that control a terminal or the direction of writing."""
    return "".join(filter(str.isprintable, " ".join(text.split())))


def file_name(path: str) -> str:
    """The last part of a path of any operating system, or of a URL without what follows its path, which may be a key.

    >>> [file_name(path) for path in ("/data/train.en", "C:\\\\Users\\\\me\\\\train.en", "data/")]
    ['train.en', 'train.en', 'data']
    >>> file_name("https://bucket.example/private/train.en?Signature=a/b#c")
    'train.en'
    """
    if re.match(r"[\w+.-]+://", path):
        path = re.split(r"[?#]", path)[0]
    return re.split(r"[/\\]", re.sub(r"\A[A-Za-z]:", "", path).rstrip("/\\"))[-1]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_CHARACTERS


def _matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII) is not None


def _are_versions(value: Any) -> bool:
    is_name, is_version = _matches(r"\w{1,50}"), _matches(r"\d[\w.+!-]{0,50}")
    return isinstance(value, dict) and all(map(is_name, value)) and all(map(is_version, value.values()))


_TEXTS = ("test_set", "source_file", "reference_file", "command")
_NUMBERS = (*METRICS, "paper_bleu", "pos_accuracy", "well_formed", "bracket_f1_40", "seconds", "sentences")
# Field of a record -> what its value must be, in words, and whether it is.
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_NUMBERS, ("a finite number", is_number)),
    **dict.fromkeys(("bleu_signature", "chrf_signature"), ("sacrebleu's", _matches(r"[\w.:|+#-]{1,300}"))),
    **dict.fromkeys(_TEXTS, (f"text of at most {_MOST_CHARACTERS:,} characters", _is_text)),
    **dict.fromkeys(("source_sha256", "reference_sha256", "weights_sha256"), ("a SHA-256", _matches("[0-9a-f]{64}"))),
    "generation": ("a table of settings", lambda value: isinstance(value, dict)),
    "versions": ("a table of versions", _are_versions),
    "date": ("a date such as 2026-05-04", _matches(r"\d{4}-\d\d-\d\d")),
}


def published_record(record: Mapping) -> dict:
    """The fields and settings of an evaluation record that are known, with no folders in the paths among them.

    Raises:
        UserError: for a field with a value that it cannot have.
    """
    known = {name: value for name, value in record.items() if name in _FIELDS}
    for name, value in known.items():
        kind, is_right = _FIELDS[name]
        if not is_right(value):
            raise UserError(f"{name} of an evaluation is {str(value)[:60]!r}: it must be {kind}; evaluate again")
    known |= {name: one_line_of_text(known[name]) for name in known.keys() & set(_TEXTS)}
    for name in known.keys() & {"source_file", "reference_file"}:
        known[name] = file_name(known[name])
    if re.match(r"[/~\\]|[A-Za-z]:[/\\]", known.get("test_set", "")):
        known["test_set"] = file_name(known["test_set"])
    if "command" in known:
        # Not shlex.split(), which takes the backslashes of Windows' paths for quotes and removes them.
        reader = shlex.shlex(known["command"], posix=True, punctuation_chars="")
        reader.whitespace_split, reader.escape, reader.commenters = True, "", ""
        try:
            words = [file_name(word) for word in reader]
        except ValueError as error:
            raise UserError(
                f"the command of an evaluation cannot be split into words ({one_line(error)}): evaluate again"
            ) from error
        known["command"] = shlex.join(words)
    settings = known.get("generation", {})
    if settings:
        known["generation"] = {name: settings[name] for name in settings if is_search_setting(name, settings[name])}
    return known


def read_run(folder: str | Path) -> tuple[dict, list[dict]]:
    """The recipe and the training log of a run's folder, without what is no field or no value of a `Recipe`.

    Of the log only numbers are read. Both are empty if there is no recipe: a log alone is another program's, whose
    steps and seconds may differ in kind.
    """
    path, log = Path(folder) / RECIPE, Path(folder) / LOG
    if not path.is_file():
        return {}, []
    recipe, values, entries = {}, None, []
    with contextlib.suppress(UserError):
        values = read_yaml(path, "it is left out")
    for known in dataclasses.fields(Recipe) if isinstance(values, dict) else ():
        if not isinstance(values.get(known.name), list | dict):
            with contextlib.suppress(UserError, KeyError):
                recipe[known.name] = convert(known.name, values[known.name])
    if log.is_file():
        with contextlib.suppress(OSError, ValueError, RecursionError):
            entries = read_training_log(log)
    entries = [entry.items() for entry in entries if isinstance(entry, dict)]
    return recipe, [{name: value for name, value in entry if is_number(value)} for entry in entries]


def read_import(folder: str | Path) -> dict:
    """Where an imported model comes from: `toolkit`, `source`, `notes`, `license` and `languages`.

    Empty for a model that was not imported; what has not the form that it must have is left out.
    """
    values = {}
    with contextlib.suppress(OSError, UserError):
        values = read_json(Path(folder) / IMPORT, "import the model again")
    if not all(_is_text(values.get(name)) for name in ("toolkit", "source")):
        return {}
    notes, languages = (value if isinstance(value, list) else [] for value in map(values.get, ("notes", "languages")))
    return {
        "toolkit": values["toolkit"],
        "source": values["source"],
        "notes": list(filter(_is_text, notes)),
        "languages": list(filter(is_language, languages)),
        "license": values["license"] if is_license(values.get("license")) else None,
    }


def metadata(card: Path) -> dict[str, Any]:
    """Return licence and languages in the front matter of a model card, as far as they have the form that they need."""
    data = ModelCardData()
    with contextlib.suppress(OSError, ValueError, TypeError, yaml.YAMLError):
        data = ModelCard.load(card).data
    languages = data.language if isinstance(data.language, list) else [data.language]
    languages = ["no" if language is False else language for language in languages]  # Norwegian, to YAML
    return {
        "license": data.license if is_license(data.license) else None,
        "languages": list(filter(is_language, languages)),
    }


def read_teachers(folder: str | Path, recipe: Mapping) -> list[str]:
    """Names of the models on whose translations a run of `vaswani distill` was trained; empty for any other run."""
    values = {}
    with contextlib.suppress(OSError, UserError):
        values = read_json(Path(folder) / DISTILLATION, "distil the text again")
    files, teachers = (value if isinstance(value, list) else [] for value in map(values.get, ("files", "teachers")))
    is_trained_on = file_name(str(recipe.get("train_target"))) in files
    return [file_name(name) for name in teachers if _is_text(name)] if is_trained_on else []


def languages_of(recipe: Mapping) -> list[str]:
    """Source and target language if the recipe's columns or files are named by codes of two letters; else empty."""
    columns = [recipe.get("source_column"), recipe.get("target_column")]
    files = [str(recipe.get(f"train_{side}")).removesuffix(".gz") for side in ("source", "target")]
    for codes in (columns, [name.rpartition(".")[2] for name in files]):
        if codes[0] != codes[1] and all(re.fullmatch("[a-z]{2}", code or "") for code in codes):
            return codes
    return []


def known_languages(folder: str | Path) -> list[str]:
    """Source and target language of a model's folder, as an import or a training noted them; empty if neither did."""
    return read_import(folder).get("languages") or languages_of(read_run(folder)[0])


def datasets_of(recipe: Mapping) -> list[str]:
    """The Hub dataset that the recipe trained on; empty for files, and where it is not certain."""
    data = recipe.get("train_data")
    if not data or not recipe.get("data_config") or (Path(recipe.get("data_dir") or "") / data).exists():
        return []  # only datasets of the Hub have configurations
    return [data] if is_dataset(data) else []


def code_facts(config: Mapping) -> dict[str, Any]:
    """What the entries of a saved configuration say of the code that lies beside it."""
    return {
        "remote_code": "AutoModelForSeq2SeqLM" in (config.get("auto_map") or {}),
        "pipeline": "translation" if "translation" in (config.get("custom_pipelines") or {}) else None,
    }


def facts_of(model, repo_id: str, folder: str | Path | None, weights: str | None = None) -> CardFacts:
    """The facts in a model that was loaded, and in the folder of its run."""
    recipe, log = read_run(folder) if folder is not None else ({}, [])
    imported = read_import(folder) if folder is not None else {}
    settings = search_settings(model.generation_config)
    return CardFacts(
        repo_id=repo_id,
        config=model.config,
        parameters=model.num_parameters(),
        generation={name: value for name, value in settings.items() if is_search_setting(name, value)},
        recipe=recipe,
        log=log,
        imported=imported,
        teachers=read_teachers(folder, recipe) if folder is not None else [],
        languages=imported.get("languages") or languages_of(recipe),
        license=imported.get("license"),
        datasets=datasets_of(recipe),
        **code_facts(vars(model.config)),
        weights=weights,
    )
