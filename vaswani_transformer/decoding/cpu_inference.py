"""Faster inference on a CPU: weights in the memory layout of the processor's kernels, or in int8.

Each linear layer is replaced by one that cannot be trained or saved. The decoder's self-attention gets one more, for
queries, keys and values in one product: with few rows three products take 1.5 times as long as one.
"""

import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import NoReturn

import torch
from torch import nn
from torch.nn.functional import linear, relu

from ..errors import UserError
from ..hardware import keep_freed_memory
from ..model.layers_vaswani import VaswaniAttention

PRECISIONS = ("float32", "bfloat16", "int8")
_ROWS = 16  # rows that weights are laid out for; measured from 1 to 400 rows, no other number was better for any
_SMALL = 1 << 16  # weights of a layer that is kept in two layouts


_DTYPES = (torch.float32, torch.bfloat16)


def _pointwise(states, weight, bias, activation="none"):
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, activation, [], "")


def _plus(states, residual, weight, bias):
    return torch.ops.mkldnn._linear_pointwise.binary(states, residual, weight, bias, "add")


def by_onednn(operation, states, weight, bias, residual=None):
    """A product (`""`), the product's positive part (`"relu"`), or its sum with `residual` (`"plus"`)."""
    if operation == "plus":
        return _plus(states, residual, weight, bias)
    return _pointwise(states, weight, bias, operation or "none")


def by_torch(operation, states, weight, bias, residual=None):
    """The same by torch's public functions."""
    output = linear(states, weight, bias)
    if operation == "plus":
        return output.add_(residual)
    return output.relu_() if operation else output


