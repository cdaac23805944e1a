"""The fused loss as a GPU computes it, on a CPU: the kernel interpreted, the matrix filled up, nothing waited for."""

import importlib.util
import os
import subprocess
import sys
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy, linear

from vaswani_transformer.model import loss_kernel_vaswani as kernel_module
from vaswani_transformer.model import loss_vaswani as loss_module
from vaswani_transformer.model.loss_vaswani import projected_cross_entropy

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def check_projected(vocab_size, dtype, tolerance, epsilon, with_bias, items=50, device="cpu"):
    """Loss and gradients against torch's in float64, in several blocks of tokens of which a fifth is ignored."""
    generator = torch.Generator().manual_seed(vocab_size)
    hidden, weight, bias = (torch.randn(size, generator=generator) for size in ((37, 8), (vocab_size, 8), vocab_size))
    labels = torch.randint(0, vocab_size, (37,), generator=generator).to(device)
    labels[::5] = -100
    inputs = [tensor.to(device, dtype).requires_grad_() for tensor in (hidden, weight, bias)[: 2 + with_bias]]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    ours = projected_cross_entropy(inputs[0][None], inputs[1], labels[None], epsilon, items, *inputs[2:])
    theirs = cross_entropy(linear(*exact), labels, label_smoothing=epsilon, reduction="sum") / items
    assert ours.item() == pytest.approx(theirs.item(), rel=tolerance)
    (3 * ours).backward()
    (3 * theirs).backward()
    for tensor, reference in zip(inputs, exact, strict=True):
        assert tensor.grad.shape == reference.shape and tensor.grad.dtype == dtype
        assert (tensor.grad - reference.grad).norm() <= tolerance * reference.grad.norm()


def small_blocks(vocab_size):
    return mock.patch.multiple(loss_module, PROJECTED_ELEMENTS=10 * vocab_size, PROJECTED_WIDTHS=0)


def addmm(total, one, other, out_dtype, out):
    """What torch has for CUDA only."""
    assert total is out and out_dtype == torch.float32
    out += one.float() @ other.float()


def as_on_tensor_cores():
    return mock.patch.multiple(loss_module.torch, addmm=addmm), mock.patch.object(
        loss_module, "_has_tensor_cores", lambda *_: True
    )


CASES = [(size, epsilon, bias) for size in (23, 64, 130) for epsilon in (0.0, 0.1) for bias in (False, True)]


@pytest.mark.parametrize(("vocab_size", "epsilon", "with_bias"), CASES)
def test_a_matrix_filled_up_to_a_multiple_of_64_rows_is_seen_by_nobody(vocab_size, epsilon, with_bias):
    shapes = []
    product, cores = as_on_tensor_cores()
    seen = lambda *args: shapes.append(args[1].shape) or linear(*args)  # noqa: E731
    with product, cores, small_blocks(vocab_size), mock.patch.object(loss_module.nn.functional, "linear", seen):
        check_projected(vocab_size, torch.float32, 2e-6, epsilon, with_bias)
        check_projected(vocab_size, torch.bfloat16, 2e-2, epsilon, with_bias)
    assert {rows % 64 for rows, _ in shapes[::2]} == {0}


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton, part of torch for CUDA, is not installed")
def test_the_kernel_as_triton_interprets_it():
    """In a process of its own: Triton reads the variable at its import."""
    subprocess.run([sys.executable, __file__], check=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=300)


def check_kernel(dtype, tolerance, device="cpu"):
    """Rows with more than the vocabulary, large logits, and forbidden entries that fill a block."""
    generator = torch.Generator().manual_seed(0)
    for vocab_size, block in ((23, 2**13), (64, 2**13), (100, 16)):
        logits = (10 * torch.randn(7, vocab_size + 21, generator=generator)).to(device, dtype)
        logits[:2, :20] = -torch.inf
        logits[2] *= 30
        labels = torch.randint(20, vocab_size, (7,), generator=generator).to(device)
        losses = torch.empty(7, device=device)
        exact = logits[:, :vocab_size].double().requires_grad_()
        expected = exact.logsumexp(-1) - 0.9 * exact.gather(-1, labels[:, None])[:, 0]
        expected.sum().backward()
        with mock.patch.object(kernel_module, "LARGEST_BLOCK", block):
            kernel_module.differentiate_in_place(logits, labels, losses, vocab_size, 0.1)
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(logits[:, :vocab_size].double(), exact.grad, rtol=tolerance, atol=1e-6)
        assert not logits[:, vocab_size:].any()


