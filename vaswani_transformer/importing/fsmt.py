"""facebook/wmt19-* and allenai/wmt16-*: folders of transformers' `FSMTForConditionalGeneration`."""

from pathlib import Path

from transformers import FSMTConfig, PreTrainedTokenizerBase

from ..data.slow_tokenizers import load_slow_tokenizer
from ..errors import reading
from ..model.configuration_vaswani import VaswaniConfig
from . import transformers_folders as folders
from .source import Imported, model_type, read_weights
from .transformers_folders import DECODER, ENCODER

NAME = "FSMTForConditionalGeneration of transformers (facebook/wmt19)"
_OUTPUT = "model.decoder.output_projection.weight"


def matches(source: Path) -> bool:
    """Return whether this is a folder of an `FSMTForConditionalGeneration`."""
    return model_type(source) == FSMTConfig.model_type


def read(source: Path) -> Imported:
    """Return the model of a folder."""
    config = folders.config_of(source, FSMTConfig)
    tied = (ENCODER, DECODER, _OUTPUT) if config.tie_word_embeddings else ()
    sides = (ENCODER, *tied), (DECODER, _OUTPUT, *tied), (_OUTPUT, DECODER, *tied)
    ties, weights = folders.renamed(read_weights(source), *sides)
    return Imported(
        VaswaniConfig(
            **folders.shared_settings(config),
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
        folders.facts_of_folder(source, "fairseq", config.langs),
        folders.search_settings(source, config),
    )


def fsmt_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder: vocab-src.json, vocab-tgt.json, merges.txt.

    It is transformers' own, since Moses' rules have no counterpart in `tokenizers`.
    """
    for name in ("vocab-src.json", "vocab-tgt.json"):
        folders.read_vocabulary(folder / name)
    with reading(folder):
        return load_slow_tokenizer(folder, "FSMTTokenizer")  # which needs the two languages as langs
