"""The paper's decoding rules (Section 6.1) in `generate()`: by our own `Search`, or as hooks into transformers' loops.

`generate()` prepares everything as transformers does. Greedy and beam search are then a `Search`, unless something is
asked for that it does not have: sampling, processors and criteria of one's own, outputs of each step, and so on.
Calls of `generate()` and threads do not affect each other: each sentence's limit is in the call's copy of the
generation configuration, and the rule of a beam search's scores in a context variable.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import torch
from transformers.generation import (
    EosTokenCriteria,
    ForcedEOSTokenLogitsProcessor,
    GenerationMixin,
    LogitsProcessor,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    StoppingCriteria,
    SuppressTokensLogitsProcessor,
)

from .incremental_decoding_vaswani import DecodingCache
from .linear_vaswani import has_own_methods
from .search_vaswani import (
    NO_SCORE,
    OpenSearch,
    Search,
    SearchSettings,
    as_generated,
    candidates,
    has_candidates,
)
from .settings_vaswani import LENGTH_NORMALIZATIONS, MAX_EXTRA_TOKENS, SETTING_RANGES, broken_range

# Our own entries of a generation configuration, with their defaults.
_OWN_SETTINGS = {"length_normalization": LENGTH_NORMALIZATIONS[0], "max_extra_tokens": MAX_EXTRA_TOKENS}


def take_back_defaults(generation_config, own: set[str]) -> set[str]:
    """Unset what transformers' `Seq2SeqTrainer` writes into a model's generation configuration.

    With `predict_with_generate` it sets every unset field of `model.generation_config` to the library's default, for
    good. The 20 of `max_length` would cut each later output of the model, and of the saved one. Users set some fields;
    only this sets all.

    Args:
        generation_config: the model's.
        own: the fields that were set before, which stay.

    Returns:
        the fields that are set now.
    """
    defaults = generation_config._get_default_generation_params()
    defaults = {name: value for name, value in defaults.items() if value is not None}
    if all(getattr(generation_config, name, None) is not None for name in defaults):
        for name, value in defaults.items():
            if name not in own and getattr(generation_config, name) == value:
                setattr(generation_config, name, None)
    return {name for name, value in vars(generation_config).items() if value is not None}


def of_each_row(values: torch.Tensor, hypotheses: torch.Tensor) -> torch.Tensor:
    """`(batch_size,)` values of sentences as `(rows,)` values of their hypotheses, `(rows, ...)`."""
    return values.to(hypotheses.device).repeat_interleave(len(hypotheses) // len(values))


class SentenceLengthCriteria(StoppingCriteria):
    """Ends the hypotheses of each sentence at its own limit, `(batch_size,)` tokens with decoder start or prefix.

    `pad_token_id` is what follows an output that has ended, if there is such a token.
    """

    def __init__(self, max_lengths: torch.Tensor, pad_token_id: torch.Tensor | None):
        self.max_lengths, self.shortest = max_lengths, int(max_lengths.min())
        if pad_token_id is not None:
            # transformers fills ended rows with padding if some criterion has this attribute.
            self.eos_token_id = None

    def __call__(self, input_ids: torch.Tensor, scores: tuple[torch.Tensor] | None, **kwargs) -> torch.Tensor:
        """Whether each of `(rows, length)` hypotheses is at its limit, `(rows,)`."""
        length = input_ids.shape[1]
        if length < self.shortest:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return length >= of_each_row(self.max_lengths, input_ids)


class SentenceEndProcessor(LogitsProcessor):
    """`forced_eos_token_id` at each sentence's own limit; transformers' own has one limit for all."""

    def __init__(self, max_lengths: torch.Tensor, eos_token_id: torch.Tensor):
        self.max_lengths, self.eos_token_id = max_lengths, eos_token_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`(rows, vocab_size)` scores that allow only the end token where one more token is left."""
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.eos_token_id] = 0
        return torch.where((of_each_row(self.max_lengths, scores) - 1 == input_ids.shape[1])[:, None], forced, scores)


@dataclass
class BeamScoring:
    """How one beam search of transformers scores its hypotheses."""

    settings: SearchSettings
    limits: torch.Tensor | None  # (batch_size, 1), the most tokens that each sentence may generate, if they differ

    @cached_property
    def divisors_at_limits(self) -> torch.Tensor:
        """The divisors at the sentences' limits, `(batch_size, 1)`."""
        rows = [[self.settings.divisor(length)] for length in self.limits.flatten().tolist()]  # in double precision
        return torch.tensor(rows, device=self.limits.device)


