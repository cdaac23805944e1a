"""Section 3.5 as an experiment: offsets as linear maps, and accuracy on sentences longer than any in training."""

import dataclasses
import functools
import logging
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
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
from .base import Cell, Estimate, Experiment, Setup, describe_runs, markdown_table, write_recipe

logger = logging.getLogger(__name__)

Pair = tuple[list[int], list[int]]  # token ids of source and target, the end token included
ENCODINGS = ("sinusoidal", "learned")
_FOLDS = 5  # of a cross-validation
_END, _FIRST = 2, 3  # ids of the end token and of the first token that is none of the special ones


def offset_matrix(offset: int, d_model: int) -> np.ndarray:
    r"""The matrix M of Section 3.5 with \(PE_{pos+k} = M_k PE_{pos}\) for every position.

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
    """The largest error of `offset_matrix` over positions 0 to `positions` - 1, all offsets and all columns."""
    table = sinusoidal_positions(torch.arange(positions + max(offsets)), d_model).numpy()
    errors = (table[k : k + positions] - table[:positions] @ offset_matrix(k, d_model).T for k in offsets)
    return max(float(np.abs(error).max()) for error in errors)


def unpredicted(table: np.ndarray, offset: int) -> float:
    """The share of the variance of a table's rows that no linear map of the rows `offset` before them predicts.

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


@dataclasses.dataclass(frozen=True)
class Task:
    """Training pairs, and test pairs of each length."""

    vocab_size: int
    draw: Callable[[random.Random, int], list[Pair]]  # draws so many training pairs
    tests: dict[int, list[Pair]]  # by the length of the source, the end token not counted

    def longest(self) -> int:
        """Tokens on a side, the end token included, of the longest test pair."""
        return max(len(side) for pairs in self.tests.values() for pair in pairs for side in pair)


@dataclasses.dataclass(frozen=True)
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
        """The pairs, the same at every call."""
        if self.task == "translate":
            return _translation_task(self)

        def pairs(rng: random.Random, number: int, shortest: int, longest: int) -> list[Pair]:
            drawn = []
            for _ in range(number):
                symbols = [_FIRST + rng.randrange(self.symbols) for _ in range(rng.randint(shortest, longest))]
                drawn.append(([*symbols, _END], [*symbols, _END]))
            return drawn

        rng = random.Random("tests")  # not a number, which may be the seed of training too
        tests = {length: pairs(rng, self.examples, length, length) for length in self.tested}
        return Task(_FIRST + self.symbols, lambda rng, number: pairs(rng, number, 1, self.trained), tests)


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

    def numbered(pair: list[list[str]]) -> Pair:
        source, target = ([*(ids[word] for word in side), _END] for side in pair)
        return source, target

    short = [numbered(pair) for pair in texts if len(pair[0]) <= study.trained]
    unseen = [pair for pair in texts if len(pair[0]) > study.trained] + held_out
    tests = {
        length: [numbered(pair) for pair in unseen if len(pair[0]) == length][: study.examples]
        for length in study.tested
        if any(len(pair[0]) == length for pair in unseen)
    }
    return Task(_FIRST + len(words), lambda rng, number: rng.choices(short, k=number), tests)


def train_on_short(study: LengthStudy, task: Task, encoding: str, seed: int) -> VaswaniForConditionalGeneration:
    """A model in evaluation mode, trained on the task's training pairs; the seed is that of weights and pairs.

    A learned table has rows for the longest test, which short pairs never reach.
    """
    torch.manual_seed(seed)
    model = VaswaniForConditionalGeneration(_config(study, task, encoding))
    model.set_attn_implementation("eager")  # the fastest for short sequences on a CPU
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    schedule = noam_scheduler(optimizer, study.d_model, study.warmup_steps, study.scale)
    rng = random.Random(seed)
    model.train()
    for step in range(1, study.steps + 1):
        loss = model(**_batch(task.draw(rng, study.batch))).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 500 == 0 or step == study.steps:
            logger.info("step %s: loss %.3f", f"{step:,}", loss.item())
    return model.eval()


