"""The layer types of Table 1, each as a module that maps a sequence to one of its size, and the table's formulas."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ..model.local_attention_vaswani import block_mask, restricted_attention

ROUNDS = 5  # measured, after one that is not
ENOUGH, PLENTY = 0.5, 2.0  # seconds: short rounds are repeated until the first, long ones no longer than the second


@dataclass(frozen=True)
class LayerCost:
    """Time and memory of one layer for one sequence, forward alone and with the backward pass."""

    length: int  # n, positions
    width: int  # d
    forward_seconds: float  # the shortest of some rounds, since other programs only ever slow it down
    training_seconds: float
    forward_bytes: int  # the peak beyond weights and input
    training_bytes: int  # gradients included


def measure_layer(layer: nn.Module, length: int, width: int, device: torch.device, rounds: int = ROUNDS) -> LayerCost:
    """Time and memory of a layer on one sequence of random numbers `(1, length, width)`, in float32.

    There are more rounds until they take half a second, and as few as two if they take two seconds.
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

    forward_seconds, training_seconds = (_shortest(run, device, rounds) for run in (forward, training))
    forward_bytes, training_bytes = (_most_bytes(run, device) for run in (forward, training))
    return LayerCost(length, width, forward_seconds, training_seconds, forward_bytes, training_bytes)


def _shortest(run, device: torch.device, rounds: int) -> float:
    run()
    _wait(device)
    times: list[float] = []
    while len(times) < rounds or (sum(times) < ENOUGH and len(times) < 20 * rounds):
        started = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - started)
        if sum(times) > PLENTY and len(times) >= 2:
            break
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _most_bytes(run, device: torch.device) -> int:
    """Peak memory of torch's allocator during a run, beyond what was allocated before."""
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    peaks = []
    for _ in range(3):  # the clocks of forward and backward thread may differ, and events change places
        with _without_standard_error(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            run()
        events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        peaks.append(int(max(np.cumsum(changes), default=0)))
    return median_low(peaks)


@contextlib.contextmanager
def _without_standard_error() -> Iterator[None]:
    """Drop what libraries write to the descriptor of standard error, as the profiler's does."""
    sys.stderr.flush()
    standard_error, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(standard_error, 2)
        os.close(standard_error)
        os.close(nowhere)


def fitted_exponent(sizes: Sequence[float], values: Sequence[float], points: int = 3) -> float:
    """The exponent a of values ~ size^a: least squares of logarithms over the largest sizes, two at least.

    At small sizes constant costs dominate. Sizes and values are above 0.
    """
    order = np.argsort(sizes)[-points:]
    x, y = (np.log(np.asarray(column, np.float64)[order]) for column in (sizes, values))
    return float(np.polyfit(x, y, 1)[0])


class Attention(nn.Module):
    """Self-attention (Equation 1) with one head, as Table 1 counts it: without the four projections by default.

    `neighbourhood` is r: attention is the model's `restricted_attention`. `fused` takes torch's
    `scaled_dot_product_attention`, which need not keep the n x n weights.
    """

    def __init__(self, width: int, projections: bool = False, neighbourhood: int | None = None, fused: bool = False):
        super().__init__()
        self.neighbourhood, self.fused = neighbourhood, fused
        self.projections = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4 if projections else 0))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Maps `(batch_size, length, width)` to the same shape."""
        *projections, out = self.projections or [nn.Identity()] * 4
        query, key, value = (project(states).unsqueeze(1) for project in projections)
        scaling = states.shape[-1] ** -0.5
        if self.neighbourhood is not None:
            padding_mask = torch.ones(states.shape[:2], device=states.device)
            mask = block_mask(padding_mask, self.neighbourhood, is_causal=False)
            return out(restricted_attention(query, key, value, mask, scaling).squeeze(2))
        if self.fused:
            return out(nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling).squeeze(1))
        return out((((query @ key.transpose(-1, -2)) * scaling).softmax(-1) @ value).squeeze(1))


class Recurrence(nn.Module):
    """torch's LSTM or GRU, one layer, one direction."""

    def __init__(self, kind: type[nn.RNNBase], width: int):
        super().__init__()
        self.layer = kind(width, width, batch_first=True)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Maps `(batch_size, length, width)` to the same shape."""
        return self.layer(states)[0]


class Convolution(nn.Module):
    """A centred convolution over positions that keeps width and length; the kernel, the paper's k, is odd.

    `separable`: one kernel for each channel, then a matrix product, as in the last paragraph of Section 4.
    """

    def __init__(self, width: int, kernel: int, dilation: int = 1, separable: bool = False):
        super().__init__()
        padding = dilation * (kernel // 2)
        groups = width if separable else 1
        self.layer = nn.Conv1d(width, width, kernel, padding=padding, dilation=dilation, groups=groups)
        self.mix = nn.Linear(width, width) if separable else nn.Identity()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Maps `(batch_size, length, width)` to the same shape."""
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
    """Layers of the same reach to cross a sequence."""
    return math.ceil((length - 1) / reach)


