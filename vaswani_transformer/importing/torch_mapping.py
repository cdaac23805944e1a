"""What a user says of a table of weights: the few lines of YAML of `--mapping`.

Sizes, biases and ties are found in the tensors; here stands what they cannot say.
"""

import difflib
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..json_and_yaml import read_yaml
from ..model.configuration_vaswani import POSITION_ENCODINGS

IN_PROJ = "in_proj"  # the rows of query, key and value in one matrix, as torch.nn.MultiheadAttention has them
CONFIG = ("num_heads", "position_encoding", "activation_function", "layer_norm_eps", "scale_embedding")
_REQUIRED = ("num_heads", "position_encoding")
_SPECIAL = ("pad", "bos", "eos", "unk")


# The parts of a layer by our names, and where `torch.nn.Transformer` has them.
_ENCODER_LAYERS = {
    "self_attn.in_proj": "encoder.layers.{i}.self_attn.in_proj",
    "self_attn.out_proj": "encoder.layers.{i}.self_attn.out_proj",
    "self_attn_layer_norm": "encoder.layers.{i}.norm1",
    "fc1": "encoder.layers.{i}.linear1",
    "fc2": "encoder.layers.{i}.linear2",
    "final_layer_norm": "encoder.layers.{i}.norm2",
}
_DECODER_LAYERS = {
    "self_attn.in_proj": "decoder.layers.{i}.self_attn.in_proj",
    "self_attn.out_proj": "decoder.layers.{i}.self_attn.out_proj",
    "self_attn_layer_norm": "decoder.layers.{i}.norm1",
    "encoder_attn.in_proj": "decoder.layers.{i}.multihead_attn.in_proj",
    "encoder_attn.out_proj": "decoder.layers.{i}.multihead_attn.out_proj",
    "encoder_attn_layer_norm": "decoder.layers.{i}.norm2",
    "fc1": "decoder.layers.{i}.linear1",
    "fc2": "decoder.layers.{i}.linear2",
    "final_layer_norm": "decoder.layers.{i}.norm3",
}


@dataclass(frozen=True)
class Mapping:
    """A mapping file; a field is a key there, those of `CONFIG` are keys too.

    A name is that of a module, whose `weight` and, where there is one, `bias` are taken.
    """

    source_embedding: str
    target_embedding: str
    output: str  # the projection to the vocabulary; the name of an embedding where they are one matrix
    special_tokens: dict[str, str | int]  # pad, bos, eos and unk: tokens of the vocabularies, or ids
    position_tables: tuple[str, ...] = ()  # of learned positions: one for both stacks, or encoder's and decoder's
    prefix: str = ""  # of the names in the next four: where the torch.nn.Transformer lies
    encoder_layers: dict[str, str] = field(default_factory=_ENCODER_LAYERS.copy)
    decoder_layers: dict[str, str] = field(default_factory=_DECODER_LAYERS.copy)
    encoder_norm: str = "encoder.norm"  # after the last layer, if it is there
    decoder_norm: str = "decoder.norm"
    norm_first: bool = False
    bos_before_source: bool = True  # whether sources began with it, as in most tutorials
    vocabularies: tuple[str, ...] = ()  # files or folders beside the mapping: of both sides, or source's and target's
    state_dict: str | None = None  # which table of a checkpoint, where it holds several
    ignored: tuple[str, ...] = ()  # tensors that are not needed
    config: dict[str, Any] = field(default_factory=dict)  # the keys of `CONFIG`


def nearest(name: str, names: Iterable[str]) -> str:
    """` (the nearest is ...)`, or nothing."""
    near = difflib.get_close_matches(name[:200], [name[:200] for name in islice(names, 1000)], n=1, cutoff=0.5)
    return f" (the nearest is {near[0]!r})" if near else ""


