"""Time and peak memory of the label-smoothed loss: ours, the Trainer's LabelSmoother, torch's cross_entropy.

    python scripts/benchmark_loss.py

Each loss runs forward and backward on the same bf16 logits under CPU autocast, as in a training step, in a fresh
process for each of several rounds, in turn. Memory is what the process took at its peak beyond what it had with the
logits made.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from statistics import median

import torch
from transformers.trainer_pt_utils import LabelSmoother

from vaswani_transformer.loss import label_smoothed_cross_entropy

LOSSES = {
    "ours": lambda logits, labels: label_smoothed_cross_entropy(logits, labels, 0.1),
    "Trainer's LabelSmoother": lambda logits, labels: LabelSmoother(epsilon=0.1)({"logits": logits}, labels),
    "torch's cross_entropy": lambda logits, labels: torch.nn.functional.cross_entropy(
        logits.float(), labels, label_smoothing=0.1
    ),
}


def peak_megabytes() -> float:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # kilobytes on Linux


def run_one(name: str, tokens: int, vocab_size: int) -> dict[str, float]:
    """Seconds and megabytes of one loss, forward and backward."""
    torch.manual_seed(0)
    weights = torch.randn(vocab_size, 8, dtype=torch.bfloat16)
    labels = torch.randint(0, vocab_size, (tokens,))
    logits = (torch.randn(tokens, 8, dtype=torch.bfloat16) @ weights.T).requires_grad_()
    before, started = peak_megabytes(), time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        loss = LOSSES[name](logits, labels)
    loss.backward()
    return {"seconds": time.perf_counter() - started, "megabytes": peak_megabytes() - before}


def main() -> None:
    """Run every loss in processes of their own and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab-size", type=int, default=37_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=LOSSES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(run_one(options.only, options.tokens, options.vocab_size)))
        return
    results = {name: [] for name in LOSSES}
    for _ in range(options.rounds):
        for name, found in results.items():
            command = [sys.executable, __file__, "--only", name]
            command += ["--tokens", str(options.tokens), "--vocab-size", str(options.vocab_size)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    middle = {name: {key: median(row[key] for row in found) for key in found[0]} for name, found in results.items()}
    print(f"{options.tokens:,} tokens, vocabulary {options.vocab_size:,}, torch {torch.__version__}")
    print("| loss | seconds | times ours | peak memory (MB) | times ours |\n|---|---|---|---|---|")
    for name, row in middle.items():
        time_ratio, memory_ratio = (row[key] / middle["ours"][key] for key in ("seconds", "megabytes"))
        print(f"| {name} | {row['seconds']:.2f} | {time_ratio:.2f} | {row['megabytes']:,.0f} | {memory_ratio:.2f} |")


if __name__ == "__main__":
    main()
