"""Section 3.5 as an experiment: offsets as linear maps, and accuracy on sentences longer than any in training."""

import functools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from ..data.batching import PairCollator
from ..data.synthetic import generate_corpus
from ..errors import UserError
from ..model.configuration_vaswani import VaswaniConfig
from ..model.layers_vaswani import sinusoidal_positions
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..training.schedule import noam_scheduler
from .base import Cell, Experiment, Setup, describe_runs, markdown_table, results_table

Pair = tuple[list[int], list[int]]  # token ids of source and target, the end token included
ENCODINGS, SEEDS = ("sinusoidal", "learned"), (0, 1)
OFFSETS = (1, 2, 5)  # k of the maps that are fitted to the trained tables
MEASURES = {"token_accuracy": "tokens", "exact_match": "exact"}
_FOLDS = 5  # of a cross-validation
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


def unpredicted(table: np.ndarray, offset: int) -> float:
    """Return the share of the variance of a table's rows that no linear map of the rows `offset` before them predicts.

    By cross-validation: the map is fitted by least squares (of the least norm where several fit) to four fifths of the
    pairs of rows and measured on the others, in turn. A table has hardly more rows than columns, so that any could be
    fitted exactly. The share is squared error over squared distance from the mean row: 0 for an exact map, about 1 for
    a useless one. The table is `(positions, d_model)`.
    """
    before, after = table[:-offset].astype(np.float64), table[offset:].astype(np.float64)
    error = np.zeros_like(after)
    for fold in range(_FOLDS):
        held_out = np.arange(len(before)) % _FOLDS == fold
        matrix = np.linalg.lstsq(before[~held_out], after[~held_out], rcond=1e-9)[0]
        error[held_out] = after[held_out] - before[held_out] @ matrix
    return float((error**2).sum() / ((after - after.mean(axis=0)) ** 2).sum())


@dataclass(frozen=True)
class Task:
    """Training pairs, and test pairs of each length."""

    vocab_size: int
    draw: Callable[[random.Random, int], list[Pair]]  # draws a number of training pairs
    tests: dict[int, list[Pair]]  # by the length of the source, the end token not counted

    def longest(self) -> int:
        """Return the tokens on a side, the end token included, of the longest test pair."""
        return max(len(side) for pairs in self.tests.values() for pair in pairs for side in pair)


@dataclass(frozen=True)
class LengthStudy:
    """A model that is trained on short sentences and tested on longer ones."""

    task: str = "copy"  # sequences of random symbols, or "translate": generated English into German
    trained: int = 20  # tokens of the longest source in training, without the end token
    tested: tuple[int, ...] = (5, 10, 15, 20, 21, 22, 24, 28, 32, 40)  # lengths, some longer than `trained`
    examples: int = 200  # test pairs a length, at most
    symbols: int = 20  # distinct ones to copy
    pairs: int = 16_000  # of the generated corpus, short ones and long ones
    d_model: int = 64
    d_ff: int = 128
    num_heads: int = 4
    layers: int = 2  # of each stack
    dropout: float = 0.0
    steps: int = 1500
    batch: int = 64  # pairs in a step
    warmup_steps: int = 300
    scale: float = 1.0  # factor on the learning rate of Equation 3

    def make_task(self) -> Task:
        """Return the pairs, the same at every call."""
        return (_translation_task if self.task == "translate" else _copy_task)(self)


STUDIES = (
    LengthStudy(),
    LengthStudy(task="translate", trained=9, tested=tuple(range(4, 17)), dropout=0.1, steps=800),
)


def _copy_task(study: LengthStudy) -> Task:
    def pairs(rng: random.Random, number: int, shortest: int, longest: int) -> list[Pair]:
        lengths = [rng.randint(shortest, longest) for _ in range(number)]
        drawn = [[*(_FIRST + rng.randrange(study.symbols) for _ in range(length)), _END] for length in lengths]
        return [(symbols, symbols) for symbols in drawn]

    rng = random.Random("tests")  # not a number, which may be the seed of training too
    tests = {length: pairs(rng, study.examples, length, length) for length in study.tested}
    return Task(_FIRST + study.symbols, lambda rng, number: pairs(rng, number, 1, study.trained), tests)


