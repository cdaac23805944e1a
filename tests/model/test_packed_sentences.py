"""Batches without padding: logits, losses and gradients are those of padded sentences."""

import contextlib

import pytest
import torch
from conftest import random_ids, tiny_config, tiny_model
from passes import IMPLEMENTATIONS, OTHER_TOOLKITS, relative_difference
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from vaswani_transformer import VaswaniForConditionalGeneration
from vaswani_transformer.model import modeling_vaswani
from vaswani_transformer.model import packed_sentences_vaswani as packing

SOURCES, TARGETS = (7, 4, 1, 9), (5, 6, 3, 1)  # lengths of sentences


def sentences(lengths, seed: int, vocab_size: int = 29) -> list[torch.Tensor]:
    return [random_ids(length, seed=seed + row, vocab_size=vocab_size) for row, length in enumerate(lengths)]


def offsets_of(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def both_batches(with_filling: bool, target_vocabulary: int = 29) -> tuple[dict, dict]:
    """The same sentences padded, and one after the other: with filling, two sentences of it and two empty ones."""
    sources, targets = sentences(SOURCES, 0), sentences(TARGETS, 50, target_vocabulary)
    targets[0][2] = -100  # a label may be left out in the middle of a sentence too
    input_ids, labels = pad_sequence(sources, True, 1), pad_sequence(targets, True, -100)
    filling = ((3, 2), (4, 1)) if with_filling else ((), ())
    empty = (0, 0) if with_filling else ()
    packed = {
        "input_ids": torch.cat([*sources, torch.full((sum(filling[0]),), 1)])[None],
        "labels": torch.cat([*targets, torch.full((sum(filling[1]),), -100)])[None],
        "source_offsets": offsets_of((*SOURCES, *filling[0], *empty)),
        "target_offsets": offsets_of((*TARGETS, *filling[1], *empty)),
        "max_length": 12,
    }
    return {"input_ids": input_ids, "attention_mask": input_ids.ne(1).long(), "labels": labels}, packed


def in_a_row(states: torch.Tensor, lengths=TARGETS) -> torch.Tensor:
    """`(sentences, longest, ...)` to `(tokens, ...)`, one sentence cut after the other."""
    return torch.cat([row[:length] for row, length in zip(states, lengths, strict=True)])


def pass_through(model, batch: dict, **options):
    """Outputs, and the gradient of every parameter."""
    model.zero_grad()
    outputs = model(**batch, **options)
    if outputs.logits is not None and outputs.logits.dtype == torch.float64:  # the model's own loss is float32
        outputs.loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten())
    outputs.loss.backward()
    return outputs, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_equal_passes(model, tolerance: float, with_filling: bool = True, **options) -> None:
    batch, packed = both_batches(with_filling, model.config.target_vocab_size)
    expected, expected_gradients = pass_through(model, batch, **options)
    actual, gradients = pass_through(model, packed, **options)
    assert relative_difference(actual.loss, expected.loss) < tolerance
    if actual.logits is not None:
        assert relative_difference(actual.logits[0, : sum(TARGETS)], in_a_row(expected.logits)) < tolerance
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, gradient in gradients.items():
        assert float((gradient - expected_gradients[name]).abs().max()) < tolerance * largest, name


@pytest.mark.parametrize("with_filling", [False, True])
@pytest.mark.parametrize("attn_implementation", IMPLEMENTATIONS)
def test_equals_padded_sentences(attn_implementation, with_filling):
    model = tiny_model(dtype=torch.float64, attn_implementation=attn_implementation).train()
    assert_equal_passes(model, 1e-10, with_filling)


@pytest.mark.parametrize("changes", [*OTHER_TOOLKITS, {"position_encoding": "learned"}, {"d_k": 5, "d_v": 7}], ids=str)
def test_equals_padded_sentences_in_models_of_every_kind(changes):
    assert_equal_passes(tiny_model(dtype=torch.float64, **changes).train(), 1e-10)


