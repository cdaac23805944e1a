"""How sure a model is of what it has written, as a share that can be checked: of 100 words at 80%, 80 are right.

A model's own probability is that of a token after those before it, and no share of anything. Here it is fitted to what
happens: a word of an output is right if the reference has it at its place, that is if it belongs to the matching words
of both. That errs on the safe side, since a good translation may use other words than the reference.

The fit is Platt's (1999) with two inputs: logistic regression on the logit of the word's probability and on the mean
log-probability of the output's tokens. A sentence's confidence is the mean of its words': the share of them that should
be right.
"""

import difflib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain
from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from ..data.words import word_places, words_at, words_of
from ..errors import UserError
from ..evaluation.records import tensors_sha256
from ..files import write_text
from ..json_and_yaml import read_json
from ..loading import is_exported
from ..plots import new_figure
from .scoring import PairScore, score_tokens

CALIBRATION, PICTURE = "calibration.json", "calibration.png"
LEAST_WORDS = 200  # with fewer a fit says nothing
BINS = 10
_FORMAT = "vaswani calibration 1"
_SURE = 1e-6  # a probability nearer to 0 or 1 counts as this far from it


@dataclass(frozen=True)
class Word:
    """A word of an output."""

    text: str
    log_probability: float  # of the tokens that it has a part in together, in nats


def scored_words(score: PairScore) -> list[Word]:
    """The words of a scored output; the end token is none, and a token of several words counts for each."""
    tokens, text = score.tokens[:-1], "".join(score.tokens[:-1])
    ends = list(accumulate(map(len, tokens)))
    # A token of no text is a part of the letter before it.
    places = [(end - max(len(token), 1), end) for token, end in zip(tokens, ends, strict=True)]
    sums = [0.0] * len(word_places(text))
    for words, log_probability in zip(words_at(text, places), score.log_probabilities[:-1], strict=True):
        for number in words:
            sums[number] += log_probability
    return [Word(*word) for word in zip(words_of(text), sums, strict=True)]


def right_words(output: Sequence[str], reference: Sequence[str]) -> list[bool]:
    """Whether each word of an output is among the matching words of output and reference, in order."""
    right = [False] * len(output)
    for match in difflib.SequenceMatcher(None, output, reference, autojunk=False).get_matching_blocks():
        right[match.a : match.a + match.size] = [True] * match.size
    return right


def mean_confidence(words: Sequence[tuple[str, float]]) -> float:
    """The share of words that should be right, of `Calibration.words`; 1 of no words."""
    return sum(sure for _, sure in words) / len(words) if words else 1.0


def _inputs(scores: Sequence[PairScore]) -> tuple[list[list[Word]], torch.Tensor]:
    """The words of outputs, and for each word of all of them the inputs of the regression, `(words, 3)`."""
    words, rows = [scored_words(score) for score in scores], []
    for score, own in zip(scores, words, strict=True):
        mean = score.log_probability / len(score.tokens)
        rows += [[word.log_probability, mean, 1.0] for word in own]
    inputs = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
    inputs[:, 0] = torch.logit(inputs[:, 0].exp(), eps=_SURE)
    return words, inputs


