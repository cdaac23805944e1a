"""Time and peak memory of the label-smoothed loss: ours, the Trainer's LabelSmoother, torch's cross_entropy.

    python scripts/benchmarks/loss.py
    python scripts/benchmarks/loss.py --projection --tokens 25000
    python scripts/benchmarks/loss.py --count --tokens 25000 --d-model 1024

Each loss runs forward and backward on the same bf16 logits under CPU autocast, as in a training step, in a fresh
process for each of several rounds, in turn. Memory is what the process took at its peak beyond what it had with the
logits made. With --projection the logits are not given: each loss starts from hidden states and the embedding matrix,
and ours fused with the projection comes in, beside torch's own `linear_cross_entropy`, in blocks too.

With --count nothing is computed: bytes that operations other than matrix products read and write on a GPU, counted on
fake tensors as `step_counts.py` does, with the Triton kernel and without.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from statistics import median
from unittest import mock

if "--count" in sys.argv:
    import step_counts  # before torch, for which it loads a stand-in for CUDA

import torch
from transformers.trainer_pt_utils import LabelSmoother

from vaswani_transformer.hardware import keep_freed_memory
from vaswani_transformer.model import loss_kernel_vaswani
from vaswani_transformer.model.loss_vaswani import label_smoothed_cross_entropy, projected_cross_entropy

LOSSES = {
    "ours": lambda logits, labels: label_smoothed_cross_entropy(logits, labels, 0.1),
    "Trainer's LabelSmoother": lambda logits, labels: LabelSmoother(epsilon=0.1)({"logits": logits}, labels),
    "torch's cross_entropy": lambda logits, labels: torch.nn.functional.cross_entropy(
        logits.float(), labels, label_smoothing=0.1
    ),
}


FUSED = {
    "ours, fused with the projection": lambda hidden, matrix, labels: projected_cross_entropy(
        hidden, matrix, labels, 0.1
    ),
    "torch's linear_cross_entropy in blocks": lambda hidden, matrix, labels: torch.nn.functional.linear_cross_entropy(
        hidden, matrix, labels, label_smoothing=0.1, options=torch.nn.LinearCrossEntropyOptions()
    ),
}


def peak_megabytes() -> float:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # kilobytes on Linux


def run_one(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds and megabytes of one loss, forward and backward; CPU seconds of all threads too."""
    torch.manual_seed(0)
    keep_freed_memory()
    tokens, vocab_size = options.tokens, options.vocab_size
    labels = torch.randint(0, vocab_size, (tokens,))
    if options.projection:
        hidden = torch.randn(tokens, options.d_model).requires_grad_()
        matrix = torch.randn(vocab_size, options.d_model).mul_(options.d_model**-0.5).requires_grad_()
    else:
        weights = torch.randn(vocab_size, 8, dtype=torch.bfloat16)
        logits = (torch.randn(tokens, 8, dtype=torch.bfloat16) @ weights.T).requires_grad_()
    before = peak_megabytes()
    seconds, cpu_seconds = [], []
    for _ in range(options.repeats):
        started, cpu_started = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", torch.bfloat16):
            if name in FUSED:
                loss = FUSED[name](hidden, matrix, labels)
            elif options.projection:
                loss = LOSSES[name](torch.nn.functional.linear(hidden, matrix), labels)
            else:
                loss = LOSSES[name](logits, labels)
        loss.backward()
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
    return {
        "seconds": min(seconds),
        "CPU seconds": min(cpu_seconds),
        "megabytes": peak_megabytes() - before,
        "loss": loss.item(),
    }


def count(options: argparse.Namespace) -> None:
    """Print what the fused loss moves on a GPU, forward and backward, under bf16 autocast."""
    print(f"{options.tokens:,} tokens, vocabulary {options.vocab_size:,}, d_model {options.d_model}, bf16 autocast")
    print("| loss and gradients | GB moved outside matrix products | TFLOP of products |\n|---|---|---|")
    for name, usable in (("Triton kernel", True), ("torch's operations", False)):
        with step_counts.fake_cuda(), mock.patch.object(loss_kernel_vaswani, "is_usable", lambda usable=usable: usable):
            hidden = torch.empty(options.tokens, options.d_model, device="cuda", requires_grad=True)
            matrix = torch.empty(options.vocab_size, options.d_model, device="cuda", requires_grad=True)
            labels = torch.empty(options.tokens, dtype=torch.int64, device="cuda")
            items = torch.empty((), dtype=torch.int64, device="cuda")
            with step_counts.StepCounter() as counter, torch.autocast("cuda", torch.bfloat16):
                projected_cross_entropy(hidden, matrix, labels, 0.1, items).backward()
        moved = sum(counter.bytes.values(), Counter())
        print(f"| {name} | {moved.total() / 1e9:.1f} | {counter.flops.total() / 1e12:.2f} |")
        for operation, size in moved.most_common(options.operations):
            print(f"|   {operation} | {size / 1e9:.1f} | |")


def main() -> None:
    """Run every loss in processes of their own and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab-size", type=int, default=37_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="passes in one process, of which the fastest counts")
    parser.add_argument("--projection", action="store_true", help="the projection to the vocabulary included")
    parser.add_argument("--d-model", type=int, default=512, help="width of the hidden states, with --projection")
    parser.add_argument("--count", action="store_true", help="count memory traffic on a GPU that is not there")
    parser.add_argument("--operations", type=int, default=0, help="with --count: those that move most")
    parser.add_argument("--only", choices=LOSSES | FUSED, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        return count(options)
    if options.only:
        print(json.dumps(run_one(options.only, options)))
        return
    results = {name: [] for name in (LOSSES | FUSED if options.projection else LOSSES)}
    for _ in range(options.rounds):
        for name, found in results.items():
            command = [sys.executable, __file__, "--only", name, *sys.argv[1:]]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    middle = {name: {key: median(row[key] for row in found) for key in found[0]} for name, found in results.items()}
    width = f", d_model {options.d_model}" if options.projection else ""
    print(f"{options.tokens:,} tokens, vocabulary {options.vocab_size:,}{width}, torch {torch.__version__}")
    print(
        "| loss | seconds | times ours | CPU seconds | times ours | peak memory (MB) | times ours |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name, row in middle.items():
        cells = [name]
        for key, form in (("seconds", ".2f"), ("CPU seconds", ".2f"), ("megabytes", ",.0f")):
            cells += [f"{row[key]:{form}}", f"{row[key] / middle['ours'][key]:.2f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
