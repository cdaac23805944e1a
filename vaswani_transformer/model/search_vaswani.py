"""Greedy and beam search (Section 6.1), which `generate()` runs in place of transformers' loops.

A step of the model is followed by a few operations that find the best continuations of each sentence; the rest is
bookkeeping in Python, about one row of numbers a sentence, for which a device is waited for once. A hypothesis is a
chain of back-pointers until it is returned. transformers' loop copies tensors of all outputs several times a step.

Sentences join a `Search` at any step, and those that are done leave it, so that no step computes a row in vain. A
`ForwardSearch` takes logits processors, stopping criteria and caches of any kind; its sentences stay to the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers.generation import (
    GenerateBeamEncoderDecoderOutput,
    GenerateEncoderDecoderOutput,
    LogitsProcessorList,
    StoppingCriteriaList,
)

from .incremental_decoding_vaswani import DecodingCache, IncrementalDecoder
from .layers_vaswani import CACHE
from .settings_vaswani import LENGTH_NORMALIZATIONS, length_normalization

NO_SCORE = -1.0e8  # beams without a hypothesis have less; no log-probability comes near

_EMPTY = -1.0e9  # the score of such a beam, as in transformers
Floats = list[float]  # all numbers of hypotheses come so from the device
_LEAVING = 4  # finished sentences leave when they are a quarter of all: moving the others costs some time


@dataclass(frozen=True)
class SearchSettings:
    """The rules of a search, named as in transformers' generation configuration where it has them."""

    num_beams: int = 1
    num_return_sequences: int = 1
    length_normalization: str = LENGTH_NORMALIZATIONS[0]
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    do_sample: bool = False  # draw the continuations of beams
    end_ids: frozenset[int] = frozenset()  # tokens that end an output
    min_tokens: int = 0  # tokens of an output before its end may come
    forced_end_ids: frozenset[int] = frozenset()  # the only tokens at an output's limit, if there are any
    forbidden_ids: frozenset[int] = frozenset()  # tokens that no output has

    def divisor(self, length: int) -> float:
        """Return the divisor of the log-probability of a hypothesis of `length` generated tokens."""
        return length_normalization(length, self.length_penalty, self.length_normalization)

    def may_improve(self, running: float, best_score: float, finished: Sequence[float]) -> bool:
        """Return whether a sentence may still get a better result.

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
        """Return the one output."""
        return [Output(self._tokens)]


class BeamSentence(Sentence):
    """A sentence in a beam search: its running hypotheses as back-pointers, and the finished ones, best first."""

    def __init__(self, limit: int, settings: SearchSettings):
        super().__init__(limit, settings)
        self._tokens: list[Floats] = []  # at each step the beams' tokens
        self._beams: list[Floats] = []  # and the beams that these came from
        self._finished: list[tuple[float, int, float, float]] = []  # score, step, beam before it, last token
        # The log-probability of a running hypothesis can only fall, so under the paper's rule its best final score is
        # today's log-probability at the most favourable length that is still possible: stopping by it changes no
        # result. transformers' own rule does the same for `early_stopping="never"`.
        by_limit = settings.length_normalization == "gnmt" or settings.early_stopping == "never"
        self.horizon = settings.divisor(limit) if by_limit and settings.length_penalty > 0 else None

    def extend(
        self, values: Floats, scores: Floats, bounds: Floats, beams: Floats, tokens: Floats, stops: Sequence[bool] = ()
    ) -> tuple[Floats, Floats, Floats]:
        """Add the best continuations, best first; returns values, beams and tokens of those that go on, one a beam.

        The `values` are log-probabilities, `scores` these over the divisor of today's length, `bounds` over the one
        that running hypotheses are judged by; `beams` are those that they continue, `tokens` their last ones, and
        `stops` says which of them a stopping criterion ends, if there are criteria.
        """
        settings, count = self.settings, self.settings.num_beams
        step, values = self.length, list(values)
        self.length += 1
        is_last = self.length >= self.limit
        ended = [rank for rank, token in enumerate(tokens) if token in settings.end_ids or (stops and stops[rank])]
        kept = range(count)
        if is_last or ended:
            for rank in range(count):  # the others only replace hypotheses that end
                is_output = values[rank] > NO_SCORE or scores[rank] >= _EMPTY  # or an empty beam, as in transformers
                if is_output and (is_last or rank in ended):
                    self._finished.append((scores[rank], step, beams[rank], tokens[rank]))
            self._finished.sort(key=lambda hypothesis: -hypothesis[0])
            del self._finished[count:]
            if not is_last:
                kept = [rank for rank in range(len(tokens)) if rank not in ended]
                for rank in ended[: max(0, count - len(kept))]:  # empty beams, where criteria end too many
                    values[rank] += _EMPTY
                    kept.append(rank)
                del kept[count:]
        best, finished = kept[0], [hypothesis[0] for hypothesis in self._finished]
        self.is_done = is_last or not settings.may_improve(values[best], bounds[best], finished)
        self._tokens.append([tokens[rank] for rank in kept])
        self._beams.append([beams[rank] for rank in kept])
        return [values[rank] for rank in kept], self._beams[-1], self._tokens[-1]

    def wanted(self) -> list[tuple[int, int]]:
        """Return beams and tokens of continuations that `extend` has to be given, however unlikely they are.

        With them it gets the likeliest of each beam, or a likely one might leave the others none but these.
        """
        return []

    def outputs(self) -> list[Output]:
        """Return the outputs that are asked for, best first; where fewer were possible, empty ones after them."""
        outputs = []
        for score, step, beam, token in self._finished[: self.settings.num_return_sequences]:
            tokens, beams = [int(token)], [int(beam)]
            for before in range(step - 1, -1, -1):
                tokens.append(int(self._tokens[before][beams[-1]]))
                beams.append(int(self._beams[before][beams[-1]]))
            outputs.append(Output(tokens[::-1], score, beams[::-1]))
        return outputs + [Output([], _EMPTY, [])] * (self.settings.num_return_sequences - len(outputs))


Kinds = Sequence[Callable[[int, SearchSettings], Sentence]]  # what makes each sentence from its limit


class _Search:
    """The rows of a search: a group for each sentence, one row for each of its beams.

    Subclasses have `_constrain`, which rules out tokens that may not follow in scores `(rows, vocab_size)`, and
    `_advance`, which continues each row, by its token, from the beam of its sentence that `origins` numbers.
    """

    def __init__(self, settings: SearchSettings):
        self.settings = settings
        self.sentences: list[Sentence] = []  # of each group of rows; some may be done
        self._values: torch.Tensor | None = None  # (sentences, beams), log-probabilities of running hypotheses

    @property
    def running(self) -> int:
        """Return the number of sentences that are not done."""
        return sum(not sentence.is_done for sentence in self.sentences)

    def _first_values(self, sentences: int, device: torch.device) -> torch.Tensor:
        """Return the first `(sentences, beams)` log-probabilities: all beams begin alike, so only the first counts."""
        values = torch.full((sentences, self.settings.num_beams), _EMPTY, dtype=torch.float32, device=device)
        values[:, 0] = 0
        return values

    def _extend_beams(self, log_probs: torch.Tensor) -> None:
        log_probs, beams = self._constrain(log_probs), self.settings.num_beams
        values, tokens, origins = [], [], []
        for sentence, continuations in zip(self.sentences, self._continuations(log_probs), strict=True):
            if sentence.is_done:  # goes on all the same, for processors that follow what they have allowed
                ranks = [rank for rank, token in enumerate(continuations[4]) if token not in self.settings.end_ids]
                kept = [[continuations[part][rank] for rank in ranks[:beams]] for part in (0, 3, 4)]
                kept[0] = [max(value, _EMPTY) for value in kept[0]]  # where only the end was allowed
            else:
                kept = sentence.extend(*continuations)
            for all_rows, of_sentence in zip((values, origins, tokens), kept, strict=True):
                all_rows += of_sentence
        device = log_probs.device
        self._values = torch.tensor(values, dtype=torch.float32, device=device).view(-1, beams)
        self._advance(*torch.tensor([tokens, origins], dtype=torch.long, device=device))

    def _best(self, log_probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log-probability, beam and token of each sentence's best `count` continuations, or of drawn ones."""
        if self.settings.do_sample:
            total = (log_probs.view(*self._values.shape, -1) + self._values[..., None]).flatten(1)
            indices = total.softmax(dim=-1).multinomial(count)
            values, order = total.gather(1, indices).sort(dim=1, descending=True)
            indices = indices.gather(1, order)
            return values, indices // log_probs.shape[1], indices % log_probs.shape[1]
        # First those of each beam: on a CPU a third of the time of all beams at once.
        best, tokens = log_probs.topk(min(count, log_probs.shape[1]))
        total = (best.view(*self._values.shape, -1) + self._values[..., None]).flatten(1)
        values, indices = total.topk(count)
        return values, indices // best.shape[1], tokens.view(len(total), -1).gather(1, indices)

    def _continuations(self, log_probs: torch.Tensor) -> list[tuple[list, ...]]:
        """Return the arguments of each sentence's `BeamSentence.extend`: enough to continue if all others end."""
        settings, beams = self.settings, self.settings.num_beams
        values, origins, tokens = self._best(log_probs, max(2, 1 + len(settings.end_ids)) * beams)
        today = [settings.divisor(sentence.length + 1) for sentence in self.sentences]
        judged = [divisor if sentence.horizon is None else sentence.horizon
                  for sentence, divisor in zip(self.sentences, today, strict=True)]  # fmt: skip
        divisors = torch.tensor([today, judged], dtype=torch.float32, device=values.device)[..., None]
        columns = torch.stack([values, *(values / divisors), origins, tokens])  # float32 holds these integers
        continuations = list(zip(*columns.tolist(), strict=True))  # the device is waited for here
        for index, sentence in enumerate(self.sentences):
            if not sentence.is_done and (wanted := sentence.wanted()):
                wanted += enumerate(log_probs[index * beams : (index + 1) * beams].argmax(dim=-1).tolist())
                rows, more = torch.tensor(wanted, device=values.device).T
                more = (self._values[index, rows] + log_probs[index * beams + rows, more]).tolist()
                scores = [[value / divisor for value in more] for divisor in (today[index], judged[index])]
                added = more, *scores, *map(list, zip(*wanted, strict=True))
                continuations[index] = tuple(old + new for old, new in zip(continuations[index], added, strict=True))
        return continuations