def _dilated(length: int, kernel: int, neighbourhood: int) -> int:
    """Layers of dilation 1, k, k^2, ...: together they reach (k^L - 1) / 2 to either side."""
    layers, reach = 0, 0
    while reach < length - 1:
        reach += kernel**layers * (kernel // 2)
        layers += 1
    return layers


_RECURRENT = ("Recurrent", "O(n·d²)", "O(n)", "O(n)")
_CONVOLUTIONAL = ("Convolutional", "O(k·n·d²)", "O(1)")
_ATTENTION = ("Self-attention", "O(n²·d)", "O(1)", "O(1)", lambda n, d, k, r: 2 * n * n * d)
KINDS = {
    "self-attention": LayerKind(
        "self-attention", *_ATTENTION, lambda d, k, r: Attention(d), lambda n, k, r: 1),
    "self-attention-fused": LayerKind(
        "self-attention, fused kernel", *_ATTENTION, lambda d, k, r: Attention(d, fused=True), lambda n, k, r: 1),
    "self-attention-projected": LayerKind(
        "self-attention with its projections", "Self-attention", "O(n²·d + n·d²)", "O(1)", "O(1)",
        lambda n, d, k, r: 2 * n * n * d + 4 * n * d * d,
        lambda d, k, r: Attention(d, projections=True), lambda n, k, r: 1),
    "lstm": LayerKind(
        "recurrent (LSTM)", *_RECURRENT, lambda n, d, k, r: 8 * n * d * d,
        lambda d, k, r: Recurrence(nn.LSTM, d), lambda n, k, r: n - 1),
    "gru": LayerKind(
        "recurrent (GRU)", *_RECURRENT, lambda n, d, k, r: 6 * n * d * d,
        lambda d, k, r: Recurrence(nn.GRU, d), lambda n, k, r: n - 1),
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
        lambda d, k, r: Attention(d, neighbourhood=r), lambda n, k, r: _stacked(n, r // 2)),
}  # fmt: skip


class _CellOnce(nn.Module):
    """One application of a recurrent cell at all positions: each takes the state of the one before it."""

    def __init__(self, width: int):
        super().__init__()
        self.cell = nn.RNNCell(width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        before = nn.functional.pad(states, (0, 0, 1, -1))
        return self.cell(states.flatten(0, 1), before.flatten(0, 1)).view_as(states)


def path_length(name: str, length: int, kernel: int, neighbourhood: int, width: int = 4) -> int:
    """The longest path between two positions, by gradients: layers until every input changes every output.

    For a recurrent layer it counts applications of the cell, and only later outputs have to change. The n positions are
    the middle of a longer sequence, so that dilated convolutions may reach beyond their ends. Weights are random, in
    float64; the width does not matter.
    """
    generator = torch.Generator().manual_seed(0)
    recurrent = name in ("lstm", "gru")
    middle = slice(length, 2 * length)
    paths = torch.ones(length, length, dtype=torch.bool)
    paths = paths.tril() if recurrent else paths  # there an output depends on the inputs up to it
    reached = torch.eye(3 * length, dtype=torch.bool)
    layers = 0
    while not (reached[middle, middle] | ~paths).all():
        if name == "convolution-dilated":
            layer = Convolution(width, kernel, dilation=kernel**layers)
        else:
            layer = _CellOnce(width) if recurrent else KINDS[name].make(width, kernel, neighbourhood)
        reached = (_directly(layer.double(), 3 * length, width, generator).double() @ reached.double()) > 0
        layers += 1
    return layers


def _directly(layer: nn.Module, length: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Which outputs (rows) of one layer depend on which inputs (columns), always on their own; `(length, length)`."""
    states = torch.randn(1, length, width, dtype=torch.float64, generator=generator)
    jacobian = torch.autograd.functional.jacobian(lambda inputs: layer(inputs)[0].sum(-1), states)
    return (jacobian[:, 0].abs().amax(-1) > 0) | torch.eye(length, dtype=torch.bool)
