"""What MarianMT and FSMT folders of transformers have in common: configuration, search settings, facts for the card."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.trainer import TRAINER_STATE_NAME

from ..errors import UserError, one_line
from ..hub.card_facts import is_language
from ..hub.existing_card import MOST_BYTES, metadata
from ..json_and_yaml import read_json
from .source import ACTIVATIONS, Facts

_AGAIN = "copy the files of the model again"
_IDS = ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id")  # our configuration has them
_ACTIVATIONS = ACTIVATIONS | {"silu": "silu"}
# Entries of older folders that transformers ignores today, and the value at which the architecture is the paper's.
_PAPERS = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "add_bias_logits": False,
    "static_position_embeddings": True,
}


def read_values(folder: Path) -> dict[str, Any]:
    """The entries of `config.json`."""
    return read_json(folder / "config.json", _AGAIN)


def config_of(folder: Path, kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """The folder's configuration, with the defaults of its class in transformers.

    Raises:
        UserError: for values of a wrong kind, and settings that our architecture does not have, by their names.
    """
    values = read_values(folder)
    try:
        config = kind(**{name: values[name] for name in values.keys() & kind.__annotations__.keys()})
    except Exception as error:  # values of a wrong kind make transformers raise errors of many kinds
        raise UserError(f"{folder} has no usable config.json: {one_line(error)}") from error
    for name, wanted in _PAPERS.items():
        if values.get(name, wanted) != wanted:
            raise UserError(
                f"{name} in {folder}/config.json is {values[name]!r:.40}: only models with {wanted} can be imported"
            )
    if config.activation_function not in _ACTIVATIONS:
        raise UserError(
            f"activation_function in {folder}/config.json is {config.activation_function!r}: it must be one of"
            f" {', '.join(_ACTIVATIONS)}"
        )
    for one, other in (("encoder_ffn_dim", "decoder_ffn_dim"), ("encoder_attention_heads", "decoder_attention_heads")):
        if getattr(config, one) != getattr(config, other):
            raise UserError(
                f"{one} in {folder}/config.json is {getattr(config, one)} and {other} {getattr(config, other)}: only"
                " models with the same number in both stacks can be imported"
            )
    return config


def shared_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Entries of our configuration that both kinds of folders give in the same way."""
    same = ("d_model", "encoder_layers", "decoder_layers", "max_position_embeddings", "scale_embedding", *_IDS[1:])
    dropouts = ("dropout", "attention_dropout", "activation_dropout")
    return {
        **{name: getattr(config, name) for name in (*same, *dropouts)},
        "d_ff": config.encoder_ffn_dim,
        "num_heads": config.encoder_attention_heads,
        "activation_function": _ACTIVATIONS[config.activation_function],
        "attention_bias": True,
    }


def search_settings(folder: Path, config: PreTrainedConfig) -> dict[str, Any]:
    """The folder's search settings, and transformers' rule for the scores of a beam search.

    They are in `generation_config.json`, in older folders in `config.json`.
    """
    path = folder / "generation_config.json"
    if path.is_file():
        settings = read_json(path, _AGAIN, finite=False)
    else:
        values = read_values(folder)
        settings = {name: values.get(name, getattr(config, name, None)) for name in GenerationConfig().to_dict()}
    left_out = {*_IDS, "transformers_version", "_from_model_config", "use_cache"}
    settings = {name: value for name, value in settings.items() if value is not None and name not in left_out}
    return {"length_normalization": "power", "length_penalty": 1.0, **settings}


def take(weights: dict[str, torch.Tensor], folder: Path, *names: str) -> torch.Tensor:
    """The first of these weights that is there: a matrix is missing under a name that is tied to another one."""
    for name in names:
        if name in weights:
            return weights[name]
    raise UserError(f"the weights in {folder} do not fit its configuration: {names[0]} is missing")


def was_trained_there(folder: Path) -> bool:
    """Whether transformers' Trainer has left something in a folder."""
    return any((folder / name).is_file() for name in ("training_args.bin", TRAINER_STATE_NAME))


def tokenizer_languages(folder: Path) -> tuple[str, ...]:
    """Source and target language as a tokenizer's configuration names them; empty where it does not."""
    path = folder / "tokenizer_config.json"
    values = read_json(path, _AGAIN) if path.is_file() else {}
    languages = values.get("source_lang"), values.get("target_lang")
    return languages if all(map(is_language, languages)) else ()


def facts_of_folder(folder: Path, toolkit: str, languages: tuple[str, ...] = ()) -> Facts:
    """What a folder's card and configuration say about its model; `languages` are source and target, if known."""
    name = str(read_values(folder).get("_name_or_path") or "")
    source = re.search(r"(?:^|/)((?:Helsinki-NLP|facebook|allenai)/[\w.-]+)$", name)
    card = folder / "README.md"
    known = {}
    if card.is_file() and card.stat().st_size <= MOST_BYTES:
        known = metadata(card.read_text(encoding="utf-8", errors="replace"))
    return Facts(
        toolkit,
        f"https://huggingface.co/{source[1]}" if source else "",
        known.get("license"),
        tuple(languages or known.get("languages") or ()),
    )
