"""What MarianMT and FSMT folders of transformers have in common: configuration, search settings, facts for the card."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.trainer import TRAINER_STATE_NAME

from ..errors import UserError, reading
from ..hub.card_facts import metadata
from ..json_and_yaml import read_json
from .source import ACTIVATIONS, Facts
from .tables import first_bytes

_IDS = ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id")  # our configuration has them


def config_of(folder: Path, kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return the folder's configuration, with the defaults of its class in transformers.

    Raises:
        UserError: for values of a wrong kind, and settings that our architecture does not have, by their names.
    """
    path = folder / "config.json"
    values = read_json(path)
    with reading(path):
        config = kind(**{name: values[name] for name in values.keys() & kind.__annotations__.keys()})
    rules = {"activation_function": (config.activation_function, tuple(ACTIVATIONS))}
    for part in ("ffn_dim", "attention_heads"):
        rules[f"decoder_{part}"] = getattr(config, f"decoder_{part}"), (getattr(config, f"encoder_{part}"),)
    for name, (value, allowed) in rules.items():
        if value not in allowed:
            raise UserError(
                f"{name} in {path} is {value!r:.40}: only models with {', '.join(map(str, allowed))} can be imported"
            )
    return config


def shared_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the entries of our configuration that both kinds of folders give in the same way."""
    same = ("d_model", "encoder_layers", "decoder_layers", "max_position_embeddings", "scale_embedding", *_IDS[1:])
    dropouts = ("dropout", "attention_dropout", "activation_dropout")
    return {
        **{name: getattr(config, name) for name in (*same, *dropouts)},
        "d_ff": config.encoder_ffn_dim,
        "num_heads": config.encoder_attention_heads,
        "activation_function": ACTIVATIONS[config.activation_function],
        "attention_bias": True,
    }


def search_settings(folder: Path, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the folder's search settings, and transformers' rule for the scores of a beam search.

    They are in `generation_config.json`, in older folders in `config.json`.
    """
    path = folder / "generation_config.json"
    if path.is_file():
        settings = read_json(path, finite=False)
    else:
        values = read_json(folder / "config.json")
        settings = {name: values.get(name, getattr(config, name, None)) for name in GenerationConfig().to_dict()}
    dropped = {*_IDS, "transformers_version", "_from_model_config", "use_cache"}
    settings = {name: value for name, value in settings.items() if value is not None and name not in dropped}
    return {"length_normalization": "power", "length_penalty": 1.0, **settings}


def take(weights: dict[str, torch.Tensor], *names: str) -> torch.Tensor:
    """Return the first of these weights that exists: a tied matrix may be stored under another of its names.

    Raises:
        KeyError: none of them exists.
    """
    return weights[next((name for name in names if name in weights), names[0])]


def was_trained_there(folder: Path) -> bool:
    """Return whether transformers' Trainer has left something in a folder."""
    return any((folder / name).is_file() for name in ("training_args.bin", TRAINER_STATE_NAME))


def facts_of_folder(folder: Path, toolkit: str, languages: tuple[str, ...] = ()) -> Facts:
    """Return what a folder's card and configuration say about its model; `languages`: source and target, if known."""
    name = str(read_json(folder / "config.json").get("_name_or_path") or "")
    source = re.search(r"(?:^|/)((?:Helsinki-NLP|facebook|allenai)/[\w.-]+)$", name)
    text = first_bytes(folder / "README.md").decode("utf-8", errors="replace")
    card = metadata(text)
    return Facts(
        toolkit,
        f"https://huggingface.co/{source[1]}" if source else "",
        card.get("license"),
        tuple(languages or card.get("languages") or ()),
    )
