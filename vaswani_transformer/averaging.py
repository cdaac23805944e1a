"""Averaging of checkpoints (Section 6.1: the last 5 of the base model, the last 20 of the big one)."""

from pathlib import Path

import torch
from safetensors import safe_open

from .errors import UserError

WEIGHTS = "model.safetensors"


def average_checkpoints(folders: list[str | Path]) -> dict[str, torch.Tensor]:
    """The mean of each weight over checkpoints, summed in float64 and returned in the first one's type.

    Args:
        folders: checkpoints, each with a `model.safetensors`; one weight at a time is held in memory for all of them.

    Raises:
        UserError: for no folders, a missing file, or weights of other names or shapes than the first one's.
    """
    if not folders:
        raise UserError("no checkpoints to average")
    paths = [Path(folder) / WEIGHTS for folder in folders]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path.parent} is not a whole checkpoint: it has no {WEIGHTS}")
    files = [safe_open(path, framework="pt") for path in paths]
    names = set(files[0].keys())
    for path, file in zip(paths, files, strict=True):
        if set(file.keys()) != names:
            other = sorted(names ^ set(file.keys()))[0]
            raise UserError(f"{path} and {paths[0]} are not of one model: only one has the weight {other}")
    averaged = {}
    for name in sorted(names):
        first = files[0].get_tensor(name)
        total = torch.zeros(first.shape, dtype=torch.float64)
        for path, file in zip(paths, files, strict=True):
            tensor = file.get_tensor(name)
            if tensor.shape != first.shape:
                raise UserError(
                    f"{name} has shape {tuple(tensor.shape)} in {path} and {tuple(first.shape)} in {paths[0]}:"
                    " only checkpoints of one model can be averaged"
                )
            total += tensor
        averaged[name] = (total / len(files)).to(first.dtype)
    return averaged