_scoring: ContextVar[BeamScoring] = ContextVar("scoring of the beam search that runs in this thread")


def _settings(generation_config, **more) -> SearchSettings:
    names = ("num_beams", "num_return_sequences", "length_normalization", "length_penalty", "early_stopping")
    return SearchSettings(**{name: getattr(generation_config, name) for name in names}, **more)


def search_settings(generation_config, prompt: int, logits_processor, stopping_criteria) -> SearchSettings | None:
    """What a `Search` would have to look for in a call of `generate()`; None if more is asked for than it has.

    Args:
        generation_config: the prepared one.
        prompt: tokens that outputs start from.
        logits_processor: all processors of the call.
        stopping_criteria: all criteria of the call.
    """
    config, end = generation_config, generation_config._eos_token_tensor

    def are_ends(ids: torch.Tensor) -> bool:
        return end is not None and torch.equal(ids, end)

    of_steps = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    others = (config.do_sample, config.is_assistant, config.low_memory, config.prefill_chunk_size, of_steps)
    if any(others) or config._pad_token_tensor is None:
        return None
    for criterion in stopping_criteria:
        is_known = (
            type(criterion) is SentenceLengthCriteria
            or (type(criterion) is MaxLengthCriteria and criterion.max_length == config.max_length)
            or (type(criterion) is EosTokenCriteria and are_ends(criterion.eos_token_id))
        )
        if not is_known:
            return None
    min_tokens, forced, forbidden = 0, [], set()
    for processor in logits_processor:
        if type(processor) is MinLengthLogitsProcessor and are_ends(processor.eos_token_id):
            min_tokens = max(min_tokens, processor.min_length - prompt)
        elif type(processor) is MinNewTokensLengthLogitsProcessor and are_ends(processor.eos_token_id):
            min_tokens = max(min_tokens, processor.prompt_length_to_skip + processor.min_new_tokens - prompt)
        elif type(processor) is SentenceEndProcessor or (
            type(processor) is ForcedEOSTokenLogitsProcessor and processor.max_length == config.max_length
        ):
            forced = processor.eos_token_id.tolist()
        elif type(processor) is SuppressTokensLogitsProcessor:
            forbidden.update(processor.suppress_tokens.tolist())
        elif type(processor) is NoBadWordsLogitsProcessor and all(len(ids) == 1 for ids in processor.sequence_bias):
            forbidden.update(*processor.sequence_bias)
        else:
            return None
    if not forbidden.isdisjoint(forced):  # the order of the processors would count
        return None
    ends = [] if end is None else end.tolist()
    sets = {"end_ids": frozenset(ends), "forced_end_ids": frozenset(forced), "forbidden_ids": frozenset(forbidden)}
    return _settings(config, min_tokens=min_tokens, **sets)


