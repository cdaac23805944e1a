"""What a model card is made from: facts of a model, the recipe and log of its run, and its scores."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ..errors import UserError
from ..evaluation.records import search_settings
from ..model.configuration_vaswani import VaswaniConfig
from ..recipes.recipe import Recipe, convert
from ..training.callbacks import read_training_log
from ..training.run_folder import LOG, RECIPE

# ISO 639-1, to tell the column `de` from the column `fr_text`.
_ISO_639_1 = (
    " aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo"
    " es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka"
    " kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng"
    " nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st"
    " su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu "
)


@dataclass(frozen=True)
class CardFacts:
    """What a card is made from.

    Args:
        repo_id: `owner/name`.
        config: the model's configuration.
        parameters: how many the model has, tied ones counted once.
        generation: `search_settings` of its `generation_config.json`.
        recipe: the recipe of its training run; empty if not known.
        log: the entries of its training log; empty if not known.
        evaluations: records of `vaswani evaluate --json`.
        languages: codes (ISO 639), source first.
        license: the Hub's identifier of the weights' licence; None if none was given.
        datasets: names of datasets on the Hub.
        remote_code: whether code travels beside the weights.
        pipeline: a pipeline task that the saved model brings, or None.
        weights: `tensors_sha256` of the weights; None if not known.
    """

    repo_id: str
    config: VaswaniConfig
    parameters: int
    generation: Mapping = field(default_factory=dict)
    recipe: Mapping = field(default_factory=dict)
    log: Sequence[Mapping] = ()
    evaluations: Sequence[Mapping] = ()
    languages: Sequence[str] = ()
    license: str | None = None
    datasets: Sequence[str] = ()
    remote_code: bool = False
    pipeline: str | None = None
    weights: str | None = None

    @property
    def name(self) -> str:
        """The repository's name without its owner."""
        return self.repo_id.rpartition("/")[2]


def read_run(folder: str | Path) -> tuple[dict, list[dict]]:
    """The recipe and the training log of a run's folder; both are empty where there is no recipe.

    A log alone is another program's: its steps and seconds may be of another kind. What is no recipe is left out.
    """
    path, log = Path(folder) / RECIPE, Path(folder) / LOG
    recipe, known = {}, {field.name for field in dataclasses.fields(Recipe)}
    if path.is_file():
        with contextlib.suppress(yaml.YAMLError, UnicodeDecodeError):  # a torn file says nothing
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
            for name in known & values.keys() if isinstance(values, dict) else ():
                with contextlib.suppress(UserError):
                    recipe[name] = convert(name, values[name])
    entries = read_training_log(log) if path.is_file() and log.is_file() else []
    return recipe, [entry for entry in entries if isinstance(entry, dict)]


def languages_of(recipe: Mapping) -> list[str]:
    """Source and target language as the recipe's column names or file endings say; empty if they do not.

    >>> languages_of({"source_column": "en", "target_column": "de"})
    ['en', 'de']
    """
    columns = [recipe.get("source_column"), recipe.get("target_column")]
    files = [str(recipe.get(f"train_{side}") or "").removesuffix(".gz") for side in ("source", "target")]
    for pair in (columns, [name.rpartition(".")[2] for name in files]):
        if pair[0] != pair[1] and all(code and f" {code} " in _ISO_639_1 for code in pair):
            return pair
    return []


def datasets_of(recipe: Mapping) -> list[str]:
    """The Hub dataset that the recipe trained on; empty for files, and where it is not certain."""
    data = recipe.get("train_data")
    return [data] if data and recipe.get("data_config") else []  # only datasets of the Hub have configurations


def facts_of(model, repo_id: str, folder: str | Path | None, weights: str | None = None) -> CardFacts:
    """What a saved model and the folder of its run tell.

    Args:
        model: a [`VaswaniForConditionalGeneration`] after `save_pretrained`, which enters what travels with it.
        repo_id: `owner/name`.
        folder: where it was trained, if known; files of the run that are not there are left out.
        weights: `tensors_sha256` of what it saves.
    """
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
