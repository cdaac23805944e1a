"""Study Section 3.5: offsets as linear maps, and accuracy on sentences longer than any in training.

    python scripts/position_study.py

Minutes on one core; prints Markdown.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration
from vaswani_transformer.data.batching import PairCollator
from vaswani_transformer.experiments.base import markdown_table
from vaswani_transformer.model.layers_vaswani import sinusoidal_positions
from vaswani_transformer.training.schedule import noam_scheduler

ENCODINGS, SEEDS = ("sinusoidal", "learned"), (0, 1)
_END, _FIRST = 2, 3  # ids of the end token and of the first token that is none of the special ones


def offset_matrix(offset: int, d_model: int) -> np.ndarray:
    r"""Return the matrix M of Section 3.5 with \(PE_{pos+k} = M_k PE_{pos}\) for every position.

    Column pair i of the encoding is \((\sin\omega_i pos, \cos\omega_i pos)\) with \(\omega_i = 10000^{-2i/d}\), so by
    the addition theorems M is made of the blocks \(((\cos\omega_i k, \sin\omega_i k), (-\sin\omega_i k, \cos\omega_i
    k))\): rotations, which depend on the offset k, of either sign, and not on the position. float64
    `(d_model, d_model)`.
    """
    even = np.arange(0, d_model, 2)
    angles = offset / 10_000.0 ** (even / d_model)  # (d_model / 2,)
    matrix = np.zeros((d_model, d_model))
    matrix[even, even] = matrix[even + 1, even + 1] = np.cos(angles)
    matrix[even, even + 1] = np.sin(angles)
    matrix[even + 1, even] = -np.sin(angles)
    return matrix


def offset_error(d_model: int, positions: int, offsets: Sequence[int]) -> float:
    """Return the largest error of `offset_matrix` over positions 0 to `positions` - 1, all offsets and all columns."""
    table = sinusoidal_positions(torch.arange(positions + max(offsets)), d_model).numpy()
    errors = (table[k : k + positions] - table[:positions] @ offset_matrix(k, d_model).T for k in offsets)
    return max(float(np.abs(error).max()) for error in errors)


@dataclass(frozen=True)
class LengthStudy:
    """A model that learns to copy short sequences of random symbols and is tested on longer ones."""

    trained: int = 20  # tokens of the longest source in training, without the end token
    tested: Sequence[int] = (5, 10, 15, 20, 21, 22, 24, 28, 32, 40)  # lengths, some longer than `trained`
    examples: int = 200  # test pairs a length
    symbols: int = 20  # distinct ones to copy
    d_model: int = 64
    d_ff: int = 128
    num_heads: int = 4
    layers: int = 2  # of each stack
    max_steps: int = 1500
    batch: int = 64  # pairs in a step
    warmup_steps: int = 300

    def draw(self, rng: random.Random, number: int, shortest: int, longest: int) -> list[dict]:
        """Return `number` examples of random symbols to copy, of lengths from `shortest` to `longest`."""
        lengths = [rng.randint(shortest, longest) for _ in range(number)]
        drawn = [[*(_FIRST + rng.randrange(self.symbols) for _ in range(length)), _END] for length in lengths]
        return [{"input_ids": symbols, "labels": symbols} for symbols in drawn]

    def tests(self) -> dict[int, list[dict]]:
        """Return the test pairs by length, the same at every call."""
        rng = random.Random("tests")  # not a number, which may be the seed of training too
        return {length: self.draw(rng, self.examples, length, length) for length in self.tested}


def train_on_short(study: LengthStudy, encoding: str, seed: int) -> VaswaniForConditionalGeneration:
    """Return a model in evaluation mode, trained on short pairs; the seed is that of weights and pairs.

    A learned table has rows for the longest test, which short pairs never reach.
    """
    torch.manual_seed(seed)
    config = VaswaniConfig(
        vocab_size=_FIRST + study.symbols, d_model=study.d_model, d_ff=study.d_ff, num_heads=study.num_heads,
        encoder_layers=study.layers, decoder_layers=study.layers, dropout=0.0, label_smoothing=0.0,
        position_encoding=encoding, max_position_embeddings=max(study.tested) + 2,
    )  # fmt: skip
    model = VaswaniForConditionalGeneration(config).train()
    model.set_attn_implementation("eager")  # the fastest for short sequences on a CPU
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    schedule = noam_scheduler(optimizer, study.d_model, study.warmup_steps)
    rng = random.Random(seed)
    for _ in range(study.max_steps):
        model(**PairCollator(1)(study.draw(rng, study.batch, 1, study.trained))).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def accuracy_by_length(model, study: LengthStudy) -> list[dict]:
    """Return the accuracy at each length in percent, each token predicted from the right ones before it.

    A target is an exact match if the right token is the likeliest one everywhere: then greedy search writes it.
    """
    rows = []
    for length, pairs in study.tests().items():
        batch = PairCollator(1)(pairs)
        right = model(**batch).logits.argmax(dim=-1) == batch["labels"]
        counts = batch["labels"] >= 0  # padding has negative labels
        rows.append({
            "length": length, "examples": len(pairs),
            "token_accuracy": 100 * float(right[counts].float().mean()),
            "exact_match": 100 * float((right | ~counts).all(dim=1).float().mean()),
        })  # fmt: skip
    return rows


def report(study: LengthStudy) -> str:
    """Return the closed form's error, and accuracies over length of a model for each encoding and seed."""
    error = offset_error(d_model=512, positions=1000, offsets=range(1, 1001, 111))
    titles, rows = ["length"], [[f"{length}{' (longer)' * (length > study.trained)}"] for length in study.tested]
    for encoding in ENCODINGS:
        for seed in SEEDS:
            titles += [f"{encoding} positions, seed {seed}: {measure}" for measure in ("tokens", "exact")]
            entries = accuracy_by_length(train_on_short(study, encoding, seed), study)
            for row, entry in zip(rows, entries, strict=True):
                row += [f"{entry[name]:.1f}" for name in ("token_accuracy", "exact_match")]
    return "\n\n".join([
        "# Positions (Section 3.5)",
        f"PE(pos+k) = M(k) PE(pos) with M(k) made of rotations: largest error {error:.1e} over positions 0 to 999,"
        " 10 offsets from 1 to 1,000, d_model 512.",
        f"## Copying, trained on sources of at most {study.trained} tokens",
        f"{study.max_steps:,} steps with the same batches for both encodings. Percent. Tokens: the right one is the"
        " likeliest, given the right ones before it; exact: all tokens of a sentence are. Learned positions that"
        " training never reaches keep their initial values.",
        markdown_table(titles, rows),
    ])  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are so small that more threads cost more than they bring
    print(report(LengthStudy()))
