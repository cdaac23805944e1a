"""The paper's decoding rules (Section 6.1) as hooks into transformers' own search; no loop of its own.

This file travels to the Hub beside the weights: it may import installed libraries and siblings in its own folder only.
"""

import torch

#: How many tokens longer than its source an output may get (Section 6.1: "input length + 50").
MAX_EXTRA_TOKENS = 50


def length_normalization(length: int | torch.Tensor, length_penalty: float) -> float | torch.Tensor:
    r"""The divisor of a hypothesis' log-probability: \(((5 + |Y|) / 6)^\alpha\).

    Section 6.1 takes the rule and alpha = 0.6 from Wu et al. (2016), "Google's Neural Machine Translation System",
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


class VaswaniGenerationMixin:
    """Scores beams by `length_normalization` and bounds outputs by their source's length.

    Stands before `GenerationMixin` in the bases of a model. In `generate()`, `length_penalty` is the alpha of the
    paper's rule. Unless `max_length` or `max_new_tokens` is given, an output ends after `max_extra_tokens` tokens more
    than the longest source of its batch; `max_extra_tokens` is read from the generation configuration (50 by default,
    300 for parsing, Section 6.3).
    """

    def generate(self, *args, **kwargs):
        """As in `GenerationMixin`."""
        self._take_back_defaults()
        return super().generate(*args, **kwargs)

    def _take_back_defaults(self):
        known, own = getattr(self, "_own_generation_settings", (None, set()))
        own = own if known is self.generation_config else set()  # another one has been put in its place
        self._own_generation_settings = self.generation_config, take_back_defaults(self.generation_config, own)

    def _prepare_generated_length(self, generation_config, has_default_max_length, **kwargs):
        generation_config = super()._prepare_generated_length(
            generation_config, has_default_max_length=has_default_max_length, **kwargs
        )
        if has_default_max_length and generation_config.max_new_tokens is None:
            extra = getattr(generation_config, "max_extra_tokens", None)
            limit = kwargs["inputs_tensor"].shape[1] + (MAX_EXTRA_TOKENS if extra is None else extra)
            generation_config.max_length = kwargs["input_ids_length"] + limit
        if self.config.position_encoding == "learned":  # there are no positions beyond
            generation_config.max_length = min(generation_config.max_length, self.config.max_position_embeddings)
        return generation_config

    def _validate_generated_length(self, generation_config, input_ids_length, has_default_max_length):
        # The bound above is the model's own, so the warning about a model-agnostic default does not apply.
        del has_default_max_length
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length=False)

    def _update_finished_beams(self, *, topk_log_probs, cur_len, decoder_prompt_len, length_penalty, **kwargs):
        normalization = length_normalization(cur_len + 1 - decoder_prompt_len, length_penalty)
        return super()._update_finished_beams(
            topk_log_probs=topk_log_probs / normalization,
            cur_len=cur_len,
            decoder_prompt_len=decoder_prompt_len,
            length_penalty=0.0,  # the division is done
            **kwargs,
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
        # A running beam's log-probability can only fall, so its best final score is today's log-probability under the
        # most favourable length that it can still end with. Stopping on this bound never changes the result.
        del early_stopping
        length = max_length - decoder_prompt_len if length_penalty > 0 else cur_len + 1 - decoder_prompt_len
        best_possible = running_beam_scores[:, :1] / length_normalization(length, length_penalty)
        worst_finished = torch.where(is_sent_finished, beam_scores.min(dim=1, keepdim=True).values, -1.0e9)
        return is_early_stop_heuristic_unsatisfied & (best_possible > worst_finished).any(dim=-1, keepdim=True)


__all__ = ["MAX_EXTRA_TOKENS", "VaswaniGenerationMixin", "length_normalization"]
