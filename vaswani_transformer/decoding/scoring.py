"""Scores of given translations: the log-probability of each of their tokens under a model."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..model.settings_vaswani import length_normalization
from .streaming import Remarks, Window, batches_by_length

TOKENS_PER_BATCH = 4096


def check_length(config, number: int, tokens: int) -> None:
    """Raise `UserError` for a sentence of more tokens, `</s>` included, than a model with learned positions can take.

    `number` is the line of the sentence, from 1.
    """
    if config.position_encoding == "learned" and tokens > config.max_position_embeddings:
        raise UserError(
            f"line {number} has {tokens} tokens and the model has {config.max_position_embeddings} positions:"
            " split the line into shorter sentences"
        )


def score_ids(
    model,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> list[list[float]]:
    """Log-probability of each token of each target, given its source and the tokens before it.

    Args:
        model: the model, or an ensemble, in evaluation mode.
        sources: token ids of the sources, `</s>` included.
        targets: token ids of their targets as the decoder should write them; a `</s>` at the end counts like any token.
        tokens_per_batch: tokens a side scored at once, padding counted.

    Returns:
        for each target as many natural-log probabilities as it has tokens.

    Raises:
        UserError: for a model whose log-probabilities are infinite or NaN, as happens beyond the range of float16.
    """
    if hasattr(model, "score_ids"):  # an exported model scores by its engine
        scores = model.score_ids(sources, targets, tokens_per_batch)
    else:
        scores = _score_ids(model, sources, targets, tokens_per_batch)
    for number, row in enumerate(scores, 1):
        if not all(map(math.isfinite, row)):
            raise UserError(
                f"output {number} has a log-probability that is infinite or NaN: the model's numbers are out of range;"
                " give --precision float32 or bfloat16, or another model"
            )
    return scores


def _score_ids(model, sources, targets, tokens_per_batch: int) -> list[list[float]]:
    import torch

    from ..data.batching import PairCollator

    scores: list[list[float]] = [[] for _ in targets]
    filled = [index for index, target in enumerate(targets) if len(target)]
    lengths = [max(len(sources[index]), len(targets[index])) for index in filled]
    collator = PairCollator(model.config.pad_token_id)
    for batch in batches_by_length(lengths, tokens_per_batch):
        indices = [filled[number] for number in batch]
        inputs = collator([{"input_ids": sources[index], "labels": targets[index]} for index in indices])
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        labels = inputs.pop("labels")
        with torch.no_grad():
            logits = model(**inputs, decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels)).logits
        losses = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
        for index, row in zip(indices, losses.tolist(), strict=True):
            scores[index] = [-loss for loss in row[: len(targets[index])]]
    return scores


@dataclass(frozen=True)
class LengthRule:
    """The rule by which beam search computes a score from a log-probability and a length (Section 6.1)."""

    length_penalty: float  # alpha
    normalization: str  # "gnmt", the paper's rule, or "power", that of transformers (log P / length^alpha)

    @classmethod
    def of(cls, generation_config, options: dict) -> "LengthRule":
        """The rule that `generate()` follows with a generation configuration and options over it."""
        settings = {"length_penalty": 1.0, "length_normalization": "gnmt"}
        for source in (vars(generation_config), options):
            settings |= {name: source[name] for name in settings if source.get(name) is not None}
        return cls(settings["length_penalty"], settings["length_normalization"])

    def score(self, log_probability: float, tokens: int) -> float:
        """The score of a translation of `tokens` tokens, `</s>` included; `log_probability` in nats."""
        return log_probability / length_normalization(tokens, self.length_penalty, self.normalization)


@dataclass(frozen=True)
class PairScore:
    """The log-probability of the target of one pair under a model."""

    tokens: list[str]  # of the target, as text, `</s>` at the end
    log_probabilities: list[float]  # log P of each token given the source and the tokens before it, in nats

    @property
    def log_probability(self) -> float:
        """log P(Y|X) of the whole target, in nats."""
        return math.fsum(self.log_probabilities)

    def score(self, rule: LengthRule) -> float:
        """Return the score by which beam search would rank the target."""
        return rule.score(self.log_probability, len(self.tokens))


_BROKEN = "\ufffd"  # what a tokenizer shows for a part of a character
_MOST_TOKENS = 4  # of a character, which has at most as many bytes in UTF-8


class TokenText:
    """The texts of tokens as people read them: with leading spaces, special tokens by name; joined, the whole text.

    The text of a character that consists of several tokens goes to the first of them.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._texts = {(token,): tokenizer.convert_ids_to_tokens(token) for token in tokenizer.all_special_ids}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        texts: list[str] = []
        while len(texts) < len(ids):
            start = len(texts)
            runs = (tuple(ids[start:end]) for end in range(start + 1, min(start + _MOST_TOKENS, len(ids)) + 1))
            run = next((run for run in runs if _BROKEN not in self._text(run)), (ids[start],))
            texts += [self._text(run), *[""] * (len(run) - 1)]
        return texts

    def _text(self, run: tuple[int, ...]) -> str:
        if run not in self._texts:
            # The decoder removes the space at the start of a text, but not between two copies of it.
            once, twice = (self._tokenizer.decode(list(run) * number) for number in (1, 2))
            self._texts[run] = twice[len(once) :]
        return self._texts[run]


