"""OPUS-MT and its kin: folders of transformers' `MarianMTModel`."""

from pathlib import Path

import torch
from transformers import MarianConfig

from ..hub.card_facts import is_language
from ..json_and_yaml import read_json
from ..model.configuration_vaswani import VaswaniConfig
from . import transformers_folders as folders
from .source import Imported, ImportOptions, embeddings, model_type
from .tables import read_weights
from .transformers_tokenizers import marian_tokenizer

NAME = "MarianMTModel of transformers (OPUS-MT)"
# Marian computes tensor2tensor's positions; transformers computes others for the same weights, and models that were
# trained there have learned with those. The two add different numbers to the variance in layer normalisation.
_POSITIONS = {"marian": ("sinusoidal-tensor2tensor", 1e-6), "transformers": ("sinusoidal-halves", 1e-5)}
_TRAINED_BY = {"marian": "Marian", "transformers": "transformers (MarianMTModel)"}
_NOTES = {
    "marian": "Positions are Marian's own (frequencies of tensor2tensor), not those that transformers computes.",
    "transformers": "Positions are those that transformers computes for MarianMTModel, not Marian's own.",
}
_NEVER = -1e4  # a logit for padding, to which Marian gives no probability; float16 can express it


def matches(source: Path) -> bool:
    """Return whether this is a folder of a `MarianMTModel`."""
    return model_type(source) == MarianConfig.model_type


def read(source: Path, options: ImportOptions) -> Imported:
    """Return the model of a folder, with Marian's own positions unless it was trained with those of transformers.

    Raises:
        UserError: for a folder that is incomplete or damaged, and settings that our architecture does not have.
    """
    positions = options.positions or ("transformers" if folders.was_trained_there(source) else "marian")
    config = folders.config_of(source, MarianConfig)
    ties, weights = _renamed(read_weights(source), config)
    if positions == "marian":
        weights["lm_head.bias"][config.pad_token_id] = _NEVER
    encoding, epsilon = _POSITIONS[positions]
    facts = folders.facts_of_folder(source, _TRAINED_BY[positions], _languages(source))
    facts.notes = (_NOTES[positions],)
    return Imported(
        VaswaniConfig(
            **folders.shared_settings(config),
            **ties,
            vocab_size=config.vocab_size,
            decoder_vocab_size=None if config.share_encoder_decoder_embeddings else config.decoder_vocab_size,
            output_bias=True,
            position_encoding=encoding,
            layer_norm_eps=epsilon,
            bos_token_id=None,  # Marian has none
        ),
        weights,
        marian_tokenizer(source),
        facts,
        folders.search_settings(source, config),
    )


def _languages(folder: Path) -> tuple[str, ...]:
    """Return source and target language as the tokenizer's configuration names them; empty where it does not."""
    path = folder / "tokenizer_config.json"
    values = read_json(path) if path.is_file() else {}
    languages = values.get("source_lang"), values.get("target_lang")
    return languages if all(map(is_language, languages)) else ()


def _renamed(weights: dict[str, torch.Tensor], config: MarianConfig) -> tuple[dict[str, bool], dict[str, torch.Tensor]]:
    """Return the ties of the embeddings, and the weights by our names; only embeddings and bias have others."""
    for stack in ("encoder", "decoder"):
        weights.pop(f"model.{stack}.embed_positions.weight", None)  # computed, not trained
    # A tied matrix may be stored under one of its names alone.
    shared = ["model.shared.weight", "lm_head.weight"] if config.share_encoder_decoder_embeddings else []
    decoder = folders.take(weights, "model.decoder.embed_tokens.weight", *shared, "lm_head.weight")
    output = folders.take(weights, "lm_head.weight", "model.decoder.embed_tokens.weight", *shared)
    encoder = folders.take(weights, "model.encoder.embed_tokens.weight", *shared)
    for name in ("encoder.embed_tokens", "decoder.embed_tokens", "shared"):
        weights.pop(f"model.{name}.weight", None)
    weights.pop("lm_head.weight", None)
    bias = weights.pop("final_logits_bias", None)
    bias = output.new_zeros(len(output)) if bias is None else bias.flatten().clone()
    ties, matrices = embeddings(encoder, decoder, output)
    return ties, weights | matrices | {"lm_head.bias": bias}
