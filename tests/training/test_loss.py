"""The label-smoothed loss against torch's and transformers' own, in value and gradient."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers.trainer_pt_utils import LabelSmoother

from vaswani_transformer.training import loss as loss_module
from vaswani_transformer.training.loss import label_smoothed_cross_entropy

VOCABULARY = 30
EPSILONS = (0.0, 0.1, 0.9)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# The loss is computed in float32 and its gradient rounded to the logits' type: a few units in the last place of each.
GRADIENT_TOLERANCE = {torch.float64: 2e-6, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}


def example(dtype=torch.float32, scale=3.0, batch=(3, 5), padded=True, seed=0):
    """Logits `(3, 5, 30)` that need a gradient, and labels with padding at the ends of rows."""
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(*batch, VOCABULARY, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, VOCABULARY, batch, generator=generator)
    if padded:
        labels[0, 3:] = -100
        labels[-1, 1:] = -100
    return logits.requires_grad_(), labels


def reference(logits, labels, epsilon, items=None, factor=1.0):
    """torch's value and gradient, computed in float64 from the same logits."""
    exact = logits.detach().double().requires_grad_()
    total = cross_entropy(
        exact.flatten(0, -2), labels.flatten(), label_smoothing=epsilon, ignore_index=-100, reduction="sum"
    )
    loss = total / (items if items is not None else labels.ne(-100).sum())
    (loss * factor).backward()
    return loss.item(), exact.grad


def assert_gradient(logits, expected):
    assert logits.grad.dtype == logits.dtype
    tolerance = GRADIENT_TOLERANCE[logits.dtype]
    smallest = 1e-7 if logits.dtype == torch.float16 else 1e-9  # below: float16 has no such numbers
    torch.testing.assert_close(
        logits.grad.double(), expected, rtol=tolerance, atol=max(smallest, 1e-6 * expected.abs().max().item())
    )


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("items", [None, 17, torch.tensor(17), torch.tensor(17.0)])
@pytest.mark.parametrize("padded", [True, False])
def test_value_and_gradient_equal_those_of_torch(epsilon, dtype, items, padded):
    logits, labels = example(dtype, padded=padded)
    loss = label_smoothed_cross_entropy(logits, labels, epsilon, items)
    loss.backward()
    value, gradient = reference(logits, labels, epsilon, None if items is None else int(items))
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert loss.item() == pytest.approx(value, rel=2e-6)
    assert_gradient(logits, gradient)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("items", [None, torch.tensor(40)])
def test_equals_the_label_smoother_of_transformers(epsilon, items):
    logits, labels = example()
    ours = label_smoothed_cross_entropy(logits, labels, epsilon, items)
    (gradient,) = torch.autograd.grad(ours, logits)
    theirs = LabelSmoother(epsilon)({"logits": logits}, labels.clone(), num_items_in_batch=items)
    (their_gradient,) = torch.autograd.grad(theirs, logits)
    assert ours.item() == pytest.approx(theirs.item(), rel=2e-6)
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-5, atol=1e-8)


def test_default_is_the_paper_value():
    logits, labels = example()
    assert label_smoothed_cross_entropy(logits, labels).item() == pytest.approx(
        reference(logits, labels, 0.1)[0], rel=2e-6
    )


def test_by_hand():
    """Two entries with probabilities 3/4 and 1/4: 0.95 ln(4/3) + 0.05 ln 4."""
    logits, labels = torch.tensor([[3.0, 1.0]]).log(), torch.tensor([0])
    assert label_smoothed_cross_entropy(logits, labels, 0.1).item() == pytest.approx(0.3426129, rel=1e-6)


