"""What a model card states: facts about a model, the recipe and log of its training run, and its scores."""

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UserError
from ..evaluation.records import search_settings
from ..json_and_yaml import read_yaml
from ..model.configuration_vaswani import VaswaniConfig
from ..recipes.recipe import Recipe, convert
from ..training.callbacks import read_training_log
from ..training.run_folder import LOG, RECIPE


@dataclass(frozen=True)
class CardFacts:
    """What a model card states; what is empty or None is not known and left out."""

    repo_id: str  # owner/name
    config: VaswaniConfig
    parameters: int  # tied ones counted once
    generation: Mapping = field(default_factory=dict)  # `search_settings` of its generation configuration
    recipe: Mapping = field(default_factory=dict)  # of its training run
    log: Sequence[Mapping] = ()  # entries of its training log
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


def read_run(folder: str | Path) -> tuple[dict, list[dict]]:
    """The recipe and the training log of a run's folder, without fields that are no field or no value of a `Recipe`.

    Both are empty if there is no recipe: a log alone is another program's, whose steps and seconds may differ in kind.
    """
    path, log = Path(folder) / RECIPE, Path(folder) / LOG
    if not path.is_file():
        return {}, []
    recipe, values = {}, None
    with contextlib.suppress(UserError):
        values = read_yaml(path, "it is left out")
    for known in dataclasses.fields(Recipe) if isinstance(values, dict) else ():
        with contextlib.suppress(UserError, KeyError):
            recipe[known.name] = convert(known.name, values[known.name])
    entries = read_training_log(log) if log.is_file() else []
    return recipe, [entry for entry in entries if isinstance(entry, dict)]


def languages_of(recipe: Mapping) -> list[str]:
    """Source and target language if the recipe's columns or files are named by codes of two letters; else empty."""
    columns = [recipe.get("source_column"), recipe.get("target_column")]
    files = [str(recipe.get(f"train_{side}")).removesuffix(".gz") for side in ("source", "target")]
    for codes in (columns, [name.rpartition(".")[2] for name in files]):
        if codes[0] != codes[1] and all(re.fullmatch("[a-z]{2}", code or "") for code in codes):
            return codes
    return []


def datasets_of(recipe: Mapping) -> list[str]:
    """The Hub dataset that the recipe trained on; empty for files, and where it is not certain."""
    data = recipe.get("train_data")
    return [data] if data and recipe.get("data_config") else []  # only datasets of the Hub have configurations


def facts_of(model, repo_id: str, folder: str | Path | None, weights: str | None = None) -> CardFacts:
    """The facts in a model, after `save_pretrained`, which sets what is saved with it, and in the folder of its run."""
    recipe, log = read_run(folder) if folder is not None else ({}, [])
    return CardFacts(
        repo_id=repo_id,
        config=model.config,
        parameters=model.num_parameters(),
        generation=search_settings(model.generation_config),
        recipe=recipe,
        log=log,
        languages=languages_of(recipe),
        datasets=datasets_of(recipe),
        remote_code="AutoModelForSeq2SeqLM" in (getattr(model.config, "auto_map", None) or {}),
        pipeline="translation" if "translation" in (getattr(model.config, "custom_pipelines", None) or {}) else None,
        weights=weights,
    )
