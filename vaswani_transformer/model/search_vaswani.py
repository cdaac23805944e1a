"""Greedy and beam search (Section 6.1): what `generate()` runs where nothing else is asked for.

A step of the model is followed by a few operations that find the best continuations of each sentence; the rest is
bookkeeping in Python, about one row of numbers a sentence, for which a device is waited for once. A hypothesis is a
chain of back-pointers until it is returned. transformers' loop copies tensors of all outputs several times a step.

Sentences join a `Search` at any step, and those that are done leave it, so that steps compute no rows in vain.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers.generation import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput

from .incremental_decoding_vaswani import DecodingCache, IncrementalDecoder
from .settings_vaswani import LENGTH_NORMALIZATIONS, length_normalization

NO_SCORE = -1.0e8  # places without a hypothesis have less; no log-probability comes near

_EMPTY = -1.0e9  # the score of such a place, as in transformers
_BLOCK = 64  # neighbouring tokens of which only the best is looked at first
_LEAVING = 4  # sentences that are done leave when they are one in so many; moving the others costs some time


def candidates(scores: torch.Tensor, count: int) -> torch.LongTensor:
    """Some tokens of each row, the best `count` among them: `(rows, vocab_size)` scores to `(rows, candidates)` ids.

    The best tokens are in the blocks of neighbours with the highest maxima. torch finds maxima several times faster
    than the best of all tokens.
    """
    rows, vocab_size = scores.shape
    blocks = vocab_size // _BLOCK
    maxima = scores[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK)).amax(dim=-1)
    best = maxima.topk(count, sorted=False).indices  # (rows, count)
    inside = torch.arange(_BLOCK, device=scores.device)
    rest = torch.arange(blocks * _BLOCK, vocab_size, device=scores.device)  # too few for a block
    return torch.cat(((best[..., None] * _BLOCK + inside).flatten(1), rest.expand(rows, -1)), dim=1)


def has_candidates(scores: torch.Tensor, count: int) -> bool:
    """Whether looking at the `candidates` of `(rows, vocab_size)` scores is faster than looking at all tokens."""
    return scores.is_cpu and scores.shape[1] >= 4 * _BLOCK * count


@dataclass(frozen=True)
class SearchSettings:
    """What is searched for, in the words of transformers' generation configuration where it has them."""

    num_beams: int = 1
    num_return_sequences: int = 1
    length_normalization: str = LENGTH_NORMALIZATIONS[0]
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    end_ids: frozenset[int] = frozenset()  # tokens that end an output
    min_tokens: int = 0  # tokens of an output before its end may come
    forced_end_ids: frozenset[int] = frozenset()  # what may come at an output's limit, if only this may
    forbidden_ids: frozenset[int] = frozenset()  # tokens that no output has

    def divisor(self, length: int) -> float:
        """The divisor of the log-probability of a hypothesis of `length` generated tokens."""
        return length_normalization(length, self.length_penalty, self.length_normalization)

    def judges_by_limit(self) -> bool:
        """Whether running hypotheses are given up by the score that they would have at their limit.

        Their log-probability can only fall, so under the paper's rule the best final score is today's log-probability
        at the most favourable length that is still possible: stopping by it changes no result. transformers' own rule
        does the same for `early_stopping="never"`.
        """
        return self.length_penalty > 0 and (self.length_normalization == "gnmt" or self.early_stopping == "never")

    def may_improve(self, running: float, best_score: float, finished: Sequence[float]) -> bool:
        """Whether a sentence may still get a better result.

        Args:
            running: log-probability of its best running hypothesis.
            best_score: the score that this is judged by.
            finished: the scores of its finished hypotheses, best first.
        """
        is_full = len(finished) == self.num_beams
        if self.early_stopping is True and is_full:
            return False
        # Under the paper's rule the last hypothesis that is returned has to be beaten; lower ones are lost anyway.
        needed = self.num_return_sequences if self.length_normalization == "gnmt" else self.num_beams
        return running > NO_SCORE and (len(finished) < needed or best_score > finished[needed - 1])


