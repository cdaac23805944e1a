"""Pickled weights, read without running what a pickle may hold; and folders of ours that were saved so."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..data.tokenization import load_tokenizer
from ..errors import UserError, one_line
from ..hub.card_facts import read_import
from ..json_and_yaml import read_json
from ..loading import check_generation_config, read_config
from ..model.checkpoint_vaswani import PICKLED_WEIGHTS
from ..model.configuration_vaswani import VaswaniConfig
from .checkpoints import read_pickle
from .source import Facts, Imported, ImportOptions, model_type
from .transformers_folders import facts_of_folder

NAME = "a folder of this package with pickled weights (pytorch_model.bin)"
_ADVICE = "get the weights as safetensors"
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder by name, from safetensors or else from pickles, in one file or several.

    Raises:
        UserError: for a folder without weights, files that are damaged or hold anything else, and an index that leads
            out of the folder.
    """
    kinds = ((SAFETENSORS, _read_safetensors), (PICKLED_WEIGHTS, _read_table))
    here = [(names, read_file) for names, read_file in kinds if any((folder / name).is_file() for name in names)]
    if not here:
        raise UserError(f"{folder} holds no weights (model.safetensors or {PICKLED_WEIGHTS[0]}): copy it again")
    names, read_file = here[0]
    single, index = (folder / name for name in names)
    weights: dict[str, torch.Tensor] = {}
    for path in [single] if single.is_file() else _files_of_index(index):
        part = read_file(path)
        if repeated := weights.keys() & part.keys():
            raise UserError(f"{min(repeated)[:200]!r} is in {path} and in another file of its index: keep one of them")
        weights |= part
    if not weights:
        raise UserError(f"the weights in {folder} are empty")
    return weights


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or not complete ({one_line(error)}): copy or download it again") from error


def _read_table(path: Path) -> dict[str, torch.Tensor]:
    table = read_pickle(path, _ADVICE)
    if not isinstance(table, dict) or not all(
        isinstance(key, str) and isinstance(tensor, torch.Tensor) for key, tensor in table.items()
    ):
        raise UserError(f"{path} is not a table of weights by name: save model.state_dict() and nothing else")
    return table


def _files_of_index(index: Path) -> list[Path]:
    """The files that an index of weights lists, all in the index's own folder."""
    try:
        names = sorted(set(read_json(index, "copy it again")["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not an index of weight files: copy it again") from error
    present = {path.name for path in index.parent.iterdir() if path.is_file()}
    if missing := [name for name in names if name not in present]:  # also whatever leads to another folder
        raise UserError(
            f"{index} names {missing[0]!r:.200}, and that is no file in its folder: copy the files of the model again"
        )
    return [index.parent / name for name in names]


def is_one(source: Path) -> bool:
    """Whether this is a folder of ours."""
    return model_type(source) == VaswaniConfig.model_type


def read(source: Path, _: ImportOptions) -> Imported:
    """Configuration, weights, search settings and tokenizer as they are."""
    if any((source / name).is_file() for name in SAFETENSORS):
        raise UserError(f"{source} is a model of this package already: there is nothing to import")
    try:
        config = read_config(source)
    except UserError:
        raise
    except Exception as error:  # values of a wrong kind make transformers raise errors of many kinds
        raise UserError(f"{source} has no usable config.json: {one_line(error)}") from error
    settings = source / "generation_config.json"
    check_generation_config(settings, config.target_vocab_size)
    generation = read_json(settings, "copy it again") if settings.is_file() else {}
    known = read_import(source)  # a model that was imported and then saved by another program
    has_tokenizer = (source / "tokenizer_config.json").is_file()
    return Imported(
        config,
        read_weights(source),
        load_tokenizer(source) if has_tokenizer else None,
        Facts(**known) if known else facts_of_folder(source, "vaswani_transformer"),
        generation,
    )
