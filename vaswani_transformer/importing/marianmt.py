"""OPUS-MT and its kin: folders of transformers' `MarianMTModel`; a fast tokenizer with the same ids where it exists."""

import warnings
from pathlib import Path
from typing import Any

from transformers import MarianConfig, PreTrainedTokenizerBase
from transformers.trainer import TRAINER_STATE_NAME

from ..data.slow_tokenizers import load_slow_tokenizer
from ..errors import UserError, reading
from ..json_and_yaml import read_json
from ..marian_format import NO_PROBABILITY
from ..model.configuration_vaswani import VaswaniConfig
from ..model.tokenization_vaswani import VaswaniTokenizer
from . import transformers_folders as folders
from .sentencepiece import Unsupported, backend
from .source import Imported, model_type, read_weights
from .transformers_folders import DECODER, ENCODER

NAME = "MarianMTModel of transformers (OPUS-MT)"
# Marian computes tensor2tensor's positions; transformers computes others for the same weights, and models that were
# trained there have learned with those. The two add different numbers to the variance in layer normalisation.
_POSITIONS = {
    "marian": ("sinusoidal-tensor2tensor", 1e-6, "Marian",
               "Positions are Marian's own (frequencies of tensor2tensor), not those that transformers computes."),
    "transformers": ("sinusoidal-halves", 1e-5, "transformers (MarianMTModel)",
                     "Positions are those that transformers computes for MarianMTModel, not Marian's own."),
}  # fmt: skip
_OUTPUT = "lm_head.weight"
_KEPT = ("model_max_length", "source_lang", "target_lang")  # of the entries of tokenizer_config.json
_TOKENS = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def matches(source: Path) -> bool:
    """Return whether this is a folder of a `MarianMTModel`."""
    return model_type(source) == MarianConfig.model_type


def read(source: Path, positions: str | None = None) -> Imported:
    """Return the model of a folder, with Marian's own positions unless it was trained with those of transformers."""
    is_of_trainer = any((source / name).is_file() for name in ("training_args.bin", TRAINER_STATE_NAME))
    positions = positions or ("transformers" if is_of_trainer else "marian")
    encoding, epsilon, toolkit, note = _POSITIONS[positions]
    config = folders.config_of(source, MarianConfig)
    weights = read_weights(source)
    bias = weights.pop("final_logits_bias")
    shared = ("model.shared.weight", ENCODER, DECODER, _OUTPUT) if config.share_encoder_decoder_embeddings else ()
    sides = (ENCODER, *shared), (DECODER, *shared, _OUTPUT), (_OUTPUT, DECODER, *shared)
    ties, weights = folders.renamed(weights, *sides)
    weights["lm_head.bias"] = bias.flatten().clone()
    if positions == "marian":
        weights["lm_head.bias"][config.pad_token_id] = NO_PROBABILITY
    languages = map(_tokenizer_settings(source).get, ("source_lang", "target_lang"))
    facts = folders.facts_of_folder(source, toolkit, languages)
    facts.notes = (note,)
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


def marian_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder: source.spm, target.spm, vocab.json, perhaps target_vocab.json.

    Its ids are those of `MarianTokenizer`, but that "</s>" in a text is text, and so is a prefix such as ``>>Oh<<``
    for models without language codes, as for Marian itself. Where two ways to cut a text have the same score, the other
    one may be taken: SentencePiece adds scores in float32 and `tokenizers` in float64.

    Returns:
        A `VaswaniTokenizer`; `MarianTokenizer` for SentencePiece models that `tokenizers` cannot follow.

    Raises:
        UserError: a file is missing or damaged, tokens were added to the vocabulary, the special tokens have different
            ids in the two vocabularies, or `MarianTokenizer` is needed and sentencepiece is not installed.
    """
    settings = _tokenizer_settings(folder)
    names = ("vocab.json", "target_vocab.json" if settings.get("separate_vocabs") else "vocab.json")
    vocabularies = [folders.read_vocabulary(folder / name) for name in names]
    tokens = {name: _text(settings.get(name)) or default for name, default in _TOKENS.items()}
    if added := sorted(_added_tokens(folder, settings) - vocabularies[0].keys()):
        fix = "add them to vocab.json and to the SentencePiece models, or import the model without them"
        names = f"tokens that were added to its tokenizer ({', '.join(added):.200})"
        raise UserError(f"{folder} has {names}, which are not kept: {fix}")
    with reading(folder):
        try:
            files = zip(("source.spm", "target.spm"), vocabularies, strict=True)
            backends = [backend(folder / file, ids, list(tokens.values())) for file, ids in files]
        except Unsupported:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it recommends sacremoses, which it does not use
                return load_slow_tokenizer(folder, "MarianTokenizer")
        return VaswaniTokenizer(
            tokenizer_object=backends[0],
            target_tokenizer_object=backends[1],
            known_tokens=tuple(1 + max(vocabulary.values()) for vocabulary in vocabularies),
            **tokens,
            **{name: settings[name] for name in _KEPT if settings.get(name) is not None},
        )


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.exists() else {}


def _added_tokens(folder: Path, settings: dict) -> set[str]:
    """Return the texts of tokens that were added to a tokenizer after its training."""
    path = folder / "added_tokens.json"
    added = read_json(path) if path.exists() else {}
    listed = settings.get("added_tokens_decoder")
    return {str(token) for token in (*added, *map(_text, listed.values() if isinstance(listed, dict) else ()))}


def _text(token) -> str | None:
    return token.get("content") if isinstance(token, dict) else token
