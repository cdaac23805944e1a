"""A table of weights of a `torch.nn.Transformer`, or of its kin with other names, by a mapping that a user writes.

Packed projections are split, biases that a model does without become zeros; all else is a change of names.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..errors import UserError, one_line
from ..model.configuration_vaswani import POSITION_ENCODINGS, VaswaniConfig
from ..model.layers_vaswani import sinusoidal_positions
from .checkpoints import read_pickle
from .source import Facts, Imported, ImportOptions, sizes_of
from .torch_mapping import IN_PROJ, Mapping, nearest, read_mapping
from .word_tokenizer import read_tokenizer

NAME = "torch.nn.Transformer"
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_STACKS = ("encoder", "decoder")
_ROUNDING = 1e-6  # of an angle in float32, which may be wrong by 1.1e-7 a position, as programs compute it

Weights = dict[str, torch.Tensor]


def is_one(source: Path) -> bool:
    """Whether this may be a file of weights; formats whose files have marks of their own are asked first."""
    return source.is_file() and source.suffix in _SUFFIXES


def read(source: Path, options: ImportOptions) -> Imported:
    """Read a table of weights by the mapping of `options`.

    Raises:
        UserError: for a missing or wrong mapping, a file that holds no table of tensors, tensors that are missing or
            left over, which are all named, and vocabularies that do not fit.
    """
    if options.mapping is None:
        raise UserError(f"{source} is a table of weights: name its parts in a file and give it as --mapping")
    mapping = read_mapping(options.mapping)
    table = _Table(_read_tensors(source, mapping.state_dict), source)
    weights = _take_all(table, mapping)
    table.check_all_taken(mapping, options.mapping)
    _split_packed(weights)
    notes = _cut_positions(weights) if mapping.position_tables else ()
    embeddings = [weights[f"model.{stack}.embed_tokens.weight"] for stack in _STACKS]
    files = options.vocabularies or [options.mapping.parent / name for name in mapping.vocabularies]
    rows = [len(embedding) for embedding in embeddings]
    tokenizer, ids = read_tokenizer(files, mapping.special_tokens, rows, mapping.bos_before_source)
    try:
        config = VaswaniConfig(**mapping.config, **_found_fields(weights, mapping.config["num_heads"]), **ids)
    except Exception as error:  # values of a wrong kind make errors of many kinds
        raise UserError(f"the mapping {options.mapping} describes no model: {one_line(error)}") from error
    _add_zero_biases(weights, config)
    return Imported(config, weights, tokenizer, Facts(toolkit=f"PyTorch ({NAME})", notes=notes))


def _read_tensors(source: Path, key: str | None) -> Weights:
    """The table of tensors in a file, be it all of a checkpoint or, under `key`, one of its entries."""
    try:
        content = (
            load_file(source) if source.suffix == ".safetensors" else read_pickle(source, "save model.state_dict()")
        )
    except OSError as error:
        raise UserError(f"cannot read {source}: {one_line(error)}") from error
    except SafetensorError as error:
        raise UserError(f"{source} is damaged ({one_line(error)}): copy it again") from error
    content = content if isinstance(content, dict) else {}
    tables = {str(name): value for name, value in content.items() if _is_table(value)}
    if key is None and _is_table(content):
        return content
    if key is None and len(tables) == 1:
        return next(iter(tables.values()))
    if key not in tables:
        lacks = "holds several tables of tensors" if key is None and tables else "does not hold a table of tensors"
        fix = f"give as state_dict in the mapping one of {', '.join(tables)}" if tables else "save model.state_dict()"
        raise UserError(f"{source} {lacks}{'' if key is None else f' {key!r}'}: {fix}")
    return tables[key]


def _is_table(value: object) -> bool:
    return (
        isinstance(value, dict)
        and len(value) > 0
        and all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items())
    )


class _Table:
    """Tensors by name; it notes which were taken and which were not there."""

    def __init__(self, tensors: Weights, source: Path):
        self.tensors, self.source = tensors, source
        self.taken: set[str] = set()
        self.missing: list[str] = []

    def find(self, module: str, kind: str) -> str | None:
        """The full name of a module's weight or bias, or None."""
        names = (_full_name(module, kind), *([module] if kind == "weight" else []))  # the latter of a bare table
        return next((name for name in names if name in self.tensors), None)

    def take(self, modules: dict[str, str], dimensions: int = 2) -> Weights:
        """The weights of modules under our names, and their biases if one of them has any.

        Args:
            modules: our name of each to its own, of modules of one kind.
            dimensions: of the weights; a table of positions may have one for the batch too.
        """
        weights = {}
        for kind in ("weight", "bias"):
            names = {ours: self.find(theirs, kind) for ours, theirs in modules.items()}
            if kind == "bias" and not any(names.values()):
                break
            for ours, name in names.items():
                if name is None:
                    self.missing.append(_full_name(modules[ours], kind))
                else:
                    self.taken.add(name)
                    weights[f"{ours}.{kind}"] = self._checked(name, dimensions if kind == "weight" else 1)
        return weights

    def _checked(self, name: str, dimensions: int) -> torch.Tensor:
        tensor = _without_batch(self.tensors[name])
        if tensor.dim() != dimensions:
            kind = "vector" if dimensions == 1 else "matrix"
            raise UserError(f"{name} in {self.source} has the shape {tuple(tensor.shape)}: it must be a {kind}")
        return tensor

    def check_all_taken(self, mapping: Mapping, path: Path) -> None:
        """Raise `UserError` that names every tensor that is missing or left over, tables of sinusoids excepted."""
        scheme = mapping.config["position_encoding"]
        left_over = {
            name: _other_positions(self.tensors[name], scheme)
            for name in self.tensors
            if name not in self.taken and name not in mapping.ignored and not _are_positions(self.tensors[name], scheme)
        }
        faults = []
        if self.missing:
            names = [f"{name}{nearest(name, left_over)}" for name in _in_short(self.missing)]
            faults.append(f"there is no {', '.join(names)}")
        if left_over:
            names = [f"{name}{left_over.get(name, '')}" for name in _in_short(left_over)]
            faults.append(
                f"nothing stands for {', '.join(names)}: correct the names, or name in `ignored` what is not needed"
            )
        if faults:
            raise UserError(f"{self.source} does not fit the mapping {path}: {'; '.join(faults)}")


