"""Checkpoints of fairseq's `transformer`, such as those of `transformer.wmt16.en-de` and `transformer.wmt19.en-ru`.

What each option does to the arithmetic was read from fairseq's `models/transformer/` and `modules/`.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError, reading, shortened
from ..marian_format import ACTIVATIONS
from ..model.configuration_vaswani import VaswaniConfig
from .fairseq_vocabulary import read_dictionaries, read_tokenizer
from .source import Facts, Imported, only_one, read_pickle, tensors_of

NAME = "a checkpoint of fairseq (.pt)"

PAD, END = 1, 2  # numbers of every dictionary of fairseq's
_OTHER_TRANSFORMERS = ("transformer_lm", "transformer_ulm")
#: Options of models that compute something else than the paper's post-norm Transformer of one table for each side.
#: Dropout of layers and quantisation noise of the kind "pq" are not here: both act in training alone.
_REFUSED = (
    "encoder_normalize_before", "decoder_normalize_before", "layernorm_embedding", "no_token_positional_embeddings",
    "adaptive_input", "adaptive_softmax_cutoff", "char_inputs", "merge_src_tgt_embed", "no_cross_attention",
    "cross_self_attention", "base_layers", "quant_noise_scalar", "encoder_xformers_att_config",
    "decoder_xformers_att_config", "encoder_langtok", "decoder_langtok",
)  # fmt: skip
_SEGMENTATIONS = (None, "subword_nmt", "fastbpe", "sentencepiece")
_PLAIN = (str, int, float, type(None))
#: Entries without a meaning for the model: counters of versions, and tables that are computed.
_WITHOUT_MEANING = re.compile(r"(en|de)coder\.(version|embed_positions\.(weights|_float_tensor))")
# Names that fairseq itself renames when it loads an old checkpoint.
_OLD_NAMES = [
    (re.compile(r"(?<=^decoder\.)embed_out$"), "output_projection.weight"),
    (re.compile(r"(?<=\.)layer_norms\.0(?=\.)"), "self_attn_layer_norm"),
    (re.compile(r"^(encoder\..*\.)layer_norms\.1(?=\.)"), r"\1final_layer_norm"),
    (re.compile(r"^(decoder\..*\.)layer_norms\.1(?=\.)"), r"\1encoder_attn_layer_norm"),
    (re.compile(r"^(decoder\..*\.)layer_norms\.2(?=\.)"), r"\1final_layer_norm"),
]
_SIGNS = (b"model", b"decoder.embed_tokens.weight")
_HEAD = 1 << 22  # bytes in which the names of a checkpoint's entries are; tensors follow


def matches(source: Path) -> list[Path]:
    """Return the checkpoints of fairseq's that a source is, or holds as a folder; none for another source."""
    return sorted(filter(_is_checkpoint, source.glob("*.pt") if source.is_dir() else [source]))


def _is_checkpoint(path: Path) -> bool:
    """Return whether a file starts as a pickle of torch with fairseq's names in it; a quick look without reading it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD)
    # A string in a pickle of protocol 2, which torch.save writes: X and its length in 4 bytes.
    return all(b"X" + len(name).to_bytes(4, "little") + name in head for name in _SIGNS)


def read(source: Path, vocabularies: Sequence[Path] = (), bpe_codes: Path | None = None) -> Imported:
    """Return a `transformer` of fairseq's in our terms; `UserError` for an option without counterpart, by its name."""
    paths = matches(source) or [source]
    best = [path for path in paths if path.name in ("model.pt", "checkpoint_best.pt")]
    path = only_one(best[:1] or paths, source)
    with reading(path):
        content = read_pickle(path)
        settings = _settings(content)
        _check(settings, path)
        weights = _renamed(tensors_of(content["model"], path))
        config = _config(settings, weights)
    names = [settings.get(f"{side}_lang") for side in ("source", "target")]  # by the endings of files
    is_known = all(isinstance(name, str) and re.fullmatch(r"[\w.-]{1,40}", name) for name in names)
    languages = tuple(names) if is_known else ()
    sizes = config.vocab_size, config.target_vocab_size
    dictionaries = read_dictionaries(path, vocabularies, languages, sizes)
    tokenizer, note = read_tokenizer(path, bpe_codes, settings, languages, dictionaries)
    is_code = re.compile("(?!(src|tgt|trg|ref)$)[a-z]{2,3}(?![a-z])").match
    codes = tuple(name.replace("_", "-") for name in languages if is_code(name))
    facts = Facts(toolkit="fairseq", languages=codes if len(codes) == 2 else (), notes=(note,) if note else ())
    # fairseq's own search: it divides a score by the number of tokens, end counted; never padding, never the end alone.
    generation = {"num_beams": 5, "length_normalization": "power", "length_penalty": 1.0, "suppress_tokens": [PAD]}
    generation["min_new_tokens"] = 1
    return Imported(config, weights, tokenizer, facts, generation)