@cache
def has_onednn(dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN's operator and it computes correctly in this type."""
    if dtype not in _DTYPES or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    weight, states = torch.tensor([[1.0, -2.0], [0.5, 4.0], [-1.0, 1.0]]).to(dtype), torch.eye(2).to(dtype)
    bias = torch.tensor([0.25, 0.5, -3.0]).to(dtype)
    expected = linear(states, weight, bias)
    try:
        results = [
            (_pointwise(states, weight, bias), expected),
            (_pointwise(states, weight, None), linear(states, weight)),
            (_pointwise(states, weight, bias, "relu"), relu(expected)),
            (_plus(states, expected, weight, bias), expected + expected),
        ]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return all(torch.equal(result, reference) for result, reference in results)


_CHOICES: dict[tuple, bool] = {}
_MANY = 64  # rows from which on the faster one is the same
_WEIGHTS, _WORK = 1 << 20, 1 << 24  # weights and multiplications of a product that is measured, at most
_COPIES = 1 << 22  # weights in all copies: too many for a core's own cache, as those of a large model are
_ROUNDS, _SECONDS = 5, 0.004  # of a measurement, at most
_MARGIN = 1.15  # times as fast torch has to be in a measurement, so that the next run of a program chooses the same


def is_onednn_faster(
    operation: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    pack: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> bool:
    """Whether oneDNN is to compute an operation (see `by_onednn`) of so many rows; measured once in a process.

    Not measured, and true, where `torch.use_deterministic_algorithms` asks for the same sums in every run. `pack` gives
    the weights the memory layout in which oneDNN has them.
    """
    rows = min(_MANY, 1 << max(0, rows - 1).bit_length())  # a power of two stands for those up to it
    key = (operation, *weight.shape, weight.dtype, rows, torch.get_num_threads(), pack is None)
    if key not in _CHOICES:
        if torch.are_deterministic_algorithms_enabled():
            return True
        _CHOICES.setdefault(key, _measure(operation, weight, bias, rows, pack))
    return _CHOICES[key]


def _measure(operation, weight, bias, rows: int, pack: Callable | None) -> bool:
    width = weight.shape[1]
    weight = weight[: max(1, min(_WEIGHTS, _WORK // rows) // width)]  # its first outputs stand for all
    bias = None if bias is None else bias[: len(weight)]
    weights = [weight, *(weight.clone() for _ in range(min(2 * _ROUNDS, _COPIES // weight.numel()) - 1))]
    states, residual = weight.new_ones(rows, width), weight.new_ones(rows, len(weight))
    ways = {by_onednn: [pack(weight) for weight in weights] if pack else weights, by_torch: weights}
    best = dict.fromkeys(ways, float("inf"))
    for compute in ways:
        compute(operation, states, ways[compute][0], bias, residual)  # the first call of a shape prepares
    ends = time.perf_counter() + _SECONDS
    for number in range(_ROUNDS):
        if number > 1 and time.perf_counter() > ends:
            break
        for place, compute in enumerate(ways):
            chosen = ways[compute][(2 * number + place) % len(weights)]
            started = time.perf_counter()
            compute(operation, states, chosen, bias, residual)
            best[compute] = min(best[compute], time.perf_counter() - started)
    return best[by_onednn] < _MARGIN * best[by_torch]


class _FrozenLinear(nn.Module):
    """A linear layer whose weights are no parameters: it cannot be trained, saved, copied, moved or converted."""

    def __init__(self, module: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = module.in_features, module.out_features
        self._dtype = module.weight.dtype

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(
            f"this model was prepared for inference and cannot be {what} any more: do it before `prepare_for_inference`"
        )

    def refuse_saving(self) -> NoReturn:
        """Raise `UserError`; `save_pretrained` calls this before it writes anything."""
        self._refuse("saved")

    def _save_to_state_dict(self, *args, **kwargs):
        self.refuse_saving()

    def __reduce_ex__(self, protocol):
        self._refuse("copied or pickled")

    def _apply(self, fn, recurse=True):
        # `to`, `half`, `cuda` and the like call this with what they do to a tensor; packed weights do not allow it.
        changed = fn(torch.empty(0, dtype=self._dtype))
        if (changed.dtype, changed.device.type) != (self._dtype, "cpu"):
            self._refuse("moved or converted")
        return self


class PackedLinear(_FrozenLinear):
    """A linear layer in the memory layout of oneDNN's kernel; the same results up to the order of sums.

    A small one keeps its weights as they were, too: with few rows torch's own product may be the faster.
    """

    def __init__(self, module: nn.Linear):
        super().__init__(module)
        weight = module.weight.detach()
        self.packed = _pack(weight)
        self.plain = weight if weight.numel() <= _SMALL else None
        self.bias = None if module.bias is None else module.bias.detach()

    def _compute(self, operation: str, states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if self.plain is not None:
            rows = states.numel() // self.in_features
            if not is_onednn_faster(operation, self.plain, self.bias, rows, _pack):
                return by_torch(operation, states, self.plain, self.bias, residual)
        return by_onednn(operation, states, self.packed, self.bias, residual)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` to `(..., out_features)`."""
        return self._compute("", states)

    def relu(self, states: torch.Tensor) -> torch.Tensor:
        """`max(0, forward(states))`, in one operator."""
        return self._compute("relu", states)

    def plus(self, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`forward(states) + residual`, in one operator; `residual` has the shape of the result."""
        return self._compute("plus", states, residual)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes with packed weights in this type; its kernels for ARM may not."""
    weight, states = torch.tensor([[1.0, -2.0], [0.5, 4.0], [-1.0, 1.0]]).to(dtype), torch.eye(2).to(dtype)
    try:
        return torch.equal(by_onednn("", states, _pack(weight), None), weight.T)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False


class Int8Linear(_FrozenLinear):
    """Weights in int8 with one scale for each output, inputs quantised on the fly with one scale for all rows."""

    def __init__(self, module: nn.Linear):
        super().__init__(module)
        bias = None if module.bias is None else module.bias.detach().float()
        # Of 15 bits the inputs get 8: theirs is one scale for all rows, and weights have one for each output.
        self.packed = _pack_int8(module.weight.detach().float(), bias, 63 if _sums_overflow() else 127)
        # `_op` skips checks of torch that take as long as a small product.
        operators = torch.ops.quantized.linear_dynamic, torch.ops.quantized.linear_relu_dynamic
        self._operators = [getattr(operator, "_op", operator) for operator in operators]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` to `(..., out_features)`."""
        return self._operators[0](states, self.packed, False)

    def relu(self, states: torch.Tensor) -> torch.Tensor:
        """`max(0, forward(states))`, in one operator."""
        return self._operators[1](states, self.packed, False)


def _pack_int8(weight: torch.Tensor, bias: torch.Tensor | None, largest: int = 127) -> torch.ScriptObject:
    scales = weight.abs().amax(dim=1).clamp(min=1e-8).double() / largest
    zeros = torch.zeros(len(weight), dtype=torch.long)
    # As `torch.quantize_per_channel`, in a tenth of its time.
    numbers = (weight * (1 / scales.float())[:, None]).round_().to(torch.int8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the tensor type that torch's int8 products still need
        quantized = torch._make_per_channel_quantized_tensor(numbers, scales, zeros, 0)
        return torch.ops.quantized.linear_prepack(quantized, bias)


@cache
def _sums_overflow() -> bool:
    """Whether two full 8-bit products overflow 16 bits, as they do without VNNI instructions: then weights get 7 bits.

    Tried out, since torch may compute with fewer instructions than the processor has.
    """
    ones = torch.ones(64, 64)
    found = torch.ops.quantized.linear_dynamic(ones, _pack_int8(ones, None), False)
    return not torch.allclose(found, ones.sum(1), rtol=0.05)


def prepare_for_inference(model: nn.Module, precision: str | None = None) -> nn.Module:
    """Make a model on a CPU translate faster; afterwards it can neither be trained nor saved.

    From now on the process also keeps the memory that it frees: large batches of many beams allocate and free the same
    large tensors at every step. Speed and BLEU of each precision: docs/performance.md.

    Args:
        model: changed in place and returned; of any class with `torch.nn.Linear` layers.
        precision: `"float32"` or `"bfloat16"`: the weights in this type, in the layout of the kernels; `"int8"`:
            weights and inputs of linear layers in 8 bits. By default the type that the model has.

    Raises:
        UserError: for an unknown precision, or a model that is not on a CPU, not in evaluation mode, with adapters
            that are not merged, or partly replaced already.
    """
    if precision not in (None, *PRECISIONS):
        raise UserError(f"precision is {precision!r}: it must be one of {', '.join(PRECISIONS)}")
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise UserError(f"the model is on {', '.join(sorted(devices))}: prepare_for_inference is for a CPU")
    if model.training:
        raise UserError("the model is in training mode: call model.eval() before prepare_for_inference")
    if any(isinstance(module, _FrozenLinear) for module in model.modules()):
        raise UserError("the model was prepared for inference before: load it again to choose another precision")
    if any(name.endswith("base_layer") for name, _ in model.named_modules()):
        raise UserError("the model has adapters beside its layers: call model.merge_and_unload() first")
    model.requires_grad_(False)
    keep_freed_memory()
    if precision is not None:
        model.to(torch.float32 if precision == "int8" else getattr(torch, precision))
    kind, dtype = Int8Linear, next(model.parameters()).dtype
    if precision != "int8":
        kind = PackedLinear if has_onednn(dtype) and _can_pack(dtype) else None
    if kind is not None:
        _replace(model, kind)
    return model


def _replace(model: nn.Module, kind: type[_FrozenLinear]) -> nn.Module:
    """Replace each linear layer by one of a kind, and add the joint projection to causal self-attention."""
    for module in list(model.modules()):
        if isinstance(module, VaswaniAttention) and module.is_causal:
            parts = module.q_proj, module.k_proj, module.v_proj
            if all(type(part) is nn.Linear for part in parts):
                module.qkv_proj = kind(_join(parts))
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, kind(child))
    return model


def _join(parts: tuple[nn.Linear, ...]) -> nn.Linear:
    """One layer whose outputs are those of several layers of the same input, concatenated."""
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    return _linear(torch.cat([part.weight for part in parts]), bias)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