def read_mapping(path: Path) -> Mapping:
    """Read and check a mapping file; the values of `CONFIG` are checked by the configuration that they go into.

    Raises:
        UserError: naming the key that is unknown, missing or of a wrong kind.
    """
    advice = "give lines of the form `key: value`"
    try:
        values = read_yaml(path, advice)
    except FileNotFoundError:
        raise UserError(f"there is no mapping file {path}") from None
    if not isinstance(values, dict):
        raise UserError(f"the mapping {path} has no keys: {advice}")
    kinds = {entry.name: entry for entry in fields(Mapping) if entry.name != "config"}
    known = [*kinds, *CONFIG]
    for key in values:
        if key not in known:
            raise UserError(f"the mapping {path} has a key {key!r:.100}, which is unknown{nearest(str(key), known)}")
    required = [name for name, entry in kinds.items() if entry.default is entry.default_factory is MISSING]
    if missing := [key for key in (*required, *_REQUIRED) if key not in values]:
        raise UserError(f"the mapping {path} lacks {', '.join(missing)}: each must be given")
    own = {key: _converted(value, kinds[key].type, f"{key} in {path}") for key, value in values.items() if key in kinds}
    mapping = Mapping(**own, config={key: value for key, value in values.items() if key in CONFIG})
    _check(mapping, path)
    return mapping


def _converted(value: Any, kind: Any, where: str) -> Any:
    if kind == tuple[str, ...]:
        names = value if isinstance(value, list) else [value]
        is_right, rule, value = all(type(name) is str for name in names), "text, or a list of texts", tuple(names)
    elif kind in (dict[str, str], dict[str, str | int]):
        values = (str,) if kind == dict[str, str] else (str, int)
        rule = "lines of the form `name: name`"
        is_right = type(value) is dict and all(type(k) is str and type(v) in values for k, v in value.items())
    elif kind is bool:
        is_right, rule = type(value) is bool, "true or false"
    else:
        is_right, rule = type(value) is str, "text"
    if not is_right:
        raise UserError(f"{where} is {value!r:.200}: it must be {rule}")
    return value


def _check(mapping: Mapping, path: Path) -> None:
    def check(is_right: bool, key: str, rule: str) -> None:
        if not is_right:
            raise UserError(f"{key} in {path} is {getattr(mapping, key)!r:.200}: it must be {rule}")

    check(not mapping.norm_first, "norm_first", "false, since the paper's layers normalise after each sublayer")
    heads = mapping.config["num_heads"]
    if type(heads) is not int or heads < 1:
        raise UserError(f"num_heads in {path} is {heads!r:.200}: it must be a whole number, 1 or more")
    positions = mapping.config["position_encoding"]
    if positions not in POSITION_ENCODINGS:
        rule = f"it must be one of {', '.join(POSITION_ENCODINGS)}"
        raise UserError(f"position_encoding in {path} is {positions!r:.200}: {rule}")
    number, is_learned = len(mapping.position_tables), positions == "learned"
    rule = "one name, or those of encoder and decoder, with `position_encoding: learned`, and only then"
    check(number in (1, 2) if is_learned else number == 0, "position_tables", rule)
    check(len(mapping.vocabularies) <= 2, "vocabularies", "that of both sides, or those of source and target")
    special = mapping.special_tokens.keys()
    check(set(_SPECIAL[:3]) <= special <= set(_SPECIAL), "special_tokens", "pad, bos, eos and, if there is one, unk")
    _check_layers(mapping.encoder_layers, set(_ENCODER_LAYERS), f"encoder_layers in {path}")
    _check_layers(mapping.decoder_layers, set(_DECODER_LAYERS), f"decoder_layers in {path}")


def _check_layers(names: dict[str, str], parts: set[str], where: str) -> None:
    """Every part of a layer must be named; an attention's query, key and value together or one by one."""
    for packed in [part for part in parts if part.endswith(IN_PROJ) and part not in names]:
        parts = parts - {packed} | {packed.replace(IN_PROJ, f"{letter}_proj") for letter in "qkv"}
    if unknown := [name for name in names if name not in parts]:
        raise UserError(f"{where} has {', '.join(unknown)}, unknown there: the parts are {', '.join(sorted(parts))}")
    if missing := sorted(parts - names.keys()):
        raise UserError(f"{where} lacks {', '.join(missing)}: all parts of a layer must be given")
    if wrong := [name for name in names.values() if "{i}" not in name]:
        raise UserError(f"{where} has {wrong[0]!r}: it must hold {{i}} where the number of the layer stands")
