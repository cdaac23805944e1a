"""Folders that `vaswani export` wrote: what is beside the weights. Imports no torch: an exported model runs without."""

from pathlib import Path
from types import SimpleNamespace

from .errors import UserError, reading
from .json_and_yaml import read_json

FACTS = "export.json"  # in the folder of an exported model: what it is and what it needs
#: Types that CTranslate2 stores weights in. What they are computed in is decided where the model is used.
QUANTIZATIONS = ("float32", "int8", "int8_float32", "bfloat16", "float16", "int16")
#: Numbers of a configuration that `export.json` has, for programs that use the exported model.
NUMBERS = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id", "decoder_layers", "num_heads",
           "d_k", "d_v")  # fmt: skip


def is_exported(folder: str | Path) -> bool:
    """Return whether a folder was written by `vaswani export`."""
    return (Path(folder) / FACTS).is_file()


def refuse_exported(folder: str | Path) -> None:
    """Raise `UserError` for the folder of an exported model, of which no other command makes a model again."""
    if is_exported(folder):
        raise UserError(f"{folder} holds an exported model: give the folder that it was exported from")


class NotExpressibleError(UserError):
    """A model or a setting that the other engine has nothing for."""


def read_facts(folder: str | Path, format: str) -> SimpleNamespace:
    """Return what `export.json` says of a model, which must have this format, by the names of a configuration."""
    path = Path(folder) / FACTS
    with reading(path):
        values = read_json(path)
        numbers = {name: int(values[name]) for name in ("positions", *NUMBERS)}
        if values["format"] != format:
            problem = f"{folder} holds a model exported to {values['format']}"
            raise UserError(f"{problem}: export it with --format {format}")
    # Whatever the positions were before, they are a table now, and have an end.
    return SimpleNamespace(position_encoding="learned", max_position_embeddings=numbers["positions"], **numbers)
