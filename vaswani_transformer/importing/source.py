"""What formats share: their result for `importing.py`, a model in our terms, and tables of tensors in files."""

import argparse
import re
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import UserError, reading
from ..json_and_yaml import read_json
from ..model.configuration_vaswani import VaswaniConfig


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
    tokenizer: PreTrainedTokenizerBase
    facts: Facts
    generation: dict[str, Any] = field(default_factory=dict)  # entries of generation_config.json besides our defaults


def model_type(source: Path) -> str | None:
    """Return the `model_type` of a folder's `config.json`, if it is a folder of transformers."""
    path = source / "config.json"
    kind = read_json(path).get("model_type") if path.is_file() else None
    return kind if isinstance(kind, str) else None


def only_one(paths: list[Path], folder: Path) -> Path:
    """Return the one model of a folder; `UserError` for several, which it names."""
    if len(paths) > 1:
        listed = ", ".join(path.name for path in paths[:5])
        raise UserError(f"{folder} holds {len(paths)} models ({listed}): give one of the files")
    return paths[0]


def is_compressed(path: Path) -> bool:
    """Return whether a file is a zip archive with compressed entries, which could grow without bounds."""
    with path.open("rb") as file:
        entries = zipfile.ZipFile(file).infolist() if zipfile.is_zipfile(file) else ()
        return any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)


def read_pickle(path: Path) -> Any:
    """Return what `torch.save` wrote, on the CPU; `UserError` for more than tensors, plain values and a `Namespace`."""
    with reading(path):
        problem = "is compressed, or holds more than tensors"
        if not is_compressed(path):
            try:
                # A Namespace is made from its attributes alone: reading one runs nothing of the file's.
                with torch.serialization.safe_globals([argparse.Namespace]):
                    return torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # torch's own words recommend reading without the restriction
                name = re.search(r"GLOBAL ([\w.]+)", str(error))
                problem = f"holds {name[1]}" if name else "is damaged, or holds more than tensors"
        raise UserError(f"{path} {problem}, which could run code: torch.save its tensors and settings alone")


def tensors_of(table: Any, path: Path) -> dict[str, torch.Tensor]:
    """Return a file's table of tensors; `UserError` for anything else, and strides of 0: more numbers than it has."""
    size = path.stat().st_size
    is_table = isinstance(table, dict) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.numel() <= size
        for name, tensor in table.items()
    )
    if not (is_table and table):
        raise UserError(f"{path} holds no table of weights by name: save model.state_dict()")
    return dict(table)
