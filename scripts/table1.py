"""Print Table 1: complexity, sequential operations and path length of layer types, the formulas and measured costs.

    python scripts/table1.py [--scale laptop|paper]

Time and memory are of one layer over lengths and widths, on a GPU if there is one; minutes. Prints Markdown.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.benchmark import Timer

from vaswani_transformer.experiments.base import markdown_table
from vaswani_transformer.hardware import choose_device
from vaswani_transformer.model.local_attention_vaswani import block_mask, restricted_attention

# Sizes measured: lengths n at width `width`, widths d at length `length`.
SCALES = {
    "laptop": {
        "lengths": [128, 256, 512, 1024, 2048, 4096], "width": 64,
        "widths": [64, 128, 256, 512, 1024], "length": 512,
    },
    "paper": {
        "lengths": [256, 512, 1024, 2048, 4096, 8192, 16384], "width": 512,
        "widths": [128, 256, 512, 1024, 2048, 4096], "length": 2048,
    },
}  # fmt: skip
KERNEL, NEIGHBOURHOOD = 3, 64  # k and r
PATH = 33, 3, 8  # n, k and r of the path lengths in the table
COSTS = {"training_seconds": "time", "training_bytes": "memory", "operations": "operations"}
SECONDS = 0.5  # that a layer of one size is timed, or two rounds if they take longer


class Attention(nn.Module):
    """Self-attention (Equation 1) with one head and without projections, as Table 1 counts it.

    `neighbourhood` is r: attention is the model's `restricted_attention`.
    """

    def __init__(self, neighbourhood: int | None = None):
        super().__init__()
        self.neighbourhood = neighbourhood

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map `(batch_size, length, width)` to the same shape."""
        scaling = states.shape[-1] ** -0.5
        if self.neighbourhood is None:
            return ((states @ states.transpose(-1, -2)) * scaling).softmax(-1) @ states
        mask = block_mask(torch.ones(states.shape[:2], device=states.device), self.neighbourhood, is_causal=False)
        return restricted_attention(*[states.unsqueeze(1)] * 3, mask, scaling).squeeze(2)


class Recurrence(nn.LSTM):
    """torch's LSTM, its outputs alone."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map `(batch_size, length, width)` to the same shape."""
        return super().forward(states)[0]


