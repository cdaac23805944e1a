"""How likely a model finds given translations: the log-probability of each of their tokens."""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..data.batching import PairCollator, batches_by_length
from ..errors import UserError
from ..model.generation_vaswani import length_normalization
from .streaming import Window, check_length

TOKENS_PER_BATCH = 4096


@torch.no_grad()
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
    """
    if hasattr(model, "score_ids"):  # an exported model has a way of its own
        return model.score_ids(sources, targets, tokens_per_batch)
    scores: list[list[float]] = [[] for _ in targets]
    filled = [index for index, target in enumerate(targets) if len(target)]
    lengths = [max(len(sources[index]), len(targets[index])) for index in filled]
    collator = PairCollator(model.config.pad_token_id)
    for batch in batches_by_length(lengths, tokens_per_batch):
        indices = [filled[place] for place in batch]
        inputs = collator([{"input_ids": sources[index], "labels": targets[index]} for index in indices])
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        labels = inputs.pop("labels")
        logits = model(**inputs, decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels)).logits
        losses = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
        for index, row in zip(indices, losses.tolist(), strict=True):
            scores[index] = [-loss for loss in row[: len(targets[index])]]
    return scores


@dataclass(frozen=True)
class LengthRule:
    """How beam search makes a score of a log-probability and a length.

    Args:
        length_penalty: alpha.
        normalization: `"gnmt"` for the paper's rule, `"power"` for transformers' (score / length^alpha).
    """

    length_penalty: float = 0.6
    normalization: str = "gnmt"

    @classmethod
    def of(cls, generation_config, options: dict | None = None) -> "LengthRule":
        """The rule of a generation configuration, under options of `generate()`."""
        given = {name: getattr(generation_config, name, None) for name in ("length_penalty", "length_normalization")}
        given |= {name: value for name, value in (options or {}).items() if name in given and value is not None}
        penalty, normalization = given["length_penalty"], given["length_normalization"]
        return cls(1.0 if penalty is None else penalty, normalization or "gnmt")  # as `generate()` has them

    def score(self, log_probability: float, tokens: int) -> float:
        """The score of a translation of `tokens` tokens, `</s>` included."""
        if self.normalization == "power":
            return log_probability / max(tokens, 1) ** self.length_penalty
        return log_probability / length_normalization(tokens, self.length_penalty)


@dataclass(frozen=True)
class PairScore:
    """What a model says of one pair.

    Args:
        tokens: the target's tokens as text, `</s>` at the end.
        log_probabilities: of each, in nats.
    """

    tokens: list[str]
    log_probabilities: list[float]

    @property
    def log_probability(self) -> float:
        """Of the whole target, in nats."""
        return math.fsum(self.log_probabilities)

    def score(self, rule: LengthRule) -> float:
        """What beam search ranks by."""
        return rule.score(self.log_probability, len(self.tokens))


def _ids_and_scores(
    model, tokenizer, sources: list[str], targets: list[str], tokens_per_batch: int
) -> Iterator[tuple[list[int], list[float]]]:
    """Of each pair the target's ids, and the log-probability of each."""
    if len(sources) != len(targets):
        raise UserError(f"{len(sources)} sources and {len(targets)} targets: give as many of both")
    if not sources:
        return iter(())
    sides = tokenizer(sources)["input_ids"], tokenizer(targets)["input_ids"]
    for number, pair in enumerate(zip(*sides, strict=True), start=1):
        check_length(model.config, number, max(map(len, pair)))
    return zip(sides[1], score_ids(model, *sides, tokens_per_batch), strict=True)


def score_tokens(
    model, tokenizer, sources: list[str], targets: list[str], tokens_per_batch: int = TOKENS_PER_BATCH
) -> list[PairScore]:
    """How likely the model finds each token of each target, given its source and the target's beginning.

    Args:
        model: the model, or an ensemble, in evaluation mode.
        tokenizer: its tokenizer.
        sources: source sentences.
        targets: their targets.
        tokens_per_batch: tokens a side scored at once.

    Returns:
        tokens and log-probabilities of each pair.

    Raises:
        UserError: for lists of different lengths, or a sentence that the model has no positions for, naming its line.
    """
    as_text, scored = TokenText(tokenizer), _ids_and_scores(model, tokenizer, sources, targets, tokens_per_batch)
    return [PairScore(as_text(ids), row) for ids, row in scored]


