"""Operations of a training: against torch's counter."""

import numpy as np
import pytest
import torch
from conftest import tiny_config
from torch.utils.flop_counter import FlopCounterMode

from vaswani_transformer import TokenBatchSampler, VaswaniConfig, VaswaniForConditionalGeneration
from vaswani_transformer.experiments.translation import EXPECTED_FILL, training_flops


def small(preset: str) -> VaswaniConfig:
    """A preset with a sixteenth of its widths."""
    full = VaswaniConfig.from_preset(preset)
    sizes = {name: max(2, getattr(full, name) // 16) for name in ("d_model", "d_ff", "d_k", "d_v")}
    return VaswaniConfig.from_preset(preset, **sizes, vocab_size=37, max_position_embeddings=16)


PRESETS = ("table3-a-heads-4", "table3-b-dk-16", "table3-e-learned-positions", "student-6-2")
OTHERS = ({"d_k": 5, "d_v": 9}, {"attention_bias": True}, {"tie_word_embeddings": False}, {"encoder_layers": 0})
CONFIGS = {name: small(name) for name in PRESETS} | {str(changes): tiny_config(**changes) for changes in OTHERS}


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_those_that_torch_counts(name):
    """While the model runs on unpadded pairs, 7 tokens to 11 or 9 to 4."""
    config = CONFIGS[name]
    config._attn_implementation = "eager"
    model = VaswaniForConditionalGeneration(config).train()
    for lengths in ((7, 11), (9, 4)):
        sources, targets = (torch.full((3, length), 3) for length in lengths)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=sources, decoder_input_ids=targets).logits.sum().backward()
        assert training_flops(config, *([length] * 3 for length in lengths)) == counter.get_total_flops()


def test_batches_are_filled_as_expected():
    random = np.random.default_rng(0)
    sources = np.exp(random.normal(np.log(29.5) - 0.18, 0.6, 200_000)).round().clip(2, 256).astype(np.int64)
    targets = (sources * np.exp(random.normal(0, 0.2, 200_000)) * 1.02).round().clip(2, 256).astype(np.int64)
    pairs_per_step = EXPECTED_FILL * 25_000 / max(sources.mean(), targets.mean())
    assert len(sources) / pairs_per_step == pytest.approx(len(TokenBatchSampler(sources, targets, 25_000)), rel=0.04)
