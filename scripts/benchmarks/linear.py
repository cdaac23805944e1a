"""Linear layers of a few rows on a CPU: torch's own, and what decoding has in its place.

    python scripts/benchmarks/linear.py

Microseconds of processor time of one thread, lower quartile, for layers of the base model's decoder and one of the
demo's; 40 MB of matrices of a shape in turn, so that they come from where a large model's come from. The last column is
what a step of decoding takes here by its own short measurement. bfloat16 is left out where oneDNN does not compute in
it.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from vaswani_transformer.decoding.cpu_inference import Int8Linear, PackedLinear
from vaswani_transformer.model.linear_vaswani import by_onednn, has_onednn, is_onednn_faster

SHAPES = ((128, 128), (512, 512), (512, 2048), (2048, 512), (512, 10_000))


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
    names = ["oneDNN", "packed", *(["bfloat16", "bfloat16, packed"] if has_onednn(torch.bfloat16) else []), "int8"]
    print(f"| rows, in, out | torch.nn.Linear | {' | '.join(names)} | decoding takes |")
    print("|---|" + "---:|" * (len(names) + 1) + "---|")
    for rows, (width, out) in itertools.product(arguments.rows, SHAPES):
        number = max(2, min(200, 10**7 // (width * out)))
        layers = [nn.Linear(width, out) for _ in range(number)]
        states = torch.randn(rows, width)
        ways = {
            "oneDNN": ([partial(by_onednn, "", weight=layer.weight, bias=layer.bias) for layer in layers], states),
            "packed": ([PackedLinear(layer) for layer in layers], states),
            "int8": ([Int8Linear(layer) for layer in layers], states),
        }
        if "bfloat16" in names:
            halves = [nn.Linear(width, out, dtype=torch.bfloat16) for _ in range(number)]
            ways["bfloat16"] = halves, states.bfloat16()
            ways["bfloat16, packed"] = [PackedLinear(layer) for layer in halves], states.bfloat16()
        by_torch = microseconds(layers, states, arguments.repeats)
        times = [microseconds(*ways[name], arguments.repeats) for name in names]
        cells = [f"{by_torch:,.0f}", *(f"{one:,.0f} ({by_torch / one:.1f})" for one in times)]
        is_onednn = is_onednn_faster("", layers[0].weight, layers[0].bias, rows)
        print(
            f"| {rows}, {width:,}, {out:,} | {' | '.join(cells)} | {'oneDNN' if is_onednn else 'torch'} |", flush=True
        )


if __name__ == "__main__":
    main()
