"""transformers' own beam search with the paper's rule for scores: the reference of our search.

Its private methods are replaced where they divide by a length, or decide by a score that a search may end.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from transformers.generation import GenerationMixin

from vaswani_transformer import VaswaniForConditionalGeneration
from vaswani_transformer.model import generation_vaswani
from vaswani_transformer.model.search_vaswani import NO_SCORE
from vaswani_transformer.model.settings_vaswani import length_normalization


@contextmanager
def transformers_loop():
    """Let `generate()` of our models run in transformers' loops alone."""
    call = SimpleNamespace(config=None, limits=None)

    def divisor(length: int) -> float:
        return length_normalization(length, call.config.length_penalty, call.config.length_normalization)

    def beam_search(model, input_ids, logits_processor, stopping_criteria, generation_config, **others):
        call.config, limits = generation_config, generation_config._sentence_limits
        call.limits = None if limits is None else limits[:, None]
        processors, criteria = generation_vaswani._limit_each_sentence(
            logits_processor, stopping_criteria, generation_config
        )
        pad = generation_config._pad_token_tensor
        if pad is not None and pad.eq(0).all():  # transformers takes 0 for no padding
            generation_config._pad_token_tensor = pad - 1
        outputs = GenerationMixin._beam_search(model, input_ids, processors, criteria, generation_config, **others)
        if pad is not None:
            sequences = outputs if isinstance(outputs, torch.Tensor) else outputs.sequences
            sequences.masked_fill_(sequences == -1, pad)
        return outputs

    def update_finished_beams(model, **state):
        scores = state["topk_log_probs"] / divisor(state["cur_len"] + 1 - state["decoder_prompt_len"])
        after = GenerationMixin._update_finished_beams(
            model, **{**state, "topk_log_probs": scores, "length_penalty": 0.0}
        )
        before = (state[name] for name in ("sequences", "beam_scores", "beam_indices", "is_sent_finished"))
        is_open = state["is_early_stop_heuristic_unsatisfied"]  # the hypotheses of the others must not change
        return tuple(
            torch.where(is_open[..., None] if new.dim() == 3 else is_open, new, old)
            for new, old in zip(after, before, strict=True)
        )

    def check_early_stop_heuristic(model, **state):
        config, prompt, best_running = call.config, state["decoder_prompt_len"], state["running_beam_scores"][:, :1]
        is_finished = state["is_sent_finished"]
        if config.length_normalization == "power":
            limit = state["max_length"] if call.limits is None else prompt + call.limits
            is_open = GenerationMixin._check_early_stop_heuristic(**{**state, "max_length": limit})
        else:
            if config.length_penalty <= 0:
                best = divisor(state["cur_len"] + 1 - prompt)
            elif call.limits is None:
                best = divisor(state["max_length"] - prompt)
            else:
                best = torch.tensor([[divisor(limit)] for limit in call.limits.flatten().tolist()])
            last = config.num_return_sequences - 1
            to_beat = torch.where(is_finished[:, last, None], state["beam_scores"][:, last, None], -1.0e9)
            is_open = state["is_early_stop_heuristic_unsatisfied"] & (best_running / best > to_beat)
        if config.early_stopping is True:
            is_open = is_open & ~is_finished.all(dim=-1, keepdim=True)
        return is_open & (best_running > NO_SCORE)

    methods = {
        "_own_search": lambda *_, **__: None,
        "_beam_search": beam_search,
        "_update_finished_beams": update_finished_beams,
        "_check_early_stop_heuristic": check_early_stop_heuristic,
    }
    with patch.multiple(VaswaniForConditionalGeneration, create=True, **methods):
        yield
