"""Pickled weights to safetensors, without running what a pickle may hold."""

import json
import pickle
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig

from .checkpoint_vaswani import PICKLED_WEIGHTS
from .configuration_vaswani import VaswaniConfig
from .errors import UserError, one_line
from .modeling_vaswani import VaswaniForConditionalGeneration


def convert_pickled_weights(folder: str | Path) -> list[Path]:
    """Write the weights of `pytorch_model.bin`, sharded or not, as safetensors beside it.

    Tensors are read with torch's restricted unpickler, which refuses everything else. The pickle stays where it is.

    Args:
        folder: a model folder with `config.json`.

    Returns:
        the files written.

    Raises:
        UserError: for a folder without pickled weights or with safetensors already, for a pickle that is damaged or
            holds more than tensors, and for weights that do not fit `config.json` exactly.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no model folder {folder}")
    if any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} already holds safetensors: there is nothing to convert")
    if not any((folder / name).is_file() for name in PICKLED_WEIGHTS):
        raise UserError(f"{folder} holds no {PICKLED_WEIGHTS[0]}: there is nothing to convert")
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:
        raise UserError(f"{folder} has no usable config.json: {one_line(error)}") from error
    if not isinstance(config, VaswaniConfig):
        raise UserError(f"{folder} holds a {config.model_type!r} model: this command takes models of type 'vaswani'")
    weights = _read_pickles(folder)
    with torch.device("meta"):
        skeleton = VaswaniForConditionalGeneration(config)
    shapes = skeleton.state_dict()
    # A tied matrix may stand there once or under each of its names.
    tied = {name for pair in (skeleton._tied_weights_keys or {}).items() for name in pair}
    needed = shapes.keys() - (tied if tied & weights.keys() else set())
    wrong = sorted((weights.keys() - shapes.keys()) | (needed - weights.keys()))
    wrong += sorted(name for name in weights.keys() & shapes.keys() if weights[name].shape != shapes[name].shape)
    if wrong:
        raise UserError(f"the pickled weights in {folder} do not fit its config.json, such as {wrong[0]}")
    model = VaswaniForConditionalGeneration(config)
    model.load_state_dict(weights, strict=False)
    loaded = model.state_dict()
    changed = [name for name in weights if loaded[name].ne(weights[name]).any()]
    if changed:
        raise UserError(
            f"{changed[0]} in {folder} differs from the matrix that config.json ties it to: set tie_word_embeddings to"
            " false there if the weights were trained untied"
        )
    staging = folder / ".converted"
    try:
        model.to(next(iter(weights.values())).dtype).save_pretrained(staging)
        written = [path.replace(folder / path.name) for path in sorted(staging.glob("*.safetensors*"))]
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return written


def _read_pickles(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's pickled weights by name."""
    names = [PICKLED_WEIGHTS[0]]
    if not (folder / names[0]).is_file():
        try:
            index = json.loads((folder / PICKLED_WEIGHTS[1]).read_text(encoding="utf-8"))
            names = sorted(set(index["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{folder / PICKLED_WEIGHTS[1]} is not an index of weight files") from error
    weights = {}
    for name in names:
        path = folder / Path(name).name
        try:
            part = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise UserError(f"{path} is missing: its index names it") from error
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            raise UserError(
                f"{path} is damaged or holds more than tensors, which could run code: get the weights as safetensors"
            ) from error
        if not isinstance(part, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in part.values()):
            raise UserError(f"{path} is not a table of weights by name: save model.state_dict() and nothing else")
        weights |= part
    if not weights:
        raise UserError(f"the pickled weights in {folder} are empty")
    return weights