@dataclass(frozen=True)
class Output:
    """A finished output: its tokens, and in a beam search its score and the beam that each of them came from."""

    tokens: list[int]
    score: float | None = None
    beams: list[int] | None = None


class Sentence:
    """A sentence in a greedy search: its most tokens, and its output so far."""

    def __init__(self, limit: int, settings: SearchSettings):
        self.limit, self.settings = limit, settings
        self.length, self.is_done = 0, False
        self._tokens: list[int] = []

    def extend(self, token: int) -> None:
        """Add the best token."""
        self._tokens.append(token)
        self.length += 1
        self.is_done = self.length >= self.limit or token in self.settings.end_ids

    def outputs(self) -> list[Output]:
        """The one output."""
        return [Output(self._tokens)]


class BeamSentence(Sentence):
    """A sentence in a beam search: its running hypotheses as back-pointers, and the finished ones, best first."""

    def __init__(self, limit: int, settings: SearchSettings):
        super().__init__(limit, settings)
        # All numbers come as floats from the device.
        self._tokens: list[list[float]] = []  # at each step the beams' tokens
        self._beams: list[list[float]] = []  # and the beams that these came from
        self._finished: list[tuple[float, int, float, float]] = []  # score, step, beam before it, last token
        self.horizon = settings.divisor(limit) if settings.judges_by_limit() else None

    def extend(
        self, values: list[float], scores: list[float], bounds: list[float], beams: list[float], tokens: list[float]
    ) -> tuple[list[float], list[float], list[float]]:
        """Add the best continuations, best first.

        Args:
            values: their log-probabilities.
            scores: these over the divisor of today's length.
            bounds: these over the divisor that running hypotheses are judged by.
            beams: the running hypotheses that they continue.
            tokens: their last tokens.

        Returns:
            values, beams and tokens of those that continue, one for each beam.
        """
        settings, count = self.settings, self.settings.num_beams
        step, kept = self.length, range(count)
        self.length += 1
        is_last = self.length >= self.limit
        if is_last or not settings.end_ids.isdisjoint(tokens):
            for rank in range(count):  # others are there only so that enough continue
                is_output = values[rank] > NO_SCORE or scores[rank] >= _EMPTY  # or an empty place, as in transformers
                if is_output and (is_last or tokens[rank] in settings.end_ids):
                    self._finished.append((scores[rank], step, beams[rank], tokens[rank]))
            self._finished.sort(key=lambda hypothesis: -hypothesis[0])
            del self._finished[count:]
            if not is_last:
                kept = [rank for rank, token in enumerate(tokens) if token not in settings.end_ids][:count]
        best, finished = kept[0], [hypothesis[0] for hypothesis in self._finished]
        self.is_done = is_last or not settings.may_improve(values[best], bounds[best], finished)
        self._tokens.append([tokens[rank] for rank in kept])
        self._beams.append([beams[rank] for rank in kept])
        return [values[rank] for rank in kept], self._beams[-1], self._tokens[-1]

    def wanted(self) -> list[tuple[int, int]]:
        """Beams and tokens of continuations that `extend` has to be given, however unlikely they are.

        With them it gets the likeliest of each beam, or a likely one might leave the others none but these.
        """
        return []

    def outputs(self) -> list[Output]:
        """The outputs that are asked for, best first; where fewer were possible, empty ones behind."""
        outputs = []
        for score, step, beam, token in self._finished[: self.settings.num_return_sequences]:
            tokens, beams = [int(token)], [int(beam)]
            for before in range(step - 1, -1, -1):
                tokens.append(int(self._tokens[before][beams[-1]]))
                beams.append(int(self._beams[before][beams[-1]]))
            outputs.append(Output(tokens[::-1], score, beams[::-1]))
        return outputs + [Output([], _EMPTY, [])] * (self.settings.num_return_sequences - len(outputs))


