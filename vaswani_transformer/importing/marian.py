"""Marian's own models: an `.npz` file with its options inside, and the vocabularies beside it.

What each option does to the arithmetic was read from Marian's `src/models/transformer.h` (`type: transformer`) and
`src/layers_new/transformer.h` (`type: transformer-new`) of version 1.12.
"""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import UserError, one_line
from ..json_and_yaml import MOST_YAML, parse_yaml, read_yaml
from ..marian_format import ACTIVATIONS, CONFIG, LAYER_NORM_EPS, NEW, stack_parameters
from ..model.configuration_vaswani import VaswaniConfig
from .marian_vocabularies import Vocabularies, read_tokenizer
from .source import Facts, Imported, ImportOptions

NAME = "a model of Marian (.npz)"
_NO_PROBABILITY = -1e4  # output bias of ids that Marian does not have
_BINARY_VERSION = (1).to_bytes(8, "little")  # how Marian's .bin files begin
_AGAIN = "copy the file again"
#: Options with the only value that has a counterpart here, which is also what an older model means that lacks it.
_ONLY: dict[str, Any] = {
    "transformer-decoder-autoreg": "self-attention",
    "transformer-ffn-depth": 2,
    "transformer-attention-mask": "default",
    "transformer-disable-position-embeddings": False,
    "transformer-no-projection": False,
    "transformer-no-bias": False,
    "transformer-no-affine": False,
    "transformer-pool": False,
    "transformer-tied-layers": [],
    "transformer-train-positions": False,
    "right-left": False,
    "ulr": False,
    "lemma-dim-emb": 0,
    "lemma-dependency": "",
    "factors-dim-emb": 0,
}  # fmt: skip


def is_one(source: Path) -> bool:
    """Whether a source is Marian's: an `.npz` file, a folder that holds one and no model of transformers, or a `.bin`
    file of Marian's.
    """
    if source.is_dir():
        return not (source / "config.json").exists() and bool(_models(source))
    if source.suffix == ".bin" and source.is_file():
        with source.open("rb") as file:
            return file.read(8) == _BINARY_VERSION
    return source.suffix == ".npz"


def read(source: Path, options: ImportOptions) -> Imported:
    """A model of Marian's in our terms.

    Its decoder starts from a zero vector: a padding entry that Marian does not have is added at the end of the
    vocabularies, with a row of zeros.

    Raises:
        UserError: for a file that is damaged, an option that has no counterpart here, by its name, and vocabularies
            that are missing or do not fit.
    """
    path = _model_file(source)
    arrays = _read_arrays(path)
    settings = _settings(arrays.pop(CONFIG, None), path)
    _check(settings, path)
    decoder = _decoder_settings(path)
    sizes = settings.get("dim-vocabs")
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)):
        raise UserError(f"{path} has dim-vocabs {sizes}: a model from one source to one target has two sizes")
    for name, size in zip(_embeddings(settings), sizes, strict=True):
        if name not in arrays or arrays[name].shape[:1] != (size,):
            rows = f"of shape {arrays[name].shape}" if name in arrays else "missing"
            raise UserError(f"{path} has dim-vocabs {sizes}, and {name} is {rows}: {_AGAIN}")
    vocabularies = Vocabularies.find(path, options.vocabularies, settings, decoder, sizes)
    config = _config(settings, vocabularies, arrays, path)
    weights = _weights(arrays, config, settings)
    generation: dict[str, Any] = {"suppress_tokens": [vocabularies.unk]}
    if decoder is not None:
        # Marian divides a score by (generated tokens)^normalize, the end token counted: transformers' own rule.
        generation |= {
            "num_beams": decoder.get("beam-size", 12),
            "length_normalization": "power",
            "length_penalty": float(decoder.get("normalize", 0)),
        }
        if decoder.get("word-penalty"):
            generation["word-penalty"] = decoder["word-penalty"]
        if decoder.get("allow-unk"):
            del generation["suppress_tokens"]
    return Imported(config, weights, read_tokenizer(vocabularies), _facts(path, settings), generation)


def _models(folder: Path) -> list[Path]:
    """The models in a folder, without what Marian's training keeps beside them."""
    return sorted(path for path in folder.glob("*.npz") if not path.name.endswith(".optimizer.npz"))


