"""The paper's decoding rules (Section 6.1) as hooks into transformers' own search; no loop of its own.

What a call of `generate()` needs beyond transformers' own settings stays its own, so that calls and threads do not see
each other's: each sentence's limit is in that call's copy of the generation configuration, and a beam search keeps the
rule of its scores in a context variable.

This file travels to the Hub beside the weights: it may import installed libraries and siblings in its own folder only.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers.generation import ForcedEOSTokenLogitsProcessor, LogitsProcessor, StoppingCriteria

#: How many tokens longer than its source an output may get (Section 6.1: "input length + 50").
MAX_EXTRA_TOKENS = 50

#: Rules of the score of a hypothesis by name: `length_normalization`, and transformers' own |Y|^alpha.
LENGTH_NORMALIZATIONS = ("gnmt", "power")

_OWN_SETTINGS = ("length_normalization", "max_extra_tokens")  # entries of a generation configuration
_BLOCK = 64  # neighbouring tokens that are looked at together for the best ones
_NO_SCORE = -1.0e8  # transformers marks hypotheses that are none with -1e9 and less; no log-probability comes near


def length_normalization(length: int | torch.Tensor, length_penalty: float) -> float | torch.Tensor:
    r"""Section 6.1, the length penalty: a hypothesis' log-probability is divided by \(((5 + |Y|) / 6)^\alpha\).

    The paper takes the rule and alpha = 0.6 from Wu et al. (2016), "Google's Neural Machine Translation System",
    Equation 14. transformers' own rule is \(|Y|^\alpha\), which weighs short outputs very differently.

    Args:
        length: generated tokens |Y|, the end token counted; a number, or a tensor of any shape.
        length_penalty: alpha; 0 compares plain log-probabilities.
    """
    return ((5 + length) / 6) ** length_penalty


def take_back_defaults(generation_config, own: set[str]) -> set[str]:
    """Unset what transformers' `Seq2SeqTrainer` writes into a model's generation configuration.

    With `predict_with_generate` it fills every unset field of `model.generation_config` with the library's default, for
    good. The 20 of `max_length` would cut each later output of the model, and of the saved one. A person sets some
    fields; this filling alone sets all.

    Args:
        generation_config: a model's own.
        own: the fields that were set when it was last seen unfilled, which stay.

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
    """`(batch_size,)` values of sentences, one for each of `(rows, ...)` hypotheses; a sentence's stand together."""
    return values.to(hypotheses.device).repeat_interleave(len(hypotheses) // len(values))


class SentenceLengthCriteria(StoppingCriteria):
    """Ends every hypothesis of a sentence at the sentence's own limit.

    Args:
        max_lengths: `(batch_size,)` tokens, the decoder's start or prefix counted.
        pad_token_id: what stands behind an output that has ended, if there is such a token.
    """

    def __init__(self, max_lengths: torch.Tensor, pad_token_id: torch.Tensor | None):
        self.max_lengths, self.shortest = max_lengths, int(max_lengths.min())
        if pad_token_id is not None:
            # By this attribute of a criterion transformers decides whether to fill ended rows with padding.
            self.eos_token_id = None

    def __call__(self, input_ids: torch.Tensor, scores: tuple[torch.Tensor] | None, **kwargs) -> torch.Tensor:
        """Which of `(rows, length)` hypotheses are at their limit."""
        length = input_ids.shape[1]
        if length < self.shortest:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return length >= of_each_row(self.max_lengths, input_ids)


class SentenceEndProcessor(LogitsProcessor):
    """`forced_eos_token_id` at each sentence's own limit; transformers' own knows one for all."""

    def __init__(self, max_lengths: torch.Tensor, eos_token_id: torch.Tensor):
        self.max_lengths, self.eos_token_id = max_lengths, eos_token_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`(rows, vocab_size)` scores that leave nothing but the end where one more token is allowed."""
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.eos_token_id] = 0
        return torch.where((of_each_row(self.max_lengths, scores) - 1 == input_ids.shape[1])[:, None], forced, scores)


@dataclass
class BeamScoring:
    """How one beam search scores its hypotheses.

    Args:
        normalization: one of `LENGTH_NORMALIZATIONS`.
        alpha: the exponent of its rule, transformers' `length_penalty`.
        num_return_sequences: hypotheses that a sentence returns.
        limits: the most tokens that each sentence may generate, `(batch_size, 1)`; None where they do not differ.
    """

    normalization: str
    alpha: float
    num_return_sequences: int
    limits: torch.Tensor | None

    def divisor(self, length: int) -> float:
        """What the log-probability of `length` generated tokens is divided by."""
        return length_normalization(length, self.alpha) if self.normalization == "gnmt" else length**self.alpha

    @cached_property
    def divisors_at_limits(self) -> torch.Tensor:
        """The same for the longest outputs of sentences that differ in their limits, `(batch_size, 1)`."""
        rows = [[self.divisor(length)] for length in self.limits.flatten().tolist()]  # in double precision
        return torch.tensor(rows, device=self.limits.device)


_scoring: ContextVar[BeamScoring] = ContextVar("scoring of the beam search that runs in this thread")


def candidates(scores: torch.Tensor, count: int) -> torch.LongTensor:
    """Few tokens of each row, among them `count` of the best.

    The best tokens lie in the blocks of neighbours that have the best maxima. torch finds maxima several times faster
    than it chooses among all tokens.

    Args:
        scores: `(rows, vocab_size)`.
        count: how many are wanted.

    Returns:
        `(rows, candidates)` token ids.
    """
    rows, vocab_size = scores.shape
    blocks = vocab_size // _BLOCK
    maxima = scores[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK)).amax(dim=-1)
    best = maxima.topk(count, sorted=False).indices  # (rows, count)
    inside = torch.arange(_BLOCK, device=scores.device)
    behind = torch.arange(blocks * _BLOCK, vocab_size, device=scores.device)  # too few for a block
    return torch.cat(((best[..., None] * _BLOCK + inside).flatten(1), behind.expand(rows, -1)), dim=1)


class VaswaniGenerationMixin:
    """Scores beams by `length_normalization` and bounds outputs by their source's length.

    Stands before `GenerationMixin` in the bases of a model. In `generate()`, `length_penalty` is the alpha of the
    paper's rule. Unless `max_length` or `max_new_tokens` is given, an output ends after `max_extra_tokens` tokens more
    than its own source has. What a sentence gets does not depend on the others of its batch.

    Two entries of the generation configuration, or arguments of `generate()`, are our own:

    - `max_extra_tokens`: see above; 50 by default, 300 for parsing (Section 6.3). Padding of the source and a given
      target prefix do not count.
    - `length_normalization`: `"gnmt"`, the paper's rule, by default; `"power"`: transformers' beam search as it is,
      with the score logP / |Y|^alpha and its own meaning of `early_stopping`. Under `"gnmt"` the search of a sentence
      ends as soon as no running beam can reach the returned hypotheses any more, which changes no result, for
      `early_stopping` `False` and `"never"` alike; with `True` it ends when as many hypotheses as beams are finished.

    A source without an `attention_mask` is taken to end where its `pad_token_id` begins.
    """

    def generate(self, *args, **kwargs):
        """As in `GenerationMixin`.

        Raises:
            ValueError: for an unknown `length_normalization` or a negative `max_extra_tokens`.
        """
        self._take_back_defaults()
        return super().generate(*args, **kwargs)

    def _take_back_defaults(self):
        known, own = getattr(self, "_own_generation_settings", (None, set()))
        own = own if known is self.generation_config else set()  # another one has been put in its place
        self._own_generation_settings = self.generation_config, take_back_defaults(self.generation_config, own)

    def _prepare_generation_config(self, generation_config, **kwargs):
        # transformers takes a setting that it does not know only where the model's own configuration has it.
        own = {name: kwargs.pop(name) for name in _OWN_SETTINGS if name in kwargs}
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        defaults = {"length_normalization": LENGTH_NORMALIZATIONS[0], "max_extra_tokens": MAX_EXTRA_TOKENS}
        for name, default in defaults.items():
            given = (own.get(name), getattr(generation_config, name, None), default)
            setattr(generation_config, name, next(value for value in given if value is not None))
        rule, extra = generation_config.length_normalization, generation_config.max_extra_tokens
        if rule not in LENGTH_NORMALIZATIONS:
            raise ValueError(f"length_normalization is {rule!r}: it must be one of {', '.join(LENGTH_NORMALIZATIONS)}")
        if not isinstance(extra, int) or extra < 0:
            raise ValueError(f"max_extra_tokens is {extra!r}: it must be a whole number, 0 or more")
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
        return super()._maybe_prepare_encoder_kwargs_for_generation(
            inputs_tensor, model_kwargs, model_input_name, generation_config
        )

    def _prepare_generated_length(self, generation_config, has_default_max_length, **kwargs):
        generation_config = super()._prepare_generated_length(
            generation_config, has_default_max_length=has_default_max_length, **kwargs
        )
        prompt, limits = kwargs["input_ids_length"], None
        positions = self.config.max_position_embeddings if self.config.position_encoding == "learned" else None
        if has_default_max_length and generation_config.max_new_tokens is None:
            limits = (generation_config._source_lengths + generation_config.max_extra_tokens).clamp(min=1)
            if positions is not None:
                limits = limits.clamp(max=max(positions - prompt, 1))
            generation_config.max_length = prompt + int(limits.max())
            limits = limits if bool((limits != limits[0]).any()) else None
        if positions is not None:  # there are none beyond
            generation_config.max_length = min(generation_config.max_length, positions)
        generation_config._prompt_length, generation_config._sentence_limits = prompt, limits
        if generation_config.is_assistant:
            # A draft starts from the whole target and a cache of most of it. transformers tells by the length of a mask
            # that encoder-decoder models do not have, and would feed what is cached once more.
            generation_config._mask_length = prompt
        return generation_config

    def _validate_generated_length(self, generation_config, input_ids_length, has_default_max_length):
        # The bound above is the model's own, so the warning about a model-agnostic default does not apply.
        del has_default_max_length
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length=False)

    def _get_stopping_criteria(self, generation_config, **kwargs):
        criteria = super()._get_stopping_criteria(generation_config=generation_config, **kwargs)
        for criterion in criteria:
            if hasattr(criterion, "max_position_embeddings") and self.config.position_encoding == "sinusoidal":
                criterion.max_position_embeddings = None  # it would warn of an end that there is not
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

    def _beam_search(self, input_ids, generation_config, **kwargs):
        limits = getattr(generation_config, "_sentence_limits", None)
        scoring = BeamScoring(
            normalization=generation_config.length_normalization,
            alpha=generation_config.length_penalty,
            num_return_sequences=generation_config.num_return_sequences,
            limits=None if limits is None else limits[:, None].to(input_ids.device),
        )
        pad = generation_config._pad_token_tensor
        if pad is not None and pad.eq(0).all():
            # transformers takes a 0 for none and would fill with the end token, which was never generated.
            generation_config._pad_token_tensor = pad - 1
        token = _scoring.set(scoring)
        try:
            outputs = super()._beam_search(input_ids, generation_config=generation_config, **kwargs)
        finally:
            _scoring.reset(token)
        generation_config._pad_token_tensor = pad
        if pad is not None:
            sequences = outputs if isinstance(outputs, torch.Tensor) else outputs.sequences
            # Without an end token, too, transformers fills with -1, which no tokenizer knows.
            sequences.masked_fill_(sequences == -1, pad)
        return outputs

    def _get_top_k_continuations(
        self, *, accumulated_log_probs, cur_len, decoder_prompt_len, do_sample, beams_to_keep, num_beams, **kwargs
    ):
        vocab_size = accumulated_log_probs.shape[1] // num_beams
        options = {"cur_len": cur_len, "decoder_prompt_len": decoder_prompt_len, "do_sample": do_sample}
        options.update(beams_to_keep=beams_to_keep, num_beams=num_beams, **kwargs)
        if do_sample or not accumulated_log_probs.is_cpu or vocab_size < 4 * _BLOCK * beams_to_keep:
            return super()._get_top_k_continuations(accumulated_log_probs=accumulated_log_probs, **options)
        scores = accumulated_log_probs.view(-1, vocab_size)
        tokens = candidates(scores, beams_to_keep)  # (rows, candidates)
        log_probs, sequences, beam_indices = super()._get_top_k_continuations(
            accumulated_log_probs=scores.gather(1, tokens).view(len(accumulated_log_probs), -1), **options
        )
        # What stands for the new token is its place among the candidates.
        rows = beam_indices[:, :, cur_len - decoder_prompt_len].long()
        sequences[:, :, cur_len] = tokens[rows, sequences[:, :, cur_len]]
        return log_probs, sequences, beam_indices

    def _update_finished_beams(
        self,
        *,
        sequences,
        beam_scores,
        beam_indices,
        is_sent_finished,
        is_early_stop_heuristic_unsatisfied,
        topk_log_probs,
        cur_len,
        decoder_prompt_len,
        **kwargs,
    ):
        before = sequences, beam_scores, beam_indices, is_sent_finished
        divisor = _scoring.get().divisor(cur_len + 1 - decoder_prompt_len)
        after = super()._update_finished_beams(
            sequences=sequences,
            beam_scores=beam_scores,
            beam_indices=beam_indices,
            is_sent_finished=is_sent_finished,
            is_early_stop_heuristic_unsatisfied=is_early_stop_heuristic_unsatisfied,
            topk_log_probs=topk_log_probs / divisor,
            cur_len=cur_len,
            decoder_prompt_len=decoder_prompt_len,
            **{**kwargs, "length_penalty": 0.0},  # the division is done
        )
        if len(beam_scores) == 1:
            return after
        # Sentences that are done wait for the others, and nothing of theirs may change.
        is_open = is_early_stop_heuristic_unsatisfied
        return tuple(
            torch.where(is_open[..., None] if new.dim() == 3 else is_open, new, old)
            for new, old in zip(after, before, strict=True)
        )

    def _check_early_stop_heuristic(
        self,
        *,
        is_early_stop_heuristic_unsatisfied,
        running_beam_scores,
        beam_scores,
        is_sent_finished,
        cur_len,
        max_length,
        decoder_prompt_len,
        length_penalty,
        early_stopping,
    ):
        """Which sentences `(batch_size, 1)` may still get a better result."""
        scoring, best_running = _scoring.get(), running_beam_scores[:, :1]
        if scoring.normalization == "power":
            is_open = super()._check_early_stop_heuristic(
                is_early_stop_heuristic_unsatisfied=is_early_stop_heuristic_unsatisfied,
                running_beam_scores=running_beam_scores,
                beam_scores=beam_scores,
                is_sent_finished=is_sent_finished,
                cur_len=cur_len,
                max_length=max_length if scoring.limits is None else decoder_prompt_len + scoring.limits,
                decoder_prompt_len=decoder_prompt_len,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
            )
        else:
            # A running beam's log-probability can only fall, so its best final score is today's log-probability under
            # the most favourable length that it can still end with. It has to beat the last hypothesis that is
            # returned; those behind are lost anyway. Stopping on this bound never changes the result.
            if scoring.alpha <= 0:
                divisor = scoring.divisor(cur_len + 1 - decoder_prompt_len)
            elif scoring.limits is None:
                divisor = scoring.divisor(max_length - decoder_prompt_len)
            else:
                divisor = scoring.divisors_at_limits
            last = scoring.num_return_sequences - 1
            to_beat = torch.where(is_sent_finished[:, last, None], beam_scores[:, last, None], -1.0e9)
            is_open = is_early_stop_heuristic_unsatisfied & (best_running / divisor > to_beat)
        if early_stopping is True:
            is_open = is_open & ~is_sent_finished.all(dim=-1, keepdim=True)
        return is_open & (best_running > _NO_SCORE)  # at a limit, or without a token that is allowed, none runs on


__all__ = [
    "LENGTH_NORMALIZATIONS",
    "MAX_EXTRA_TOKENS",
    "BeamScoring",
    "SentenceEndProcessor",
    "SentenceLengthCriteria",
    "VaswaniGenerationMixin",
    "length_normalization",
]
