"""The result of every format for `importing.py`: a model of another toolkit in our terms."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..json_and_yaml import read_json
from ..model.configuration_vaswani import VaswaniConfig

#: Activation functions by the names that fairseq and transformers have for them, and by ours.
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu"}


@dataclass
class Facts:
    """The origin of a model, for its card; what is empty or None is not known."""

    toolkit: str  # that trained it, in words, such as "Marian"
    source: str = ""  # name or URL of the original; `importing.py` fills in the name of the source
    license: str | None = None  # the Hub's identifier
    languages: tuple[str, ...] = ()  # ISO 639 codes, source first
    notes: tuple[str, ...] = ()  # sentences about this import


@dataclass
class Imported:
    """A model of another toolkit in our terms."""

    config: VaswaniConfig
    #: Names and shapes of `VaswaniForConditionalGeneration.state_dict()`; tied ones once or under each name.
    weights: dict[str, torch.Tensor]
    tokenizer: PreTrainedTokenizerBase | None  # saved by `save_pretrained`
    facts: Facts
    generation: dict[str, Any] = field(default_factory=dict)  # entries of generation_config.json besides our defaults


def model_type(source: Path) -> str | None:
    """Return the `model_type` of a folder's `config.json`, if it is a folder of transformers."""
    if not (source / "config.json").is_file():
        return None
    kind = read_json(source / "config.json").get("model_type")
    return kind if isinstance(kind, str) else None


def only_one(paths: list[Path], folder: Path) -> Path:
    """Return the one model of a folder.

    Raises:
        UserError: there are several, which are named.
    """
    if len(paths) > 1:
        listed = ", ".join(path.name for path in paths[:5])
        raise UserError(f"{folder} holds {len(paths)} models ({listed}): give one of the files")
    return paths[0]
