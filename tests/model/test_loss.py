"""The label-smoothed loss against torch's and transformers' own: of logits, fused with the projection, of a model."""

import pytest
import torch
from conftest import random_ids, tiny_model
from passes import batch_of_three
from test_loss_kernel import check_projected
from test_packed_sentences import pass_through
from torch.nn.functional import cross_entropy, linear
from transformers.trainer_pt_utils import LabelSmoother

from vaswani_transformer.model import loss_vaswani as loss_module
from vaswani_transformer.model import modeling_vaswani
from vaswani_transformer.model.loss_vaswani import can_be_fused, label_smoothed_cross_entropy, projected_cross_entropy

TOKENS, WIDTH, ENTRIES = 37, 6, 23


def example(dtype=torch.float32):
    """Logits `(3, 5, ENTRIES)` that need a gradient, and labels with padding at the ends of rows."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(3, 5, ENTRIES, generator=generator)).to(dtype)
    labels = torch.randint(0, ENTRIES, (3, 5), generator=generator)
    labels[0, 3:] = -100
    labels[-1, 1:] = -100
    return logits.requires_grad_(), labels


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("items", [None, 40, torch.tensor(40), torch.tensor([[40]])])
def test_equals_the_label_smoother_of_transformers(epsilon, dtype, items):
    logits, labels = example(dtype)
    ours = label_smoothed_cross_entropy(logits, labels, epsilon, items)
    wide = torch.promote_types(dtype, torch.float32)
    assert ours.dtype == wide and ours.shape == ()
    (gradient,) = torch.autograd.grad(ours, logits)
    smoother, items = LabelSmoother(epsilon), None if items is None else int(items)
    theirs = smoother({"logits": logits.to(wide)}, labels.clone(), num_items_in_batch=items)
    (their_gradient,) = torch.autograd.grad(theirs, logits)
    assert ours.item() == pytest.approx(theirs.item(), rel=2e-6)
    tolerance = max(1e-5, torch.finfo(dtype).eps)  # each is rounded to the logits' type
    torch.testing.assert_close(gradient, their_gradient, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("epsilon", [-0.1, 1.0, 1.5, float("nan")])
def test_smoothing_out_of_range(epsilon):
    for loss, inputs in ((label_smoothed_cross_entropy, example()), (projected_cross_entropy, projection_example())):
        with pytest.raises(ValueError, match="at least 0 and below 1"):
            loss(*inputs, epsilon)


def projection_example(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(ENTRIES, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, ENTRIES, (TOKENS,), generator=generator)
    labels[::5] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.9])
@pytest.mark.parametrize(("rows", "elements"), [(1, 1), (5, 1), (16, 3 * ENTRIES), (37, 1), (100, 2**19)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_projected_value_and_gradients_equal_those_of_torch(monkeypatch, epsilon, rows, elements, with_bias):
    monkeypatch.setattr(loss_module, "PROJECTED_ELEMENTS", rows * ENTRIES)
    monkeypatch.setattr(loss_module, "PROJECTED_WIDTHS", 0)
    monkeypatch.setattr(loss_module, "BLOCK_ELEMENTS", elements)
    check_projected(ENTRIES, torch.float32, 2e-6, epsilon, with_bias)


def test_projected_under_autocast_gradients_are_as_good_as_torchs_own():
    hidden, weight, labels = projection_example()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = cross_entropy(linear(*exact), labels, label_smoothing=0.1)
    expected.backward()
    with torch.autocast("cpu", torch.bfloat16):
        ours = projected_cross_entropy(hidden, weight, labels, 0.1)
        ours.backward()
    gradients = hidden.grad, weight.grad
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    hidden, weight, labels = projection_example()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = cross_entropy(linear(hidden, weight), labels, label_smoothing=0.1)
    theirs.backward()
    assert ours.item() == pytest.approx(expected.item(), rel=2**-8)
    for gradient, torchs, right in zip(gradients, (hidden.grad, weight.grad), exact, strict=True):
        assert (gradient - right.grad).norm() <= 1.5 * (torchs - right.grad).norm()


def test_a_frozen_matrix_gets_no_gradient():
    gradients = []
    for is_trained in (True, False):
        hidden, weight, labels = projection_example()
        projected_cross_entropy(hidden, weight.requires_grad_(is_trained), labels, 0.1).backward(torch.tensor(2.0))
        gradients.append(hidden.grad)
    assert weight.grad is None and torch.equal(*gradients)


def test_no_whole_logits_exist(monkeypatch):
    """A tensor of as many elements as all logits would be seen by the allocator's own book-keeping."""
    monkeypatch.setattr(loss_module, "PROJECTED_ELEMENTS", 4 * 4096)
    monkeypatch.setattr(loss_module, "PROJECTED_WIDTHS", 0)
    hidden = torch.randn(512, 8, requires_grad=True)
    weight = torch.randn(4096, 8, requires_grad=True)
    labels = torch.randint(0, 4096, (512,))
    with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
        projected_cross_entropy(hidden, weight, labels).backward()
    assert max(event.cpu_memory_usage for event in profile.events()) < 512 * 4096


