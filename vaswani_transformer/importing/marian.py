"""Marian's own models: an `.npz` file with its options inside, and the vocabularies beside it.

What each option does to the arithmetic was read from Marian's `src/models/transformer.h` (`type: transformer`) and
`src/layers_new/transformer.h` (`type: transformer-new`) of version 1.12.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import UserError, reading
from ..json_and_yaml import MOST_YAML, parse_yaml, read_yaml
from ..marian_format import ACTIVATIONS, CONFIG, EOS, LAYER_NORM_EPS, NEW, NO_PROBABILITY, UNK, stack_parameters
from ..model.configuration_vaswani import VaswaniConfig
from .marian_vocabularies import Vocabulary, find_vocabularies, read_tokenizer
from .source import Facts, Imported, is_compressed, only_one

NAME = "a model of Marian (.npz)"
_POSITIONS = "TransformerBatchEncoder->encoder->positionEmbedding->embeddings"
#: Options with the values that have a counterpart here; the first is what a model means that lacks the option. What
#: others change (depths, widths, tied layers, missing biases) is seen in the names and shapes of the weights. Of the
#: operations d(ropout), a(dd) and n(ormalise) the paper adds and normalises after each sublayer (post-norm).
_KNOWN: dict[str, tuple] = {
    "type": tuple(LAYER_NORM_EPS),
    "input-types": ([], ["sequence", "sequence"]),
    "transformer-ffn-activation": ("swish", *ACTIVATIONS),
    "transformer-postprocess": ("an",),
    "transformer-postprocess-top": ("", "n"),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-attention-mask": ("default",),
    **dict.fromkeys(("transformer-preprocess", "transformer-postprocess-emb", "lemma-dependency"), ("",)),
    **dict.fromkeys(("lemma-dim-emb", "factors-dim-emb"), (0,)),
    **dict.fromkeys(("right-left", "ulr", "transformer-pool", "transformer-train-positions"), (False,)),
    "transformer-disable-position-embeddings": (False,),
}


def matches(source: Path) -> bool:
    """Return whether a source is Marian's: an `.npz` file, or a folder with one and no config.json."""
    if source.is_dir():
        return not (source / "config.json").exists() and bool(_models(source))
    return source.suffix == ".npz" and source.is_file()


def read(source: Path, vocabularies: Sequence[Path] = ()) -> Imported:
    """Return a model of Marian's in our terms; `UserError` for an option without a counterpart here, by its name.

    Its decoder starts from a zero vector: a padding entry is added at the end of the vocabularies, with a row of zeros.
    """
    path = source
    if source.is_dir():
        models = _models(source)
        named = (_decoder_settings(source / "model.npz") or {}).get("models")
        names = [Path(name).name for name in named] if isinstance(named, list) else []
        path = only_one([model for model in models if model.name in names] or models, source)
    with reading(path):
        arrays = _read_arrays(path)
        # The options end at the first of several NULs.
        settings = parse_yaml(arrays.pop(CONFIG)[:MOST_YAML].tobytes().partition(b"\0")[0].decode("utf-8"))
        _check(settings, arrays, path)
        decoder = _decoder_settings(path)
        sides = find_vocabularies(path, vocabularies, settings, decoder)
        config = _config(settings, sides[1], arrays)
        weights = _weights(arrays, config, settings)
    generation: dict[str, Any] = {"suppress_tokens": [sides[1].ids[UNK]]}  # which Marian does not put out
    if decoder is not None:
        # Marian divides a score by (generated tokens)^normalize, the end token counted: transformers' own rule.
        generation |= {"length_normalization": "power", "num_beams": decoder.get("beam-size", 12)}
        if generation["num_beams"] > 1:
            generation["length_penalty"] = float(decoder.get("normalize", 0))
        if decoder.get("word-penalty"):
            generation["word-penalty"] = decoder["word-penalty"]
        if decoder.get("allow-unk"):
            del generation["suppress_tokens"]
    license = path.parent / "LICENSE"  # as archives of OPUS-MT have it
    is_free = license.is_file() and b"Attribution 4.0 International" in license.read_bytes()[:1000]
    note = f"It was trained by Marian {settings.get('version', 'of an unknown version')}."[:200]
    facts = Facts("Marian", path.name, "cc-by-4.0" if is_free else None, notes=(note,))
    return Imported(config, weights, read_tokenizer(*sides), facts, generation)


