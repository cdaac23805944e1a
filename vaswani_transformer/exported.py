"""Folders that `vaswani export` wrote: what is beside the weights. Imports no torch: an exported model runs without."""

from pathlib import Path

from .errors import UserError

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
