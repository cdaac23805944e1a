"""Section 3.5 checked: offsets as linear maps of sinusoids, and sentences longer than any in training."""

import dataclasses
import functools
import logging
import random
import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..data.batching import PairCollator
from ..data.synthetic import generate_corpus
from ..model.configuration_vaswani import VaswaniConfig
from ..model.layers_vaswani import sinusoidal_positions
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..training.schedule import noam_scheduler

logger = logging.getLogger(__name__)

Pair = tuple[list[int], list[int]]  # token ids of source and target, the end token included
ENCODINGS = ("sinusoidal", "learned")
_END, _FIRST = 2, 3  # ids of the end token and of the first token that is none of the special ones


def offset_matrix(offset: int, d_model: int) -> np.ndarray:
    r"""The matrix M of Section 3.5 with \(PE_{pos+k} = M_k PE_{pos}\) for every position.

    Column pair i of the encoding is \((\sin\omega_i pos, \cos\omega_i pos)\) with \(\omega_i = 10000^{-2i/d}\), so by
    the addition theorems M is made of the blocks \(((\cos\omega_i k, \sin\omega_i k), (-\sin\omega_i k, \cos\omega_i
    k))\): rotations, which depend on the offset k and not on the position.

    Args:
        offset: k, of either sign.
        d_model: width of the encoding, even.

    Returns:
        float64 `(d_model, d_model)`.
    """
    angles = offset / 10_000.0 ** (np.arange(0, d_model, 2) / d_model)  # (d_model / 2,)
    matrix = np.zeros((d_model, d_model))
    even = np.arange(0, d_model, 2)
    matrix[even, even] = matrix[even + 1, even + 1] = np.cos(angles)
    matrix[even, even + 1] = np.sin(angles)
    matrix[even + 1, even] = -np.sin(angles)
    return matrix


def offset_error(d_model: int, positions: int, offsets: Sequence[int]) -> float:
    """The largest error of `offset_matrix` over positions 0 to `positions` - 1, all offsets and all columns."""
    table = sinusoidal_positions(torch.arange(positions + max(offsets)), d_model).numpy()
    errors = (table[k : k + positions] - table[:positions] @ offset_matrix(k, d_model).T for k in offsets)
    return max(float(np.abs(error).max()) for error in errors)


def unpredicted(table: np.ndarray, offset: int, folds: int = 5) -> float:
    """The share of the variance of a table's rows that no linear map of the rows `offset` before them predicts.

    By cross-validation: the map is fitted by least squares (of the least norm where several fit) to four fifths of the
    pairs of rows and measured on the others, in turn. A table has hardly more rows than columns, so that any could be
    fitted exactly.

    Args:
        table: `(positions, d_model)`.
        offset: k.
        folds: parts of which each is left out once.

    Returns:
        squared error over squared distance from the mean row: 0 for an exact map, about 1 for a useless one.
    """
    before, after = table[:-offset].astype(np.float64), table[offset:].astype(np.float64)
    error = np.zeros_like(after)
    for fold in range(folds):
        held_out = np.arange(len(before)) % folds == fold
        matrix = np.linalg.lstsq(before[~held_out], after[~held_out], rcond=1e-9)[0]
        error[held_out] = after[held_out] - before[held_out] @ matrix
    return float((error**2).sum() / ((after - after.mean(axis=0)) ** 2).sum())


@dataclasses.dataclass(frozen=True)
class Task:
    """Training pairs, and test pairs of each length.

    Args:
        vocab_size: number of ids.
        draw: draws so many training pairs with a source of random numbers.
        tests: test pairs by the length of the source, the end token not counted.
    """

    vocab_size: int
    draw: Callable[[random.Random, int], list[Pair]]
    tests: dict[int, list[Pair]]

    def longest(self) -> int:
        """Tokens on a side, the end token included, of the longest test pair."""
        return max(len(side) for pairs in self.tests.values() for pair in pairs for side in pair)


@dataclasses.dataclass(frozen=True)
class LengthStudy:
    """A model that is trained on short sentences and tested on longer ones.

    Args:
        task: `"copy"` sequences of random symbols, or `"translate"` generated English into German.
        trained: longest source in training, in tokens without the end token.
        tested: lengths to test, some longer than `trained`.
        examples: test pairs a length, at most.
        symbols: distinct symbols to copy.
        pairs: of the generated corpus, short ones and long ones.
        d_model, d_ff, num_heads, layers: sizes of the model; as many layers in both stacks.
        dropout: in training.
        steps: optimizer steps.
        batch: pairs in a step.
        warmup_steps: of the learning rate.
        scale: factor on the learning rate of Equation 3.
    """

    task: str = "copy"
    trained: int = 20
    tested: tuple[int, ...] = (5, 10, 15, 20, 21, 22, 24, 28, 32, 40)
    examples: int = 200
    symbols: int = 20
    pairs: int = 16_000
    d_model: int = 64
    d_ff: int = 128
    num_heads: int = 4
    layers: int = 2
    dropout: float = 0.0
    steps: int = 1500
    batch: int = 64
    warmup_steps: int = 300
    scale: float = 1.0

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


def train_and_test(study: LengthStudy, encoding: str, seed: int) -> tuple[list[dict], np.ndarray]:
    """Train one model on short pairs and test it at every length.

    Args:
        study: sizes and lengths.
        encoding: one of `ENCODINGS`; a learned table has rows for the longest test, which short pairs never reach.
        seed: of weights and pairs.

    Returns:
        the rows of `accuracy_by_length`, and the encoder's rows that training used, `(trained + 1, d_model)`.
    """
    task = study.make_task()
    model = train_on_short(study, task, encoding, seed)
    rows = torch.arange(study.trained + 1)
    table = model.model.encoder.embed_positions(rows, len(rows)).detach().numpy()
    return accuracy_by_length(model, task), table


def train_on_short(study: LengthStudy, task: Task, encoding: str, seed: int) -> VaswaniForConditionalGeneration:
    """A model in evaluation mode, trained on the task's training pairs; arguments as of `train_and_test`."""
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
    sizes = {"d_model": study.d_model, "d_ff": study.d_ff, "num_heads": study.num_heads, "dropout": study.dropout}
    layers = {"encoder_layers": study.layers, "decoder_layers": study.layers}
    rows = {"max_position_embeddings": task.longest() + 1}
    other = {"position_encoding": encoding, "label_smoothing": 0.0}
    return VaswaniConfig(vocab_size=task.vocab_size, **sizes, **layers, **rows, **other)


def _batch(pairs: list[Pair]) -> dict[str, torch.Tensor]:
    return PairCollator(1)([{"input_ids": source, "labels": target} for source, target in pairs])


@torch.no_grad()
def accuracy_by_length(model, task: Task) -> list[dict]:
    """Accuracy at each length, each token predicted from the right ones before it.

    A target is an exact match if the right token is the likeliest one everywhere: then greedy search writes it.

    Returns:
        for each length `length`, `examples`, `token_accuracy` and `exact_match` in percent.
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
