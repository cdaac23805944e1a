"""The table of benchmark_training.py: medians over the rounds, and ratios taken within each round."""

import argparse
from statistics import median

import torch
from contestants import BARE, MARIAN


def middle(values: list[float]) -> float:
    """The median of what was measured."""
    return median(values) if values else float("nan")


def ratio(rows: dict[str, list[dict]], name: str, other: str, key: str) -> str:
    """Median over the rounds of one contestant's measure over another's in the same round."""
    if other not in rows:
        return "-"
    value = middle([mine[key] / theirs[key] for mine, theirs in zip(rows[name], rows[other], strict=True)])
    return f"{value:.2f}" if value == value else "-"


def table(rows: dict[str, list[dict]], peaks: list[dict], flops: float, options: argparse.Namespace) -> str:
    """The results in Markdown."""
    bare = next((name for name in rows if name.startswith(f"{BARE}, ")), BARE)
    header = (
        "| training | target tokens/s | times Marian | positions/s | times the bare loop | padding"
        " | share of the peak, bf16 | float32 | peak memory (GiB) | target tokens/CPU s | times Marian"
        " | positions/CPU s, times the bare loop |"
    )
    lines = [header, "|---" * 12 + "|"]
    peak = {name: middle([found[name] for found in peaks]) for name in peaks[0]}
    for name, found in rows.items():
        value = {key: middle([row[key] for row in found]) for key in found[0]}
        shares = [f"{value['target tokens/s'] * flops / peak[kind]:.0%}" for kind in ("bfloat16", "float32")]
        unknown = value["padding"] != value["padding"]
        cells = [
            name,
            f"{value['target tokens/s']:,.0f}",
            ratio(rows, name, MARIAN, "target tokens/s"),
            "-" if unknown else f"{value['positions/s']:,.0f}",
            ratio(rows, name, bare, "positions/s"),
            "-" if unknown else f"{value['padding']:.1%}",
            *shares,
            f"{value['memory'] / 2**30:.2f}",
            f"{value['target tokens/CPU s']:,.0f}",
            ratio(rows, name, MARIAN, "target tokens/CPU s"),
            ratio(rows, name, bare, "positions/CPU s"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    spread = {name: [f"{row['target tokens/s']:,.0f}" for row in found] for name, found in rows.items()}
    rounds = "; ".join(f"{name} {', '.join(values)}" for name, values in spread.items())
    threads = options.threads or torch.get_num_threads()
    return "\n".join(
        [
            f"Matrix products: {peak['float32'] / 1e9:,.0f} GFLOP/s in float32, {peak['bfloat16'] / 1e9:,.0f} in bf16"
            f" ({options.device}, {threads} threads, torch {torch.__version__}); the model takes"
            f" {flops / 1e6:,.1f} MFLOP a target token, forward and backward, its source's share included.",
            "",
            *lines,
            "",
            f"Positions are tokens and padding of both sides. Target tokens/s of each round: {rounds}.",
        ]
    )
