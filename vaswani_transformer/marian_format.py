"""Names and shapes in the `.npz` files of Marian, and its vocabularies, which `importing` reads and `export` writes.

Marian has two Transformers. `type: transformer` is what all its versions decode, and the engines made from it
(translateLocally, Firefox): sinusoids of its own. `type: transformer-new` came with version 1.12; its positions may be
a table. Parameters were read off models that Marian wrote; Marian's source is `src/models/transformer.h` and
`src/layers_new/transformer.h`.
"""

from pathlib import Path

import yaml

from .json_and_yaml import read_text
from .model.configuration_vaswani import VaswaniConfig

CONFIG = "special:model.yml"  # the array of bytes that holds a model's options
OLD, NEW = "transformer", "transformer-new"
LAYER_NORM_EPS = {OLD: 1e-6, NEW: 1e-5}  # added to the variance in layer normalisation, by type
ACTIVATIONS = {"relu": "relu", "swish": "silu", "gelu": "gelu"}  # names of Marian, fairseq and transformers: ours
EOS, UNK, PAD = "</s>", "<unk>", "<pad>"
NO_PROBABILITY = -1e4  # output bias of ids that a model of Marian's does not have; float16 can express it
# Characters that PyYAML refuses or takes for the end of a line, unlike Marian, and private ones to read in their place.
_UNREAD = (*range(9), 11, 12, *range(14, 32), *range(127, 160), 0x2028, 0x2029, 0xFFFE, 0xFFFF)
_STAND_INS = {code: 0xF0000 + code for code in _UNREAD}
_STOOD_FOR = {0xF0000 + code: code for code in _UNREAD}


def stack_parameters(config: VaswaniConfig, type: str) -> dict[str, tuple[str, str]]:
    """Return Marian's name and the kind of all parameters of both stacks, by our name (biases of attention among them).

    A `"matrix"` is (inputs, outputs), the transpose of ours; a `"vector"` is a row for OLD; a `"table"` is as ours.
    """
    names = {}
    for stack, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for index in range(layers):
            for ours, theirs in _layer(stack, index, config.activation_function).items():
                names[f"model.{stack}.layers.{index}.{ours}"] = theirs[type == NEW]
        if config.add_final_layer_norm:
            for ours, old, new in (("weight", "scale", "weight"), ("bias", "bias", "bias")):
                theirs = f"{stack}_top_ln_{old}" if type == OLD else f"{_new_stack(stack)}postprocessor->norm->{new}"
                names[f"model.{stack}.layer_norm.{ours}"] = theirs
        if config.position_encoding == "learned":
            names[f"model.{stack}.embed_positions.weight"] = f"{_new_stack(stack)}positionEmbedding->embeddings"
    kinds = (("embed_positions", "table"), ("layer_norm", "vector"), (".bias", "vector"), ("", "matrix"))
    return {ours: (theirs, next(kind for part, kind in kinds if part in ours)) for ours, theirs in names.items()}


def _layer(stack: str, index: int, activation: str) -> dict[str, tuple[str, str]]:
    """Return the names of a layer's parameters for OLD and for NEW, by ours."""
    kind = "TransformerEncoderLayer" if stack == "encoder" else "TransformerDecoderLayerWithCrossAttention"
    old, new = f"{stack}_l{index + 1}_", f"{_new_stack(stack)}layers->at({index})->as<marian::nn::{kind}>()->"
    # A ReLU is a part of the first linear layer; other activations, and dropout, are layers of their own.
    linear = ("0)->as<marian::nn::LinearReluDropout", "1)->as<marian::nn::Linear")
    if activation != "relu":
        linear = ("0)->as<marian::nn::Linear", "3)->as<marian::nn::Linear")
    own = "selfAttention" if stack == "encoder" else "autoRegressive"
    attentions = [("self_attn", "self", own, "selfAttention")]
    attentions += [("encoder_attn", "context", "crossAttention", "crossAttention")] if stack == "decoder" else []
    names = {}
    for part, letter, norm in (("weight", "W", "scale"), ("bias", "b", "bias")):
        for ours, theirs, block, attention in attentions:
            for name in ("q", "k", "v", "out"):
                projection = f"{new}{block}Block->{attention}->{name[0]}Proj->{part}"
                names[f"{ours}.{name}_proj.{part}"] = f"{old}{theirs}_{letter}{name[0]}", projection
            norms = f"{old}{theirs}_Wo_ln_{norm}", f"{new}{block}Block->postprocessor->norm->{part}"
            names[f"{ours}_layer_norm.{part}"] = norms
        for number, theirs in enumerate(linear, start=1):
            layers = f"{old}ffn_{letter}{number}", f"{new}filterBlock->layers->at({theirs}>()->{part}"
            names[f"fc{number}.{part}"] = layers
        names[f"final_layer_norm.{part}"] = f"{old}ffn_ffn_ln_{norm}", f"{new}filterBlock->postprocessor->norm->{part}"
    return names


def _new_stack(stack: str) -> str:
    return f"TransformerBatch{stack.title()}->{stack}->"


def read_vocabulary(path: Path) -> list[tuple[str, str]]:
    """Return the entries of a YAML (or JSON) file that holds one flat mapping, as texts, in their order in the file.

    A key may be there twice. In vocabularies `null`, `1.5` and `yes` are words: no value is built from them.
    Errors as in `read_text`; of any kind for a file of another form.
    """
    mapping = yaml.compose(read_text(path).translate(_STAND_INS), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return [(key.value.translate(_STOOD_FOR), value.value) for key, value in mapping.value]
