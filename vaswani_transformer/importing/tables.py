"""Tables of tensors by name: pickles, read by torch's restricted reader, and safetensors."""

import argparse
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..errors import UserError, reading


def is_compressed(path: Path) -> bool:
    """Return whether a file is a zip archive with compressed entries, which could grow without bounds."""
    with path.open("rb") as file:
        entries = zipfile.ZipFile(file).infolist() if zipfile.is_zipfile(file) else ()
        return any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)


def read_pickle(path: Path) -> Any:
    """Return what `torch.save` wrote, of tensors, plain values and options of `argparse`; on the CPU.

    Raises:
        UserError: for a file that cannot be read, is damaged, or holds other objects, which could run code.
    """
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
        raise UserError(f"{path} {problem}, which could run code: torch.save the state_dict alone")


def tensors_of(table: Any, path: Path) -> dict[str, torch.Tensor]:
    """Return a table of tensors by name that was read from a file.

    Raises:
        UserError: for anything else, and for a tensor of more numbers than the file has, by strides of 0.
    """
    size = path.stat().st_size
    is_table = isinstance(table, dict) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.numel() <= size
        for name, tensor in table.items()
    )
    if not (is_table and table):
        raise UserError(f"{path} holds no table of weights by name: save model.state_dict()")
    return dict(table)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder by name, from safetensors or else from a pickle.

    Raises:
        UserError: for a folder without weights in one file, and a file that is damaged or holds anything else.
    """
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    path = safe if safe.is_file() else pickled
    with reading(path):
        return load_file(path) if path is safe else tensors_of(read_pickle(path), path)
