"""Restricted against full self-attention in training: seconds of a step over the length of the sentence.

    python scripts/benchmarks/restricted.py --window 64

Forward and backward of an encoder (2 layers, d_model 64, 4 heads, random weights, one sentence) with sdpa, and with the
eager implementation, which masks a full square; no decoder, whose attention to the source is never restricted.
Processor time of one thread, the median of some rounds in which all contestants take turns; the exponent is that of n
between the last two lengths of a row.
"""

import argparse
import math
import time
from statistics import median

import torch

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration

EAGER_LENGTH = 2048  # beyond it the eager square takes gigabytes


def build(window: int | None, implementation: str) -> VaswaniForConditionalGeneration:
    """A small model in training mode, without dropout."""
    config = VaswaniConfig(
        vocab_size=100, d_model=64, d_ff=128, num_heads=4, encoder_layers=2, decoder_layers=1, dropout=0.0,
        attention_window=window, attn_implementation=implementation,
    )  # fmt: skip
    return VaswaniForConditionalGeneration(config).train()


def seconds(model: VaswaniForConditionalGeneration, length: int) -> float:
    """Processor time of the encoder's forward and backward pass."""
    ids = torch.randint(4, 100, (1, length))
    started = time.thread_time()
    model.model.encoder(ids, torch.ones_like(ids)).last_hidden_state.square().sum().backward()
    return time.thread_time() - started


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    contestants = {
        f"window {arguments.window}, sdpa": build(arguments.window, "sdpa"),
        "full, sdpa": build(None, "sdpa"),
        f"window {arguments.window}, eager": build(arguments.window, "eager"),
    }
    rows: dict[str, list[float]] = {name: [] for name in contestants}
    for length in arguments.lengths:
        taking = {name: model for name, model in contestants.items() if "eager" not in name or length <= EAGER_LENGTH}
        times = [[seconds(model, length) for model in taking.values()] for _ in range(arguments.rounds + 1)][1:]
        for name, column in zip(taking, zip(*times, strict=True), strict=True):
            rows[name].append(median(column))
    print("| milliseconds | " + " | ".join(f"n = {length:,}" for length in arguments.lengths) + " | exponent |")
    print("|---" * (len(arguments.lengths) + 2) + "|")
    for name, times in rows.items():
        cells = [f"{1000 * value:.0f}" for value in times] + ["-"] * (len(arguments.lengths) - len(times))
        exponent = "-"
        if len(times) > 1:
            last, before = arguments.lengths[len(times) - 1], arguments.lengths[len(times) - 2]
            exponent = f"{math.log(times[-1] / times[-2]) / math.log(last / before):.2f}"
        print(f"| {name} | " + " | ".join([*cells, exponent]) + " |")


if __name__ == "__main__":
    main()
