"""Folders that `vaswani export` wrote, as far as other rooms have to know them."""

from pathlib import Path

from .errors import UserError

FACTS = "export.json"  # in the folder of an exported model: what it is and what it needs


def is_exported(folder: str | Path) -> bool:
    """Return whether a folder was written by `vaswani export`."""
    return (Path(folder) / FACTS).is_file()


def refuse_exported(folder: str | Path) -> None:
    """Raise `UserError` for the folder of an exported model, of which no other command makes a model again."""
    if is_exported(folder):
        raise UserError(f"{folder} holds an exported model: give the folder that it was exported from")
