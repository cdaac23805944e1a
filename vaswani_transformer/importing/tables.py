"""Tables of tensors by name: pickles, read by torch's restricted reader, and safetensors, in one file or several."""

import argparse
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..errors import UserError, reading
from ..json_and_yaml import read_json

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def is_compressed(path: Path) -> bool:
    """Return whether a file is a zip archive with compressed entries, which could grow without bounds."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())


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
    """Return all tensors of a folder by name, from safetensors or else from pickles, in one file or several.

    Raises:
        UserError: for a folder without weights, and files that are damaged or hold anything else; all are read from the
            folder itself, wherever an index leads.
    """
    is_safe = any((folder / name).is_file() for name in _SAFETENSORS)
    single, index = (folder / name for name in (_SAFETENSORS if is_safe else _PICKLES))
    names = [single.name] if single.is_file() else {Path(name).name for name in read_json(index)["weight_map"].values()}
    weights: dict[str, torch.Tensor] = {}
    for path in (folder / name for name in sorted(names)):
        with reading(path):
            weights |= load_file(path) if is_safe else tensors_of(read_pickle(path), path)
    return weights
