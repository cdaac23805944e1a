"""A second model of the same weights, so that what looks at a model need not change it for its other users."""

import copy

import torch
from torch import nn


def copy_sharing_weights(model: nn.Module) -> nn.Module:
    """Return a model of its own with the same weights, in evaluation mode.

    Its modes, configuration and tables of hooks are its own; parameters, buffers and the hooks themselves are those of
    `model`, of any class, which is left as it is. A copy takes milliseconds and no memory to speak of. It computes
    without torch.compile, whose results belong to the modules that they were made for.
    """
    shared = {}  # what `deepcopy` takes for copied, by id
    for module in model.modules():
        for own in vars(module).values():
            values = own.values() if isinstance(own, dict) else [own] if isinstance(own, torch.Tensor) else []
            shared |= {id(value): value for value in values if not isinstance(value, nn.Module)}
    for module in reversed(list(model.modules())):  # inner ones first
        if "_orig_mod" in module._modules:  # made by torch.compile
            shared[id(module)] = copy.deepcopy(module._modules["_orig_mod"], shared)
    copied = copy.deepcopy(model, shared)
    for module in copied.modules():
        if id(module) not in shared:
            module.training = False
    return copied