@pytest.mark.parametrize("elements", [1, VOCABULARY, 4 * VOCABULARY, 7 * VOCABULARY + 1, 2**19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_size_of_blocks_gives_the_same(monkeypatch, elements, dtype):
    monkeypatch.setattr(loss_module, "BLOCK_ELEMENTS", elements)
    logits, labels = example(dtype, batch=(5, 9))
    loss = label_smoothed_cross_entropy(logits, labels, 0.1)
    loss.backward()
    value, gradient = reference(logits, labels, 0.1)
    assert loss.item() == pytest.approx(value, rel=2e-6)
    assert_gradient(logits, gradient)


def test_more_rows_than_a_block_as_it_is():
    vocabulary = 5000
    logits = torch.randn(250, vocabulary, requires_grad=True, generator=torch.Generator().manual_seed(3))
    assert logits.numel() > 2 * loss_module.BLOCK_ELEMENTS
    labels = torch.arange(250) * 20
    labels[-30:] = -100
    loss = label_smoothed_cross_entropy(logits, labels, 0.1)
    loss.backward()
    value, gradient = reference(logits, labels, 0.1)
    assert loss.item() == pytest.approx(value, rel=2e-6)
    assert_gradient(logits, gradient)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [3.0, 0.25, -1.0, 0.0])
def test_scaled_upstream_gradients(dtype, factor):
    logits, labels = example(dtype)
    (label_smoothed_cross_entropy(logits, labels, 0.1) * factor).backward()
    assert_gradient(logits, reference(logits, labels, 0.1, factor=factor)[1])


def test_gradient_scaler_saves_small_gradients_of_float16():
    """Divided by the tokens of a large step they would vanish in float16, were they not scaled up first."""
    logits, labels = example(torch.float16)
    items, scale = torch.tensor(50_000), 2.0**16
    (label_smoothed_cross_entropy(logits, labels, 0.1, items) * scale).backward()
    expected = reference(logits, labels, 0.1, 50_000, factor=scale)[1]
    torch.testing.assert_close(logits.grad.double(), expected, rtol=2**-8, atol=1e-6)


def test_gradient_through_what_made_the_logits():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 4, 8, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, 8, generator=generator, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (2, 4), generator=generator)
    ours = torch.autograd.grad(label_smoothed_cross_entropy(hidden @ weight.T, labels, 0.1) * 5, (hidden, weight))
    logits = (hidden @ weight.T).flatten(0, 1)
    theirs = torch.autograd.grad(cross_entropy(logits, labels.flatten(), label_smoothing=0.1) * 5, (hidden, weight))
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_two_losses_of_the_same_logits():
    logits, labels = example()
    loss = label_smoothed_cross_entropy(logits, labels, 0.1) + label_smoothed_cross_entropy(logits, labels, 0.5)
    loss.backward()
    assert_gradient(logits, reference(logits, labels, 0.1)[1] + reference(logits, labels, 0.5)[1])


def test_repeated_backward_adds_up_or_is_refused():
    """The stored gradient may be the memory that autograd sums into; torch notices, and nothing wrong comes of it."""
    logits, labels = example()
    loss = label_smoothed_cross_entropy(logits, labels, 0.1)
    expected = reference(logits, labels, 0.1)[1]
    for times in (1, 2, 3):
        try:
            loss.backward(retain_graph=True)
        except RuntimeError as error:
            assert times > 1
            assert "modified by an inplace operation" in str(error)
            return
        assert_gradient(logits, times * expected)


def test_second_derivatives_are_right_or_refused():
    logits, labels = example(torch.float64)

    def second(function):
        (first,) = torch.autograd.grad(function(logits).square(), logits, create_graph=True)
        return torch.autograd.grad(first.square().sum(), logits)[0]

    expected = second(lambda z: cross_entropy(z.flatten(0, 1), labels.flatten(), label_smoothing=0.1))
    try:
        ours = second(lambda z: label_smoothed_cross_entropy(z, labels, 0.1))
    except RuntimeError:
        return
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_rows_of_padding_alone_add_nothing(epsilon):
    logits, labels = example()
    labels[1] = -100
    loss = label_smoothed_cross_entropy(logits, labels, epsilon)
    loss.backward()
    value, gradient = reference(logits, labels, epsilon)
    assert loss.item() == pytest.approx(value, rel=2e-6)
    assert_gradient(logits, gradient)
    assert not logits.grad[labels == -100].any()