def _model_file(source: Path) -> Path:
    if source.suffix == ".bin":
        raise UserError(
            f"{source} is a model of Marian in its binary format, which holds packed or quantised weights: give the"
            " .npz file that it was made from"
        )
    if not source.is_dir():
        return source
    models = _models(source)
    if len(models) > 1:
        named = (_decoder_settings(source / "model.npz") or {}).get("models")
        names = [Path(name).name for name in named] if isinstance(named, list) else []
        models = [path for path in models if path.name in names] or models
    if len(models) > 1:
        raise UserError(
            f"{source} holds {len(models)} models ({', '.join(path.name for path in models[:5])}): give one"
        )
    return models[0]


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an `.npz` file by name, without running pickled code."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise UserError(f"{path} is compressed, which Marian never does: write it with numpy.savez")
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"there is no file {path}: give a model of Marian's") from None
    except Exception as error:  # bytes that are no archive, or no array, make numpy raise errors of any kind
        raise UserError(f"{path} is damaged, or holds more than plain arrays ({one_line(error)}): {_AGAIN}") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise UserError(f"{name!r:.200} in {path} is no array: {_AGAIN}")
        if not name.startswith("special:") and array.dtype not in (np.float32, np.float16, np.float64):
            raise UserError(
                f"{name!r:.200} in {path} is of type {array.dtype}: packed and quantised models of Marian cannot be"
                " read, give the model in float32"
            )
    return arrays


