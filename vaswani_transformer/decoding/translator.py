"""A trained model at work: text in, text out."""

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from tqdm.auto import tqdm
from transformers import LogitsProcessor, LogitsProcessorList

from ..data.batching import PairCollator, batches_by_length
from ..errors import UserError
from ..model.generation_vaswani import MAX_EXTRA_TOKENS
from .long_inputs import split_line
from .scoring import LengthRule, score_ids
from .streaming import WINDOW_LINES, Window, check_length, in_windows

_RULED_OUT = -1e4  # a log-probability for what is nearly impossible


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a line.

    Args:
        text: the translation.
        tokens: |Y|, its tokens, `</s>` included where it ends with one.
        log_probability: log P(Y|X) under the model in nats; None if not asked for.
        score: what beam search ranks by, the log-probability over a function of `tokens`; None as above.
    """

    text: str
    tokens: int = 0
    log_probability: float | None = None
    score: float | None = None


@dataclass
class Piece:
    """What is translated by itself: a line, or a part of one that is too long.

    Args:
        place: of the line in its window.
        ids: tokens of the source, `</s>` included.
        prefix: tokens that its translation begins with.
    """

    place: int
    ids: list[int]
    prefix: list[int] = field(default_factory=list)


@dataclass
class PreparedWindow:
    """A window of lines, tokenised.

    Args:
        window: where it is from; its lines are those before the error, if it has one.
        pieces: what to translate, in the order of the lines; a blank line has none.
        split: numbers of the lines that were too long.
    """

    window: Window
    pieces: list[Piece]
    split: list[int]


class ForcedPrefixes(LogitsProcessor):
    """Lets each output begin with tokens that are given for its sentence.

    All that `generate()` weighs stays as it is: the prefix counts in log-probability and length like any other tokens.

    Args:
        prefixes: token ids for each sentence of the batch.
        begin: tokens that the decoder is started with.
    """

    def __init__(self, prefixes: list[list[int]], begin: int = 1):
        self.begin = begin
        longest = max(map(len, prefixes), default=0)
        self.forced = torch.tensor([prefix + [-1] * (longest - len(prefix)) for prefix in prefixes])

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores `(rows, vocab_size)`, the rows of a sentence together, with all but the forced token ruled out."""
        step = input_ids.shape[1] - self.begin
        if step >= self.forced.shape[1]:
            return scores
        forced = self.forced[:, step].repeat_interleave(len(scores) // len(self.forced)).to(scores.device)
        token = forced.clamp(min=0)[:, None]
        kept = scores.gather(1, token).clamp(min=_RULED_OUT)  # even if another processor has ruled it out
        only = torch.full_like(scores, -torch.inf).scatter_(1, token, kept)
        return torch.where((forced >= 0)[:, None], only, scores)


class Translator:
    """Text in, text out.

    Args:
        model: the model, or an ensemble, in evaluation mode.
        tokenizer: its tokenizer.
        tokens_per_batch: source tokens translated at once, padding counted.
        max_source_tokens: longest source in tokens, `</s>` included; what learned positions allow if not given.
        split_long: split a longer line into sentences, clauses or words and join what comes out; else refuse it.
        scores: also give scores; one more pass through the decoder a translation.
        seed: for sampling: each window begins with a state made from it and from the window's number.
        **generate_options: for `generate()`, over the model's own generation configuration.
    """

    def __init__(
        self,
        model,
        tokenizer,
        tokens_per_batch: int = 2048,
        *,
        max_source_tokens: int | None = None,
        split_long: bool = False,
        scores: bool = False,
        seed: int | None = None,
        **generate_options,
    ):
        self.model, self.tokenizer, self.tokens_per_batch = model, tokenizer, tokens_per_batch
        self.max_source_tokens, self.split_long, self.scores, self.seed = max_source_tokens, split_long, scores, seed
        self.generate_options = {name: value for name, value in generate_options.items() if value is not None}
        self._reading = copy.deepcopy(tokenizer)  # `prepare` may work in another thread than the rest

    def _setting(self, name: str, default):
        value = self.generate_options.get(name, getattr(self.model.generation_config, name, None))
        return default if value is None else value

    @property
    def hypotheses_per_line(self) -> int:
        """How many translations a line gets."""
        return self._setting("num_return_sequences", 1)

    # Before the model.

    def prepare(self, window: Window) -> PreparedWindow:
        """Tokenise a window whose lines are strings, or pairs of a source and the beginning of its translation."""
        pairs = [(line, "") if isinstance(line, str) else line for line in window.lines]
        sources = [source.strip() for source, _ in pairs]
        filled = [place for place, source in enumerate(sources) if source]
        ids = self._reading([sources[place] for place in filled])["input_ids"] if filled else []
        pieces, split = [], []
        for place, source_ids in zip(filled, ids, strict=True):
            number = window.first + place
            try:
                parts = self._within_limits(number, sources[place], source_ids)
                prefix = self._prefix_ids(number, pairs[place][1], len(parts[0]))
            except UserError as error:  # what comes before it is still translated
                window = replace(window, lines=window.lines[:place], error=error)
                break
            if len(parts) > 1:
                split.append(number)
            pieces += [Piece(place, part, [] if rank else prefix) for rank, part in enumerate(parts)]
        return PreparedWindow(window, pieces, split)

    def _within_limits(self, number: int, text: str, ids: list[int]) -> list[list[int]]:
        config = self.model.config
        limits = [self.max_source_tokens] if self.max_source_tokens is not None else []
        if config.position_encoding == "learned":
            limits.append(config.max_position_embeddings)
        if not limits or len(ids) <= min(limits):
            return [ids]
        if not self.split_long:
            if min(limits) != self.max_source_tokens:
                check_length(config, number, len(ids))
            raise UserError(
                f"line {number} has {len(ids)} tokens and at most {self.max_source_tokens} are taken: split it into"
                " shorter sentences, or raise --max-source-tokens"
            )
        texts = split_line(text, min(limits), lambda part: len(self._reading(part)["input_ids"]))
        parts = self._reading(texts)["input_ids"]
        if max(map(len, parts)) > min(limits):
            raise UserError(
                f"line {number} has a letter of {max(map(len, parts))} tokens and at most {min(limits)} fit: raise"
                " --max-source-tokens"
            )
        return parts

    def _prefix_ids(self, number: int, text: str, source_length: int) -> list[int]:
        if not text.strip():
            return []
        ids = self._reading(text.strip(), add_special_tokens=False)["input_ids"]
        limit = self._output_limit(source_length)
        if len(ids) >= limit:
            raise UserError(
                f"line {number} of the prefixes has {len(ids)} tokens, and no more fit into an output of at most"
                f" {limit}: shorten it, or raise --max-new-tokens"
            )
        return ids

    def _output_limit(self, source_length: int) -> int:
        """Tokens that the output for a source may have."""
        limit = self._setting("max_new_tokens", None)
        if limit is None and (whole := self._setting("max_length", None)) is not None:
            limit = whole - 1
        if limit is None:
            limit = source_length + self._setting("max_extra_tokens", MAX_EXTRA_TOKENS)
        config = self.model.config
        return min(limit, config.max_position_embeddings - 1) if config.position_encoding == "learned" else limit

    # The model.

    def _processors(self, pieces: list[Piece]) -> list[LogitsProcessor]:
        """What the outputs of these pieces are bound to; before the processors among the options."""
        return [ForcedPrefixes([piece.prefix for piece in pieces])] if any(piece.prefix for piece in pieces) else []

    @torch.no_grad()
    def _generate(self, pieces: list[Piece]) -> list[list[list[int]]]:
        """Token ids of each hypothesis of each piece, without what comes before and after it."""
        model = self.model
        inputs = PairCollator(model.config.pad_token_id)([{"input_ids": piece.ids, "labels": [0]} for piece in pieces])
        inputs.pop("labels")
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        options = dict(self.generate_options)
        if processors := self._processors(pieces):
            options["logits_processor"] = LogitsProcessorList([*processors, *options.get("logits_processor", ())])
        outputs = model.generate(**inputs, **options)
        outputs = getattr(outputs, "sequences", outputs)  # as the model's own settings have it
        rows = [self._trimmed(row) for row in outputs.tolist()]
        number = len(rows) // len(pieces)
        return [rows[start : start + number] for start in range(0, len(rows), number)]

    def _trimmed(self, ids: list[int]) -> list[int]:
        """An output without the decoder's first token and the filling after `</s>`."""
        ends = self._setting("eos_token_id", None)
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        for place, token in enumerate(ids[1:], start=1):
            if token in ends:
                return ids[1 : place + 1]
        kept = len(ids)
        while kept > 1 and ids[kept - 1] == self.model.config.pad_token_id:
            kept -= 1
        return ids[1:kept]

    def _hypotheses(self, pieces: list[Piece]) -> list[list[Hypothesis]]:
        rows = self._generate(pieces)
        flat = [ids for row in rows for ids in row]
        texts = self.tokenizer.batch_decode(flat, skip_special_tokens=True)
        found = [Hypothesis(text, len(ids)) for text, ids in zip(texts, flat, strict=True)]
        if self.scores:
            sources = [piece.ids for piece, row in zip(pieces, rows, strict=True) for _ in row]
            logs = [math.fsum(row) for row in score_ids(self.model, sources, flat, self.tokens_per_batch)]
            found = [self._scored(one, log) for one, log in zip(found, logs, strict=True)]
        number = len(rows[0])
        return [found[start : start + number] for start in range(0, len(found), number)]

    def _scored(self, hypothesis: Hypothesis, log_probability: float) -> Hypothesis:
        rule = LengthRule.of(self.model.generation_config, self.generate_options)
        score = rule.score(log_probability, hypothesis.tokens)
        return replace(hypothesis, log_probability=log_probability, score=score)

    def translate_prepared(self, prepared: PreparedWindow, progress: tqdm | None = None) -> list[list[Hypothesis]]:
        """The hypotheses of each line of a window, best first; of a blank line they are empty."""
        if self.seed is not None:
            torch.manual_seed((self.seed * 1_000_003 + prepared.window.index) % 2**63)
        pieces, size = prepared.pieces, len(prepared.window.lines)
        results: list[list[Hypothesis]] = [[] for _ in pieces]
        missing = [0] * size  # pieces of each line that are not translated yet
        for piece in pieces:
            missing[piece.place] += 1
        if progress is not None:
            progress.update(missing.count(0))
        for indices in batches_by_length([len(piece.ids) for piece in pieces], self.tokens_per_batch):
            for index, found in zip(indices, self._hypotheses([pieces[index] for index in indices]), strict=True):
                results[index] = found
                missing[pieces[index].place] -= 1
                if progress is not None and not missing[pieces[index].place]:
                    progress.update(1)
        parts: list[list[list[Hypothesis]]] = [[] for _ in range(size)]
        for piece, found in zip(pieces, results, strict=True):
            parts[piece.place].append(found)
        return [self._joined(line) for line in parts]

    def _joined(self, parts: list[list[Hypothesis]]) -> list[Hypothesis]:
        """A line's hypotheses from those of its pieces: the first ones together, the second ones, and so on."""
        if not parts:
            empty = Hypothesis("", 0, 0.0, 0.0) if self.scores else Hypothesis("")
            return [empty] * self.hypotheses_per_line
        joined = []
        for ranked in zip(*parts, strict=True):
            # One line out for one line in, whatever the model has written.
            text = " ".join(" ".join(part.text.splitlines()) for part in ranked)
            whole = Hypothesis(text, sum(part.tokens for part in ranked))
            joined.append(
                self._scored(whole, math.fsum(part.log_probability for part in ranked)) if self.scores else whole
            )
        return joined

    # Both.

    def translate_windows(
        self, prepared: Iterable[PreparedWindow], progress: tqdm | None = None
    ) -> Iterator[list[list[Hypothesis]]]:
        """Hypotheses window by window; an error in reading a window is raised after those of the lines before it."""
        for one in prepared:
            yield self.translate_prepared(one, progress)
            if one.window.error is not None:
                raise one.window.error

    def hypotheses(
        self, sentences: Iterable[str | tuple[str, str]], window: int = WINDOW_LINES, progress: tqdm | None = None
    ) -> Iterator[list[Hypothesis]]:
        """The hypotheses of each sentence, best first, in the order of the sentences, as windows of them are ready.

        Args:
            sentences: one source each, or a pair of a source and text that its translation has to begin with; read
                `window` at a time, so that long files do not have to fit in memory.
            window: sentences sorted by length together.
            progress: a bar that moves by one a sentence.

        Raises:
            UserError: for a sentence that is too long, unless such are split; those before it are out by then.
        """
        prepared = map(self.prepare, in_windows(sentences, window))
        for lines in self.translate_windows(prepared, progress):
            yield from lines

    def translate(
        self, sentences: Iterable[str | tuple[str, str]], window: int = WINDOW_LINES, progress: tqdm | None = None
    ) -> Iterator[str]:
        """Translations in the order of the sentences, as they are ready; an empty line gives an empty line.

        Args and Raises as of `hypotheses`, of which these are the first ones.
        """
        for found in self.hypotheses(sentences, window, progress):
            yield found[0].text