def _in_short(names: Iterable[str]) -> list[str]:
    """Names of which those that differ in the number of the layer alone stand together.

    >>> _in_short(["layers.0.norm1.bias", "output.bias", "layers.2.norm1.bias"])
    ['layers.{0,2}.norm1.bias', 'output.bias']
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        start, number, end = re.fullmatch(r"(.*?)(?:\.(\d+)(\..*))?", name).groups("")
        groups.setdefault((start, end), []).append(number)
    return [
        start if not end else f"{start}.{numbers[0] if len(numbers) == 1 else '{' + ','.join(numbers) + '}'}{end}"
        for (start, end), numbers in groups.items()
    ]


def _full_name(module: str, kind: str) -> str:
    """Of a module's weight or bias; the packed ones of `torch.nn.MultiheadAttention` have no module of their own."""
    return f"{module.removesuffix('.weight')}{'_' if module.endswith(IN_PROJ) else '.'}{kind}"


def _without_batch(tensor: torch.Tensor) -> torch.Tensor:
    """A table of positions, `(rows, 1, d_model)` or `(1, rows, d_model)`, as `(rows, d_model)`; others as they are."""
    return tensor.flatten(0, 1) if tensor.dim() == 3 and 1 in tensor.shape[:2] else tensor


def _are_positions(tensor: torch.Tensor, scheme: str) -> bool:
    """Whether this is the table of a scheme, from position 0, to within the rounding of its type."""
    tensor = _without_batch(tensor)
    if scheme == "learned" or tensor.dim() != 2 or tensor.shape[1] % 2 or not tensor.is_floating_point():
        return False
    positions = torch.arange(len(tensor))
    difference = (tensor.double() - sinusoidal_positions(positions, tensor.shape[1], scheme)).abs()
    return bool((difference <= torch.finfo(tensor.dtype).eps + _ROUNDING * positions[:, None]).all())


def _other_positions(tensor: torch.Tensor, scheme: str) -> str:
    """What may be said of a tensor that looks like a table of positions, in brackets, or nothing."""
    if other := [kind for kind in POSITION_ENCODINGS if _are_positions(tensor, kind)]:
        return f" (positions of the encoding {other[0]!r})"
    if tensor.dim() == 3 and _without_batch(tensor).dim() == 2:
        return f" (if it holds positions, they are not {scheme!r}: make them learned, with it in position_tables)"
    return ""