_BROKEN = "\ufffd"  # what a tokenizer shows for a part of a letter
_LETTER_TOKENS = 4  # bytes of a letter in UTF-8, and so tokens it may have, at most


class TokenText:
    """Tokens as people read them: each with its leading space where it has one, special ones by name.

    A letter that is made of several tokens stands at the first of them, so that the texts joined are the whole text.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._texts = {(token,): tokenizer.convert_ids_to_tokens(token) for token in tokenizer.all_special_ids}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        texts: list[str] = []
        while len(texts) < len(ids):
            start = len(texts)
            runs = (tuple(ids[start:end]) for end in range(start + 1, min(start + _LETTER_TOKENS, len(ids)) + 1))
            run = next((run for run in runs if _BROKEN not in self._text(run)), (ids[start],))
            texts += [self._text(run), *[""] * (len(run) - 1)]
        return texts

    def _text(self, run: tuple[int, ...]) -> str:
        if run not in self._texts:
            # The decoder takes one space off the beginning of a text: behind other tokens there is none to take.
            once, twice = (self._tokenizer.decode(list(run) * number) for number in (1, 2))
            self._texts[run] = twice[len(once) :]
        return self._texts[run]


def score_pairs(
    model, tokenizer, sources: list[str], targets: list[str], tokens_per_batch: int = TOKENS_PER_BATCH
) -> tuple[list[float], list[int]]:
    """How likely the model finds each target, given its source and its own beginning.

    Args:
        model: the model, or an ensemble, in evaluation mode.
        tokenizer: its tokenizer.
        sources: source sentences.
        targets: their targets.
        tokens_per_batch: tokens a side scored at once.

    Returns:
        for each pair the negative log-probability of its target in nats, and the target's tokens, `</s>` counted.

    Raises:
        UserError: for lists of different lengths, or a sentence that the model has no positions for, naming its line.
    """
    scored = list(_ids_and_scores(model, tokenizer, sources, targets, tokens_per_batch))
    return [-math.fsum(row) for _, row in scored], [len(ids) for ids, _ in scored]


class PairScorer:
    """Scores windows of pairs, one side a column of text; for files, in constant memory.

    Args:
        model: the model, or an ensemble, in evaluation mode.
        tokenizer: its tokenizer.
        tokens_per_batch: tokens a side scored at once, padding counted.
    """

    def __init__(self, model, tokenizer, tokens_per_batch: int = TOKENS_PER_BATCH):
        self.model, self.tokens_per_batch = model, tokens_per_batch
        self.tokenizer = copy.deepcopy(tokenizer)  # two threads at one tokenizer may meet in it
        self._as_text = TokenText(tokenizer)

    def prepare(self, window: Window) -> tuple[Window, list[int], list, list]:
        """Tokenise a window of pairs of strings; a pair with a blank side is left out."""
        filled = [place for place, pair in enumerate(window.lines) if all(side.strip() for side in pair)]
        sides = [[window.lines[place][side] for place in filled] for side in (0, 1)]
        ids = [self.tokenizer(side)["input_ids"] if side else [] for side in sides]
        for number, (place, *pair) in enumerate(zip(filled, *ids, strict=True)):
            try:
                check_length(self.model.config, window.first + place, max(map(len, pair)))
            except UserError as error:  # what comes before it is still scored
                window = Window(window.index, window.first, window.lines[:place], error)
                filled, ids = filled[:number], [side[:number] for side in ids]
                break
        return window, filled, *ids

    def score(self, prepared: tuple[Window, list[int], list, list]) -> list[PairScore | None]:
        """The scores of a window's pairs, None for a pair with a blank side."""
        window, filled, sources, targets = prepared
        rows = score_ids(self.model, sources, targets, self.tokens_per_batch)
        scores: list[PairScore | None] = [None] * len(window.lines)
        for place, ids, row in zip(filled, targets, rows, strict=True):
            scores[place] = PairScore(self._as_text(ids), row)
        return scores

    def score_windows(self, prepared: Iterable[tuple]) -> Iterator[list[PairScore | None]]:
        """Scores window by window; an error in reading a window is raised after the scores before it."""
        for one in prepared:
            yield self.score(one)
            if one[0].error is not None:
                raise one[0].error