def _regress(inputs: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The weights `(3,)` of a logistic regression."""
    weights = torch.zeros(inputs.shape[1], dtype=inputs.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = binary_cross_entropy_with_logits(inputs @ weights, right) + 1e-6 * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weights.detach()


@dataclass(frozen=True)
class Reliability:
    """Confidence beside what came true, for words in `BINS` equal ranges of confidence; empty ranges are left out."""

    confidence: list[float]  # mean of the range
    right: list[float]  # share of right words
    words: list[int]

    @property
    def error(self) -> float:
        """The expected calibration error: the mean distance of both, over all words (Naeini et al., 2015)."""
        distances = zip(self.confidence, self.right, self.words, strict=True)
        return sum(abs(sure - true) * number for sure, true, number in distances) / sum(self.words)


def reliability(confidence: torch.Tensor, right: torch.Tensor) -> Reliability:
    """Compare `(words,)` confidences with `(words,)` 1.0 for a right and 0.0 for a wrong word."""
    places = (confidence * BINS).long().clamp(max=BINS - 1)
    found = [(places == place).nonzero().flatten() for place in range(BINS)]
    found = [rows for rows in found if len(rows)]
    return Reliability(
        [float(confidence[rows].mean()) for rows in found],
        [float(right[rows].mean()) for rows in found],
        [len(rows) for rows in found],
    )


@dataclass(frozen=True)
class Calibration:
    """A fit, and how far it can be trusted: measured on sentences that it had not seen, by cross-validation."""

    weights: list[float]  # of the logit of a word's probability, the mean log-probability of a token, and 1
    tensors_sha256: str | None  # of the model that it is for
    sentences: int
    before: Reliability  # of the model's own probabilities
    after: Reliability

    def words(self, score: PairScore) -> list[tuple[str, float]]:
        """The words of an output and how sure the model is of each, from 0 to 1."""
        [words], inputs = _inputs([score])
        sure = torch.sigmoid(inputs @ torch.tensor(self.weights, dtype=inputs.dtype)).tolist()
        return [(word.text, value) for word, value in zip(words, sure, strict=True)]

    def confide(self, model, tokenizer, sources: list[str], outputs: list[str]) -> list[list[tuple[str, float]]]:
        """The `words` of each output of a source; an empty output has none."""
        filled = [number for number, output in enumerate(outputs) if output.strip()]
        scores = score_tokens(model, tokenizer, *([side[number] for number in filled] for side in (sources, outputs)))
        found = dict(zip(filled, map(self.words, scores), strict=True))
        return [found.get(number, []) for number in range(len(outputs))]

    def write(self, folder: str | Path) -> None:
        """Write it into a model's folder, with its reliability diagram where matplotlib is installed."""
        check_folder(folder)
        write_text(Path(folder) / CALIBRATION, json.dumps({"format": _FORMAT} | asdict(self), indent=1) + "\n")
        if (figure := new_figure(figsize=(5, 4.6))) is not None:
            self._draw(figure.subplots())
            figure.savefig(Path(folder) / PICTURE, dpi=110)

    def _draw(self, axes) -> None:
        axes.plot([0, 1], [0, 1], color="tab:gray", linestyle=":", label="as sure as right")
        for found, label in ((self.before, "the model's probabilities"), (self.after, "calibrated")):
            axes.plot(found.confidence, found.right, marker="o", label=f"{label} (error {found.error:.3f})")
        axes.set(xlabel="confidence in a word", ylabel="share of words that are right", xlim=(0, 1), ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend()


def fit(
    scores: Sequence[PairScore], references: Sequence[str], tensors_sha256: str | None = None, parts: int = 5
) -> Calibration:
    """Fit a calibration to scored outputs and the references of their sources.

    Args:
        scores: outputs of the model, scored by it.
        references: one for each.
        tensors_sha256: of the model, as `evaluation.records` counts it.
        parts: of the cross-validation behind `after`.

    Raises:
        UserError: for fewer than `LEAST_WORDS` words or `parts` sentences, or if all words are right, or none.
    """
    words, inputs = _inputs(scores)
    pairs = zip(words, references, strict=True)
    right = [right_words([word.text for word in own], words_of(reference)) for own, reference in pairs]
    target = torch.tensor([value for own in right for value in own], dtype=inputs.dtype)
    sentence = torch.tensor([number for number, own in enumerate(filter(None, words)) for _ in own])
    if len(target) < LEAST_WORDS or target.min() == target.max() or sentence[-1] < parts - 1:
        raise UserError(
            f"{len(target)} words of {len(scores)} sentences were translated, {int(target.sum())} of them right: a"
            f" calibration needs {LEAST_WORDS} or more of at least {parts} sentences, some right and some wrong; give"
            " more pairs, that the model was not trained on"
        )
    seen_by_others = torch.empty_like(target)
    for part in range(parts):
        held_out = sentence % parts == part
        seen_by_others[held_out] = torch.sigmoid(inputs[held_out] @ _regress(inputs[~held_out], target[~held_out]))
    return Calibration(
        _regress(inputs, target).tolist(),
        tensors_sha256,
        len(scores),
        reliability(torch.sigmoid(inputs[:, 0]), target),
        reliability(seen_by_others, target),
    )


def check_folder(folder: str | Path) -> None:
    """Refuse the folder of a model that has another file in the place of a calibration."""
    path = Path(folder) / CALIBRATION
    if path.exists() and not _is_ours(path):
        raise UserError(f"{path} was not written by `vaswani calibrate`: move it away")


def _is_ours(path: Path) -> bool:
    try:
        return read_json(path, "move it away").get("format") == _FORMAT
    except (UserError, AttributeError):
        return False


def _parse(values: dict) -> Calibration:
    """Raises KeyError, TypeError or ValueError for anything that `write` would not have written."""
    parts = {name: Reliability(**values.pop(name)) for name in ("before", "after")}
    calibration = Calibration(**values, **parts)
    columns = [column for part in parts.values() for column in (part.confidence, part.right, part.words)]
    numbers = [*calibration.weights, calibration.sentences, *chain(*columns)]
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise ValueError
    if len(calibration.weights) != 3 or not re.fullmatch("[0-9a-f]{64}", calibration.tensors_sha256):
        raise ValueError
    if any(len(set(map(len, columns[start : start + 3]))) != 1 or not columns[start] for start in (0, 3)):
        raise ValueError
    return calibration


def read_calibration(folder: str | Path) -> Calibration:
    """The calibration in a model's folder.

    Raises:
        UserError: if there is none, if it is damaged, or of other weights.
    """
    path, advice = Path(folder) / CALIBRATION, f"make one: vaswani calibrate {folder} --source FILE --reference FILE"
    try:
        values = dict(read_json(path, advice))
        if values.pop("format") != _FORMAT:
            raise ValueError
        calibration = _parse(values)
    except FileNotFoundError:
        if is_exported(folder):
            line = f"{folder} is an exported model, of which no confidence is known: give the model it was made from"
            raise UserError(line) from None
        raise UserError(f"{folder} has no {CALIBRATION}: {advice}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is no calibration of this version: {advice}") from error
    if calibration.tensors_sha256 != tensors_sha256(folder):
        raise UserError(f"{path} is of other weights than those in the folder: {advice}")
    return calibration