def _take_all(table: _Table, mapping: Mapping) -> Weights:
    """Every weight that the mapping names, under our names, projections packed as they are."""
    embeddings = {"encoder": mapping.source_embedding, "decoder": mapping.target_embedding}
    weights = table.take({f"model.{stack}.embed_tokens": name for stack, name in embeddings.items()})
    weights |= table.take({"lm_head": mapping.output})
    if mapping.position_tables:
        tables = (mapping.position_tables * 2)[:2]
        weights |= table.take({f"model.{s}.embed_positions": name for s, name in zip(_STACKS, tables, strict=True)})
    norms = {
        "model.encoder.layer_norm": mapping.prefix + mapping.encoder_norm,
        "model.decoder.layer_norm": mapping.prefix + mapping.decoder_norm,
    }
    if any(table.find(name, "weight") for name in norms.values()):
        weights |= table.take(norms, dimensions=1)
    for stack, names in (("encoder", mapping.encoder_layers), ("decoder", mapping.decoder_layers)):
        number = 0
        while any(table.find(_of_layer(mapping, name, number), "weight") for name in names.values()):
            number += 1
        for part, name in names.items():
            layers = range(number or 1)  # where there is none, those of the first are missing
            modules = {f"model.{stack}.layers.{i}.{part}": _of_layer(mapping, name, i) for i in layers}
            weights |= table.take(modules, dimensions=1 if part.endswith("norm") else 2)
    return weights


def _of_layer(mapping: Mapping, name: str, number: int) -> str:
    return mapping.prefix + name.replace("{i}", str(number))


def _split_packed(weights: Weights) -> None:
    """Replace each `in_proj` by the projections of queries, keys and values."""
    for name in [name for name in weights if f".{IN_PROJ}." in name]:
        for letter, rows in zip("qkv", weights.pop(name).chunk(3), strict=False):
            weights[name.replace(IN_PROJ, f"{letter}_proj")] = rows


def _cut_positions(weights: Weights) -> tuple[str, ...]:
    """Cut the learned positions of encoder and decoder to one length; returns a note where one was longer."""
    names = [f"model.{stack}.embed_positions.weight" for stack in _STACKS]
    lengths = [len(weights[name]) for name in names]
    weights |= {name: weights[name][: min(lengths)] for name in names}
    if len(set(lengths)) == 1:
        return ()
    return (f"Encoder and decoder had {lengths[0]} and {lengths[1]} positions: {min(lengths)} of both were imported.",)


def _found_fields(weights: Weights, num_heads: int) -> dict:
    """The fields of the configuration that shapes and values give."""
    source, target, output = (
        weights[f"{name}.weight"] for name in ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    )
    layer = "model.encoder.layers.0"
    widths = {"d_k": weights[f"{layer}.self_attn.q_proj.weight"], "d_v": weights[f"{layer}.self_attn.v_proj.weight"]}
    for tensor in widths.values():
        if len(tensor) % num_heads:
            raise UserError(f"num_heads is {num_heads}: it must divide the {len(tensor)} rows of the projections")
    fields = sizes_of(weights) | {
        "output_bias": "lm_head.bias" in weights,
        "attention_bias": any("_attn." in name and name.endswith(".bias") for name in weights),
        "add_final_layer_norm": "model.encoder.layer_norm.weight" in weights,
        "tie_word_embeddings": _are_same(output, target),
        "share_encoder_decoder_embeddings": _are_same(source, target),
        **{name: len(tensor) // num_heads for name, tensor in widths.items()},
    }
    if "model.encoder.embed_positions.weight" in weights:
        fields["max_position_embeddings"] = len(weights["model.encoder.embed_positions.weight"])
    return fields


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _add_zero_biases(weights: Weights, config: VaswaniConfig) -> None:
    """Give zeros for the biases that our layers have and these do without."""
    for name in [name for name in weights if name.endswith(".weight")]:
        bias = name.removesuffix("weight") + "bias"
        is_biased = config.attention_bias if "_proj." in name else ".layers." in name or ".layer_norm." in name
        if is_biased and bias not in weights:
            weights[bias] = weights[name].new_zeros(len(weights[name]))