class Search:
    """A search that sentences may join at any step, and leave when they are done.

        search = Search(IncrementalDecoder(model), settings)
        sentences = search.add(states, mask, limits, start)
        while search.is_open:
            done = search.step()  # and here others may be added

    Args:
        decoder: computes the steps.
        settings: what is searched for.
        cache: an empty cache of one's own, if it is wanted afterwards. Sentences that are done then stay in it.
        tokens: a shortlist, `(size,)` ids in ascending order: only they are looked at. What ends an output is in it.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        settings: SearchSettings,
        cache: DecodingCache | None = None,
        tokens: torch.LongTensor | None = None,
    ):
        self.settings, self._stay, self._tokens = settings, cache is not None, tokens
        decoder = decoder if tokens is None else decoder.limited_to(tokens)
        self.cache = DecodingCache(decoder, settings.num_beams) if cache is None else cache
        groups = settings.forbidden_ids, settings.end_ids, settings.forced_end_ids
        self._forbidden, self._ends, self._forced = map(self._columns, groups)
        self.sentences: list[Sentence] = []  # of each group of rows of the cache; some may be done
        self._input: torch.Tensor | None = None  # (rows, new tokens), the decoder's next input
        self._values: torch.Tensor | None = None  # (sentences, beams), log-probabilities of running hypotheses

    def _columns(self, ids: frozenset[int]) -> torch.LongTensor:
        """Where scores have these tokens."""
        wanted = torch.tensor(sorted(ids), dtype=torch.long)
        return wanted if self._tokens is None else torch.isin(self._tokens.cpu(), wanted).nonzero().flatten()

    @property
    def running(self) -> int:
        """Number of sentences that are not done."""
        return sum(not sentence.is_done for sentence in self.sentences)

    @property
    def is_open(self) -> bool:
        """Whether there is anything left to do."""
        return not all(sentence.is_done for sentence in self.sentences)

    @property
    def source_length(self) -> int:
        """Tokens that are kept of each source, those of the longest one, with padding; 0 if all are done."""
        return max(self.cache.source_lengths, default=0)

    def add(
        self,
        states: torch.Tensor,
        mask: torch.Tensor | None,
        limits: Sequence[int],
        start: torch.LongTensor,
        kinds: Sequence[Callable[[int, SearchSettings], Sentence]] | None = None,
    ) -> list[Sentence]:
        """Let sentences join, in places of those that are done and behind the others.

        Args:
            states: the encoder's output, `(sentences, source_length, d_model)`.
            mask: `(sentences, source_length)`, 0 for padding; None where there is none.
            limits: the most tokens that each may generate.
            start: `(sentences, prompt_length)` ids that outputs start from; behind others `prompt_length` is 1.
            kinds: what makes each sentence from its limit and the settings, if some are sentences of their own kind.

        Returns:
            the sentences, whose `outputs()` are ready when they are done.
        """
        kinds = kinds or [Sentence if self.settings.num_beams == 1 else BeamSentence] * len(limits)
        added = [kind(limit, self.settings) for kind, limit in zip(kinds, limits, strict=True)]
        beams = self.settings.num_beams
        values = torch.full((len(added), beams), _EMPTY, device=states.device)
        values[:, 0] = 0  # all beams begin alike: only the first counts
        rows = start.repeat_interleave(beams, dim=0)
        if not self.is_open:
            if self.sentences:
                self.cache = DecodingCache(self.cache.decoder, beams)
            self.cache.decoder.read_source(states, mask, self.cache)
            self.sentences, self._input, self._values = list(added), rows, values
            return added
        places = [place for place, sentence in enumerate(self.sentences) if sentence.is_done][: len(added)]
        places += range(len(self.sentences), len(self.sentences) + len(added) - len(places))
        self.cache.decoder.read_source(states, mask, self.cache, places)
        self.sentences += added[: max(0, places[-1] + 1 - len(self.sentences))]
        more = len(self.sentences) - len(self._values)
        self._values = torch.cat((self._values, values[:more]))
        self._input = torch.cat((self._input, rows[: more * beams])).view(len(self.sentences), beams)
        for place, sentence in zip(places, added, strict=True):
            self.sentences[place] = sentence
        self._values[places], self._input[places] = values, rows.view(-1, beams)
        self._input = self._input.view(-1, 1)
        self._leave(1)
        return added

    @torch.no_grad()
    def step(self) -> list[Sentence]:
        """Compute the next token of all sentences; returns those that it has finished."""
        if not self._stay:
            self._leave(len(self.sentences) // _LEAVING + 1)
        running = [sentence for sentence in self.sentences if not sentence.is_done]
        logits = self.cache.decoder.logits(self._input, self.cache)[:, -1]
        if self.settings.num_beams == 1:
            self._extend_greedily(logits)
        else:
            self._extend_beams(logits.float().log_softmax(dim=-1))
        done = [sentence for sentence in running if sentence.is_done]
        if done:
            self._retire()
        return done

    def give_up(self, sentences: Sequence[Sentence]) -> None:
        """Let sentences be done whose outputs nobody waits for; those of the others do not change."""
        for sentence in sentences:
            sentence.is_done = True
        self._retire()

    def _retire(self) -> None:
        self.cache.retire([place for place, sentence in enumerate(self.sentences) if sentence.is_done])

    def _leave(self, least: int) -> None:
        """Drop the rows of sentences that are done, if there are so many: the last others take their places."""
        running = self.running
        if len(self.sentences) - running < least or not running:
            return
        free = [place for place, sentence in enumerate(self.sentences[:running]) if sentence.is_done]
        moved = [place for place in range(running, len(self.sentences)) if not self.sentences[place].is_done]
        for place, old in zip(free, moved, strict=True):
            self.sentences[place] = self.sentences[old]
        del self.sentences[running:]
        beams = self.settings.num_beams
        rows = self._input.view(-1, beams)
        self._values[free], rows[free] = self._values[moved], rows[moved]
        self._values, self._input = self._values[:running], rows[:running].view(-1, 1)
        self.cache.move(moved, free, running)

    def _constrain(self, scores: torch.Tensor) -> None:
        """Forbid tokens, and ends that come too early, and force those at a limit, in `(rows, vocab_size)` scores."""
        settings, sentences = self.settings, self.sentences
        if len(self._forbidden):
            scores.index_fill_(1, self._forbidden.to(scores.device), -torch.inf)
        grouped = scores.view(len(sentences), -1, scores.shape[1])
        early = [place for place, sentence in enumerate(sentences) if sentence.length < settings.min_tokens]
        for token in self._ends if early else ():
            grouped[early if len(early) < len(sentences) else slice(None), :, token] = -torch.inf
        if settings.forced_end_ids:
            last = [place for place, sentence in enumerate(sentences) if sentence.length == sentence.limit - 1]
            if last:
                grouped[last] = -torch.inf
                for token in self._forced:
                    grouped[last, :, token] = 0

    def _extend_greedily(self, logits: torch.Tensor) -> None:
        self._constrain(logits)
        if has_candidates(logits, 1):
            tokens = candidates(logits, 1)
            self._input = tokens.gather(1, logits.gather(1, tokens).argmax(dim=-1, keepdim=True))
        else:
            self._input = logits.argmax(dim=-1, keepdim=True)
        if self._tokens is not None:
            self._input = self._tokens[self._input]
        for sentence, (token,) in zip(self.sentences, self._input.tolist(), strict=True):
            if not sentence.is_done:
                sentence.extend(token)

    def _extend_beams(self, log_probs: torch.Tensor) -> None:
        self._constrain(log_probs)
        beams, number = self.settings.num_beams, len(self.sentences)
        values, tokens, origins = [], [], []
        for sentence, continuations in zip(self.sentences, self._continuations(log_probs), strict=True):
            if sentence.is_done:
                kept = [0.0] * beams, range(beams), [0] * beams
            else:
                kept = sentence.extend(*continuations)
            for all_sentences, own in zip((values, origins, tokens), kept, strict=True):
                all_sentences += own
        device = log_probs.device
        self._values = torch.tensor(values, dtype=torch.float32, device=device).view(number, beams)
        self._input, origins = torch.tensor([tokens, origins], dtype=torch.long, device=device)
        self._input = self._input[:, None]
        self.cache.reorder_cache(origins)

    def _continuations(self, log_probs: torch.Tensor) -> list[tuple[list[float], ...]]:
        """What `BeamSentence.extend` takes, for each sentence: so many that enough continue if all others end."""
        settings, beams, number = self.settings, self.settings.num_beams, len(self.sentences)
        count = max(2, 1 + len(settings.end_ids)) * beams
        tokens = candidates(log_probs, count) if has_candidates(log_probs, count) else None
        all_log_probs, log_probs = log_probs, log_probs if tokens is None else log_probs.gather(1, tokens)
        width = log_probs.shape[1]
        values, places = (log_probs.view(number, beams, width) + self._values[..., None]).flatten(1).topk(count)
        tokens = places % width if tokens is None else tokens.view(number, -1).gather(1, places)
        tokens = tokens if self._tokens is None else self._tokens[tokens]
        today = [settings.divisor(sentence.length + 1) for sentence in self.sentences]
        judged = [own if (own := sentence.horizon) is not None else divisor
                  for sentence, divisor in zip(self.sentences, today, strict=True)]  # fmt: skip
        divisors = torch.tensor([today, judged], dtype=torch.float32, device=values.device)[..., None]
        columns = torch.stack([values, *(values / divisors), places // width, tokens])  # float32 holds these integers
        found = list(zip(*columns.tolist(), strict=True))  # the device is waited for here
        for place, sentence in enumerate(self.sentences):
            if not sentence.is_done and (wanted := sentence.wanted()):
                wanted += enumerate(all_log_probs[place * beams : (place + 1) * beams].argmax(dim=-1).tolist())
                rows, more = torch.tensor(wanted, device=values.device).T
                more = (self._values[place, rows] + all_log_probs[place * beams + rows, more]).tolist()
                scores = [[value / divisor for value in more] for divisor in (today[place], judged[place])]
                added = more, *scores, *map(list, zip(*wanted, strict=True))
                found[place] = tuple(own + new for own, new in zip(found[place], added, strict=True))
        return found


class OpenSearch(Search):
    """A `Search` that sentences join as token ids."""

    def __init__(self, model, decoder: IncrementalDecoder, settings: SearchSettings, generation_config, start: int):
        super().__init__(decoder, settings)
        self._model, self._generation_config, self._start = model, generation_config, start

    @torch.no_grad()
    def join(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.LongTensor,
        kinds: Sequence[Callable[[int, SearchSettings], Sentence]] | None = None,
    ) -> list[Sentence]:
        """Let sources join, `(sentences, source_length)` ids padded on the right and their mask; see `add`."""
        device = self._model.device
        input_ids, attention_mask, lengths = input_ids.to(device), attention_mask.to(device), attention_mask.sum(dim=1)
        states = self._model.get_encoder()(input_ids, attention_mask=attention_mask).last_hidden_state
        limits = [self._model._output_limit(self._generation_config, length, 1) for length in lengths.tolist()]
        return self.add(states, attention_mask, limits, input_ids.new_full((len(limits), 1), self._start), kinds)


def as_generated(
    outputs: list[Output], prompts: torch.LongTensor, settings: SearchSettings, pad: int, cache: DecodingCache
) -> GenerateEncoderDecoderOutput | GenerateBeamEncoderDecoderOutput:
    """Outputs as transformers' loops return them, behind their prompts, `(outputs, prompt_length)`."""
    longest, device = max(len(output.tokens) for output in outputs), prompts.device

    def filled(rows: list[list[int]], value: int, dtype: torch.dtype) -> torch.Tensor:
        rows = [row + [value] * (longest - len(row)) for row in rows]
        return torch.tensor(rows, dtype=dtype, device=device).view(len(rows), longest)

    sequences = torch.cat((prompts, filled([output.tokens for output in outputs], pad, torch.long)), dim=1)
    if settings.num_beams == 1:
        return GenerateEncoderDecoderOutput(sequences=sequences, past_key_values=cache)
    first = [settings.num_beams * (number // settings.num_return_sequences) for number in range(len(outputs))]
    indices = [[row + beam for beam in output.beams] for row, output in zip(first, outputs, strict=True)]
    return GenerateBeamEncoderDecoderOutput(
        sequences=sequences,
        sequences_scores=torch.tensor([output.score for output in outputs], dtype=torch.float32, device=device),
        beam_indices=filled(indices, -1, torch.int32),
        past_key_values=cache,
    )
