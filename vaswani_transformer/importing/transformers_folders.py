"""Common parts of MarianMT and FSMT folders of transformers: configuration, weights, vocabularies, facts."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

from ..errors import UserError, reading
from ..hub.card_facts import is_language, metadata
from ..json_and_yaml import read_json
from .source import ACTIVATIONS, Facts

ENCODER, DECODER = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
_IDS = ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id")  # our configuration has them


def config_of(folder: Path, kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return the folder's configuration, with the defaults of its class in transformers.

    Raises:
        UserError: for values of a wrong kind, and a decoder of other heads than the encoder's.
    """
    path = folder / "config.json"
    values = read_json(path)
    with reading(path):
        config = kind(**{name: values[name] for name in values.keys() & kind.__annotations__.keys()})
    heads = config.encoder_attention_heads
    if config.decoder_attention_heads != heads:  # which no weight shows
        value = f"decoder_attention_heads in {path} is {config.decoder_attention_heads}"
        raise UserError(f"{value}: only models with as many in the encoder, which has {heads}, can be imported")
    return config


def shared_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the entries of our configuration that both kinds of folders give in the same way."""
    same = ("d_model", "encoder_layers", "decoder_layers", "max_position_embeddings", "scale_embedding", *_IDS[1:])
    dropouts = ("dropout", "attention_dropout", "activation_dropout")
    return {
        **{name: getattr(config, name) for name in (*same, *dropouts)},
        "d_ff": config.encoder_ffn_dim,
        "num_heads": config.encoder_attention_heads,
        "activation_function": ACTIVATIONS.get(config.activation_function, config.activation_function),
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


def renamed(
    weights: dict[str, torch.Tensor], encoder: Sequence[str], decoder: Sequence[str], output: Sequence[str]
) -> tuple[dict[str, bool], dict[str, torch.Tensor]]:
    """Return the ties of the embeddings, and the weights by our names, which differ in the embeddings alone.

    Args:
        weights: by transformers' names.
        encoder, decoder, output: names of both embeddings and of the output projection. The first that exists counts:
            a tied matrix may be stored under another of its names.

    Returns:
        the entries `tie_word_embeddings` and `share_encoder_decoder_embeddings` of a configuration, by which of the
        matrices are the same, and the weights, tied ones under each name.

    Raises:
        KeyError: a matrix is missing.
    """
    matrices = [weights[next(filter(weights.__contains__, names), names[0])] for names in (encoder, decoder, output)]
    tied, shared = torch.equal(matrices[1], matrices[2]), torch.equal(matrices[0], matrices[1])
    computed = [f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")]
    others = {*encoder, *decoder, *output, *computed, "model.shared.weight"}
    ours = {name: tensor for name, tensor in weights.items() if name not in others}
    ours |= dict(zip((ENCODER, DECODER, "lm_head.weight"), matrices, strict=True))
    return {"tie_word_embeddings": tied, "share_encoder_decoder_embeddings": shared}, ours


def read_vocabulary(path: Path) -> dict[str, int]:
    """Return the numbers of a vocabulary's tokens."""
    vocabulary = read_json(path)
    numbers = set(vocabulary.values())
    # Numbers far apart would make a table of as many names.
    is_whole = all(type(number) is int and 0 <= number < 2 * len(numbers) + 100 for number in numbers)
    if not is_whole or not 0 < len(vocabulary) == len(numbers):
        raise UserError(f"{path} is not a vocabulary, of tokens with numbers from 0 on: copy the folder again")
    return vocabulary


def facts_of_folder(folder: Path, toolkit: str, languages: Iterable = ()) -> Facts:
    """Return what a folder's card and configuration say about its model; `languages`: source and target, if known."""
    name = str(read_json(folder / "config.json").get("_name_or_path") or "")
    source = re.search(r"(?:^|/)((?:Helsinki-NLP|facebook|allenai)/[\w.-]+)$", name)
    path = folder / "README.md"
    card = {}
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            card = metadata(file.read(1 << 22))
    codes = [language for language in languages if is_language(language)]
    return Facts(
        toolkit,
        f"https://huggingface.co/{source[1]}" if source else "",
        card.get("license"),
        tuple(codes if len(codes) == 2 else card.get("languages", ())),
    )
