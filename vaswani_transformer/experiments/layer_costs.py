"""Time and memory of one layer, measured over lengths and widths, and the exponents that fit them."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

ROUNDS = 5  # measured, after one that is not
ENOUGH, PLENTY = 0.5, 2.0  # seconds of rounds: short ones are made till the first, long ones not beyond the second


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes for one sequence.

    Args:
        length: n, positions.
        width: d.
        forward_seconds: forward alone, shortest of some rounds: other programs only ever slow it down.
        training_seconds: forward and backward.
        forward_bytes: most memory allocated at once beyond weights and input, forward alone.
        training_bytes: forward and backward, gradients included.
    """

    length: int
    width: int
    forward_seconds: float
    training_seconds: float
    forward_bytes: int
    training_bytes: int

    def as_dict(self) -> dict:
        """Plain values."""
        return asdict(self)


def measure_layer(layer: nn.Module, length: int, width: int, device: torch.device, rounds: int = ROUNDS) -> LayerCost:
    """Time and memory of a layer on one sequence of random numbers, in float32.

    Args:
        layer: maps `(1, length, width)` to the same shape.
        length: n.
        width: d.
        device: where to.
        rounds: so many, more until half a second is full, or two or more that fill two seconds.
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
    """The most that torch's allocator had given out at once during a run, beyond what it had before."""
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(max(np.cumsum(changes), default=0))


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """The profiler's library writes lines of its own to the process' standard error."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def fitted_exponent(sizes: Sequence[float], values: Sequence[float], points: int = 3) -> float:
    """The exponent a of values ~ size^a: least squares of logarithms over the largest sizes.

    Args:
        sizes: lengths or widths, above 0.
        values: times or bytes, above 0.
        points: how many of the largest sizes count; small ones are ruled by what does not grow.

    Raises:
        ValueError: for fewer than two sizes.
    """
    order = np.argsort(sizes)[-points:]
    if len(order) < 2:
        raise ValueError(f"{len(order)} size(s): an exponent needs two or more")
    x, y = (np.log(np.asarray(column, np.float64)[order]) for column in (sizes, values))
    return float(np.polyfit(x, y, 1)[0])