def _models(folder: Path) -> list[Path]:
    """Return the models in a folder, without what Marian's training keeps beside them."""
    return sorted(path for path in folder.glob("*.npz") if not path.name.endswith(".optimizer.npz"))


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of an `.npz` file by name, without running pickled code."""
    with np.load(path, allow_pickle=False) as archive:
        arrays = {} if is_compressed(path) else {name: archive[name] for name in archive.files}
    plain = (np.float32, np.float16, np.float64)
    packed = [name for name, array in arrays.items() if name[:8] != "special:" and array.dtype not in plain]
    if packed or not arrays:
        problem = f"holds {packed[0]!r:.200}, packed or quantised" if packed else "is compressed or empty"
        raise UserError(f"{path} {problem}: give the model as Marian's training writes it, in float32")
    return arrays


def _check(settings: dict[str, Any], arrays: dict[str, np.ndarray], path: Path) -> None:
    """Refuse options that change the arithmetic to what the paper does not have."""
    rows = [len(arrays[name]) for name in _matrices(settings)[:2]]
    for name, known in (_KNOWN | {"dim-vocabs": (rows,)}).items():
        value = settings.get(name, known[0])
        is_operations = name.startswith("transformer-p") and isinstance(value, str)
        if (value.replace("d", "") if is_operations else value) not in known:  # dropout is for training
            rule = " or ".join(map(repr, known))
            raise UserError(f"{path} has {name} {value!r:.200}, which has no counterpart here: only {rule}")


def _decoder_settings(path: Path) -> dict[str, Any] | None:
    """Return the settings for decoding beside a model, or None."""
    for file in (path.with_name(f"{path.name}.decoder.yml"), path.with_name("decoder.yml")):
        if file.is_file():
            with reading(file):
                return dict(read_yaml(file))
    return None


def _config(settings: dict[str, Any], vocabulary: Vocabulary, arrays: dict[str, np.ndarray]) -> VaswaniConfig:
    source, target, output = _matrices(settings)
    # The other type has no such table.
    learned = settings["type"] == NEW and settings.get("transformer-train-position-embeddings", False)
    rows = {"max_position_embeddings": len(arrays[_POSITIONS])} if learned else {}
    return VaswaniConfig(
        vocab_size=vocabulary.pad + 1,
        d_model=settings["dim-emb"],
        d_ff=settings["transformer-dim-ffn"],
        num_heads=settings["transformer-heads"],
        encoder_layers=settings["enc-depth"],
        decoder_layers=settings["dec-depth"],
        activation_function=ACTIVATIONS[settings.get("transformer-ffn-activation", "swish")],
        attention_bias=True,
        output_bias=True,
        position_encoding="learned" if learned else "sinusoidal-tensor2tensor",
        scale_embedding=not learned,
        layer_norm_eps=LAYER_NORM_EPS[settings["type"]],
        add_final_layer_norm="n" in settings.get("transformer-postprocess-top", ""),
        tie_word_embeddings=output == target,
        share_encoder_decoder_embeddings=source == target,
        bos_token_id=None,
        pad_token_id=vocabulary.pad,
        eos_token_id=vocabulary.ids[EOS],
        decoder_start_token_id=vocabulary.pad,
        **rows,
    )


def _matrices(settings: dict[str, Any]) -> tuple[str, str, str]:
    """Return Marian's names of the embeddings of both sides and of the output projection: the same where tied."""
    every = settings.get("tied-embeddings-all", False)
    source, target = "encoder_Wemb", "decoder_Wemb"
    if every or settings.get("tied-embeddings-src", False):
        source = target = "Wemb"
    return source, target, target if every or settings.get("tied-embeddings", False) else "decoder_ff_logit_out_Wt"


def _weights(arrays: dict[str, np.ndarray], config: VaswaniConfig, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights under our names; what the configuration does not describe stays under Marian's."""
    theirs = {name: torch.from_numpy(array).float() for name, array in arrays.items() if name[:8] != "special:"}
    weights = {}
    for ours, (name, kind) in stack_parameters(config, settings["type"]).items():
        if name in theirs:
            tensor = theirs.pop(name)
            if kind != "table":
                tensor = tensor.flatten() if kind == "vector" else tensor.T if tensor.ndim == 2 else tensor
            weights[ours] = tensor
    if "decoder_ff_logit_out_W" in theirs:  # as early versions stored it
        theirs["decoder_ff_logit_out_Wt"] = theirs.pop("decoder_ff_logit_out_W").T

    def with_padding(name: str, side: int, value: float) -> torch.Tensor:
        """Return a matrix or the bias of a vocabulary, with rows of one value for the ids that Marian does not have."""
        tensor = theirs[name]
        rows = tensor.new_full((config.vocab_size - settings["dim-vocabs"][side], *tensor.shape[1:]), value)
        return torch.cat([tensor, rows])

    source, target, output = _matrices(settings)
    weights["model.encoder.embed_tokens.weight"] = with_padding(source, 0, 0.0)
    weights["model.decoder.embed_tokens.weight"] = with_padding(target, 1, 0.0)
    weights["lm_head.weight"] = with_padding(output, 1, 0.0)
    bias = "decoder_ff_logit_out_b"
    if settings.get("output-omit-bias"):
        theirs.setdefault(bias, torch.zeros(settings["dim-vocabs"][1]))
    theirs[bias] = theirs[bias].flatten()
    weights["lm_head.bias"] = with_padding(bias, 1, NO_PROBABILITY)
    taken = {source, target, output, bias}
    return weights | {name: tensor for name, tensor in theirs.items() if name not in taken}
