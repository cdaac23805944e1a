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
#: Added to the variance in layer normalisation, by type.
LAYER_NORM_EPS = {OLD: 1e-6, NEW: 1e-5}
#: `transformer-ffn-activation`, and what we call it.
ACTIVATIONS = {"relu": "relu", "swish": "silu", "gelu": "gelu"}
EOS, UNK, PAD = "</s>", "<unk>", "<pad>"
# Characters that PyYAML refuses or takes for the end of a line, unlike Marian, and private ones to read in their place.
_UNREAD = (*range(9), 11, 12, *range(14, 32), *range(127, 160), 0x2028, 0x2029, 0xFFFE, 0xFFFF)
_STAND_INS = {code: 0xF0000 + code for code in _UNREAD}
_STOOD_FOR = {0xF0000 + code: code for code in _UNREAD}


def stack_parameters(config: VaswaniConfig, type: str) -> dict[str, tuple[str, str]]:
    """Return Marian's name and the kind of all parameters of both stacks, by our name (biases of attention among them).

    A `"matrix"` is (inputs, outputs), the transpose of ours; a `"vector"` is a row of a matrix for OLD; a `"table"` is
    as ours.
    """
    names = {}
    for stack, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for index in range(layers):
            name_of = _old_layer if type == OLD else _new_layer
            for ours, theirs in name_of(stack, index, config.activation_function).items():
                names[f"model.{stack}.layers.{index}.{ours}"] = theirs
        if config.add_final_layer_norm:
            for ours, old, new in (("weight", "scale", "weight"), ("bias", "bias", "bias")):
                theirs = f"{stack}_top_ln_{old}" if type == OLD else f"{_new_stack(stack)}postprocessor->norm->{new}"
                names[f"model.{stack}.layer_norm.{ours}"] = theirs
        if config.position_encoding == "learned":
            names[f"model.{stack}.embed_positions.weight"] = f"{_new_stack(stack)}positionEmbedding->embeddings"
    return {ours: (theirs, _kind(ours)) for ours, theirs in names.items()}


def _kind(ours: str) -> str:
    if "embed_positions" in ours:
        return "table"
    return "vector" if ours.endswith("bias") or "layer_norm" in ours else "matrix"


def _old_layer(stack: str, index: int, activation: str) -> dict[str, str]:
    layer, names = f"{stack}_l{index + 1}", {}
    for part, letter, norm in (("weight", "W", "scale"), ("bias", "b", "bias")):
        for ours, theirs in _attentions(stack, "self", "context"):
            for projection in ("q", "k", "v", "out"):
                names[f"{ours}.{projection}_proj.{part}"] = f"{layer}_{theirs}_{letter}{projection[0]}"
            names[f"{ours}_layer_norm.{part}"] = f"{layer}_{theirs}_Wo_ln_{norm}"
        for number in ("1", "2"):
            names[f"fc{number}.{part}"] = f"{layer}_ffn_{letter}{number}"
        names[f"final_layer_norm.{part}"] = f"{layer}_ffn_ffn_ln_{norm}"
    return names


def _new_layer(stack: str, index: int, activation: str) -> dict[str, str]:
    kind = "TransformerEncoderLayer" if stack == "encoder" else "TransformerDecoderLayerWithCrossAttention"
    layer = f"{_new_stack(stack)}layers->at({index})->as<marian::nn::{kind}>()->"
    # A ReLU is a part of the first linear layer; other activations, and dropout, are layers of their own.
    linear = ("0)->as<marian::nn::LinearReluDropout", "1)->as<marian::nn::Linear")
    if activation != "relu":
        linear = ("0)->as<marian::nn::Linear", "3)->as<marian::nn::Linear")
    own, names = "selfAttention" if stack == "encoder" else "autoRegressive", {}
    for part in ("weight", "bias"):
        for ours, theirs in _attentions(stack, own, "crossAttention"):
            attention = "crossAttention" if theirs == "crossAttention" else "selfAttention"
            block = f"{layer}{theirs}Block->"
            for projection in ("q", "k", "v", "out"):
                names[f"{ours}.{projection}_proj.{part}"] = f"{block}{attention}->{projection[0]}Proj->{part}"
            names[f"{ours}_layer_norm.{part}"] = f"{block}postprocessor->norm->{part}"
        for number, theirs in enumerate(linear, start=1):
            names[f"fc{number}.{part}"] = f"{layer}filterBlock->layers->at({theirs}>()->{part}"
        names[f"final_layer_norm.{part}"] = f"{layer}filterBlock->postprocessor->norm->{part}"
    return names


def _attentions(stack: str, own: str, other: str) -> list[tuple[str, str]]:
    return [("self_attn", own)] + ([("encoder_attn", other)] if stack == "decoder" else [])


def _new_stack(stack: str) -> str:
    return f"TransformerBatch{stack.title()}->{stack}->"


def read_vocabulary(path: Path) -> list[tuple[str, str]]:
    """Return the entries of a YAML (or JSON) file that holds one flat mapping, as texts, in their order in the file.

    A key may be there twice. In vocabularies `null`, `1.5` and `yes` are words: no value is built from them.
    Errors as of `read_text`; of any kind for a file of another form.
    """
    mapping = yaml.compose(read_text(path).translate(_STAND_INS), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return [(key.value.translate(_STOOD_FOR), value.value) for key, value in mapping.value]
