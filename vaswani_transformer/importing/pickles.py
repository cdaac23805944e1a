"""Folders of ours, also those that were saved with pickled weights."""

from pathlib import Path

from ..data.tokenization import load_tokenizer
from ..hub.card_facts import read_import
from ..json_and_yaml import read_json
from ..loading import read_config
from ..model.configuration_vaswani import VaswaniConfig
from .source import Facts, Imported, model_type
from .tables import read_weights
from .transformers_folders import facts_of_folder

NAME = "a folder of this package"


def matches(source: Path) -> bool:
    """Return whether this is a folder of ours."""
    return model_type(source) == VaswaniConfig.model_type


def read(source: Path) -> Imported:
    """Return configuration, weights, search settings and tokenizer as they are."""
    config = read_config(source)
    settings = source / "generation_config.json"
    origin = read_import(source)  # of a model that was imported and then saved by another program
    return Imported(
        config,
        read_weights(source),
        load_tokenizer(source) if (source / "tokenizer_config.json").is_file() else None,
        Facts(**origin) if origin else facts_of_folder(source, "vaswani_transformer"),
        read_json(settings) if settings.is_file() else {},
    )