def check_everything_with_the_kernel():
    check_kernel(torch.float32, 1e-5)
    check_kernel(torch.bfloat16, 2**-7)  # the interpreter cuts off where a GPU rounds
    kernel = mock.Mock(side_effect=kernel_module.differentiate_in_place)
    product, cores = as_on_tensor_cores()
    with mock.patch.object(loss_module, "_kernel", lambda logits: kernel):
        for vocab_size, epsilon, with_bias in CASES:
            with product, cores, small_blocks(vocab_size):
                check_projected(vocab_size, torch.float32, 2e-6, epsilon, with_bias)
                check_projected(vocab_size, torch.bfloat16, 2e-2, epsilon, with_bias)
    assert kernel.call_count == len(CASES) * 2 * 4  # blocks of 10 of 37 tokens


@pytest.mark.parametrize("on_gpu", [False, True], ids=["fallback", "kernel"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_no_value_is_read(monkeypatch, on_gpu, with_bias):
    """On the meta device there are none; autograd works there without a GPU, `torch.autocast` does not."""
    kernel = mock.Mock(side_effect=kernel_module.differentiate_in_place)
    monkeypatch.setattr(loss_module, "_kernel", lambda logits: kernel if on_gpu else None)
    monkeypatch.setattr(loss_module, "_has_tensor_cores", lambda *_: on_gpu)
    monkeypatch.setattr(torch, "autocast", lambda device, enabled: nullcontext())
    with torch.device("meta"), small_blocks(100):
        hidden = torch.empty(3, 9, 8, dtype=torch.bfloat16, requires_grad=True)
        weight, bias = torch.empty(100, 8, requires_grad=True), torch.empty(100, requires_grad=True)
        labels, items = torch.empty(3, 9, dtype=torch.long), torch.empty((), dtype=torch.long)
        with pytest.raises(RuntimeError, match="meta"):  # what reading would do
            items.item()
        for divisor in (None, items):
            inputs = [hidden, weight] + [bias] * with_bias
            loss = projected_cross_entropy(hidden, weight, labels, 0.1, divisor, bias if with_bias else None)
            assert loss.dtype == torch.float32 and loss.shape == ()
            for tensor, gradient in zip(inputs, torch.autograd.grad(loss, inputs), strict=True):
                assert gradient.shape == tensor.shape and gradient.dtype == tensor.dtype
    assert kernel.call_count == (2 * 3 if on_gpu else 0)


@pytest.mark.parametrize("usable", [False, True])
def test_who_computes_where(monkeypatch, usable):
    monkeypatch.setattr(kernel_module, "is_usable", lambda: usable)
    assert loss_module._kernel(torch.empty(2, 3)) is None
    with FakeTensorMode():
        on_gpu = {dtype: loss_module._kernel(torch.empty(2, 3, dtype=dtype, device="cuda")) for dtype in DTYPES}
        cores = {dtype: loss_module._has_tensor_cores(torch.empty(2, device="cuda"), dtype) for dtype in DTYPES}
    kernel = kernel_module.differentiate_in_place if usable else None
    assert on_gpu == {torch.bfloat16: kernel, torch.float32: kernel, torch.float64: None}
    assert cores == {torch.bfloat16: True, torch.float32: False, torch.float64: False}
    assert not loss_module._has_tensor_cores(torch.empty(2), torch.bfloat16)


def test_without_triton_or_its_compiler_torch_computes(monkeypatch):
    kernel_module.is_usable.cache_clear()
    monkeypatch.setattr(kernel_module, "is_triton_available", lambda: False)
    assert not kernel_module.is_usable()
    kernel_module.is_usable.cache_clear()
    monkeypatch.setattr(kernel_module, "is_triton_available", lambda: True)
    broken = mock.Mock(side_effect=RuntimeError("Failed to find C compiler"))
    monkeypatch.setattr(kernel_module, "differentiate_in_place", broken)
    warning = mock.Mock()
    monkeypatch.setattr(kernel_module.logger, "warning", warning)
    with FakeTensorMode():
        assert not kernel_module.is_usable()
    assert "slower: Failed to find C compiler" in warning.call_args.args[0]
    kernel_module.is_usable.cache_clear()


if __name__ == "__main__":
    check_everything_with_the_kernel()
