"""The paper's decoding rules (Section 6.1) in `generate()`.

`generate()` prepares everything as transformers does. Greedy and beam search are then searches of our own; sampling,
drafts by an assistant, and greedy search with a streamer or processors of one's own are transformers' loops. Calls of
`generate()` and threads do not affect each other: a call's limits are in its copy of the generation configuration.

The private methods of `GenerationMixin` that are overridden here have no public counterpart; each names its reason and
the first version of transformers that has the method in this form.
"""

import copy
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from transformers.generation import (
    EosTokenCriteria,
    ForcedEOSTokenLogitsProcessor,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)

from .incremental_decoding_vaswani import DecodingCache, IncrementalDecoder
from .layers_vaswani import CACHE
from .linear_vaswani import has_own_methods
from .search_vaswani import ForwardSearch, OpenSearch, Search, SearchSettings, as_generated
from .settings_vaswani import LENGTH_NORMALIZATIONS, MAX_EXTRA_TOKENS, SETTING_RANGES, broken_range

# Without effect unless tokens are drawn; transformers checks them then.
_OF_SAMPLING = {"temperature", "top_k", "top_p"}
# Our own entries of a generation configuration, with their defaults.
OWN_SETTINGS = {"length_normalization": LENGTH_NORMALIZATIONS[0], "max_extra_tokens": MAX_EXTRA_TOKENS}


