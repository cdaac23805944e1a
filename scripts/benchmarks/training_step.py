"""What each of our choices for training on a CPU is worth: one training step, choices switched one at a time.

    python scripts/benchmarks/training_step.py
    python scripts/benchmarks/training_step.py --threads 1     # in CPU seconds, which others on the machine change less

All variants run in turn, several rounds, in one process on the same batch, so that only their ratios mean something.
The default is the model of the recipe multi30k-en-de on a batch of its usual shape. The allocator's settings cannot be
taken back within a process, so that row comes from a second process, which runs everything without them.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from statistics import median
from unittest import mock

import torch
from loss_curves import in_dtype_of_embeddings, one_by_one
from training_contestants import SIZES, add_whole_numbers, vaswani_config
from transformers.trainer_pt_utils import LabelSmoother

from vaswani_transformer import VaswaniForConditionalGeneration
from vaswani_transformer.hardware import keep_freed_memory
from vaswani_transformer.model import layers_vaswani
from vaswani_transformer.model import modeling_vaswani as stacks_vaswani
from vaswani_transformer.model.linear_vaswani import project_together
from vaswani_transformer.model.loss_vaswani import label_smoothed_cross_entropy


def smoothed_by_transformers(logits, labels):
    """The Trainer's own label smoothing."""
    return LabelSmoother(epsilon=0.1)({"logits": logits}, labels)


def smoothed_by_torch(logits, labels):
    """torch's own label smoothing."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=0.1)


OURS = {
    "attention": "eager",
    "bf16": True,
    "dropout": "ours",
    "loss": label_smoothed_cross_entropy,
    "projections": project_together,
    "stream": layers_vaswani.stream_dtype,
    "is_packed": False,
}
VARIANTS = {
    "ours": {},
    "sdpa instead of eager attention": {"attention": "sdpa"},
    "torch's dropout": {"dropout": "torch"},
    "Trainer's LabelSmoother": {"loss": smoothed_by_transformers},
    "torch's cross_entropy": {"loss": smoothed_by_torch},
    "a product for each of q, k and v": {"projections": one_by_one},
    "float32 residual stream": {"stream": in_dtype_of_embeddings},
    "both of these": {"projections": one_by_one, "stream": in_dtype_of_embeddings},
    "batches without padding": {"is_packed": True},
    "float32 instead of bf16 autocast": {"bf16": False},
    "the same, a product for each of q, k and v": {"bf16": False, "projections": one_by_one},
    "the same, batches without padding": {"bf16": False, "is_packed": True},
    "all of these at once": {
        "attention": "sdpa",
        "dropout": "torch",
        "loss": smoothed_by_transformers,
        "bf16": False,
        "projections": one_by_one,
    },
}


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a training step for each variant: of the CPU's time where there is one thread."""
    if options.threads:
        torch.set_num_threads(options.threads)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    torch.manual_seed(0)
    model = VaswaniForConditionalGeneration(vaswani_config(options, dropout=0.3)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    shape = (options.sentences, options.length)
    source, labels = (torch.randint(4, options.vocab_size, shape) for _ in range(2))
    mask = torch.ones_like(source)
    mask[: shape[0] // 4, -1] = 0
    decoder_inputs = model.prepare_decoder_input_ids_from_labels(labels)
    padded = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": decoder_inputs}
    packed = {
        "input_ids": source[mask == 1][None],
        "decoder_input_ids": decoder_inputs.flatten()[None],
        "source_offsets": torch.nn.functional.pad(mask.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32),
        "target_offsets": torch.arange(0, labels.numel() + 1, shape[1], dtype=torch.int32),
    }

    def step(attention, bf16, dropout, loss, projections, stream, is_packed):
        model.set_attn_implementation(attention)
        replaced = torch.nn.functional.dropout if dropout == "torch" else layers_vaswani.dropout
        with (
            mock.patch.multiple(layers_vaswani, dropout=replaced, project_together=projections),
            mock.patch.multiple(stacks_vaswani, dropout=replaced, stream_dtype=stream),
        ):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(**(packed if is_packed else padded), use_cache=False).logits
                value = loss(logits, labels.view(logits.shape[:2]))
            value.backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = {name: [] for name in VARIANTS}
    shuffle = random.Random(0)
    for round_ in range(options.rounds + 1):
        order = list(VARIANTS.items())
        shuffle.shuffle(order)  # a step runs slower after one that left the caches in disorder
        for name, changes in order:
            started = clock()
            step(**{**OURS, **changes})
            if round_ > 0:  # the first round warms up
                seconds[name].append(clock() - started)
    return {name: median(values) for name, values in seconds.items()}


def main() -> None:
    """Measure with and without the allocator's settings and print a table of ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_whole_numbers(parser, **SIZES, sentences=256, length=15, rounds=7)
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--plain-allocator", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain_allocator:
        print(json.dumps(measure(options)))
        return
    plain = json.loads(
        subprocess.run(
            [sys.executable, __file__, "--plain-allocator", *sys.argv[1:]], check=True, capture_output=True, text=True
        ).stdout.splitlines()[-1]
    )
    print(f"allocator keeps freed memory: {keep_freed_memory()}")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    kept = measure(options)
    tokens = options.sentences * options.length
    print("| one training step | seconds | times ours | target tokens/s |\n|---|---|---|---|")
    rows = [(name, value) for name, value in kept.items()]
    rows.insert(1, ("freed memory given back to the kernel", plain["ours"]))
    rows.append(("all of these, and memory given back", plain["all of these at once"]))
    for name, value in rows:
        print(f"| {name} | {value:.3f} | {value / kept['ours']:.2f} | {tokens / value:,.0f} |")


if __name__ == "__main__":
    main()