def _settings(array: np.ndarray | None, path: Path) -> dict[str, Any]:
    """The options of a model, which end at the first of several NULs."""
    if array is None:
        raise UserError(f"{path} has no {CONFIG}, in which Marian keeps a model's options: give a model of Marian's")
    try:
        if array.nbytes > MOST_YAML:
            raise ValueError(f"it has more than {MOST_YAML:,} bytes")
        settings = parse_yaml(array.tobytes().partition(b"\0")[0].decode("utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it must hold options by name")
    except ValueError as error:
        raise UserError(f"{CONFIG} in {path} is damaged ({one_line(error)}): {_AGAIN}") from error
    return settings


def _check(settings: dict[str, Any], path: Path) -> None:
    """Refuse options that change the arithmetic to what the paper does not have."""

    def refuse(name: str, rule: str) -> None:
        raise UserError(f"{path} has {name} {settings.get(name)!r}, which has no counterpart here: only {rule} has")

    if settings.get("type") not in LAYER_NORM_EPS:
        refuse("type", " and ".join(LAYER_NORM_EPS))
    for name, only in _ONLY.items():
        if settings.get(name, only) != only:
            refuse(name, f"{only!r}")
    if settings.get("input-types", []) not in ([], ["sequence", "sequence"]):
        refuse("input-types", "a source and a target")
    if settings.get("transformer-decoder-ffn-depth", 0) not in (0, 2):
        refuse("transformer-decoder-ffn-depth", "2")
    if settings.get("transformer-decoder-dim-ffn", 0) not in (0, settings.get("transformer-dim-ffn")):
        refuse("transformer-decoder-dim-ffn", "the encoder's")
    if settings.get("transformer-ffn-activation", "swish") not in ACTIVATIONS:
        refuse("transformer-ffn-activation", ", ".join(ACTIVATIONS))
    # d(ropout), a(dd), n(ormalise): the paper adds and normalises after each sublayer. Dropout is for training.
    if "n" in str(settings.get("transformer-preprocess", "")):
        raise UserError(
            f"{path} is pre-norm (transformer-preprocess {settings['transformer-preprocess']!r}): the paper's"
            " Transformer normalises after each sublayer"
        )
    operations = {
        "transformer-preprocess": ("", ("",)),
        "transformer-postprocess": ("dan", ("an",)),
        "transformer-postprocess-emb": ("d", ("",)),
        "transformer-postprocess-top": ("", ("", "n")),
    }
    for name, (default, known) in operations.items():
        if str(settings.get(name, default)).replace("d", "") not in known:
            refuse(name, f"{default!r}")


def _decoder_settings(path: Path) -> dict[str, Any] | None:
    """The settings for decoding beside a model, if there are some."""
    for name in (f"{path.name}.decoder.yml", "decoder.yml"):
        try:
            settings = read_yaml(path.parent / name, "correct it, or delete it and give --vocabulary")
        except FileNotFoundError:
            continue
        if not isinstance(settings, dict):
            raise UserError(f"{path.parent / name} must hold options by name: correct it, or delete it")
        for option in ("beam-size", "normalize"):
            if not isinstance(settings.get(option, 1), (int, float)):
                raise UserError(f"{path.parent / name} has {option} {settings[option]!r}: it must be a number")
        return settings
    return None


def _config(
    settings: dict[str, Any], vocabularies: Vocabularies, arrays: dict[str, np.ndarray], path: Path
) -> VaswaniConfig:
    ties = _ties(settings)
    new = settings["type"] == NEW
    learned = new and settings.get("transformer-train-position-embeddings", False)  # the other type has no such table
    table = arrays.get("TransformerBatchEncoder->encoder->positionEmbedding->embeddings")
    rows = {"max_position_embeddings": len(table)} if learned and table is not None and table.ndim else {}
    try:
        return VaswaniConfig(
            vocab_size=vocabularies.pad + 1,
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
            tie_word_embeddings=ties["output"],
            share_encoder_decoder_embeddings=ties["source"],
            bos_token_id=None,
            pad_token_id=vocabularies.pad,
            eos_token_id=vocabularies.eos,
            decoder_start_token_id=vocabularies.pad,
            **rows,
        )
    except Exception as error:  # of several classes; each names the field
        raise UserError(f"{path} describes no usable model: {one_line(error)}") from error


def _ties(settings: dict[str, Any]) -> dict[str, bool]:
    """Whether the source's embeddings, and the output projection, are the target's embeddings."""
    every = settings.get("tied-embeddings-all", False)
    return {
        "source": every or settings.get("tied-embeddings-src", False),
        "output": every or settings.get("tied-embeddings", False),
    }


def _embeddings(settings: dict[str, Any]) -> tuple[str, str]:
    """Marian's names of the embeddings of both sides."""
    return ("Wemb", "Wemb") if _ties(settings)["source"] else ("encoder_Wemb", "decoder_Wemb")


def _weights(arrays: dict[str, np.ndarray], config: VaswaniConfig, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights under our names; what the configuration does not describe stays under Marian's."""
    theirs = {
        name: torch.from_numpy(array).float() for name, array in arrays.items() if not name.startswith("special:")
    }
    weights, rows = {}, config.vocab_size
    for ours, (name, kind) in stack_parameters(config, settings["type"]).items():
        if name in theirs:
            tensor = theirs.pop(name)
            if kind != "table":
                tensor = tensor.flatten() if kind == "vector" else tensor.T if tensor.ndim == 2 else tensor
            weights[ours] = tensor
    ties = _ties(settings)
    if "decoder_ff_logit_out_W" in theirs:  # as early versions stored it
        theirs["decoder_ff_logit_out_Wt"] = theirs.pop("decoder_ff_logit_out_W").T
    apart = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    names = dict(zip(apart, (*_embeddings(settings), "decoder_ff_logit_out_Wt"), strict=True))
    if config.shares_embeddings:
        names = {"model.shared.weight": "Wemb", "lm_head.weight": names["lm_head.weight"]}
    if ties["output"]:
        del names["lm_head.weight"]
    for ours, name in names.items():
        if name in theirs:
            size = settings["dim-vocabs"]["decoder" in ours or "lm_head" in ours]
            weights[ours] = _with_rows(theirs[name], size, rows, 0.0)
    bias = theirs.get("decoder_ff_logit_out_b")
    if bias is None and settings.get("output-omit-bias"):
        bias = torch.zeros(settings["dim-vocabs"][1])
    if bias is not None:
        weights["lm_head.bias"] = _with_rows(bias.flatten(), settings["dim-vocabs"][1], rows, _NO_PROBABILITY)
    taken = {*names.values(), "decoder_ff_logit_out_b"}
    return weights | {name: tensor for name, tensor in theirs.items() if name not in taken}


def _with_rows(tensor: torch.Tensor, size: int, rows: int, value: float) -> torch.Tensor:
    """A tensor of `size` rows with more of one value at its end, `rows` in all; of another size, as it is."""
    if not tensor.ndim or len(tensor) != size:
        return tensor
    return torch.cat([tensor, tensor.new_full((rows - size, *tensor.shape[1:]), value)])


def _facts(path: Path, settings: dict[str, Any]) -> Facts:
    license = path.parent / "LICENSE"  # as archives of OPUS-MT have it
    text = b""
    if license.is_file():
        with license.open("rb") as file:
            text = file.read(1000)
    return Facts(
        toolkit="Marian",
        source=path.name,
        license="cc-by-4.0" if b"Attribution 4.0 International" in text else None,
        notes=(f"It was trained by Marian {settings.get('version', 'of an unknown version')}."[:200],),
    )
