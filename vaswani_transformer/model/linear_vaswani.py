"""Linear layers at their fastest: several at once in training, and outside of it by oneDNN.

On a CPU `torch.nn.Linear` computes float32 with MKL, OpenBLAS or the like; oneDNN, which is part of torch, may be twice
or half as fast, by processor, shape, rows and threads (`scripts/benchmarks/linear.py`). torch's public functions reach
it only by converting inputs and outputs. The operator that torch.compile uses does not, but is private: it is tried out
before it is used, and `torch.nn.Linear` computes where it fails.

The steps of decoding, which have few rows, take the faster of the two, which some milliseconds of measuring find for
each shape: `is_onednn_faster`. Both compute the same up to the order of sums. Whole sequences take oneDNN wherever it
works, so that losses and scores do not depend on a measurement.
"""

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.nn.functional import linear, relu
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # DTensor and quantized tensors

_DTYPES = (torch.float32, torch.bfloat16)
_CAPTURES = "transformers.utils.output_capturing"


def product_dtype(states: torch.Tensor) -> torch.dtype:
    """The dtype in which a product with `states` is computed: autocast's where it is on."""
    device = states.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return states.dtype


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


def has_hooks(module: nn.Module) -> bool:
    """Whether calling a module runs more than the forward of its class.

    Hooks that transformers leaves behind once it has been asked for attention weights or hidden states do not count:
    they do nothing unless it is asked again.
    """
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    if any(getattr(hook, "__module__", None) != _CAPTURES for hook in module._forward_hooks.values()):
        return True
    return "forward" in vars(module) or module._compiled_call_impl is not None


def has_own_methods(module: nn.Module) -> bool:
    """Whether a method of its class has been replaced for this module alone."""
    return any(callable(getattr(type(module), name, None)) for name in vars(module))


def is_transformed() -> bool:
    """Whether torch is compiling, tracing or transforming, and so must know every operation."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def _is_quick(module: nn.Module, states: torch.Tensor) -> bool:
    """Whether oneDNN may compute in a module's place without breaking what others do with the model."""
    if torch.is_grad_enabled() or not states.is_cpu or type(module) is not nn.Linear:
        return False
    weight = module.weight
    if type(weight) is not nn.Parameter or type(states) is not torch.Tensor or weight.dtype != states.dtype:
        return False
    if type(weight.data) is not torch.Tensor or not weight.is_cpu or has_hooks(module):
        return False
    # Transforms, and tools that count or record operations, do not know the private operator.
    if is_transformed() or _len_torch_dispatch_stack() or torch.is_autocast_enabled("cpu"):
        return False
    return has_onednn(states.dtype) and not nn.modules.module._has_any_global_hook()


def project(module: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """`module(states)` for a linear layer of any class: `(..., in_features)` to `(..., out_features)`."""
    if _is_quick(module, states):
        return _pointwise(states, module.weight, module.bias)
    return module(states)


def project_together(modules: list[nn.Module], states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`project(module, states)` for each module, in training: where possible by one product.

    A GPU is better filled by one large product than by several, and `states` are cast for autocast once. Layers that
    have been replaced, quantized, divided among devices or given hooks are called one by one.
    """
    if not all(map(is_plain, modules)) or nn.modules.module._has_any_global_hook():
        return tuple(project(module, states) for module in modules)
    weights, biases = [module.weight for module in modules], [module.bias for module in modules]
    dtype = product_dtype(states)
    if dtype != weights[0].dtype:  # or the joined matrix would be written in float32 and then cast
        weights = [weight.to(dtype) for weight in weights]
    bias = None if biases[0] is None else torch.cat(biases)
    widths = [len(weight) for weight in weights]
    return linear(states, torch.cat(weights), bias).split(widths, dim=-1)


def is_plain(module: nn.Module) -> bool:
    """Whether a layer computes what its matrix says, and its matrix is here as a whole."""
    if type(module) is not nn.Linear or has_hooks(module):
        return False
    return isinstance(module.weight, nn.Parameter) and not is_traceable_wrapper_subclass(module.weight)


class Projection:
    """A linear layer, alone and together with the operation that follows it, for one `generate()`.

    A layer of another class than `torch.nn.Linear` is called, as are its methods `relu` and `plus` where it has them.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        weight = getattr(module, "weight", None)
        self.is_quick = isinstance(weight, nn.Parameter) and _is_quick(module, weight.data)
        self.weight, self.bias = (module.weight, module.bias) if self.is_quick else (None, None)
        self._relu, self._plus = getattr(module, "relu", None), getattr(module, "plus", None)
        self._computes = {}  # by operation and rows

    def _compute(self, operation: str, states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        compute = self._computes.get((operation, len(states)))
        if compute is None:
            is_onednn = is_onednn_faster(operation, self.weight, self.bias, len(states))
            compute = self._computes[operation, len(states)] = by_onednn if is_onednn else by_torch
        return compute(operation, states, self.weight, self.bias, residual)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """`(rows, in_features)` to `(rows, out_features)`."""
        return self._compute("", states) if self.is_quick else self.module(states)

    def activated(self, states: torch.Tensor, function: str) -> torch.Tensor:
        """A function of `torch.nn.functional`, given by name, of `self(states)`."""
        return self.relu(states) if function == "relu" else getattr(nn.functional, function)(self(states))

    def relu(self, states: torch.Tensor) -> torch.Tensor:
        """`max(0, self(states))`; oneDNN gives 0 for nan."""
        if self.is_quick:
            return self._compute("relu", states)
        return self._relu(states) if self._relu is not None else relu(self.module(states))

    def plus(self, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`self(states) + residual`, both `(rows, out_features)`."""
        if self.is_quick:
            return self._compute("plus", states, residual)
        return self._plus(states, residual) if self._plus is not None else residual + self.module(states)