class Search(_Search):
    """A search that sentences may join at any step, and leave when they are done.

        search = Search(IncrementalDecoder(model), settings)
        sentences = search.add(states, mask, limits, start)
        while search.running:
            done = search.step()  # and here others may be added

    Args:
        decoder: computes the steps.
        settings: the rules of the search.
        cache: an empty cache of one's own, if it is wanted afterwards. Sentences that are done then stay in it.
    """

    def __init__(self, decoder: IncrementalDecoder, settings: SearchSettings, cache: DecodingCache | None = None):
        super().__init__(settings)
        self._stay = cache is not None
        self.cache = DecodingCache(decoder, settings.num_beams) if cache is None else cache
        self._forbidden = torch.tensor(sorted(settings.forbidden_ids), dtype=torch.long)
        self._input: torch.Tensor | None = None  # (rows, new tokens), the decoder's next input

    def add(
        self,
        states: torch.Tensor,
        mask: torch.Tensor | None,
        limits: Sequence[int],
        start: torch.LongTensor,
        kinds: Kinds | None = None,
    ) -> list[Sentence]:
        """Let sentences join, in the rows of those that are done and after the others.

        Args:
            states: the encoder's output, `(sentences, source_length, d_model)`.
            mask: `(sentences, source_length)`, 0 for padding; None where there is none.
            limits: the most tokens that each may generate.
            start: `(sentences, prompt_length)` ids that outputs start from; beside others `prompt_length` is 1.
            kinds: what makes each sentence from its limit and the settings, if some are sentences of their own kind.

        Returns:
            the sentences, whose `outputs()` are ready when they are done.
        """
        kinds = kinds or [Sentence if self.settings.num_beams == 1 else BeamSentence] * len(limits)
        added = [kind(limit, self.settings) for kind, limit in zip(kinds, limits, strict=True)]
        beams = self.settings.num_beams
        values, rows = self._first_values(len(added), states.device), start.repeat_interleave(beams, dim=0)
        if not self.running:
            if self.sentences:
                self.cache = DecodingCache(self.cache.decoder, beams)
            self.cache.decoder.read_source(states, mask, self.cache)
            self.sentences, self._input, self._values = list(added), rows, values
            return added
        groups = [index for index, sentence in enumerate(self.sentences) if sentence.is_done][: len(added)]
        groups += range(len(self.sentences), len(self.sentences) + len(added) - len(groups))
        self.cache.decoder.read_source(states, mask, self.cache, groups)
        self.sentences += added[: max(0, groups[-1] + 1 - len(self.sentences))]
        more = len(self.sentences) - len(self._values)
        self._values = torch.cat((self._values, values[:more]))
        self._input = torch.cat((self._input, rows[: more * beams])).view(len(self.sentences), beams)
        for index, sentence in zip(groups, added, strict=True):
            self.sentences[index] = sentence
        self._values[groups], self._input[groups] = values, rows.view(-1, beams)
        self._input = self._input.view(-1, 1)
        self._leave(1)
        return added

    @torch.no_grad()
    def step(self) -> list[Sentence]:
        """Compute the next token of all sentences; return those that it has finished."""
        if not self._stay:
            self._leave(len(self.sentences) // _LEAVING + 1)
        running = [sentence for sentence in self.sentences if not sentence.is_done]
        logits = self.cache.decoder.logits(self._input, self.cache)[:, -1]
        if self.settings.num_beams == 1:
            self._input = self._constrain(logits).argmax(dim=-1, keepdim=True)
            for sentence, (token,) in zip(self.sentences, self._input.tolist(), strict=True):
                if not sentence.is_done:
                    sentence.extend(token)
        else:
            self._extend_beams(logits.float().log_softmax(dim=-1))
        done = [sentence for sentence in running if sentence.is_done]
        if done:
            self._retire()
        return done

    def give_up(self, sentences: Sequence[Sentence]) -> None:
        """Mark sentences as done whose outputs nobody waits for; those of the others do not change."""
        for sentence in sentences:
            sentence.is_done = True
        self._retire()

    def _retire(self) -> None:
        self.cache.retire([index for index, sentence in enumerate(self.sentences) if sentence.is_done])

    def _leave(self, least: int) -> None:
        """Drop the rows of finished sentences, if there are at least `least`: the last others move into them."""
        running = self.running
        if len(self.sentences) - running < least or not running:
            return
        free = [index for index, sentence in enumerate(self.sentences[:running]) if sentence.is_done]
        moved = [index for index in range(running, len(self.sentences)) if not self.sentences[index].is_done]
        for new, old in zip(free, moved, strict=True):
            self.sentences[new] = self.sentences[old]
        del self.sentences[running:]
        rows = self._input.view(-1, self.settings.num_beams)
        self._values[free], rows[free] = self._values[moved], rows[moved]
        self._values, self._input = self._values[:running], rows[:running].view(-1, 1)
        self.cache.move(moved, free, running)

    def _constrain(self, scores: torch.Tensor) -> torch.Tensor:
        # In place: forbids tokens, and ends that come too early, and forces those at a limit.
        settings, sentences = self.settings, self.sentences
        if len(self._forbidden):
            scores.index_fill_(1, self._forbidden.to(scores.device), -torch.inf)
        grouped = scores.view(len(sentences), -1, scores.shape[1])
        early = [index for index, sentence in enumerate(sentences) if sentence.length < settings.min_tokens]
        for token in settings.end_ids if early else ():
            grouped[early if len(early) < len(sentences) else slice(None), :, token] = -torch.inf
        if settings.forced_end_ids:
            last = [index for index, sentence in enumerate(sentences) if sentence.length == sentence.limit - 1]
            if last:
                grouped[last] = -torch.inf
                for token in settings.forced_end_ids:
                    grouped[last, :, token] = 0
        return scores

    def _advance(self, tokens: torch.LongTensor, origins: torch.LongTensor) -> None:
        self._input = tokens[:, None]
        self.cache.reorder_cache(origins)


class ForwardSearch(_Search):
    """A beam search of one batch whose steps the model's own `forward` computes, with a cache of any kind or none.

    Args:
        model: a model with `GenerationMixin`.
        settings: the rules of the search, without `min_tokens`, forced and forbidden tokens.
        generation_config: the prepared one of the call; it says what to record of each step.
        processors: applied to log-probabilities as transformers does, `(rows, vocab_size)`.
        criteria: end hypotheses besides `settings.end_ids` and the limits.
        model_kwargs: further inputs of `forward`, as `generate()` prepares them.
    """

    def __init__(
        self,
        model,
        settings: SearchSettings,
        generation_config,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        model_kwargs: dict,
    ):
        super().__init__(settings)
        self._model, self._config, self._model_kwargs = model, generation_config, model_kwargs
        self._processors, self._criteria = processors, criteria
        self._sequences: torch.LongTensor | None = None  # (rows, length), with the prompts
        fields = {"attentions": ["decoder_attentions", "cross_attentions"], "hidden_states": ["decoder_hidden_states"]}
        names = ("scores", "logits", *fields) if generation_config.return_dict_in_generate else ()
        asked = [name for name in names if getattr(generation_config, f"output_{name}")]
        self._records = {field: [] for name in asked for field in fields.get(name, [name])}  # of each step

    def run(self, prompts: torch.LongTensor, limits: Sequence[int], synced_gpus: bool) -> list[Output]:
        """Search from `(rows, prompt_length)` ids, with a most number of tokens for each sentence."""
        self.sentences = [BeamSentence(limit, self.settings) for limit in limits]
        self._sequences, self._values = prompts, self._first_values(len(limits), prompts.device)
        while self._model._has_unfinished_sequences(not self.running, synced_gpus, device=prompts.device):
            outputs = self._step(is_first=self._sequences is prompts)
            if self.running:  # or other processes are waited for
                logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=prompts.device)
                for name in self._records.keys() - {"scores"}:  # which `_constrain` makes
                    self._records[name].append(logits if name == "logits" else getattr(outputs, name))
                self._extend_beams(logits.log_softmax(dim=-1))
        return [output for sentence in self.sentences for output in sentence.outputs()]

    def _step(self, is_first: bool):
        model, kwargs = self._model, self._model_kwargs
        if is_first:
            outputs = model._prefill(self._sequences, self._config, kwargs)
        else:
            new = 1 if kwargs["use_cache"] else None
            inputs = model.prepare_inputs_for_generation(self._sequences, next_sequence_length=new, **kwargs)
            outputs = model(**inputs, return_dict=True)
        self._model_kwargs = model._update_model_kwargs_for_generation(outputs, kwargs, is_encoder_decoder=True)
        return outputs

    def records(self) -> dict[str, object]:
        """Return the further fields of transformers' output: what was asked for of each step, and the cache."""
        fields = {name: tuple(steps) for name, steps in self._records.items()}
        for name in ("attentions", "hidden_states"):
            if f"decoder_{name}" in fields:
                fields[f"encoder_{name}"] = self._model_kwargs["encoder_outputs"].get(name)
        return fields | {CACHE: self._model_kwargs.get(CACHE)}

    def _constrain(self, scores: torch.Tensor) -> torch.Tensor:
        scores = self._processors(self._sequences, scores)
        if "scores" in self._records:
            self._records["scores"].append(scores.clone())
        return scores

    def _continuations(self, log_probs: torch.Tensor) -> list[tuple[list, ...]]:
        continuations = super()._continuations(log_probs)
        if not self._criteria:
            return continuations
        beams = self.settings.num_beams
        rows = [index * beams + int(beam) for index, own in enumerate(continuations) for beam in own[3]]
        tokens = torch.tensor([[int(token)] for own in continuations for token in own[4]], device=log_probs.device)
        stops = self._criteria(torch.cat((self._sequences[rows], tokens), dim=1), self._records.get("scores"))
        stops = stops.view(len(continuations), -1).tolist()
        return [(*own, of_sentence) for own, of_sentence in zip(continuations, stops, strict=True)]

    def _advance(self, tokens: torch.LongTensor, origins: torch.LongTensor) -> None:
        beams = self.settings.num_beams
        rows = origins + torch.arange(len(self.sentences), device=origins.device).repeat_interleave(beams) * beams
        self._sequences = torch.cat((self._sequences[rows], tokens[:, None]), dim=1)
        if (cache := self._model_kwargs.get(CACHE)) is not None:
            cache.reorder_cache(rows)


