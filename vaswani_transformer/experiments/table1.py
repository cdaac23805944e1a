"""Table 1: complexity, sequential operations and path length of layer types, the formulas and what is measured."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.benchmark import Timer

from ..errors import UserError
from ..model.local_attention_vaswani import block_mask, restricted_attention
from .base import Cell, Experiment, Setup, describe_runs, results_table

# Sizes measured: lengths n at width `width`, widths d at length `length`; k and r.
SCALES = {
    "laptop": {
        "lengths": [128, 256, 512, 1024, 2048, 4096], "width": 64,
        "widths": [64, 128, 256, 512, 1024], "length": 512, "kernel": 3, "neighbourhood": 64,
    },
    "paper": {
        "lengths": [256, 512, 1024, 2048, 4096, 8192, 16384], "width": 512,
        "widths": [128, 256, 512, 1024, 2048, 4096], "length": 2048, "kernel": 3, "neighbourhood": 64,
    },
}  # fmt: skip
PATH = 33, 3, 8  # n, k and r of the path lengths in the table
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
    """torch's LSTM, one layer, one direction."""

    def __init__(self, width: int):
        super().__init__(width, width, batch_first=True)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map `(batch_size, length, width)` to the same shape."""
        return super().forward(states)[0]


class Convolution(nn.Module):
    """A centred convolution over positions that keeps width and length; the kernel, the paper's k, is odd.

    `separable`: one kernel for each channel, then a matrix product, as in the last paragraph of Section 4.
    """

    def __init__(self, width: int, kernel: int, dilation: int = 1, separable: bool = False):
        super().__init__()
        sizes = {"padding": dilation * (kernel // 2), "dilation": dilation, "groups": width if separable else 1}
        self.layer = nn.Conv1d(width, width, kernel, **sizes)
        self.mix = nn.Linear(width, width) if separable else nn.Identity()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map `(batch_size, length, width)` to the same shape."""
        return self.mix(self.layer(states.transpose(1, 2)).transpose(1, 2))


@dataclass(frozen=True)
class LayerKind:
    """A row of Table 1, or a variant of one."""

    label: str
    row: str  # of the paper's table that it belongs to
    complexity: str  # operations a layer, the paper's O(...)
    sequential: str  # operations that must follow each other, the paper's O(...)
    path: str  # longest path between two positions, the paper's O(...)
    # From n, d, k and r: multiplications with an addition in its matrix products, `complexity` with its constants.
    operations: Callable[[int, int, int, int], int]
    make: Callable[[int, int, int], nn.Module]  # from d, k and r
    # From n, k and r: layers until every position has reached every other; of a recurrent layer, which reaches later
    # positions only, applications of its cell.
    layers_needed: Callable[[int, int, int], int]


def _stacked(length: int, reach: int) -> int:
    """Return the layers of the same reach that cross a sequence."""
    return math.ceil((length - 1) / reach)


def _dilated(length: int, kernel: int, neighbourhood: int) -> int:
    """Return the layers of dilation 1, k, k^2, ... that do: together they reach (k^L - 1) / 2 to either side."""
    layers = 0
    while (kernel**layers - 1) // 2 < length - 1:
        layers += 1
    return layers


