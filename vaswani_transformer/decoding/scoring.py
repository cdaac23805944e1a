"""Scores of given translations: the log-probability of each of their tokens under a model, and words' confidence.

The probability of a word is that of its tokens together, and the confidence in a sentence is the mean of its words'. It
ranks words and sentences; how many words are right it does not say, which a model over- or underestimates.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, count
from typing import Any

from ..data.words import word_places, words_at, words_of
from ..errors import UserError, reading, texts_in
from ..model.language_codes_vaswani import LanguageCodes
from ..model.settings_vaswani import length_normalization
from .streaming import LineWorker, Remarks, Window, batches_by_length

TOKENS_PER_BATCH = 4096


def positions(config) -> float:
    """Return the most tokens that a source or, with the start token, an output can have."""
    return config.max_position_embeddings if config.position_encoding == "learned" else math.inf


def check_length(config, number: int | str, tokens: int, most: float = math.inf) -> None:
    """Raise `UserError` where line `number`, from 1, has more tokens, `</s>` included, than positions or `most`."""
    if tokens > (limit := min(positions(config), most)):
        raise UserError(f"line {number} has {tokens} tokens and at most {limit} are taken: split it into sentences")


def score_ids(
    model,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    tokens_per_batch: int = TOKENS_PER_BATCH,
    numbers: Sequence[int] = (),
) -> list[list[float]]:
    """Return the log-probability, in nats, of each token of each target, given its source and the tokens before it.

    Args:
        model: the model, or an ensemble, in evaluation mode.
        sources: token ids of the sources, `</s>` included.
        targets: token ids of their targets as the decoder should write them; a `</s>` at the end counts like any token.
        tokens_per_batch: tokens a side scored at once, padding counted.
        numbers: of the lines, for errors; by default from 1.

    Raises:
        UserError: for a model whose log-probabilities are infinite or NaN, as happens beyond the range of float16.
    """
    score = getattr(model, "score_ids", None) or partial(_score_ids, model)  # an exported model scores by its engine
    scores = score(sources, targets, tokens_per_batch)
    for number, row in zip(numbers or count(1), scores, strict=False):
        if not all(map(math.isfinite, row)):
            fix = "give --precision float32 or bfloat16, or another model"
            raise UserError(f"line {number}: a log-probability is infinite or NaN: {fix}")
    return scores


def _score_ids(model, sources, targets, tokens_per_batch: int) -> list[list[float]]:
    import torch

    from ..data.batching import PairCollator
    from ..model.copying_vaswani import copy_sharing_weights

    model = copy_sharing_weights(model) if model.training else model
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


def token_texts(tokenizer, rows: Iterable[Sequence[int]]) -> list[list[str]]:
    """Return the texts of tokens as people read them, with their spaces, special tokens by name.

    Those of a row are, joined, its whole text. That of a character of several tokens goes to the first of them.
    """
    names = {(token,): tokenizer.convert_ids_to_tokens(token) for token in tokenizer.all_special_ids}

    @cache
    def text_of(run: tuple[int, ...]) -> str:
        # The decoder removes the space at the start of a text, but not between two copies of it.
        once, twice = (tokenizer.decode(list(run) * number) for number in (1, 2))
        if (tokenizer.convert_ids_to_tokens(run[-1]) or "").endswith("</w>"):  # of fairseq's: spaces are behind words
            return names.get(run, once + " ")
        return names.get(run, twice[len(once) :])

    all_texts = []
    for ids in rows:
        texts: list[str] = []
        while (start := len(texts)) < len(ids):
            runs = (tuple(ids[start:end]) for end in range(start + 1, min(start + _MOST_TOKENS, len(ids)) + 1))
            run = next((run for run in runs if _BROKEN not in text_of(run)), (ids[start],))
            texts += [text_of(run), *[""] * (len(run) - 1)]
        all_texts.append(texts)
    return all_texts


def score_tokens(
    model,
    tokenizer,
    sources: list[str],
    targets: list[str],
    tokens_per_batch: int = TOKENS_PER_BATCH,
    numbers: Sequence[int] | None = None,
) -> list[PairScore]:
    """Score each token of each target, a text, given its source and the tokens before it.

    `model`, `tokens_per_batch` and `numbers` are as in `score_ids`.

    Raises:
        UserError: for a sentence too long for the model's positions, or with an unknown language code, naming its line.
        ValueError: for lists of different lengths.
    """
    sources, targets = texts_in(sources, "source"), texts_in(targets, "target")
    if not list(zip(sources, targets, strict=True)):
        return []
    numbers, codes = numbers or range(1, len(sources) + 1), LanguageCodes(tokenizer)
    for number, source in zip(numbers, sources, strict=True):
        with reading(f"line {number}"):
            codes.split(source)
    sources, targets = tokenizer(sources)["input_ids"], tokenizer(text_target=targets)["input_ids"]
    for number, source, target in zip(numbers, sources, targets, strict=True):
        check_length(model.config, number, len(source))
        check_length(model.config, f"{number} of the targets", len(target))
    rows = score_ids(model, sources, targets, tokens_per_batch, numbers)
    return list(map(PairScore, token_texts(tokenizer, targets), rows))


def score_pairs(
    model, tokenizer, sources: list[str], targets: list[str], tokens_per_batch: int = TOKENS_PER_BATCH
) -> tuple[list[float], list[int]]:
    """Score each target as a whole; Args and Raises as in `score_tokens`.

    Returns:
        for each pair the negative log-probability of its target in nats, and the target's tokens, `</s>` counted.
    """
    scores = score_tokens(model, tokenizer, sources, targets, tokens_per_batch)
    return [-score.log_probability for score in scores], [len(score.tokens) for score in scores]


Words = list[tuple[str, float]]  # words of an output and the probability of each


def word_probabilities(score: PairScore) -> Words:
    """Return the words of a scored output; the end token is none, and a token of several words counts for each."""
    tokens, text = score.tokens[:-1], "".join(score.tokens[:-1])
    ends = list(accumulate(map(len, tokens)))
    # A token of no text is a part of the character before it.
    spans = [(end - max(len(token), 1), end) for token, end in zip(tokens, ends, strict=True)]
    sums = [0.0] * len(word_places(text))
    for words, log_probability in zip(words_at(text, spans), score.log_probabilities[:-1], strict=True):
        for number in words:
            sums[number] += log_probability
    return list(zip(words_of(text), map(math.exp, sums), strict=True))


def mean_confidence(words: Words) -> float:
    """Return the mean probability of words; 1 for no words."""
    return sum(probability for _, probability in words) / len(words) if words else 1.0


def confidences(model, tokenizer, sources: Sequence[str], outputs: Sequence[str]) -> list[float]:
    """Return the `mean_confidence` of each output of a source; 0 where they cannot be scored, mostly as too long."""
    try:
        return list(map(mean_confidence, word_confidences(model, tokenizer, sources, outputs)))
    except UserError:
        pairs = [([source], [output]) for source, output in zip(sources, outputs, strict=True)]
        return [confidences(model, tokenizer, *pair)[0] for pair in pairs] if len(pairs) > 1 else [0.0]


def word_confidences(
    model, tokenizer, sources: Sequence[str], outputs: Sequence[str], tokens_per_batch: int = TOKENS_PER_BATCH
) -> list[Words]:
    """Return the words of each output of a source and their probabilities; errors as in `score_tokens`."""
    return list(map(word_probabilities, score_tokens(model, tokenizer, sources, outputs, tokens_per_batch)))


@dataclass
class FileScorer(LineWorker):
    """Scores pairs of lines into an output, in constant memory; a pair with a blank side has no score."""

    doing, unit = "scoring", "pairs"  # of the progress bar

    model: Any  # or an ensemble, in evaluation mode
    tokenizer: Any
    rule: LengthRule
    json: bool  # write one JSON object for each pair, in place of fields separated by tabs
    tokens: bool  # also write the log-probability of each token
    window: int
    tokens_per_batch: int = TOKENS_PER_BATCH
    target_language: str | None = None  # as in `LanguageCodes`

    def __post_init__(self):
        with reading("--target-language"):
            self.codes = LanguageCodes(self.tokenizer, self.target_language)
        self.sums: dict[str, Any] = {"pairs": 0, "tokens": 0, "log_probability": 0.0}  # of what was written

    def records(self, window: Window, bar: Any, remarks: Remarks) -> list[str]:
        """Score a window; see `LineWorker`. There are no remarks."""
        numbered = list(enumerate(window.lines, window.first))
        stripped = ((number, *map(str.strip, pair)) for number, pair in numbered)  # as models translate
        filled = {number: pair for number, *pair in stripped if all(pair)}
        sides = [self.codes.coded(source) for source, _ in filled.values()], [target for _, target in filled.values()]
        scores = score_tokens(self.model, self.tokenizer, *sides, self.tokens_per_batch, list(filled))
        by_number = dict(zip(filled, scores, strict=True))
        records = [self._record(number, by_number.get(number)) for number, _ in numbered]
        self.add(records)
        bar.update(len(records))
        return records

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