class OpenSearch(Search):
    """A `Search` that sentences join as token ids."""

    def __init__(self, model, decoder: IncrementalDecoder, settings: SearchSettings, generation_config, start: int):
        super().__init__(decoder, settings)
        self._model, self._generation_config, self._start = model, generation_config, start

    @torch.no_grad()
    def join(
        self, input_ids: torch.LongTensor, attention_mask: torch.LongTensor, kinds: Kinds | None = None
    ) -> list[Sentence]:
        """Add sources, `(sentences, source_length)` ids padded on the right and their mask; see `add`."""
        device = self._model.device
        input_ids, attention_mask, lengths = input_ids.to(device), attention_mask.to(device), attention_mask.sum(dim=1)
        states = self._model.get_encoder()(input_ids, attention_mask=attention_mask).last_hidden_state
        limits = [self._model._output_limit(self._generation_config, length, 1) for length in lengths.tolist()]
        return self.add(states, attention_mask, limits, input_ids.new_full((len(limits), 1), self._start), kinds)


def as_generated(outputs: list[Output], prompts: torch.LongTensor, settings: SearchSettings, generation_config, **more):
    """Return outputs as transformers' loops do, after the prompts of their sentences, `(sentences, prompt_length)`.

    `generation_config` is the prepared one of the call, `more` are further fields, such as the cache.
    """
    longest, device = max(len(output.tokens) for output in outputs), prompts.device
    pad = generation_config._pad_token_tensor

    def filled(rows: list[list[int]], value: int, dtype: torch.dtype) -> torch.Tensor:
        rows = [row + [value] * (longest - len(row)) for row in rows]
        return torch.tensor(rows, dtype=dtype, device=device).view(len(rows), longest)

    tokens = filled([output.tokens for output in outputs], -1 if pad is None else int(pad), torch.long)
    sequences = torch.cat((prompts.repeat_interleave(settings.num_return_sequences, dim=0), tokens), dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences
    if settings.num_beams == 1:
        return GenerateEncoderDecoderOutput(sequences=sequences, **more)
    first = [settings.num_beams * (number // settings.num_return_sequences) for number in range(len(outputs))]
    indices = [[row + beam for beam in output.beams] for row, output in zip(first, outputs, strict=True)]
    return GenerateBeamEncoderDecoderOutput(
        sequences=sequences,
        sequences_scores=torch.tensor([output.score for output in outputs], dtype=torch.float32, device=device),
        beam_indices=filled(indices, -1, torch.int32),
        **more,
    )