_CONVOLUTIONAL = ("Convolutional", "O(k·n·d²)", "O(1)")
KINDS = {
    "self-attention": LayerKind(
        "self-attention", "Self-attention", "O(n²·d)", "O(1)", "O(1)", lambda n, d, k, r: 2 * n * n * d,
        lambda d, k, r: Attention(), lambda n, k, r: 1),
    "lstm": LayerKind(
        "recurrent (LSTM)", "Recurrent", "O(n·d²)", "O(n)", "O(n)", lambda n, d, k, r: 8 * n * d * d,
        lambda d, k, r: Recurrence(d), lambda n, k, r: n - 1),
    "convolution": LayerKind(
        "convolutional, contiguous", *_CONVOLUTIONAL, "O(n/k)", lambda n, d, k, r: k * n * d * d,
        lambda d, k, r: Convolution(d, k), lambda n, k, r: _stacked(n, k // 2)),
    "convolution-dilated": LayerKind(
        "convolutional, dilated", *_CONVOLUTIONAL, "O(log_k(n))", lambda n, d, k, r: k * n * d * d,
        lambda d, k, r: Convolution(d, k, dilation=k), _dilated),
    "convolution-separable": LayerKind(
        "convolutional, separable", "Convolutional", "O(k·n·d + n·d²)", "O(1)", "O(n/k)",
        lambda n, d, k, r: k * n * d + n * d * d,
        lambda d, k, r: Convolution(d, k, separable=True), lambda n, k, r: _stacked(n, k // 2)),
    "self-attention-restricted": LayerKind(
        "self-attention, restricted", "Self-attention (restricted)", "O(r·n·d)", "O(1)", "O(n/r)",
        lambda n, d, k, r: 2 * (r + 1) * n * d,
        lambda d, k, r: Attention(neighbourhood=r), lambda n, k, r: _stacked(n, r // 2)),
}  # fmt: skip


def measure_layer(layer: nn.Module, length: int, width: int, device: torch.device) -> dict[str, float]:
    """Measure a layer on one sequence of random numbers `(1, length, width)`, in float32.

    Returns:
        `length`, `width`; `forward_seconds`, and `training_seconds` of forward and backward together, the shortest of
        some rounds, since other programs only ever slow it down; `training_bytes` beside the weights, which the forward
        pass keeps for the backward pass.
    """
    layer = layer.to(device)
    states = torch.randn(1, length, width, device=device, requires_grad=True)

    def forward() -> None:
        with torch.no_grad():
            layer(states)

    def training() -> None:
        layer.zero_grad(set_to_none=True)
        states.grad = None
        layer(states).sum().backward()

    costs: dict[str, float] = {"length": length, "width": width}
    for name, run in (("forward_seconds", forward), ("training_seconds", training)):
        timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        costs[name] = min(timer.blocked_autorange(min_run_time=SECONDS).times)
    kept: dict[int, int] = {}  # bytes by the address of the memory, which several tensors may share

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(states)
    for tensor in layer.parameters():
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return costs | {"training_bytes": sum(kept.values())}


def fitted_exponent(sizes: Sequence[float], values: Sequence[float], points: int = 3) -> float:
    """Return the exponent a of values ~ size^a: least squares of logarithms over the largest sizes, two at least.

    At small sizes constant costs dominate. Sizes and values are above 0.
    """
    order = np.argsort(sizes)[-points:]
    x, y = (np.log(np.asarray(column, np.float64)[order]) for column in (sizes, values))
    return float(np.polyfit(x, y, 1)[0])


def table1_settings(setup: Setup) -> dict[str, Any]:
    """Return the sizes to measure, with the changes of the call: whole numbers, several separated by commas."""
    settings = dict(SCALES[setup.scale])
    for name, text in setup.changes.items():
        several, numbers = isinstance(settings.get(name), list), text.split(",")
        is_valid = all(number.isdecimal() and int(number) for number in numbers) and (len(set(numbers)) > 1) == several
        if name not in settings or not is_valid:
            kinds = (f"{name}={'N,N,...' if isinstance(value, list) else 'N'}" for name, value in settings.items())
            raise UserError(f"{name}={text} is not a setting of table1: there are {', '.join(kinds)}, N from 1")
        settings[name] = sorted(map(int, numbers)) if several else int(text)
    if settings["kernel"] % 2 == 0 or settings["neighbourhood"] % 2:
        raise UserError("kernel must be odd, for a centred convolution, and neighbourhood even, half to either side")
    return settings


class Table1(Experiment):
    """A cell for each layer type: time and memory of one layer over lengths and widths."""

    name = "table1"
    title = "layer types: complexity, sequential operations and path length, formulas and measurements"

    def cells(self, setup: Setup) -> list[Cell]:
        """Return one for each of `KINDS`."""
        settings = table1_settings(setup)
        return [
            Cell(name, kind.label, settings | {"layer": name},
                 {"complexity": kind.complexity, "sequential": kind.sequential, "path": kind.path}, kind.row)
            for name, kind in KINDS.items()
        ]  # fmt: skip

    def measure(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Measure a layer over lengths, then over widths."""
        settings = cell.settings
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

        def measured(length: int, width: int) -> dict[str, float]:
            layer = KINDS[cell.name].make(width, settings["kernel"], settings["neighbourhood"])
            return measure_layer(layer, length, width, device)

        return {
            "over_lengths": [measured(length, settings["width"]) for length in settings["lengths"]],
            "over_widths": [measured(settings["length"], width) for width in settings["widths"]],
        }

    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """Return the formulas, then exponents and costs at the largest size."""
        settings = table1_settings(setup)
        lengths, widths, rest = settings["lengths"], settings["widths"], (settings["kernel"], settings["neighbourhood"])
        formulas = {
            "complexity a layer": lambda _, cell: cell.paper["complexity"],
            "sequential operations": lambda _, cell: cell.paper["sequential"],
            "maximum path length": lambda _, cell: cell.paper["path"],
            "at n = {}, k = {}, r = {}".format(*PATH): lambda _, cell: str(KINDS[cell.name].layers_needed(*PATH)),
        }
        measured: dict[str, Callable] = {}
        for letter, sizes, over in (("n", lengths, "over_lengths"), ("d", widths, "over_widths")):
            for title, cost in (("time", "training_seconds"), ("memory", "training_bytes")):
                measured[f"{title} ~ {letter}^"] = lambda ours, _, sizes=sizes, over=over, cost=cost: (
                    f"{fitted_exponent(sizes, [costs[cost] for costs in ours[over]]):.2f}"
                )
            pairs = [(n, settings["width"]) if letter == "n" else (settings["length"], n) for n in sizes]
            measured[f"operations ~ {letter}^"] = lambda _, cell, sizes=sizes, pairs=pairs: (
                f"{fitted_exponent(sizes, [KINDS[cell.name].operations(*pair, *rest) for pair in pairs]):.2f}"
            )
        for title, cost, factor in (
            ("forward (ms)", "forward_seconds", 1e3), ("and backward (ms)", "training_seconds", 1e3),
            ("memory (MB)", "training_bytes", 1e-6),
        ):  # fmt: skip
            measured[f"n = {lengths[-1]:,}: {title}"] = lambda ours, _, cost=cost, factor=factor: (
                f"{factor * ours['over_lengths'][-1][cost]:.1f}"
            )
        notes = (
            f"One sequence, float32; n from {lengths[0]:,} to {lengths[-1]:,} at d = {settings['width']}, d from"
            f" {widths[0]:,} to {widths[-1]:,} at n = {settings['length']:,}; k = {settings['kernel']}, r ="
            f" {settings['neighbourhood']}. Exponents: least squares of logarithms over the three largest sizes; time"
            " is of forward and backward together, operations are counted, memory is what the forward pass keeps for"
            " the backward pass. Self-attention is one head and without projections, as the table counts it; the"
            " restricted one is the model's (`attention_window`)."
        )
        tables = (results_table(cells, results, columns) for columns in (formulas, measured))
        return "\n\n".join([f"# Table 1, {setup.scale} scale", *tables, f"{notes} {describe_runs(results)}"])