@functools.cache
def _translation_task(study: LengthStudy) -> Task:
    """Word by word, punctuation marks apart: training on the shorter sentences of the generated corpus."""
    corpus = generate_corpus(train_size=study.pairs, validation_size=study.pairs // 16, test_size=1)
    texts, held_out = (
        [[re.findall(r"\w+(?:-\w+)*|[^\w\s]", side) for side in pair] for pair in pairs]
        for pairs in (corpus.train, corpus.validation)
    )
    words = sorted({word for pair in texts + held_out for side in pair for word in side})
    ids = {word: _FIRST + number for number, word in enumerate(words)}

    def numbered(pairs: list[list[list[str]]]) -> list[Pair]:
        return [tuple([*(ids[word] for word in side), _END] for side in pair) for pair in pairs]

    short = numbered([pair for pair in texts if len(pair[0]) <= study.trained])
    unseen = [pair for pair in texts if len(pair[0]) > study.trained] + held_out
    tests = {length: numbered([pair for pair in unseen if len(pair[0]) == length]) for length in study.tested}
    tests = {length: pairs[: study.examples] for length, pairs in tests.items() if pairs}
    return Task(_FIRST + len(words), lambda rng, number: rng.choices(short, k=number), tests)


def train_on_short(study: LengthStudy, task: Task, encoding: str, seed: int) -> VaswaniForConditionalGeneration:
    """Return a model in evaluation mode, trained on the task's training pairs; the seed is that of weights and pairs.

    A learned table has rows for the longest test, which short pairs never reach.
    """
    torch.manual_seed(seed)
    config = VaswaniConfig(
        vocab_size=task.vocab_size, d_model=study.d_model, d_ff=study.d_ff, num_heads=study.num_heads,
        encoder_layers=study.layers, decoder_layers=study.layers, dropout=study.dropout, label_smoothing=0.0,
        position_encoding=encoding, max_position_embeddings=task.longest() + 1,
    )  # fmt: skip
    model = VaswaniForConditionalGeneration(config).train()
    model.set_attn_implementation("eager")  # the fastest for short sequences on a CPU
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    schedule = noam_scheduler(optimizer, study.d_model, study.warmup_steps, study.scale)
    rng = random.Random(seed)
    for _ in range(study.steps):
        model(**_batch(task.draw(rng, study.batch))).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def _batch(pairs: list[Pair]) -> dict[str, torch.Tensor]:
    return PairCollator(1)([{"input_ids": source, "labels": target} for source, target in pairs])


@torch.no_grad()
def accuracy_by_length(model, task: Task) -> list[dict]:
    """Return the accuracy at each length in percent, each token predicted from the right ones before it.

    A target is an exact match if the right token is the likeliest one everywhere: then greedy search writes it.
    """
    rows = []
    for length, pairs in task.tests.items():
        batch = _batch(pairs)
        right = model(**batch).logits.argmax(dim=-1) == batch["labels"]
        counts = batch["labels"] >= 0  # padding has negative labels
        rows.append({
            "length": length, "examples": len(pairs),
            "token_accuracy": 100 * float(right[counts].float().mean()),
            "exact_match": 100 * float((right | ~counts).all(dim=1).float().mean()),
        })  # fmt: skip
    return rows


class Positions(Experiment):
    """A cell for each task, encoding and seed, of the same size at both scales."""

    name = "positions"
    title = "offsets as linear maps of sinusoids, and learned against sinusoidal positions on long sentences"

    def cells(self, setup: Setup) -> list[Cell]:
        """Return one for each model; raises `UserError` for changes, of which there are none."""
        if setup.changes:
            raise UserError(f"positions has no setting {next(iter(setup.changes))!r}: leave --set out")
        return [
            Cell(f"{study.task}-{encoding}-{seed}", f"{study.task}, {encoding} positions, seed {seed}",
                 asdict(study) | {"encoding": encoding, "seed": seed}, group=study.task)
            for study in STUDIES for encoding in ENCODINGS for seed in SEEDS
        ]  # fmt: skip

    def measure(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Train a model on short sentences and test it at every length."""
        settings = dict(cell.settings)
        encoding, seed = settings.pop("encoding"), settings.pop("seed")
        study, threads = LengthStudy(**settings), torch.get_num_threads()
        torch.set_num_threads(1)  # the matrices are so small that more threads cost more than they bring
        try:
            task = study.make_task()
            model = train_on_short(study, task, encoding, seed)
            rows = torch.arange(study.trained + 1)  # of the encoder's positions, those that training used
            table = model.model.encoder.embed_positions(rows, len(rows)).detach().numpy()
            lengths = accuracy_by_length(model, task)
        finally:
            torch.set_num_threads(threads)
        return {"lengths": lengths, "unpredicted": {str(offset): unpredicted(table, offset) for offset in OFFSETS}}

    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """Return the closed form's error, what linear maps leave of trained tables, and accuracies over length."""
        columns = {f"k = {k}": lambda ours, _, name=str(k): f"{ours['unpredicted'][name]:.1%}" for k in OFFSETS}
        error = offset_error(d_model=512, positions=1000, offsets=range(1, 1001, 111))
        sections = [
            "# Positions (Section 3.5)",
            f"PE(pos+k) = M(k) PE(pos) with M(k) made of rotations: largest error {error:.1e} over positions 0 to 999,"
            " 10 offsets from 1 to 1,000, d_model 512.",
            "The share of a trained table's variance that the best linear map from the rows k before does not predict"
            " (fitted to four fifths of the rows, measured on the others):",
            results_table(cells, results, columns),
        ]
        for study in STUDIES:
            rows: dict[int, list[str]] = {length: [] for length in study.tested}
            titles = [f"{encoding}: {MEASURES[measure]}" for encoding in ENCODINGS for measure in MEASURES]
            for encoding in ENCODINGS:
                names = [f"{study.task}-{encoding}-{seed}" for seed in SEEDS]
                seeds = [results[name]["figures"]["lengths"] for name in names if name in results]
                for measure in MEASURES:
                    for entries in zip(*seeds, strict=True):  # of one length
                        values = [entry[measure] for entry in entries]
                        text = f"{mean(values):.1f} ({', '.join(f'{value:.0f}' for value in values)})"
                        rows[entries[0]["length"]].append(text)
                    for row in rows.values():
                        row += [""] * (titles.index(f"{encoding}: {MEASURES[measure]}") + 1 - len(row))
            labels = {length: f"{length}{' (longer)' if length > study.trained else ''}" for length in rows}
            sections += [
                f"## {study.task}, trained on sources of at most {study.trained} tokens",
                f"{study.steps:,} steps with the same batches for both encodings. Percent, mean over the seeds, in"
                " brackets each seed. Tokens: the right one is the likeliest, given the right ones before it; exact:"
                " all tokens of a sentence are. Learned positions that training never reaches keep their initial"
                " values.",
                markdown_table(["length", *titles], [[labels[length], *row] for length, row in rows.items()]),
            ]
        return "\n\n".join([*sections, describe_runs(results)])
