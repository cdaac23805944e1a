"""Folders that `vaswani export` wrote, as far as other rooms have to know them."""

from pathlib import Path

from .errors import UserError
from .json_and_yaml import read_json

FACTS = "export.json"  # in the folder of an exported model: what it is and what it needs


def is_exported(folder: str | Path) -> bool:
    """Return whether a folder was written by `vaswani export`."""
    return (Path(folder) / FACTS).is_file()


def refuse_exported(folder: str | Path) -> None:
    """Raise `UserError` for the folder of an exported model, with what can be done with it."""
    if not is_exported(folder):
        return
    path = Path(folder) / FACTS
    format = read_json(path, "export the model again").get("format")
    use = {
        "ctranslate2": "`vaswani translate`, `score` and `evaluate` and CTranslate2Translator take it",
        "onnx": "ONNX Runtime runs it (scripts/translate_onnx.py)",
        "marian": "marian-decoder runs it, and `vaswani import` reads its model.npz",
    }
    raise UserError(
        f"{folder} holds a model exported to {format}, which cannot be made a model again: give the folder that it was"
        f" exported from; {use.get(str(format), 'another program takes it')}"
    )
