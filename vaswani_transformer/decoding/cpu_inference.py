"""Faster inference on a CPU: weights in the memory order that is faster for the few rows of a search."""

import torch
from torch import nn

from ..errors import UserError
from ..hardware import PRECISIONS, keep_freed_memory


def prepare_for_inference(model: nn.Module, precision: str | None = None) -> nn.Module:
    """Make a model on a CPU translate faster, with the same results up to the order of sums.

    Linear layers keep their weights column by column: with 4 to 64 rows, which the steps of a search have, torch's
    products then take half to nine tenths of the time. A matrix that is also an embedding stays as it is, since its
    rows are looked up. From now on the process also keeps the memory that it frees: large batches of many beams
    allocate and free the same large tensors at every step. For int8 there is CTranslate2 (`CTranslate2Translator`).

    Args:
        model: changed in place and returned; of any class with `torch.nn.Linear` layers.
        precision: `"float32"` or `"bfloat16"`; by default the type that the model has.

    Raises:
        UserError: for an unknown precision, or a model that is not on a CPU.
    """
    if precision not in (None, *PRECISIONS):
        raise UserError(f"precision is {precision!r}: it must be one of {', '.join(PRECISIONS)}")
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise UserError("the model is not on a CPU, which prepare_for_inference is for")
    keep_freed_memory()
    if precision is not None:
        model.to(getattr(torch, precision))
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if type(module) is nn.Linear and id(module.weight) not in embeddings:
            module.weight.data = module.weight.data.T.contiguous().T
    return model
