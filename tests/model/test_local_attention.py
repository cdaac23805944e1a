"""Restricted self-attention (Section 4) against full attention under a mask that is written down by hand."""

from unittest.mock import patch

import pytest
import torch
from conftest import padded_batch, random_ids, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from vaswani_transformer.model import local_attention_vaswani as restricted_vaswani
from vaswani_transformer.model.local_attention_vaswani import block_mask, restricted_attention


def neighbourhood(length: int, window: int, is_causal: bool) -> torch.Tensor:
    """`(length, length)`, position by position."""
    rows = []
    for query in range(length):
        rows.append([abs(query - key) <= window // 2 and not (is_causal and key > query) for key in range(length)])
    return torch.tensor(rows)


@settings(max_examples=60)
@given(
    length=st.integers(1, 90), window=st.integers(1, 40), is_causal=st.booleans(), padding=st.integers(0, 89),
    block=st.sampled_from([1, 4, 16]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_blocks_give_what_masked_full_attention_gives(length, window, is_causal, padding, block, seed):
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, 2, 3, length, 4, generator=generator, dtype=torch.float64)
    value = torch.randn(2, 3, length, 5, generator=generator, dtype=torch.float64)
    kept = torch.ones(2, length, dtype=torch.long)
    kept[1, length - min(padding, length - 1) :] = 0
    seen = neighbourhood(length, window, is_causal) & kept.bool()[:, None, None] | torch.eye(length, dtype=torch.bool)
    expected = scaled_dot_product_attention(query, key, value, seen, scale=0.3).transpose(1, 2)
    with patch.object(restricted_vaswani, "_SMALLEST_BLOCK", block):
        found = restricted_attention(query, key, value, block_mask(kept, window, is_causal), 0.3)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [3, 70])
def test_implementations_agree(window):
    """Losses and gradients of long sentences: blocks (sdpa) and the whole square (eager)."""
    (ids, mask), losses, gradients = padded_batch((300, 200, 7)), [], []
    for attention in ("sdpa", "eager"):
        model = tiny_model(attention_window=window, attn_implementation=attention, dtype=torch.float64)
        with patch.object(restricted_vaswani, "block_mask", side_effect=block_mask) as blocks:
            loss = model(ids, mask, ids, labels=ids).loss
        assert blocks.call_count == (2 if attention == "sdpa" else 0)
        loss.backward()
        losses.append(loss)
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 7])
@torch.no_grad()
def test_a_layer_sees_its_neighbourhood_and_nothing_else(window, attention):
    """One layer's output changes with exactly the inputs that its window holds."""
    length = 150
    model = tiny_model(attention_window=window, attn_implementation=attention, encoder_layers=1, decoder_layers=1)
    for stack, is_causal in ((model.model.encoder, False), (model.model.decoder, True)):
        ids, options = random_ids(1, length, seed=1), {}
        if is_causal:
            options["encoder_hidden_states"] = torch.zeros(1, 2, model.config.d_model)
        before = stack(input_ids=ids, **options).last_hidden_state
        seen = neighbourhood(length, window, is_causal)
        for key in (0, 1, 63, 64, 65, length - 1):
            changed = ids.clone()
            changed[0, key] = 4 + (changed[0, key] - 3) % 20
            differs = (stack(input_ids=changed, **options).last_hidden_state - before).abs().amax(-1)[0] > 1e-6
            assert torch.equal(differs, seen[:, key])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("window", [18, 10**30])
def test_a_window_over_everything_is_full_attention(window, attention):
    ids, mask = padded_batch((9, 4))
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    model, plain = tiny_model(attention_window=window, attn_implementation=attention, scale=2.0), tiny_model(scale=2.0)
    torch.testing.assert_close(model(**inputs).loss, plain(**inputs).loss)
    options = {"attention_mask": mask, "max_new_tokens": 5, "num_beams": 2}
    for cache in ({}, {"cache_implementation": "static"}):
        assert torch.equal(model.generate(ids, **options, **cache), plain.generate(ids, **options, **cache))


@torch.no_grad()
def test_an_exported_program_works_for_every_length():
    """Exported from a sentence that is long enough for blocks."""

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = tiny_model(attention_window=5, max_position_embeddings=400).model.encoder

        def forward(self, ids, mask):
            return self.stack(input_ids=ids, attention_mask=mask).last_hidden_state

    encoder, sizes = Encoder(), {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=400)}
    inputs = padded_batch((150, 90))
    program = torch.export.export(encoder, inputs, dynamic_shapes=(sizes, sizes), strict=False).module()
    for lengths in ((7, 3, 1), (300, 150)):
        torch.testing.assert_close(program(*padded_batch(lengths)), encoder(*padded_batch(lengths)))


SEARCHES = {
    "greedy": {"min_new_tokens": 12, "max_new_tokens": 12},
    "beams": {"num_beams": 4, "min_new_tokens": 20, "max_new_tokens": 20},
    "prefix": {"decoder_input_ids": random_ids(4, 9, seed=3), "max_new_tokens": 9},
    "prefix of beams": {"num_beams": 3, "decoder_input_ids": random_ids(4, 9, seed=3), "max_new_tokens": 9},
}


@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("window", [1, 4])
def test_generation_with_and_without_a_cache(window, options):
    model = tiny_model(attention_window=window, dtype=torch.float64, scale=2.0)
    ids, mask = padded_batch((7, 3, 9, 1))
    options = {**options, "attention_mask": mask, "return_dict_in_generate": True, "output_scores": True}
    cached = model.generate(ids, **options)
    for others in ({"use_cache": False}, {"cache_implementation": "static"}):
        other = model.generate(ids, **options, **others)
        assert torch.equal(other.sequences, cached.sequences)
        torch.testing.assert_close(other.scores, cached.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("is_causal", "share"), [(False, 1.5), (True, 1)])
def test_what_is_computed_grows_with_length_and_window_and_no_faster(is_causal, share):
    def scores(length, window):
        return block_mask(torch.ones(1, length), window, is_causal).seen.numel()

    for length, window in ((4000, 400), (8000, 400), (8000, 800)):
        assert scores(length, window) == share * length * window