def test_a_batch_of_padding_alone():
    """Nothing to learn in one accumulated part; on its own the mean over no tokens is nan, as in torch."""
    logits, labels = example()
    labels[:] = -100
    loss = label_smoothed_cross_entropy(logits, labels, 0.1, num_items_in_batch=12)
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()
    assert cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1).isnan()
    assert label_smoothed_cross_entropy(logits, labels, 0.1).isnan()


def test_what_stands_at_padding_has_no_part():
    """Not even what is not a number."""
    logits, labels = example()
    expected = label_smoothed_cross_entropy(logits, labels, 0.1).item()
    broken = logits.detach().clone()
    broken[labels == -100] = torch.tensor(float("inf"))
    assert label_smoothed_cross_entropy(broken, labels, 0.1).item() == expected


def test_large_logits_do_not_overflow():
    for dtype in (torch.float32, torch.bfloat16):
        logits, labels = example(dtype, scale=1000.0)
        loss = label_smoothed_cross_entropy(logits, labels, 0.1)
        loss.backward()
        assert loss.item() == pytest.approx(reference(logits, labels, 0.1)[0], rel=1e-5)
        assert logits.grad.isfinite().all()


def test_forbidden_entries_without_smoothing():
    """An entry of probability 0, as a mask of -inf makes it, costs nothing in plain cross-entropy."""
    logits, labels = example(padded=False)
    labels[labels == 4] = 5
    with torch.no_grad():
        logits[..., 4] = -torch.inf
    loss = label_smoothed_cross_entropy(logits, labels, 0.0)
    loss.backward()
    exact = logits.detach().clone().requires_grad_()
    expected = cross_entropy(exact.flatten(0, 1), labels.flatten())
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6)
    torch.testing.assert_close(logits.grad, exact.grad)


def test_sum_of_parts_over_all_items_is_the_whole():
    logits, labels = example(batch=(4, 6))
    whole = label_smoothed_cross_entropy(logits, labels, 0.1)
    (gradient,) = torch.autograd.grad(whole, logits)
    items = labels.ne(-100).sum()
    for part in range(4):
        label_smoothed_cross_entropy(logits[part], labels[part], 0.1, items).backward()
    torch.testing.assert_close(logits.grad, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("epsilon", [-0.1, 1.0, 1.5, float("nan")])
def test_smoothing_out_of_range(epsilon):
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        label_smoothed_cross_entropy(*example(), epsilon)


def test_under_autocast():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 4, 8, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, 8, generator=generator, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (2, 4), generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = hidden @ weight.T
        assert logits.dtype == torch.bfloat16
        logits.retain_grad()
        loss = label_smoothed_cross_entropy(logits, labels, 0.1)
    assert loss.dtype == torch.float32
    loss.backward()
    value, gradient = reference(logits, labels, 0.1)
    assert loss.item() == pytest.approx(value, rel=2e-6)
    assert_gradient(logits, gradient)
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert weight.grad.any()


def test_inputs_are_left_alone():
    logits, labels = example()
    before = logits.detach().clone(), labels.clone()
    label_smoothed_cross_entropy(logits, labels, 0.1).backward()
    assert torch.equal(logits, before[0])
    assert torch.equal(labels, before[1])


def test_no_gradient_is_computed_where_none_is_needed():
    logits, labels = example()
    with torch.no_grad():
        loss = label_smoothed_cross_entropy(logits, labels, 0.1)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(reference(logits, labels, 0.1)[0], rel=2e-6)
    assert not label_smoothed_cross_entropy(logits.detach(), labels, 0.1).requires_grad


def test_logits_in_two_dimensions_and_not_contiguous():
    logits, labels = example()
    flat = label_smoothed_cross_entropy(logits.flatten(0, 1), labels.flatten(), 0.1)
    assert flat.item() == label_smoothed_cross_entropy(logits, labels, 0.1).item()
    turned = label_smoothed_cross_entropy(logits.transpose(0, 1), labels.T, 0.1)
    turned.backward()
    assert turned.item() == pytest.approx(flat.item(), rel=1e-6)
    assert_gradient(logits, reference(logits, labels, 0.1)[1])
