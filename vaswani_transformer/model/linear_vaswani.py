"""Linear layers: several at once in training, and a few rows at once in the steps of decoding."""

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # DTensor and quantized tensors

_CAPTURES = "transformers.utils.output_capturing"
_ONEDNN, _PRODUCT = torch.ops.mkldnn, "_linear_pointwise"
_ROWS = 64  # for which oneDNN chooses the order of a weight; it serves any number


def product_dtype(states: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a product with `states` is computed: autocast's where it is on."""
    device = states.device.type
    # `is_autocast_available` would say it of any device, and cut the graphs of torch.compile (torch 2.11).
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return states.dtype


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling a module runs more than the forward of its class.

    Hooks that transformers leaves behind once it has been asked for attention weights or hidden states do not count:
    they do nothing unless it is asked again.
    """
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    if any(getattr(hook, "__module__", None) != _CAPTURES for hook in module._forward_hooks.values()):
        return True
    return "forward" in own_names(module) or module._compiled_call_impl is not None


def has_own_methods(module: nn.Module) -> bool:
    """Return whether a method of its class has been replaced for this module alone."""
    return any(callable(getattr(type(module), name, None)) for name in own_names(module))


def own_names(module: nn.Module) -> set[str]:
    """Return what is set in a module itself, but for the `forward` in which accelerate only turns autocast on."""
    return {*vars(module)} - ({"forward"} if "_original_forward" in vars(module) else set())


def project_together(modules: list[nn.Module], states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return `module(states)` for each module, in training: where possible by one product.

    A GPU is better filled by one large product than by several, and `states` are cast for autocast once. Layers that
    have been replaced, quantized, divided among devices or given hooks are called one by one.
    """
    if not all(map(is_plain, modules)) or nn.modules.module._has_any_global_hook():
        return tuple(module(states) for module in modules)
    weights, biases = [module.weight for module in modules], [module.bias for module in modules]
    dtype = product_dtype(states)
    if dtype != weights[0].dtype:  # or the joined matrix would be written in float32 and then cast
        weights = [weight.to(dtype) for weight in weights]
    bias = None if biases[0] is None else torch.cat(biases)
    return linear(states, torch.cat(weights), bias).split([len(weight) for weight in weights], dim=-1)


def is_plain(module: nn.Module) -> bool:
    """Return whether a layer computes what its matrix says, and its matrix is here as a whole."""
    if type(module) is not nn.Linear or has_hooks(module):
        return False
    return isinstance(module.weight, nn.Parameter) and not is_traceable_wrapper_subclass(module.weight)


class Projection:
    """A linear layer of any class whose weight does not change.

    On a CPU, float32 is computed by oneDNN from a copy of the weight in its own order, which suits the few rows of a
    step. Only private operators offer that, those that `torch.compile` calls: without them the layer itself computes.
    """

    def __init__(self, module: nn.Module):
        self.module, self._packed, self._is_plain = module, None, is_plain(module) and hasattr(_ONEDNN, _PRODUCT)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """`(rows, in_features)` to `(rows, out_features)`."""
        if not (self._is_plain and states.is_cpu and states.dtype == torch.float32):
            return self.module(states)
        if self._packed is None:
            self._packed = _ONEDNN._reorder_linear_weight(self.module.weight.detach().contiguous(), _ROWS)
        return getattr(_ONEDNN, _PRODUCT)(states, self._packed, self.module.bias, "none", [], "")

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_packed": None}  # which torch can neither copy nor pickle
