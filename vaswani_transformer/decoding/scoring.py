"""Scores of given translations: the log-probability of each of their tokens under a model."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import UserError
from ..model.settings_vaswani import length_normalization
from .streaming import LineWorker, Remarks, Window, batches_by_length, read_ahead

TOKENS_PER_BATCH = 4096


def positions(config) -> float:
    """Return the most tokens that a source or, with the start token, an output can have."""
    return config.max_position_embeddings if config.position_encoding == "learned" else math.inf


def check_length(config, number: int, tokens: int, most: float = math.inf) -> None:
    """Raise `UserError` where line `number`, from 1, has more tokens, `</s>` included, than positions or `most`."""
    if tokens > (limit := min(positions(config), most)):
        raise UserError(f"line {number} has {tokens} tokens and at most {limit} are taken: split it into sentences")


def score_ids(
    model,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> list[list[float]]:
    """Return the log-probability of each token of each target, given its source and the tokens before it.

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
    score = getattr(model, "score_ids", None) or partial(_score_ids, model)  # an exported model scores by its engine
    scores = score(sources, targets, tokens_per_batch)
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


LengthRule = Callable[[float, int], float]  # from log P(Y|X) in nats and |Y|, `</s>` included, to a score


def length_rule(generation_config, options: dict) -> LengthRule:
    """Return the rule by which beam search ranks (Section 6.1), by a generation configuration and options over it."""
    settings = {"length_penalty": 1.0, "length_normalization": "gnmt"}
    for source in (vars(generation_config), options):
        settings |= {name: source[name] for name in settings if source.get(name) is not None}
    alpha, kind = settings.values()
    return lambda log_probability, tokens: log_probability / length_normalization(tokens, alpha, kind)


@dataclass(frozen=True)
class PairScore:
    """The log-probability of the target of one pair under a model."""

    tokens: list[str]  # of the target, as text, `</s>` at the end
    log_probabilities: list[float]  # log P of each token given the source and the tokens before it, in nats

    @property
    def log_probability(self) -> float:
        """Return log P(Y|X) of the whole target, in nats."""
        return math.fsum(self.log_probabilities)


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
        """Return the text of each token."""
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


def _score(
    model, tokenizer, pairs: Sequence[tuple[str, str]], numbers: Sequence[int], tokens_per_batch: int
) -> list[PairScore]:
    """Score pairs of lines with these numbers."""
    if not pairs:
        return []
    sources, targets = map(list, zip(*pairs, strict=True))
    sources, targets = tokenizer(sources)["input_ids"], tokenizer(text_target=targets)["input_ids"]
    for number, *pair in zip(numbers, sources, targets, strict=True):
        check_length(model.config, number, max(map(len, pair)))
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
    return _score(model, tokenizer, pairs, range(1, len(pairs) + 1), tokens_per_batch)


def score_pairs(
    model, tokenizer, sources: list[str], targets: list[str], tokens_per_batch: int = TOKENS_PER_BATCH
) -> tuple[list[float], list[int]]:
    """Score each target as a whole; Args and Raises as of `score_tokens`.

    Returns:
        for each pair the negative log-probability of its target in nats, and the target's tokens, `</s>` counted.
    """
    scores = score_tokens(model, tokenizer, sources, targets, tokens_per_batch)
    return [-score.log_probability for score in scores], [len(score.tokens) for score in scores]


class FileScorer(LineWorker):
    """Scores pairs of lines into an output, in constant memory; a pair with a blank side has no score.

    Args:
        model, tokenizer: the model, or an ensemble, in evaluation mode, and its tokenizer.
        rule: the rule of the scores.
        json: write one JSON object for each pair, in place of fields separated by tabs.
        tokens: also write the log-probability of each token.
        window: pairs that are sorted by length and written together.
        tokens_per_batch: tokens a side scored at once, padding counted.
    """

    doing, unit = "scoring", "pairs"  # of the progress bar

    def __init__(
        self, model, tokenizer, rule: LengthRule, json: bool, tokens: bool, window: int, tokens_per_batch: int
    ):
        self.model, self.tokenizer, self.rule, self.json, self.tokens = model, tokenizer, rule, json, tokens
        self.window, self.tokens_per_batch = window, tokens_per_batch
        self.sums: dict[str, Any] = {"pairs": 0, "tokens": 0, "log_probability": 0.0}  # of what was written

    def write(
        self, windows: Iterator[Window], output: Any, bar: Any, remarks: Remarks, done: int = 0, ahead: bool = True
    ) -> None:
        """Write the scores of windows, up to the first error, as `run`; updates `bar`, and has no `remarks`."""
        for window in read_ahead(windows) if ahead else windows:
            filled = [index for index, pair in enumerate(window.lines) if all(side.strip() for side in pair)]
            numbers, pairs = [window.first + index for index in filled], [window.lines[index] for index in filled]
            scores = _score(self.model, self.tokenizer, pairs, numbers, self.tokens_per_batch)
            by_number = dict(zip(numbers, scores, strict=True))
            first = max(window.first, done + 1)
            records = [self._record(n, by_number.get(n)) for n in range(first, window.first + len(window.lines))]
            output.write("".join(records))
            self.add(records)
            bar.update(len(records))
            window.check()

    def _record(self, number: int, score: PairScore | None) -> str:
        """Return the text of line `number`, its end included; `score` is None for a pair with a blank side."""
        if score is None:
            return json.dumps({"line": number, "score": None}) + "\n" if self.json else "\n"
        logs, tokens = score.log_probabilities, len(score.tokens)
        ranked = self.rule(score.log_probability, tokens)
        if self.json:
            values = {"line": number, "score": ranked, "log_probability": score.log_probability, "tokens": tokens}
            if self.tokens:
                values["token_log_probabilities"] = list(zip(score.tokens, logs, strict=True))
            return json.dumps(values, ensure_ascii=False) + "\n"
        fields = [f"{ranked:.6f}", f"{score.log_probability:.6f}", str(tokens)]
        fields += [" ".join(f"{log:.6f}" for log in logs)] if self.tokens else []
        return "\t".join(fields) + "\n"

    def add(self, lines: Iterable[str]) -> None:
        """Add what is written in lines to the sums: pairs that have a score, their tokens and log-probability."""
        for line in lines:
            if self.json:
                values = json.loads(line)
                entry = (values["log_probability"], values["tokens"]) if "tokens" in values else None
            else:
                entry = line.split("\t")[1:3] if line.strip() else None
            if entry is not None:
                self.sums["pairs"] += 1
                self.sums["tokens"] += int(entry[1])
                self.sums["log_probability"] += float(entry[0])