@pytest.mark.parametrize("options", [{"skip_logits": True}, {"num_items_in_batch": torch.tensor(40)}], ids=str)
def test_losses_of_every_kind(options):
    assert_equal_passes(tiny_model(label_smoothing=0.1).train(), 1e-5, **options)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_with_gradient_checkpointing(use_reentrant):
    model = tiny_model(dtype=torch.float64).train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_equal_passes(model, 1e-10)


def test_in_float32_and_bfloat16():
    assert_equal_passes(tiny_model(attn_implementation="eager").train(), 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal_passes(tiny_model(attn_implementation="eager").train(), 3e-2)


def reference_varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size):
    """What the kernel computes, sentence by sentence, of `(tokens, num_heads, width)`."""
    parts = []
    for row in range(len(cu_seq_q) - 1):
        q = query[cu_seq_q[row] : cu_seq_q[row + 1]]
        k, v = (states[cu_seq_k[row] : cu_seq_k[row + 1]] for states in (key, value))
        assert len(q) <= max_q and len(k) <= max_k
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        if window_size == (-1, 0):
            scores = scores.masked_fill(torch.ones(len(q), len(k)).triu(1).bool(), -torch.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(parts)


def reference_efficient_attention(query, key, value, bias, *places_and_more):
    """The same by the other kernel's arguments, of `(1, tokens, num_heads, width)`."""
    *places, dropout, is_causal, _ = places_and_more
    assert bias is None and dropout == 0
    return [reference_varlen_attn(query[0], key[0], value[0], *places, window_size=(-1, 0 if is_causal else -1))[None]]


@pytest.fixture
def with_kernel(monkeypatch):
    """Every device has flash attention."""
    monkeypatch.setattr(packing, "can_use_flash_attention", lambda config, states: True)


@pytest.mark.parametrize("short", [0, packing.SHORT])
def test_equals_padded_sentences_with_either_kernel(with_kernel, monkeypatch, short):
    monkeypatch.setattr(packing, "SHORT", short)
    monkeypatch.setattr(packing, "varlen_attn", None if short else reference_varlen_attn)
    monkeypatch.setattr(packing, "efficient_attention", reference_efficient_attention if short else None)
    assert_equal_passes(tiny_model(dtype=torch.float64).train(), 1e-10)


def test_flash_attention_drops_no_weights(with_kernel, monkeypatch):
    for kernel in ("varlen_attn", "efficient_attention"):
        monkeypatch.setattr(packing, kernel, None)
    assert pass_through(tiny_model(attention_dropout=0.1).train(), both_batches(True)[1])


def on_meta(batch: dict) -> dict:
    return {name: value.to("meta") if torch.is_tensor(value) else value for name, value in batch.items()}


@pytest.mark.parametrize("fused", [False, True])
def test_no_step_waits_for_a_device(with_kernel, monkeypatch, fused):
    """Tensors of the meta device have no values: whatever asked for one would raise."""
    monkeypatch.setattr(modeling_vaswani, "can_be_fused", lambda *arguments: fused)
    monkeypatch.setattr(torch, "autocast", lambda *arguments, **options: contextlib.nullcontext())  # knows no meta
    with torch.device("meta"):
        model = VaswaniForConditionalGeneration(tiny_config(dropout=0.1)).bfloat16().train()
    loss = model(**on_meta(both_batches(True)[1]), skip_logits=True, num_items_in_batch=torch.tensor(9)).loss
    loss.backward()
    assert loss.shape == () and all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_mask": torch.ones(1, 26)}, "without masks"),
        ({"output_attentions": True}, "attention weights"),
        ({"past_key_values": DynamicCache()}, "caches"),
        ({"target_offsets": None}, "go together"),
        ({"source_offsets": torch.tensor([0, 26])}, "the same number of sentences"),
        ({"source_offsets": offsets_of((5, 5, 5, 5, 5, 5, 5, 5))}, "40 and there are 26 tokens"),
    ],
)
def test_refuses_what_goes_with_padding_only(changes, reason):
    with pytest.raises(ValueError, match=reason):
        tiny_model()(**{**both_batches(True)[1], **changes})