class Convolution(nn.Conv1d):
    """A centred convolution over positions that keeps width and length; the kernel, the paper's k, is odd."""

    def __init__(self, width: int, kernel: int, dilation: int):
        super().__init__(width, width, kernel, padding=dilation * (kernel // 2), dilation=dilation)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map `(batch_size, length, width)` to the same shape."""
        return super().forward(states.transpose(1, 2)).transpose(1, 2)


@dataclass(frozen=True)
class LayerKind:
    """A row of Table 1."""

    label: str
    complexity: str  # operations a layer, the paper's O(...)
    path: str  # longest path between two positions, the paper's O(...)
    # From n, d, k and r: multiplications with an addition in its matrix products, `complexity` with its constants.
    operations: Callable[[int, int, int, int], int]
    make: Callable[[int, int, int], nn.Module]  # from d, k and r
    # From n, k and r: layers until every position has reached every other; of a recurrent layer, which reaches later
    # positions only, applications of its cell.
    layers_needed: Callable[[int, int, int], int]
    sequential: str = "O(1)"  # operations that must follow each other, the paper's O(...)


def _dilated(length: int, kernel: int, neighbourhood: int) -> int:
    """Return the layers of dilation 1, k, k^2, ... across a sequence: L of them reach (k^L - 1) / 2 to either side."""
    layers = 0
    while (kernel**layers - 1) // 2 < length - 1:
        layers += 1
    return layers


KINDS = {
    "self-attention": LayerKind(
        "self-attention", "O(n²·d)", "O(1)", lambda n, d, k, r: 2 * n * n * d,
        lambda d, k, r: Attention(), lambda n, k, r: 1),
    "lstm": LayerKind(
        "recurrent (LSTM)", "O(n·d²)", "O(n)", lambda n, d, k, r: 8 * n * d * d,
        lambda d, k, r: Recurrence(d, d, batch_first=True), lambda n, k, r: n - 1, "O(n)"),
    "convolution-dilated": LayerKind(
        "convolutional, dilated", "O(k·n·d²)", "O(log_k(n))", lambda n, d, k, r: k * n * d * d,
        lambda d, k, r: Convolution(d, k, dilation=k), _dilated),
    "self-attention-restricted": LayerKind(
        "self-attention, restricted", "O(r·n·d)", "O(n/r)", lambda n, d, k, r: 2 * (r + 1) * n * d,
        lambda d, k, r: Attention(neighbourhood=r), lambda n, k, r: math.ceil((n - 1) / (r // 2))),
}  # fmt: skip


def measure_layer(layer: nn.Module, length: int, width: int, device: torch.device) -> dict[str, float]:
    """Measure a layer on one sequence of random numbers `(1, length, width)`, in float32.

    Returns:
        `length`, `width`; `training_seconds` of forward and backward together, the shortest of some rounds, since other
        programs only ever slow it down; `training_bytes` beside the weights, which the forward pass keeps for the
        backward pass.
    """
    layer = layer.to(device)
    states = torch.randn(1, length, width, device=device, requires_grad=True)
    statement, names = "layer.zero_grad(); layer(states).sum().backward()", {"layer": layer, "states": states}
    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    seconds = min(timer.blocked_autorange(min_run_time=SECONDS).times)
    kept: dict[int, int] = {}  # bytes by the address of the memory, which several tensors may share

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(states)
    for tensor in layer.parameters():
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return {"length": length, "width": width, "training_seconds": seconds, "training_bytes": sum(kept.values())}


def fitted_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the exponent a of values ~ size^a: least squares of logarithms over the three last, and largest, sizes.

    At small sizes constant costs dominate. Sizes and values are above 0.
    """
    return float(np.polyfit(np.log(sizes[-3:]), np.log(values[-3:]), 1)[0])


def measure_kind(name: str, settings: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """Measure a layer of one of `KINDS` over lengths, then over widths."""
    device = choose_device()

    def measured(length: int, width: int) -> dict[str, float]:
        return measure_layer(KINDS[name].make(width, KERNEL, NEIGHBOURHOOD), length, width, device)

    return {
        "over_lengths": [measured(length, settings["width"]) for length in settings["lengths"]],
        "over_widths": [measured(settings["length"], width) for width in settings["widths"]],
    }


def report(scale: str) -> str:
    """Return the formulas, then exponents and costs at the largest size."""
    settings = SCALES[scale]
    places = "at n = {}, k = {}, r = {}".format(*PATH)
    formulas = ["", "complexity a layer", "sequential operations", "maximum path length", places]
    exponents = {f"{title} ~ {letter}^": f"{cost}_{size}" for letter, size in (("n", "length"), ("d", "width"))
                 for cost, title in COSTS.items()}  # fmt: skip
    measured = ["", *exponents, f"n = {settings['lengths'][-1]:,}: time (s)", "memory (bytes)"]
    rows, costs = [], []
    for name, kind in KINDS.items():
        rows.append([kind.label, kind.complexity, kind.sequential, kind.path, str(kind.layers_needed(*PATH))])
        figures = summary(kind, measure_kind(name, settings))
        largest = [f"{figures['training_seconds']:.4f}", f"{figures['training_bytes']:,}"]
        costs.append([kind.label, *(f"{figures[key]:.2f}" for key in exponents.values()), *largest])
    notes = (
        f"One sequence, float32; d = {settings['width']} over n, n = {settings['length']:,} over d; k ="
        f" {KERNEL}, r = {NEIGHBOURHOOD}. Exponents: least squares of logarithms over the"
        " three largest sizes; time is of forward and backward together, operations are counted, memory is what"
        " the forward pass keeps for the backward pass. Self-attention is one head and without projections, as the"
        " table counts it; the restricted one is the model's (`attention_window`)."
    )
    tables = markdown_table(formulas, rows), markdown_table(measured, costs)
    return "\n\n".join([f"# Table 1, {scale} scale", *tables, notes])


def summary(kind: LayerKind, measured: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return a layer's costs at the largest length, and the exponents of its costs in length and in width."""
    figures = dict(measured["over_lengths"][-1])
    for size, over in (("length", "over_lengths"), ("width", "over_widths")):
        costs = measured[over]
        for cost in costs:
            cost["operations"] = kind.operations(cost["length"], cost["width"], KERNEL, NEIGHBOURHOOD)
        for name in COSTS:
            figures[f"{name}_{size}"] = fitted_exponent([cost[size] for cost in costs], [cost[name] for cost in costs])
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=SCALES, default="laptop")
    print(report(parser.parse_args().scale))