def of_each_row(values: torch.Tensor, hypotheses: torch.Tensor) -> torch.Tensor:
    """Return `(batch_size,)` values of sentences as `(rows,)` values of their hypotheses, `(rows, ...)`."""
    return values.to(hypotheses.device).repeat_interleave(len(hypotheses) // len(values))


class SentenceLengthCriteria(StoppingCriteria):
    """Ends the hypotheses of each sentence at its own limit, `(batch_size,)` tokens with decoder start or prefix.

    `pad_token_id` is what follows an output that has ended, if there is such a token.
    """

    def __init__(self, max_lengths: torch.Tensor, pad_token_id: torch.Tensor | None):
        self.max_lengths = max_lengths
        if pad_token_id is not None:
            # transformers fills ended rows with padding if some criterion has this attribute.
            self.eos_token_id = None

    def __call__(self, input_ids: torch.Tensor, scores: tuple[torch.Tensor] | None, **kwargs) -> torch.Tensor:
        """Return whether each of `(rows, length)` hypotheses is at its limit, `(rows,)`."""
        return input_ids.shape[1] >= of_each_row(self.max_lengths, input_ids)


class SentenceEndProcessor(LogitsProcessor):
    """`forced_eos_token_id` at each sentence's own limit; transformers' own has one limit for all."""

    def __init__(self, max_lengths: torch.Tensor, eos_token_id: torch.Tensor):
        self.max_lengths, self.eos_token_id = max_lengths, eos_token_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `(rows, vocab_size)` scores that allow only the end token where one more token is left."""
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.eos_token_id] = 0
        return torch.where((of_each_row(self.max_lengths, scores) - 1 == input_ids.shape[1])[:, None], forced, scores)


def _limit_each_sentence(processors: Sequence, criteria: Sequence, generation_config) -> tuple:
    """Return processors and criteria of a call that keep each sentence's own limit, where limits differ."""
    limits = generation_config._sentence_limits
    if limits is None:
        return processors, criteria
    max_lengths = generation_config._prompt_length + limits
    processors = LogitsProcessorList(processors)
    for place, processor in enumerate(processors):
        if isinstance(processor, ForcedEOSTokenLogitsProcessor):
            processors[place] = SentenceEndProcessor(max_lengths, processor.eos_token_id)
    own = SentenceLengthCriteria(max_lengths, generation_config._pad_token_tensor)
    return processors, StoppingCriteriaList([*criteria, own])


def _are_ends(ids: torch.Tensor, generation_config) -> bool:
    end = generation_config._eos_token_tensor
    return end is not None and torch.equal(ids, end)


def _settings(generation_config, **more) -> SearchSettings:
    names = ("num_beams", "num_return_sequences", "length_normalization", "length_penalty", "early_stopping")
    end = generation_config._eos_token_tensor
    ends = frozenset(() if end is None else end.tolist())
    return SearchSettings(**{name: getattr(generation_config, name) for name in names}, end_ids=ends, **more)


def _other_criteria(generation_config, criteria: Sequence) -> StoppingCriteriaList:
    """Return the criteria that are neither the end tokens nor the greatest length, which every search follows."""
    return StoppingCriteriaList(
        criterion
        for criterion in criteria
        if not (type(criterion) is MaxLengthCriteria and criterion.max_length == generation_config.max_length)
        and not (type(criterion) is EosTokenCriteria and _are_ends(criterion.eos_token_id, generation_config))
    )


class VaswaniGenerationMixin:
    """Scores beams by `length_normalization` and limits outputs by the length of their source.

    Comes before `GenerationMixin` in the bases of a model. In `generate()`, `length_penalty` is the alpha of the
    paper's rule. Unless `max_length` or `max_new_tokens` is given, an output has at most `max_extra_tokens` more tokens
    than its own source. A sentence's output does not depend on the rest of its batch, padded on the right.

    Two entries of the generation configuration, or arguments of `generate()`, are our own:

    - `max_extra_tokens`: see above; 50 by default, 300 for parsing (Section 6.3). Padding of the source and a given
      target prefix do not count.
    - `length_normalization`: `"gnmt"`, the paper's rule, by default; `"power"`: the score logP / |Y|^alpha of
      transformers' beam search, with its meaning of `early_stopping`. Under `"gnmt"` the search of a sentence ends as
      soon as no running beam can become one of the returned hypotheses, which changes no result, for `early_stopping`
      `False` and `"never"` alike; with `True` it ends when as many hypotheses as beams are finished.

    A source without an `attention_mask` ends where its `pad_token_id` starts.
    """

    def generate(self, *args, **kwargs):
        """Generate as `GenerationMixin` does.

        Raises:
            ValueError: for an unknown `length_normalization`, and numbers of a search beyond their range.
        """
        self._unset_trainer_defaults()
        given = [kwargs.get(name) for name in (CACHE, "past_key_values", "cache_implementation")]
        configs = kwargs.get("generation_config"), self.generation_config
        given += [getattr(config, "cache_implementation", None) for config in configs]
        is_open = kwargs.get("use_cache") is not False and all(each is None for each in given)
        if is_open and callable(kwargs.get("custom_generate")):
            kwargs["cache_implementation"] = "dynamic"  # others can do more with it than with ours
        outputs = super().generate(*args, **kwargs)
        cache = None if isinstance(outputs, torch.Tensor) else getattr(outputs, CACHE, None)
        is_draft = getattr(kwargs.get("generation_config"), "is_assistant", False)  # of which the next one uses them
        if isinstance(cache, DecodingCache) and cache.decoder is not self._decoder and not is_draft:
            cache.decoder = IncrementalDecoder(self)  # without the copies of the weights that outputs would keep
        return outputs

    def open_search(self, **options) -> OpenSearch | None:
        """Return an empty search that sources may join at any time, each of which gets what it would alone.

        Options and errors are those of `generate()`; None if they ask for more than such a search has.
        """

        def open_prepared(model, input_ids, **prepared):
            settings = model._own_search(input_ids, **prepared)
            if settings is None or input_ids.shape[1] > 1:
                return None
            decoder, start = prepared[CACHE].decoder, int(input_ids[0, 0])
            return OpenSearch(model, decoder, settings, prepared["generation_config"], start)

        if options.keys() & {"streamer", "assistant_model", "synced_gpus", "custom_generate"}:
            return None
        source = torch.zeros(1, 1, dtype=torch.long, device=self.device)  # only for what is checked and prepared
        mask = torch.ones_like(source)
        self._unset_trainer_defaults()
        return super().generate(source, attention_mask=mask, custom_generate=open_prepared, **options)

    def compute_transition_scores(self, *args, **kwargs) -> torch.Tensor:
        """Compute as `GenerationMixin` does, which reads only a model's configuration; by the target's vocabulary."""
        decoder = SimpleNamespace(config=self.config.get_text_config(decoder=True))
        return GenerationMixin.compute_transition_scores(decoder, *args, **kwargs)

    def _unset_trainer_defaults(self):
        """Unset what transformers' `Seq2SeqTrainer` writes into the model's generation configuration.

        With `predict_with_generate` it sets every unset field to the library's default, for good. The 20 of
        `max_length` would cut each later output of the model, and of the saved one. Only this sets all fields, and
        `generate` has noted before which were unset.
        """
        config = self.generation_config
        defaults = {name: value for name, value in config._get_default_generation_params().items() if value is not None}
        if unset := [name for name in defaults if getattr(config, name, None) is None]:
            self._unset_settings = unset
            return
        for name in getattr(self, "_unset_settings", defaults):
            if getattr(config, name) == defaults[name]:
                setattr(config, name, None)

    def _prepare_generation_config(self, generation_config, **kwargs):
        # Since 5.0: an unknown setting is accepted only if the model's own generation configuration has it.
        own = {name: kwargs.pop(name) for name in OWN_SETTINGS if name in kwargs}
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        if generation_config.min_new_tokens == 1 and (generation_config.min_length or 0) > 1:
            generation_config.min_new_tokens = None  # each trained model has it, and transformers would let it win
        generation_config.prefill_chunk_size = None  # transformers cuts the source's mask as if it were the prompt's
        for name, default in OWN_SETTINGS.items():
            values = (own.get(name), getattr(generation_config, name, None), default)
            setattr(generation_config, name, next(value for value in values if value is not None))
        for name, (kind, *_) in {"length_normalization": [str], **SETTING_RANGES}.items():
            value = getattr(generation_config, name, None)
            if value is not None and name not in _OF_SAMPLING and (expected := broken_range(name, value)):
                raise ValueError(f"{name} is {value!r}: it must be {expected}")
            if kind is float and type(value) is int:
                setattr(generation_config, name, float(value))  # transformers refuses a temperature of 2
        return generation_config, model_kwargs

    def _maybe_prepare_encoder_kwargs_for_generation(
        self, inputs_tensor, model_kwargs, model_input_name, generation_config
    ):
        # Since 5.17: the only place that sees the source, its mask and the special tokens before the encoder runs.
        mask = model_kwargs.get("attention_mask")
        if mask is None and hasattr(generation_config, "_pad_token_tensor"):  # or this is an assistant
            mask = self._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
            if not mask.all():
                model_kwargs["attention_mask"] = mask
        if mask is None:
            mask = torch.ones(inputs_tensor.shape[:2], device=inputs_tensor.device)
        generation_config._source_lengths = mask.ne(0).sum(dim=1)
        return super()._maybe_prepare_encoder_kwargs_for_generation(
            inputs_tensor, model_kwargs, model_input_name, generation_config
        )

    def _prepare_generated_length(self, generation_config, **kwargs):
        # Since 5.0: `max_length` follows the sources here, before caches are made for it.
        generation_config = super()._prepare_generated_length(generation_config, **kwargs)
        prompt, limits = kwargs["input_ids_length"], None
        follows_source = kwargs["has_default_max_length"] and generation_config.max_new_tokens is None
        generation_config._follows_source = follows_source
        if follows_source:
            lengths = generation_config._source_lengths.tolist()
            limits = torch.tensor([self._output_limit(generation_config, length, prompt) for length in lengths])
            generation_config.max_length = prompt + int(limits.max())
            limits = limits.to(kwargs["inputs_tensor"].device) if bool((limits != limits[0]).any()) else None
        if self.config.position_encoding == "learned":
            generation_config.max_length = min(generation_config.max_length, self.config.max_position_embeddings)
        generation_config._prompt_length, generation_config._sentence_limits = prompt, limits
        if generation_config.is_assistant:
            # A draft starts from the whole target and a cache of most of it. transformers reads from the length of a
            # mask, which encoder-decoder models do not have, how much is new, and would repeat what is cached.
            generation_config._mask_length = prompt
        return generation_config

    def _output_limit(self, generation_config, source_length: int, prompt: int) -> int:
        """Return the most tokens that may be generated for a source of some length in tokens after a prompt."""
        if not generation_config._follows_source:
            return generation_config.max_length - prompt
        limit = max(source_length + generation_config.max_extra_tokens, 1)
        if self.config.position_encoding == "learned":
            limit = min(limit, max(self.config.max_position_embeddings - prompt, 1))
        return limit

    def _validate_generated_length(self, generation_config, input_ids_length, has_default_max_length):
        # Since 5.0: the limit above is the model's own, so that a warning about transformers' default would be wrong.
        # A minimum is compared with the shortest limit of a batch.
        config, limits = copy.copy(generation_config), generation_config._sentence_limits
        if limits is not None:
            config.max_length = min(config.max_length, input_ids_length + int(limits.min()))
        super()._validate_generated_length(config, input_ids_length, has_default_max_length=False)

    def _own_search(
        self, input_ids, logits_processor, stopping_criteria, generation_config, **call
    ) -> SearchSettings | None:
        """Return the settings of a `Search` that gives what transformers' loop would; None if there are none."""
        config, prompt = generation_config, input_ids.shape[1]  # the tokens that outputs start from
        is_new = isinstance(cache := call.get(CACHE), DecodingCache) and not cache.source
        # A class derived from the model's, or the object alone, may have methods that a `Search` would bypass.
        is_derived = VaswaniGenerationMixin not in type(self).__bases__ or has_own_methods(self)
        of_steps = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        has_streamer = call.get("streamer") is not None
        others = (config.do_sample, config.is_assistant, of_steps, call.get("synced_gpus"), has_streamer, is_derived)
        if not is_new or any(others) or config._pad_token_tensor is None or _other_criteria(config, stopping_criteria):
            return None
        min_tokens, forced, forbidden = 0, [], set()
        for processor in logits_processor:
            if type(processor) is MinLengthLogitsProcessor and _are_ends(processor.eos_token_id, config):
                min_tokens = max(min_tokens, processor.min_length - prompt)
            elif type(processor) is MinNewTokensLengthLogitsProcessor and _are_ends(processor.eos_token_id, config):
                min_tokens = max(min_tokens, processor.prompt_length_to_skip + processor.min_new_tokens - prompt)
            elif type(processor) is ForcedEOSTokenLogitsProcessor and processor.max_length == config.max_length:
                forced = processor.eos_token_id.tolist()
            elif type(processor) is SuppressTokensLogitsProcessor:
                forbidden.update(processor.suppress_tokens.tolist())
            elif type(processor) is NoBadWordsLogitsProcessor and all(len(ids) == 1 for ids in processor.sequence_bias):
                forbidden.update(*processor.sequence_bias)
            else:
                return None
        if not forbidden.isdisjoint(forced):  # the order of the processors would count
            return None
        sets = {"forced_end_ids": frozenset(forced), "forbidden_ids": frozenset(forbidden)}
        settings = _settings(config, min_tokens=min_tokens, **sets)
        tokens = settings.end_ids | settings.forced_end_ids | settings.forbidden_ids
        return settings if all(0 <= token < self.config.target_vocab_size for token in tokens) else None

    def _search(self, settings: SearchSettings, input_ids, generation_config, **model_kwargs):
        """Return the outputs of a `Search`, as transformers' loops do."""
        config, beams, mask = generation_config, settings.num_beams, model_kwargs.get("attention_mask")
        cache = model_kwargs[CACHE]
        search = Search(cache.decoder, settings, cache if config.return_dict_in_generate else None)
        prompts = input_ids[::beams]
        states, mask = model_kwargs["encoder_outputs"][0][::beams], None if mask is None else mask[::beams]
        sentences = search.add(states, mask, _limits(config, prompts), prompts.to(self.device))
        while search.running:
            search.step()
        outputs = [output for sentence in sentences for output in sentence.outputs()]
        return as_generated(outputs, prompts, settings, config, **{CACHE: search.cache})

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **call):
        # Since 4.42: greedy search is our own where nothing keeps it from that; limits are each sentence's own.
        settings = self._own_search(input_ids, logits_processor, stopping_criteria, generation_config, **call)
        if settings is not None:
            return self._search(settings, input_ids, generation_config, **call)
        limited = _limit_each_sentence(logits_processor, stopping_criteria, generation_config)
        return super()._sample(input_ids, *limited, generation_config, **call)

    def _beam_search(self, input_ids, logits_processor, stopping_criteria, generation_config, **call):
        # Since 4.50: beam search is our own, by the paper's rule for scores and each sentence's own limit.
        config = generation_config
        settings = self._own_search(input_ids, logits_processor, stopping_criteria, config, **call)
        if settings is not None:
            return self._search(settings, input_ids, config, **call)
        synced_gpus = call.pop("synced_gpus", False)
        processors, _ = _limit_each_sentence(logits_processor, stopping_criteria, config)
        settings, criteria = _settings(config, do_sample=config.do_sample), _other_criteria(config, stopping_criteria)
        search = ForwardSearch(self, settings, config, processors, criteria, call)
        prompts = input_ids[:: settings.num_beams]
        outputs = search.run(input_ids, _limits(config, prompts), synced_gpus)
        return as_generated(outputs, prompts, settings, config, **search.records())


def _limits(generation_config, prompts: torch.Tensor) -> list[int]:
    """Return the most tokens that each sentence may generate after its prompt, `(batch_size, prompt_length)`."""
    limits = generation_config._sentence_limits
    return [generation_config.max_length - prompts.shape[1]] * len(prompts) if limits is None else limits.tolist()
