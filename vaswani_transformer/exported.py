"""Folders that `vaswani export` wrote, as far as other rooms have to know them."""

from pathlib import Path

from .errors import UserError
from .json_and_yaml import read_json

FACTS = "export.json"  # in the folder of an exported model: what it is and what it needs


def is_exported(folder: str | Path) -> bool:
    """Return whether a folder was written by `vaswani export`."""
    return (Path(folder) / FACTS).is_file()


def refuse_exported(folder: str | Path) -> None:
    """Raise `UserError` for the folder of an exported model, of which no other command makes a model again."""
    if is_exported(folder):
        format = read_json(Path(folder) / FACTS).get("format")
        raise UserError(f"{folder} holds a model exported to {format}: give the folder that it was exported from")