def _config(study: LengthStudy, task: Task, encoding: str) -> VaswaniConfig:
    return VaswaniConfig(
        vocab_size=task.vocab_size, d_model=study.d_model, d_ff=study.d_ff, num_heads=study.num_heads,
        encoder_layers=study.layers, decoder_layers=study.layers, dropout=study.dropout, label_smoothing=0.0,
        position_encoding=encoding, max_position_embeddings=task.longest() + 1,
    )  # fmt: skip


def _batch(pairs: list[Pair]) -> dict[str, torch.Tensor]:
    return PairCollator(1)([{"input_ids": source, "labels": target} for source, target in pairs])


@torch.no_grad()
def accuracy_by_length(model, task: Task) -> list[dict]:
    """Accuracy at each length, each token predicted from the right ones before it.

    A target is an exact match if the right token is the likeliest one everywhere: then greedy search writes it.
    Accuracies are percentages.
    """
    rows = []
    for length, pairs in task.tests.items():
        batch = _batch(pairs)
        right = model(**batch).logits.argmax(dim=-1) == batch["labels"]
        counts = batch["labels"] >= 0  # padding has negative labels
        rows.append({
            "length": length,
            "examples": len(pairs),
            "token_accuracy": 100 * float(right[counts].float().mean()),
            "exact_match": 100 * float((right | ~counts).all(dim=1).float().mean()),
        })  # fmt: skip
    return rows


STUDIES = (
    LengthStudy(),
    LengthStudy(task="translate", trained=9, tested=tuple(range(4, 17)), dropout=0.1, steps=800),
)
SEEDS = (0, 1)
OFFSETS = (1, 2, 5)  # k of the maps that are fitted to the trained tables
CLOSED_FORM = {"d_model": 512, "positions": 1000, "offsets": list(range(1, 1001, 111))}  # arguments of `offset_error`
SECONDS = 50.0  # of a cell, on one core
MEASURES = {"token_accuracy": "tokens", "exact_match": "exact"}


