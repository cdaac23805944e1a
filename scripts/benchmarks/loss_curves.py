"""What a choice inside the model does to learning: curves of trainings that differ in it alone, side by side.

    python scripts/benchmarks/loss_curves.py multi30k-en-de --data-dir FOLDER_OF_MULTI30K --steps 600 --seeds 3
    python scripts/benchmarks/loss_curves.py multi30k-en-de --data-dir FOLDER_OF_MULTI30K --study order --seeds 3

The variants of the first study compute the same up to rounding, so that their curves may differ as those of two seeds
do and no more. Those of the second have the same pairs an epoch: batched by length among all of them, or one window
after the other, as prepared text of more than three million pairs is, with windows of a quarter or a twentieth of all.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from vaswani_transformer.data.batching import WindowedBatchSampler
from vaswani_transformer.model import layers_vaswani, modeling_vaswani
from vaswani_transformer.model.linear_vaswani import project
from vaswani_transformer.recipes.recipe import load_recipe
from vaswani_transformer.training import trainer
from vaswani_transformer.training.run import train

SHARD = 145  # pairs


def in_dtype_of_embeddings(states, training):
    """A residual stream in float32, as it was under autocast before `stream_dtype`."""
    return states.dtype


def one_by_one(modules, states):
    """A product for each of the matrices that `project_together` joins."""
    return tuple(project(module, states) for module in modules)


def in_windows(number, sources, targets, max_tokens, **options):
    """The batches of so many windows of prepared shards."""
    starts = [*range(0, len(sources), SHARD), len(sources)]
    return WindowedBatchSampler((sources, targets), max_tokens, starts, window=-(-len(sources) // number), **options)


SEPARATE = (layers_vaswani, "project_together", one_by_one)
FLOAT32_STREAM = (modeling_vaswani, "stream_dtype", in_dtype_of_embeddings)
STUDIES = {
    "rounding": {
        "as it is": [],
        "float32 residual stream": [FLOAT32_STREAM],
        "float32 residual stream, separate products": [FLOAT32_STREAM, SEPARATE],
    },
    "order": {
        "grouped by length among all pairs": [],
        "4 windows, one after the other": [(trainer, "TokenBatchSampler", partial(in_windows, 4))],
        "20 windows, one after the other": [(trainer, "TokenBatchSampler", partial(in_windows, 20))],
    },
}


def curve(options: argparse.Namespace, replaced: list, seed: int) -> list[float]:
    """Validation losses, in nats a token, of one training."""
    every = max(1, options.steps // options.points)
    fields = {
        "data_dir": options.data_dir, "max_steps": options.steps, "warmup_steps": options.warmup,
        "evaluate_every": every, "validation_bleu": 0, "best_by": "loss", "max_minutes": 10_000.0, "seed": seed,
        **({"tokens_per_batch": options.tokens} if options.tokens else {}),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for owner, name, value in replaced:
            mock.patch.object(owner, name, value).start()
        try:
            train(load_recipe(options.recipe, {**fields, "output": folder + "/run"}))
        finally:
            mock.patch.stopall()
        lines = (Path(folder) / "run" / "training_log.jsonl").read_text().splitlines()
    return [entry["eval_loss"] for entry in map(json.loads, lines) if "eval_loss" in entry]


def main() -> None:
    """Train every variant with every seed and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--study", choices=STUDIES, default="rounding")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--warmup", type=int, default=800, help="steps over which the learning rate grows")
    parser.add_argument("--points", type=int, default=6, help="validations of each training")
    parser.add_argument("--tokens", type=int, help="tokens of a batch; the recipe's by default")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| variant | seed | validation loss (nats a token) |\n|---|---|---|", flush=True)
    for seed in range(options.seeds):
        for name, replaced in STUDIES[options.study].items():
            losses = ", ".join(f"{loss:.4f}" for loss in curve(options, replaced, seed))
            print(f"| {name} | {seed} | {losses} |", flush=True)


if __name__ == "__main__":
    main()
