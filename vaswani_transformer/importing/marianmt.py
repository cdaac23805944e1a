"""OPUS-MT and its kin: folders of transformers' `MarianMTModel`; a fast tokenizer with the same ids where it exists."""

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, MarianConfig, PreTrainedTokenizerBase
from transformers.trainer import TRAINER_STATE_NAME

from ..data.tokenization import load_marian_tokenizer
from ..errors import UserError, reading
from ..hub.card_facts import is_language, metadata
from ..json_and_yaml import read_json
from ..marian_format import ACTIVATIONS, NO_PROBABILITY
from ..model.configuration_vaswani import VaswaniConfig
from ..model.tokenization_vaswani import VaswaniTokenizer
from .sentencepiece import Unsupported, backend
from .source import Facts, Imported, model_type, read_pickle, tensors_of

NAME = "MarianMTModel of transformers (OPUS-MT)"
# Marian computes tensor2tensor's positions; transformers computes others for the same weights, and models that were
# trained there have learned with those. The two add different numbers to the variance in layer normalisation.
_POSITIONS = {
    "marian": ("sinusoidal-tensor2tensor", 1e-6, "Marian",
               "Positions are Marian's own (frequencies of tensor2tensor), not those that transformers computes."),
    "transformers": ("sinusoidal-halves", 1e-5, "transformers (MarianMTModel)",
                     "Positions are those that transformers computes for MarianMTModel, not Marian's own."),
}  # fmt: skip
_SHARED = "model.shared.weight"
_ENCODER, _DECODER = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
_OUTPUT = "lm_head.weight"
_IDS = ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id")  # our configuration has them
_SAME = ("d_model", "encoder_layers", "decoder_layers", "max_position_embeddings", "scale_embedding", *_IDS[1:],
         "dropout", "attention_dropout", "activation_dropout")  # fmt: skip
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
    path = source / "config.json"
    values = read_json(path)
    with reading(path):
        config = MarianConfig(**{name: values[name] for name in values.keys() & MarianConfig.__annotations__.keys()})
    for name in ("attention_heads", "ffn_dim"):
        if (own := getattr(config, f"decoder_{name}")) != (other := getattr(config, f"encoder_{name}")):
            value = f"decoder_{name} in {path} is {own}"
            raise UserError(f"{value}: only models with as many in the encoder, which has {other}, can be imported")
    safe, pickled = source / "model.safetensors", source / "pytorch_model.bin"
    path = safe if safe.is_file() else pickled
    with reading(path):
        weights = load_file(path) if path is safe else tensors_of(read_pickle(path), path)
    bias = weights.pop("final_logits_bias").flatten().clone()
    if positions == "marian":
        bias[config.pad_token_id] = NO_PROBABILITY
    encoder, decoder, output = _matrices(weights, config.share_encoder_decoder_embeddings)
    computed = [f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")]
    weights = {name: tensor for name, tensor in weights.items() if name not in (_SHARED, *computed)}
    weights |= {_ENCODER: encoder, _DECODER: decoder, _OUTPUT: output, "lm_head.bias": bias}
    return Imported(
        VaswaniConfig(
            **{name: getattr(config, name) for name in _SAME},
            vocab_size=config.vocab_size,
            decoder_vocab_size=None if config.share_encoder_decoder_embeddings else config.decoder_vocab_size,
            d_ff=config.encoder_ffn_dim,
            num_heads=config.encoder_attention_heads,
            activation_function=ACTIVATIONS.get(config.activation_function, config.activation_function),
            attention_bias=True,
            output_bias=True,
            position_encoding=encoding,
            layer_norm_eps=epsilon,
            tie_word_embeddings=torch.equal(decoder, output),
            share_encoder_decoder_embeddings=torch.equal(encoder, decoder),
            bos_token_id=None,  # Marian has none
        ),
        weights,
        marian_tokenizer(source),
        _facts(source, toolkit, note),
        _search_settings(source, config, positions == "marian"),
    )


def _matrices(weights: dict[str, torch.Tensor], is_shared: bool) -> list[torch.Tensor]:
    """Return embeddings of encoder and decoder and the output projection, `(tokens, d_model)`; `KeyError` without one.

    A tied matrix may be stored under another of its names; one that `is_shared` has four.
    """
    shared = (_SHARED, _ENCODER, _DECODER, _OUTPUT) if is_shared else ()
    sides = (_ENCODER, *shared), (_DECODER, *shared, _OUTPUT), (_OUTPUT, _DECODER, *shared)
    return [weights[next(filter(weights.__contains__, names), names[0])] for names in sides]


def _search_settings(folder: Path, config: MarianConfig, is_marian: bool) -> dict[str, Any]:
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
    if is_marian and settings.get("bad_words_ids") in (None, [[config.pad_token_id]]):
        dropped.add("renormalize_logits")  # no effect without other processors; own searches lack it
    settings = {name: value for name, value in settings.items() if value is not None and name not in dropped}
    return {"length_normalization": "power", "length_penalty": 1.0, **settings}


def _facts(folder: Path, toolkit: str, note: str) -> Facts:
    """Return what a folder's configurations and card say about its model."""
    name = str(read_json(folder / "config.json").get("_name_or_path") or "")
    source = re.search(r"/(Helsinki-NLP/[\w.-]+)$", name)  # without a folder before it, of who trained it further
    path = folder / "README.md"
    card = metadata(path.read_text("utf-8", errors="replace")) if path.is_file() else {}
    settings = _read_if_there(folder / "tokenizer_config.json")
    codes = tuple(filter(is_language, map(settings.get, ("source_lang", "target_lang"))))
    page = f"https://huggingface.co/{source[1]}" if source else ""
    listed = tuple(card.get("languages", ()))  # of more than two perhaps by the alphabet
    languages = codes if len(codes) == 2 else listed if len(listed) == 2 else ()
    return Facts(toolkit, page, card.get("license"), languages, (note,))


def marian_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder: source.spm, target.spm, vocab.json, perhaps target_vocab.json.

    It is a `VaswaniTokenizer`, or a `MarianTokenizer` for SentencePiece models that `tokenizers` cannot follow. The ids
    of the former are those of the latter, but that "</s>" in a text is text, and so is a prefix such as ``>>Oh<<``
    for models without language codes, as for Marian itself. Where two ways to cut a text have the same score, the other
    one may be taken: SentencePiece adds scores in float32 and `tokenizers` in float64.

    `UserError` if a file is missing or damaged, tokens were added to the vocabulary, the special tokens have different
    ids in the two vocabularies, or `MarianTokenizer` is needed and sentencepiece is not installed.
    """
    settings = _read_if_there(folder / "tokenizer_config.json")
    names = ("vocab.json", "target_vocab.json" if settings.get("separate_vocabs") else "vocab.json")
    vocabularies = [_read_vocabulary(folder / name) for name in names]
    tokens = {name: _text(settings.get(name)) or default for name, default in _TOKENS.items()}
    listed = settings.get("added_tokens_decoder")
    listed = map(_text, listed.values() if isinstance(listed, dict) else ())
    if added := sorted({*_read_if_there(folder / "added_tokens.json"), *map(str, listed)} - vocabularies[0].keys()):
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
                return load_marian_tokenizer(folder)
        return VaswaniTokenizer(
            tokenizer_object=backends[0],
            target_tokenizer_object=backends[1],
            known_tokens=tuple(1 + max(vocabulary.values()) for vocabulary in vocabularies),
            **tokens,
            **{name: settings[name] for name in _KEPT if settings.get(name) is not None},
        )


def _read_vocabulary(path: Path) -> dict[str, int]:
    """Return the numbers of a vocabulary's tokens."""
    vocabulary = read_json(path)
    numbers = set(vocabulary.values())
    # Numbers far apart would make a table of as many names.
    is_whole = all(type(number) is int and 0 <= number < 2 * len(numbers) + 100 for number in numbers)
    if not is_whole or not 0 < len(vocabulary) == len(numbers):
        raise UserError(f"{path} is not a vocabulary, of tokens with numbers from 0 on: copy the folder again")
    return vocabulary


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _text(token) -> str | None:
    return token.get("content") if isinstance(token, dict) else token