class Positions(Experiment):
    """A cell for each task, encoding and seed, of the same size at both scales."""

    name = "positions"
    title = "offsets as linear maps of sinusoids, and learned against sinusoidal positions on long sentences"

    def cells(self, setup: Setup) -> list[Cell]:
        """One for each model.

        Raises:
            UserError: for changes.
        """
        if setup.changes:
            raise UserError(f"positions has no setting {next(iter(setup.changes))!r}: leave --set out")
        return [
            Cell(
                f"{study.task}-{encoding}-{seed}",
                f"{study.task}, {encoding} positions, seed {seed}",
                dataclasses.asdict(study) | {"encoding": encoding, "seed": seed},
                group=study.task,
            )
            for study in STUDIES
            for encoding in ENCODINGS
            for seed in SEEDS
        ]

    def estimate(self, setup: Setup, cell: Cell, device: str | None) -> Estimate:
        """About a minute on one core."""
        return Estimate(steps=cell.settings["steps"], seconds=SECONDS)

    def run(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Train a model on short sentences and test it at every length."""
        write_recipe(folder, cell)
        settings = dict(cell.settings)
        encoding, seed = settings.pop("encoding"), settings.pop("seed")
        study = LengthStudy(**settings)
        threads = torch.get_num_threads()
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
        """The closed form's error, what linear maps leave of trained tables, accuracies by length."""
        positions, offsets = CLOSED_FORM["positions"], CLOSED_FORM["offsets"]
        rows = [
            [cell.settings["task"], cell.settings["encoding"], str(cell.settings["seed"])]
            + [f"{results[cell.name]['figures']['unpredicted'][str(offset)]:.1%}" for offset in OFFSETS]
            for cell in cells
            if cell.name in results
        ]
        lines = [
            "# Positions (Section 3.5)\n",
            f"PE(pos+k) = M(k) PE(pos) with M(k) made of rotations: largest error {offset_error(**CLOSED_FORM):.1e}"
            f" over positions 0 to {positions - 1:,}, {len(offsets)} offsets from {min(offsets)} to {max(offsets):,},"
            f" d_model {CLOSED_FORM['d_model']}.\n",
            "The share of a trained table's variance that the best linear map from the rows k before does not predict"
            " (fitted to four fifths of the rows, measured on the others):\n",
            markdown_table(["task", "positions", "seed", *(f"k = {offset}" for offset in OFFSETS)], rows),
        ]
        for study in STUDIES:
            lines += [
                f"\n## {study.task}, trained on sources of at most {study.trained} tokens\n",
                f"{study.steps:,} steps with the same batches for both encodings. Percent, mean over the seeds, in"
                " brackets each seed. Tokens: the right one is the likeliest, given the right ones before it; exact:"
                " all tokens of a sentence are, which greedy search then writes. Learned positions that training never"
                " reaches keep their initial values.\n",
                _accuracy_table(study, results),
            ]
        return "\n".join([*lines, "", describe_runs(results)]) + "\n"

    def draw(self, figure, cells: Sequence[Cell], results: dict[str, dict]) -> None:
        """Accuracy over length: a row of panels for each task, the mean of the seeds thick, each seed thin."""
        figure.set_size_inches(9, 3.1 * len(STUDIES))
        panels = figure.subplots(len(STUDIES), len(MEASURES), squeeze=False)
        for row, study in zip(panels, STUDIES, strict=True):
            for axis, measure in zip(row, MEASURES, strict=True):
                for encoding, color, marker in zip(ENCODINGS, ("tab:blue", "tab:orange"), ("o", "s"), strict=True):
                    if not (seeds := _accuracies(study, encoding, results)):
                        continue
                    lengths = [entry["length"] for entry in seeds[0]]
                    values = np.array([[entry[measure] for entry in entries] for entries in seeds])
                    axis.plot(lengths, values.T, color=color, alpha=0.35, linewidth=0.8)
                    axis.plot(lengths, values.mean(0), color=color, marker=marker, markersize=4, label=encoding)
                axis.axvline(study.trained + 0.5, color="0.4", linestyle="--", linewidth=1)
                place = (study.trained + 0.7, 103)
                axis.annotate("longer than trained →", place, fontsize=8, color="0.3", annotation_clip=False)
                axis.set_ylim(-3, 110)
                title = "token accuracy" if measure == "token_accuracy" else "sentences exactly right"
                axis.set_title(f"{study.task}: {title}")
                axis.set_xlabel("source length (tokens)")
                axis.set_ylabel("%")
                axis.grid(alpha=0.3)
                axis.legend(loc="lower left", title="positions", fontsize=8)


def _accuracies(study: LengthStudy, encoding: str, results: dict[str, dict]) -> list[list[dict]]:
    """The entries of `accuracy_by_length` of each finished seed."""
    names = [f"{study.task}-{encoding}-{seed}" for seed in SEEDS]
    return [results[name]["figures"]["lengths"] for name in names if name in results]


def _accuracy_table(study: LengthStudy, results: dict[str, dict]) -> str:
    columns = [(encoding, measure) for encoding in ENCODINGS for measure in MEASURES]
    titles = ["length", "pairs", *(f"{encoding}: {MEASURES[measure]}" for encoding, measure in columns)]
    rows: dict[int, list[str]] = {}
    for encoding, measure in columns:
        for entries in zip(*_accuracies(study, encoding, results), strict=True):  # of the seeds, at one length
            length, values = entries[0]["length"], [entry[measure] for entry in entries]
            label = str(length) if length <= study.trained else f"{length} (longer)"
            row = rows.setdefault(length, [label, str(entries[0]["examples"]), *[""] * len(columns)])
            each = ", ".join(f"{value:.0f}" for value in values)
            row[2 + columns.index((encoding, measure))] = f"{np.mean(values):.1f} ({each})"
    return markdown_table(titles, list(rows.values()))