def _settings(content: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a model was trained with, flat: `args`, or the parts of `cfg` of newer checkpoints."""
    cfg = content.get("cfg") or {}
    settings: dict[str, Any] = {}
    for part in (*(cfg.get(name) for name in ("task", "bpe", "tokenizer", "model")), content.get("args")):
        part = vars(part) if isinstance(part, argparse.Namespace) else part
        for name, value in part.items() if isinstance(part, dict) else ():
            is_group = name in ("encoder", "decoder", "quant_noise") and isinstance(value, dict)
            new = {f"{name}_{key}": inner for key, inner in value.items()} if is_group else {name: value}
            # Of others it counts whether they are empty: the text of lists within lists may have no end.
            settings |= {key: inner if isinstance(inner, _PLAIN) else bool(inner) for key, inner in new.items()}
    for kind in ("bpe", "tokenizer"):
        if isinstance(cfg.get(kind), dict):
            settings[kind] = cfg[kind].get("_name")
    return {"arch": settings.get("_name"), **settings}


def _check(settings: dict[str, Any], path: Path) -> None:
    """Refuse what computes something else than our model, by the option's name."""
    architecture = str(settings.get("arch") or "transformer")
    is_known = architecture.startswith("transformer") and not architecture.startswith(_OTHER_TRANSFORMERS)
    heads, activation = settings.get("encoder_attention_heads"), settings.get("activation_fn") or "relu"
    faults = {} if is_known else {"arch": "only a 'transformer' from one language to another"}
    faults |= {name: "the paper's Transformer (post-norm) has none of it" for name in _REFUSED if settings.get(name)}
    if settings.get("bpe") not in _SEGMENTATIONS:
        faults["bpe"] = f"only {', '.join(_SEGMENTATIONS[1:])}"
    faults |= {} if activation in ACTIVATIONS else {"activation_fn": f"only {', '.join(ACTIVATIONS)}"}
    if settings.get("decoder_attention_heads", heads) != heads:  # other sizes are those of the weights
        faults["decoder_attention_heads"] = f"only models with the encoder's, of which there are {heads!r:.60}"
    for name, reason in faults.items():
        value = shortened(str(settings[name]), 60)
        raise UserError(f"{path} was trained with {name}={value} and cannot be imported: {reason}")


def _renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters under our names, which are those of fairseq's newer checkpoints behind `model.`."""
    weights = {}
    for name, tensor in state.items():
        if _WITHOUT_MEANING.fullmatch(name):
            continue
        for pattern, replacement in _OLD_NAMES:
            name = pattern.sub(replacement, name)
        if name == "decoder.output_projection.weight":
            weights["lm_head.weight"] = tensor
        elif match := re.fullmatch(r"(.*_attn\.)in_proj_(weight|bias)", name):  # three in one, in old checkpoints
            for part, rows in zip("qkv", tensor.chunk(3), strict=False):
                weights[f"model.{match[1]}{part}_proj.{match[2]}"] = rows
        else:
            weights[f"model.{name}"] = tensor
    positions = [name for name in weights if name.endswith(".embed_positions.weight")]
    rows = min((len(weights[name]) for name in positions), default=0)
    # Row `PAD` and those above it are of no position.
    return weights | {name: weights[name][PAD + 1 : rows] for name in positions}


def _config(settings: dict[str, Any], weights: dict[str, torch.Tensor]) -> VaswaniConfig:
    """Return the configuration that a model's options and the shapes of its parameters describe."""
    embeddings = [weights[f"model.{stack}.embed_tokens.weight"] for stack in ("encoder", "decoder")]
    layers = {match[0] for name in weights if (match := re.match(r"model\.(en|de)coder\.layers\.\d+", name))}
    positions = weights.get("model.encoder.embed_positions.weight")
    limits = [settings.get(f"max_{side}_positions") or 1024 for side in ("source", "target")]
    shares_all = bool(settings.get("share_all_embeddings"))
    return VaswaniConfig(
        vocab_size=len(embeddings[0]),
        decoder_vocab_size=None if len(embeddings[1]) == len(embeddings[0]) else len(embeddings[1]),
        d_model=embeddings[0].shape[1],
        d_ff=len(weights["model.encoder.layers.0.fc1.weight"]),
        encoder_layers=sum("encoder" in layer for layer in layers),
        decoder_layers=sum("decoder" in layer for layer in layers),
        num_heads=settings["encoder_attention_heads"],  # which no weight shows
        dropout=settings.get("dropout", 0.1),
        attention_dropout=settings.get("attention_dropout") or 0.0,
        activation_dropout=settings.get("activation_dropout") or settings.get("relu_dropout") or 0.0,
        activation_function=ACTIVATIONS[settings.get("activation_fn") or "relu"],
        attention_bias=True,
        scale_embedding=not settings.get("no_scale_embedding"),
        # SinusoidalPositionalEmbedding numbers positions from the padding's id on.
        position_encoding="sinusoidal-tensor2tensor" if positions is None else "learned",
        position_offset=PAD + 1 if positions is None else 0,
        max_position_embeddings=min(limits) if positions is None else len(positions),
        tie_word_embeddings=shares_all or bool(settings.get("share_decoder_input_output_embed")),
        share_encoder_decoder_embeddings=shares_all,
        bos_token_id=0,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=END,
    )