def _tokenize(
    config, tokenizer, pairs: Sequence[tuple[str, str]], numbers: Sequence[int]
) -> tuple[list[tuple[list[int], list[int]]], UserError | None]:
    """Token ids of pairs with these line numbers, up to one that is too long, and the error that names it."""
    ids = []
    sources, targets = ([pair[side] for pair in pairs] for side in range(2))
    sides = [tokenizer(sources)["input_ids"], tokenizer(text_target=targets)["input_ids"]] if pairs else [[], []]
    for number, *pair in zip(numbers, *sides, strict=True):
        try:
            check_length(config, number, max(map(len, pair)))
        except UserError as error:
            return ids, error
        ids.append(tuple(pair))
    return ids, None


def _score(model, tokenizer, ids: list[tuple[list[int], list[int]]], tokens_per_batch: int) -> list[PairScore]:
    sources, targets = [source for source, _ in ids], [target for _, target in ids]
    as_text, rows = TokenText(tokenizer), score_ids(model, sources, targets, tokens_per_batch)
    return [PairScore(as_text(target), row) for target, row in zip(targets, rows, strict=True)]


def score_tokens(
    model, tokenizer, sources: list[str], targets: list[str], tokens_per_batch: int = TOKENS_PER_BATCH
) -> list[PairScore]:
    """Score each token of each target, given its source and the tokens before it.

    Args:
        model: the model, or an ensemble, in evaluation mode.
        tokenizer: its tokenizer.
        sources: source sentences.
        targets: one target for each source.
        tokens_per_batch: tokens a side scored at once, padding counted.

    Raises:
        UserError: for a sentence that is too long for the model's positions, naming its line.
        ValueError: for lists of different lengths.
    """
    pairs = list(zip(sources, targets, strict=True))
    ids, error = _tokenize(model.config, tokenizer, pairs, range(1, len(pairs) + 1))
    if error is not None:
        raise error
    return _score(model, tokenizer, ids, tokens_per_batch)


def score_pairs(
    model, tokenizer, sources: list[str], targets: list[str], tokens_per_batch: int = TOKENS_PER_BATCH
) -> tuple[list[float], list[int]]:
    """Score each target as a whole; Args and Raises as of `score_tokens`.

    Returns:
        for each pair the negative log-probability of its target in nats, and the target's tokens, `</s>` counted.
    """
    scores = score_tokens(model, tokenizer, sources, targets, tokens_per_batch)
    return [-score.log_probability for score in scores], [len(score.tokens) for score in scores]


@dataclass(frozen=True)
class ScoreLayout:
    """The layout in which scores of pairs are written."""

    rule: LengthRule
    json: bool = False  # one JSON object for each pair, in place of fields separated by tabs
    tokens: bool = False  # also the log-probability of each token

    def record(self, number: int, score: PairScore | None) -> str:
        """Return the text of line `number`, its end included; `score` is None for a pair with a blank side."""
        if self.json:
            values: dict[str, Any] = {"line": number, "score": None}
            if score is not None:
                ranked = score.score(self.rule)
                values |= {"score": ranked, "log_probability": score.log_probability, "tokens": len(score.tokens)}
                if self.tokens:
                    values["token_log_probabilities"] = list(zip(score.tokens, score.log_probabilities, strict=True))
            return json.dumps(values, ensure_ascii=False) + "\n"
        if score is None:
            return "\n"
        fields = [f"{score.score(self.rule):.6f}", f"{score.log_probability:.6f}", str(len(score.tokens))]
        if self.tokens:
            fields.append(" ".join(f"{log:.6f}" for log in score.log_probabilities))
        return "\t".join(fields) + "\n"

    def add(self, lines: Iterable[str], sums: dict[str, Any]) -> None:
        """Add what is written in lines to the pairs that have a score, their tokens and log-probability."""
        for line in lines:
            if self.json:
                values = json.loads(line)
                entry = (values["log_probability"], values["tokens"]) if "tokens" in values else None
            else:
                entry = line.split("\t")[1:3] if line.strip() else None
            if entry is not None:
                sums["pairs"] += 1
                sums["tokens"] += int(entry[1])
                sums["log_probability"] += float(entry[0])


class FileScorer:
    """Scores pairs of lines into an output, in constant memory; a pair with a blank side has no score."""

    doing, unit = "scoring", "pairs"  # of the progress bar

    def __init__(self, model, tokenizer, layout: ScoreLayout, window: int, tokens_per_batch: int):
        self.model, self.tokenizer, self.layout = model, tokenizer, layout
        self.window, self.tokens_per_batch = window, tokens_per_batch
        self.sums: dict[str, Any] = {"pairs": 0, "tokens": 0, "log_probability": 0.0}  # of what was written

    def write(self, windows: Iterable[Window], output: Any, bar: Any, done: int = 0) -> Remarks:
        """Write the scores of windows, but for the first `done` lines, up to the first error; `bar` counts them."""
        remarks = Remarks()
        for chunk in windows:
            filled = [index for index, pair in enumerate(chunk.lines) if all(side.strip() for side in pair)]
            numbers = [chunk.first + index for index in filled]
            pairs = [chunk.lines[index] for index in filled]
            ids, remarks.error = _tokenize(self.model.config, self.tokenizer, pairs, numbers)
            scores = dict(zip(filled, _score(self.model, self.tokenizer, ids, self.tokens_per_batch), strict=False))
            end = len(chunk.lines) if remarks.error is None else filled[len(ids)]
            records = [self.layout.record(chunk.first + index, scores.get(index)) for index in range(end)]
            new = records[max(0, done - chunk.first + 1) :]
            output.write("".join(new))
            self.layout.add(new, self.sums)
            bar.update(len(new))
            remarks.error = remarks.error or chunk.error
            if remarks.error is not None:
                break
        return remarks
