"""Linear layers of a few rows on a CPU: torch's own, and what decoding has in its place.

    python scripts/benchmarks/linear.py

Microseconds of processor time of one thread, lower quartile, for layers of the base model's decoder; 40 MB of matrices
of a shape in turn, so that they come from where a model's come from.
"""

import argparse
import itertools
import time
from collections.abc import Callable

import torch
from torch import nn

from vaswani_transformer.decoding.cpu_inference import Int8Linear, PackedLinear
from vaswani_transformer.model.linear_vaswani import project

SHAPES = ((512, 512), (512, 2048), (2048, 512), (512, 10_000))


def microseconds(layers: list[Callable], states: torch.Tensor, repeats: int) -> float:
    """Of one call."""
    taken = []
    for layer in itertools.islice(itertools.cycle(layers), repeats + len(layers)):
        started = time.thread_time()
        layer(states)
        taken.append(time.thread_time() - started)
    return 1e6 * sorted(taken[len(layers) :])[repeats // 4]


@torch.no_grad()
def main() -> None:
    """Measure and print a table; in brackets how many times as fast as torch's own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--repeats", type=int, default=80)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| rows, in, out | torch.nn.Linear | oneDNN | packed | bfloat16 | bfloat16, packed | int8 |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for rows, (width, out) in itertools.product(arguments.rows, SHAPES):
        number = max(2, 10**7 // (width * out))
        layers = [nn.Linear(width, out) for _ in range(number)]
        states = torch.randn(rows, width)
        halves = [nn.Linear(width, out, dtype=torch.bfloat16) for _ in range(number)]
        ways = [
            (layers, states),
            ([lambda x, layer=layer: project(layer, x) for layer in layers], states),
            ([PackedLinear(layer) for layer in layers], states),
            (halves, states.bfloat16()),
            ([PackedLinear(layer) for layer in halves], states.bfloat16()),
            ([Int8Linear(layer) for layer in layers], states),
        ]
        times = [microseconds(*way, arguments.repeats) for way in ways]
        cells = [f"{times[0]:,.0f}", *(f"{one:,.0f} ({times[0] / one:.1f})" for one in times[1:])]
        print(f"| {rows}, {width:,}, {out:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