class VaswaniGenerationMixin:
    """Scores beams by `length_normalization` and limits outputs by the length of their source.

    Stands before `GenerationMixin` in the bases of a model. In `generate()`, `length_penalty` is the alpha of the
    paper's rule. Unless `max_length` or `max_new_tokens` is given, an output has at most `max_extra_tokens` more tokens
    than its own source. A sentence's output does not depend on the rest of its batch.

    Two entries of the generation configuration, or arguments of `generate()`, are our own:

    - `max_extra_tokens`: see above; 50 by default, 300 for parsing (Section 6.3). Padding of the source and a given
      target prefix do not count.
    - `length_normalization`: `"gnmt"`, the paper's rule, by default; `"power"`: transformers' beam search as it is,
      with the score logP / |Y|^alpha and its own meaning of `early_stopping`. Under `"gnmt"` the search of a sentence
      ends as soon as no running beam can become one of the returned hypotheses, which changes no result, for
      `early_stopping` `False` and `"never"` alike; with `True` it ends when as many hypotheses as beams are finished.

    A source without an `attention_mask` ends where its `pad_token_id` starts.
    """

    def generate(self, *args, **kwargs):
        """As in `GenerationMixin`.

        Raises:
            ValueError: for an unknown `length_normalization`, and for our and transformers' own numbers of a search
                beyond their range.
        """
        self._take_back_defaults()
        return super().generate(*args, **kwargs)

    def open_search(self, **options) -> OpenSearch | None:
        """An empty search that sources may join at any time, each of which gets what it would alone.

        Args:
            **options: as for `generate()`.

        Returns:
            None if more is asked for than such a search has, so that `generate()` has to be called.

        Raises:
            ValueError: as `generate()`.
        """

        def open_prepared(model, input_ids, **prepared):
            settings = model._own_search(input_ids, **prepared)
            if settings is None or input_ids.shape[1] > 1:
                return None
            decoder, start = prepared["past_key_values"].decoder, int(input_ids[0, 0])
            return OpenSearch(model, decoder, settings, prepared["generation_config"], start)

        if options.keys() & {"streamer", "assistant_model", "synced_gpus", "custom_generate"}:
            return None
        source = torch.zeros(1, 1, dtype=torch.long, device=self.device)  # only for what is checked and prepared
        mask = torch.ones_like(source)
        return self.generate(source, attention_mask=mask, custom_generate=open_prepared, **options)

    def compute_transition_scores(self, *args, **kwargs) -> torch.Tensor:
        """As in `GenerationMixin`, which reads only the configuration of a model; with the target's vocabulary."""
        decoder = SimpleNamespace(config=self.config.get_text_config(decoder=True))
        return GenerationMixin.compute_transition_scores(decoder, *args, **kwargs)

    def _take_back_defaults(self):
        known, own = getattr(self, "_own_generation_settings", (None, set()))
        own = own if known is self.generation_config else set()  # it has been replaced by another one
        self._own_generation_settings = self.generation_config, take_back_defaults(self.generation_config, own)

    def _prepare_generation_config(self, generation_config, **kwargs):
        # transformers accepts an unknown setting only if the model's own configuration has it.
        own = {name: kwargs.pop(name) for name in _OWN_SETTINGS if name in kwargs}
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        for name, default in _OWN_SETTINGS.items():
            values = (own.get(name), getattr(generation_config, name, None), default)
            setattr(generation_config, name, next(value for value in values if value is not None))
        rule = generation_config.length_normalization
        if rule not in LENGTH_NORMALIZATIONS:
            raise ValueError(f"length_normalization is {rule!r}: it must be one of {', '.join(LENGTH_NORMALIZATIONS)}")
        for name in ("num_beams", "num_return_sequences", "length_penalty", "max_extra_tokens"):
            value = getattr(generation_config, name)
            if value is not None and (expected := broken_range(name, value)):
                raise ValueError(f"{name} is {value!r}: it must be {expected}")
        for name, (kind, _, _) in SETTING_RANGES.items():
            if kind is float and type(value := getattr(generation_config, name, None)) is int:
                setattr(generation_config, name, float(value))  # transformers refuses a temperature of 2
        return generation_config, model_kwargs

    def _maybe_prepare_encoder_kwargs_for_generation(
        self, inputs_tensor, model_kwargs, model_input_name, generation_config
    ):
        mask = model_kwargs.get("attention_mask")
        if mask is None and inputs_tensor.dim() == 2:
            pad, end = (getattr(generation_config, f"_{name}_token_tensor", None) for name in ("pad", "eos"))
            if pad is not None and (end is None or not torch.isin(end, pad).any()):
                mask = inputs_tensor.ne(pad).long()
                if not mask.all():
                    model_kwargs["attention_mask"] = mask
        if mask is None or mask.dim() != 2:
            states = model_kwargs.get("encoder_outputs")
            states = inputs_tensor if states is None else states[0]
            mask = torch.ones(states.shape[:2], dtype=torch.long, device=states.device)
        generation_config._source_lengths = mask.ne(0).sum(dim=1)
        generation_config._source_ids = inputs_tensor if inputs_tensor.dim() == 2 else None
        return super()._maybe_prepare_encoder_kwargs_for_generation(
            inputs_tensor, model_kwargs, model_input_name, generation_config
        )

    def _prepare_generated_length(self, generation_config, has_default_max_length, **kwargs):
        generation_config = super()._prepare_generated_length(
            generation_config, has_default_max_length=has_default_max_length, **kwargs
        )
        prompt, limits = kwargs["input_ids_length"], None
        generation_config._follows_source = has_default_max_length and generation_config.max_new_tokens is None
        positions = self.config.max_position_embeddings if self.config.position_encoding == "learned" else None
        if generation_config._follows_source:
            lengths = generation_config._source_lengths.tolist()
            limits = torch.tensor([self._output_limit(generation_config, length, prompt) for length in lengths])
            generation_config.max_length = prompt + int(limits.max())
            limits = limits.to(kwargs["inputs_tensor"].device) if bool((limits != limits[0]).any()) else None
        if positions is not None:
            generation_config.max_length = min(generation_config.max_length, positions)
        generation_config._prompt_length, generation_config._sentence_limits = prompt, limits
        if generation_config.is_assistant:
            # A draft starts from the whole target and a cache of most of it. transformers reads from the length of a
            # mask, which encoder-decoder models do not have, how much is new, and would repeat what is cached.
            generation_config._mask_length = prompt
        return generation_config

    def _output_limit(self, generation_config, source_length: int, prompt: int) -> int:
        """The most tokens that may be generated for a source of so many tokens behind a prompt of so many."""
        if not generation_config._follows_source:
            return generation_config.max_length - prompt
        limit = max(source_length + generation_config.max_extra_tokens, 1)
        if self.config.position_encoding == "learned":
            limit = min(limit, max(self.config.max_position_embeddings - prompt, 1))
        return limit

    def _validate_generated_length(self, generation_config, input_ids_length, has_default_max_length):
        # The limit above is the model's own, so the warning about a model-agnostic default does not apply.
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length=False)

    def _get_stopping_criteria(self, generation_config, **kwargs):
        criteria = super()._get_stopping_criteria(generation_config=generation_config, **kwargs)
        for criterion in criteria:
            if hasattr(criterion, "max_position_embeddings") and self.config.position_encoding != "learned":
                criterion.max_position_embeddings = None  # it would warn that positions run out
        limits = getattr(generation_config, "_sentence_limits", None)
        if limits is not None:
            pad = generation_config._pad_token_tensor
            criteria.append(SentenceLengthCriteria(generation_config._prompt_length + limits, pad))
        return criteria

    def _get_logits_processor(self, generation_config, **kwargs):
        processors = super()._get_logits_processor(generation_config=generation_config, **kwargs)
        limits = getattr(generation_config, "_sentence_limits", None)
        for index, processor in enumerate(processors):
            if limits is not None and isinstance(processor, ForcedEOSTokenLogitsProcessor):
                max_lengths = generation_config._prompt_length + limits
                processors[index] = SentenceEndProcessor(max_lengths, processor.eos_token_id)
        return processors

    def _own_search(
        self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, streamer=None,
        past_key_values=None, **model_kwargs,
    ) -> SearchSettings | None:  # fmt: skip
        """What a `Search` has to look for to give what transformers' loop would; None if it cannot."""
        is_new = isinstance(past_key_values, DecodingCache) and not past_key_values.source
        if not is_new or synced_gpus or streamer is not None or _has_own_hooks(self):
            return None
        settings = search_settings(generation_config, input_ids.shape[1], logits_processor, stopping_criteria)
        if settings is None:
            return None
        tokens = settings.end_ids | settings.forced_end_ids | settings.forbidden_ids
        return settings if all(0 <= token < self.config.target_vocab_size for token in tokens) else None

    def _search(self, settings: SearchSettings, input_ids, generation_config, past_key_values, **model_kwargs):
        """The outputs of a `Search`, as transformers' loops return them."""
        config, beams = generation_config, settings.num_beams
        returns_cache, mask = config.return_dict_in_generate, model_kwargs.get("attention_mask")
        search = Search(past_key_values.decoder, settings, past_key_values if returns_cache else None)
        prompts = input_ids[::beams]
        states, mask = model_kwargs["encoder_outputs"][0][::beams], None if mask is None else mask[::beams]
        limits = config._sentence_limits
        limits = [config.max_length - prompts.shape[1]] * len(prompts) if limits is None else limits.tolist()
        sentences = search.add(states, mask, limits, prompts.to(self.device))
        while search.is_open:
            search.step()
        outputs = [output for sentence in sentences for output in sentence.outputs()]
        prompts = prompts.repeat_interleave(config.num_return_sequences, dim=0)
        generated = as_generated(outputs, prompts, settings, int(config._pad_token_tensor), search.cache)
        return generated if returns_cache else generated.sequences

    def _sample(self, input_ids, **kwargs):
        settings = self._own_search(input_ids, **kwargs)
        return super()._sample(input_ids, **kwargs) if settings is None else self._search(settings, input_ids, **kwargs)

    def _beam_search(self, input_ids, **kwargs):
        settings = self._own_search(input_ids, **kwargs)
        if settings is not None:
            return self._search(settings, input_ids, **kwargs)
        generation_config = kwargs["generation_config"]
        limits = generation_config._sentence_limits
        limits = None if limits is None else limits[:, None].to(input_ids.device)
        pad = generation_config._pad_token_tensor
        if pad is not None and pad.eq(0).all():
            # transformers takes 0 for no padding and would fill with the end token, which was never generated.
            generation_config._pad_token_tensor = pad - 1
        token = _scoring.set(BeamScoring(_settings(generation_config), limits))
        try:
            outputs = super()._beam_search(input_ids, **kwargs)
        finally:
            _scoring.reset(token)
        generation_config._pad_token_tensor = pad
        if pad is not None:
            sequences = outputs if isinstance(outputs, torch.Tensor) else outputs.sequences
            # Without an end token, too, transformers fills with -1, which is no token.
            sequences.masked_fill_(sequences == -1, pad)
        return outputs

    def _get_top_k_continuations(self, *, accumulated_log_probs, **state):
        vocab_size, count = accumulated_log_probs.shape[1] // state["num_beams"], state["beams_to_keep"]
        scores = accumulated_log_probs.view(-1, vocab_size)
        if state["do_sample"] or not has_candidates(scores, count):
            return super()._get_top_k_continuations(accumulated_log_probs=accumulated_log_probs, **state)
        tokens = candidates(scores, count)  # (rows, candidates)
        log_probs, sequences, beam_indices = super()._get_top_k_continuations(
            accumulated_log_probs=scores.gather(1, tokens).view(len(accumulated_log_probs), -1), **state
        )
        # In place of the new token stands its index among the candidates.
        new = state["cur_len"]
        rows = beam_indices[:, :, new - state["decoder_prompt_len"]].long()
        sequences[:, :, new] = tokens[rows, sequences[:, :, new]]
        return log_probs, sequences, beam_indices

    def _update_finished_beams(self, **state):
        divisor = _scoring.get().settings.divisor(state["cur_len"] + 1 - state["decoder_prompt_len"])
        scored = {"topk_log_probs": state["topk_log_probs"] / divisor, "length_penalty": 0.0}  # no further division
        after = super()._update_finished_beams(**{**state, **scored})
        if len(state["beam_scores"]) == 1:
            return after
        # Sentences that are done wait for the others, and their hypotheses must not change.
        before = (state[name] for name in ("sequences", "beam_scores", "beam_indices", "is_sent_finished"))
        is_open = state["is_early_stop_heuristic_unsatisfied"]
        return tuple(
            torch.where(is_open[..., None] if new.dim() == 3 else is_open, new, old)
            for new, old in zip(after, before, strict=True)
        )

    def _check_early_stop_heuristic(self, **state):
        """Which sentences `(batch_size, 1)` may still get a better result."""
        scoring, best_running, prompt = _scoring.get(), state["running_beam_scores"][:, :1], state["decoder_prompt_len"]
        settings, is_finished = scoring.settings, state["is_sent_finished"]
        if settings.length_normalization == "power":
            limit = state["max_length"] if scoring.limits is None else prompt + scoring.limits
            is_open = super()._check_early_stop_heuristic(**{**state, "max_length": limit})
        else:
            if not settings.judges_by_limit():
                divisor = settings.divisor(state["cur_len"] + 1 - prompt)
            elif scoring.limits is None:
                divisor = settings.divisor(state["max_length"] - prompt)
            else:
                divisor = scoring.divisors_at_limits
            last = settings.num_return_sequences - 1
            to_beat = torch.where(is_finished[:, last, None], state["beam_scores"][:, last, None], -1.0e9)
            is_open = state["is_early_stop_heuristic_unsatisfied"] & (best_running / divisor > to_beat)
        if settings.early_stopping is True:
            is_open = is_open & ~is_finished.all(dim=-1, keepdim=True)
        return is_open & (best_running > NO_SCORE)  # at a limit, or without an allowed token, none continues


#: What a subclass may override that a `Search` would pass by.
_HOOKS = {name for name in dir(GenerationMixin) if not name.startswith("__")} | {"__call__", "forward"}


def _has_own_hooks(model) -> bool:
    """Whether a class derived from ours, or the object alone, has methods of its own that take part in a search."""
    kinds = type(model).__mro__
    own = next(index for index, kind in enumerate(kinds) if VaswaniGenerationMixin in kind.__bases__)
    return has_own_methods(model) or any(not _HOOKS.isdisjoint(vars(kind)) for kind in kinds[:own])
