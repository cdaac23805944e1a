"""facebook/wmt19-* and allenai/wmt16-*: folders of transformers' `FSMTForConditionalGeneration`."""

from pathlib import Path

import torch
from transformers import FSMTConfig

from ..hub.card_facts import is_language
from ..model.configuration_vaswani import VaswaniConfig
from .source import Imported, ImportOptions, embeddings, model_type
from .tables import read_weights
from .transformers_folders import config_of, facts_of_folder, search_settings, shared_settings, take
from .transformers_tokenizers import fsmt_tokenizer

NAME = "FSMTForConditionalGeneration of transformers (facebook/wmt19)"


def matches(source: Path) -> bool:
    """Return whether this is a folder of an `FSMTForConditionalGeneration`."""
    return model_type(source) == FSMTConfig.model_type


def read(source: Path, _: ImportOptions) -> Imported:
    """Return the model of a folder.

    Raises:
        UserError: for a folder that is incomplete or damaged, and settings that our architecture does not have.
    """
    config = config_of(source, FSMTConfig)
    ties, weights = _renamed(read_weights(source), config)
    languages = tuple(config.langs) if len(config.langs) == 2 and all(map(is_language, config.langs)) else ()
    return Imported(
        VaswaniConfig(
            **shared_settings(config),
            **ties,
            vocab_size=config.src_vocab_size,
            decoder_vocab_size=config.tgt_vocab_size,
            position_encoding="sinusoidal-tensor2tensor",
            position_offset=config.pad_token_id + 1,
            layer_norm_eps=1e-5,
            bos_token_id=config.bos_token_id,
        ),
        weights,
        fsmt_tokenizer(source),
        facts_of_folder(source, "fairseq", languages),
        search_settings(source, config),
    )


def _renamed(weights: dict[str, torch.Tensor], config: FSMTConfig) -> tuple[dict[str, bool], dict[str, torch.Tensor]]:
    """Return the ties of the embeddings, and the weights by our names, which differ in the embeddings alone."""
    names = [f"model.{name}.weight" for name in ("encoder.embed_tokens", "decoder.embed_tokens")]
    output_name = "model.decoder.output_projection.weight"
    decoder = take(weights, names[1], output_name)
    encoder = take(weights, *names[: 2 if config.tie_word_embeddings else 1])
    output = take(weights, output_name, names[1])
    for name in (*names, output_name, *(f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder"))):
        weights.pop(name, None)  # positions are computed, not trained
    ties, matrices = embeddings(encoder, decoder, output)
    return ties, weights | matrices