def losses_and_gradients(model, labels, **options):
    input_ids, attention_mask, *_ = batch_of_three()
    return pass_through(model, {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}, **options)


def some_labels():
    labels = random_ids(3, 6, seed=4)
    labels[1, 2:] = -100
    return labels


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("items", [None, 50, torch.tensor(50)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_model_smooths_its_loss_in_training_mode_only(training, items, smoothing):
    model, labels = tiny_model(label_smoothing=smoothing).train(training), some_labels()
    outputs, gradients = losses_and_gradients(model, labels, num_items_in_batch=items)
    logits, epsilon = outputs.logits.detach().flatten(0, 1), smoothing if training else 0.0
    expected = cross_entropy(logits, labels.flatten(), label_smoothing=epsilon, reduction="sum")
    expected /= labels.ne(-100).sum() if items is None else 50
    torch.testing.assert_close(outputs.loss, expected)
    fused, fused_gradients = losses_and_gradients(model, labels, num_items_in_batch=items, skip_logits=True)
    assert fused.logits is None and "logits" not in fused
    torch.testing.assert_close(fused.loss, expected)
    torch.testing.assert_close(fused_gradients, gradients, rtol=1e-4, atol=1e-6)


def hook(model):
    model.lm_head.register_forward_hook(lambda module, inputs, output: 2 * output)


def replaced(model):
    model.lm_head.forward = lambda states: 2 * linear(states, model.lm_head.weight)


@pytest.mark.parametrize("change", [hook, replaced, torch.nn.Module.half])
def test_what_cannot_be_fused_is_computed_from_logits_that_are_then_dropped(change):
    model, labels = tiny_model(label_smoothing=0.1).train(), some_labels()
    hidden = torch.zeros(1, 24)
    assert can_be_fused(model.lm_head, hidden)
    change(model)
    assert not can_be_fused(model.lm_head, hidden.to(model.dtype))
    outputs, gradients = losses_and_gradients(model, labels)
    skipped, others = losses_and_gradients(model, labels, skip_logits=True)
    assert skipped.logits is None and torch.equal(skipped.loss, outputs.loss)
    torch.testing.assert_close(others, gradients, rtol=0, atol=0)
    once = cross_entropy(outputs.logits.float().flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(outputs.loss, once)


@pytest.mark.parametrize("attention_window", [None, 3])
def test_masks_that_an_accelerator_need_not_be_asked_for_are_the_same_attention(monkeypatch, attention_window):
    """What is done in training on a GPU so that nothing waits for it, on a CPU."""
    model, shapes = tiny_model(attention_window=attention_window).train(), []
    for layer in (model.model.encoder.layers[0].self_attn, model.model.decoder.layers[0].encoder_attn):
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: shapes.append(kwargs["attention_mask"].shape[-2]), with_kwargs=True
        )
    expected, gradients = losses_and_gradients(model, some_labels())
    monkeypatch.setattr(modeling_vaswani, "_SYNCHRONOUS", "none")
    outputs, others = losses_and_gradients(model, some_labels())
    assert shapes == [7, 6, 1 if attention_window is None else 7, 1]  # queries that have a mask of their own
    torch.testing.assert_close(outputs.loss, expected.loss)
    torch.testing.assert_close(others, gradients)
