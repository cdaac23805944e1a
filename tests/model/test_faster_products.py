"""Decoding's products: by oneDNN or by torch, whichever a measurement finds faster."""

import itertools
from unittest import mock

import pytest
import torch
from conftest import padded_batch, tiny_model
from torch import nn

from vaswani_transformer.decoding.cpu_inference import PackedLinear, prepare_for_inference
from vaswani_transformer.model import linear_vaswani
from vaswani_transformer.model.linear_vaswani import Projection, by_onednn, by_torch, has_onednn, is_onednn_faster

needs_onednn = pytest.mark.skipif(not has_onednn(torch.float32), reason="this torch has no oneDNN operator")
pytestmark = needs_onednn


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.setattr(linear_vaswani, "_CHOICES", {})


class Clock:
    """Time passes in the two ways of computing alone, and a call of each takes what the test says."""

    def __init__(self, monkeypatch, onednn: list[float], torch: list[float]):
        self.now, self.calls = 0.0, {"by_onednn": 0, "by_torch": 0}
        monkeypatch.setattr(linear_vaswani.time, "perf_counter", lambda: self.now)
        for name, seconds in (("by_onednn", onednn), ("by_torch", torch)):
            monkeypatch.setattr(linear_vaswani, name, self.way(name, itertools.cycle(seconds)))

    def way(self, name, seconds):
        def compute(*arguments):
            self.calls[name] += 1
            self.now += next(seconds)

        return compute


@pytest.mark.parametrize(
    ("onednn", "torchs", "expected"),
    [
        ([1e-5], [1e-5], True),
        ([1e-5], [0.9e-5], True),  # too little for the next run to see the same
        ([1e-5], [0.8e-5], False),
        ([1e-5], [5e-5], True),
        ([9e-5, 9e-5, 1e-5], [0.9e-5], True),  # other programs only ever slow a product down
        ([1e-5], [9e-5, 0.5e-5, 9e-5], False),
    ],
    ids=str,
)
def test_torch_computes_where_it_is_clearly_faster(onednn, torchs, expected, monkeypatch):
    Clock(monkeypatch, onednn, torchs)
    assert is_onednn_faster("", torch.ones(8, 4), None, 3) is expected


def test_measured_once_for_a_shape_and_not_for_long(monkeypatch):
    clock = Clock(monkeypatch, [1.0], [1.0])  # seconds: products of a slow machine
    weight = torch.ones(8, 4)
    for rows in (3, 4, 3):
        assert is_onednn_faster("", weight, None, rows)
    assert clock.calls == {"by_onednn": 3, "by_torch": 3}
    for rows, operation, other in ((5, "", weight), (3, "relu", weight), (3, "", weight.bfloat16()), (3, "", weight.T)):
        before = clock.calls["by_torch"]
        is_onednn_faster(operation, other, None, rows)
        assert clock.calls["by_torch"] > before
    before = clock.calls["by_torch"]
    for rows in (64, 65, 1000):
        is_onednn_faster("", weight, None, rows)
    assert clock.calls["by_torch"] == before + 3


def test_a_part_of_a_large_product_is_measured():
    sizes = []

    def compute(operation, states, weight, bias, residual):
        sizes.append(len(states) * weight.numel())
        assert bias.shape == weight.shape[:1] and residual.shape == (len(states), len(weight))

    with mock.patch.multiple(linear_vaswani, by_onednn=compute, by_torch=mock.Mock(side_effect=compute)):
        for width, out, rows in ((512, 40_000, 500), (2048, 512, 1)):
            is_onednn_faster("plus", torch.ones(out, width), torch.ones(out), rows)
    assert max(sizes) == 1 << 24 and min(sizes) == 1 << 20


def test_nothing_is_measured_where_sums_are_to_be_the_same_in_every_run():
    torch.use_deterministic_algorithms(True)
    try:
        with mock.patch.object(linear_vaswani, "_measure", side_effect=AssertionError):
            assert is_onednn_faster("", torch.ones(8, 4), None, 1)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("way", [by_onednn, by_torch])
def test_both_compute_the_same(way, bias, dtype):
    if not has_onednn(dtype):
        pytest.skip("oneDNN does not compute in it here")
    torch.manual_seed(0)
    module, states, residual = nn.Linear(24, 40, bias).to(dtype), torch.randn(5, 24), torch.randn(5, 40)
    states, residual = states.to(dtype), residual.to(dtype)
    parameters = [None if p is None else p.detach() for p in (module.weight, module.bias)]
    exact = nn.functional.linear(states.double(), *(None if p is None else p.double() for p in parameters))
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for operation, expected in (("", exact), ("relu", exact.relu()), ("plus", exact + residual.double())):
        actual = way(operation, states, *parameters, residual)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, **tolerance)


@pytest.mark.parametrize("is_faster", [True, False], ids=["oneDNN", "torch"])
def test_steps_take_what_was_chosen(is_faster):
    model, (ids, mask) = tiny_model(scale=2.0), padded_batch((7, 3))
    expected = model.generate(input_ids=ids, attention_mask=mask, num_beams=2)
    linear_vaswani._CHOICES.clear()
    ways = {name: mock.Mock(side_effect=way) for name, way in (("by_onednn", by_onednn), ("by_torch", by_torch))}
    with mock.patch.multiple(linear_vaswani, _measure=lambda *_: is_faster, **ways):
        actual = model.generate(input_ids=ids, attention_mask=mask, num_beams=2)
    assert torch.equal(actual, expected)
    assert ways["by_onednn"].called == is_faster and ways["by_torch"].called != is_faster


@torch.no_grad()
def test_threads_may_change_between_searches():
    projection = Projection(nn.Linear(4, 8))
    projection(torch.ones(3, 4))
    (key,) = linear_vaswani._CHOICES
    assert torch.get_num_threads() in key


@pytest.mark.parametrize("is_faster", [True, False], ids=["packed", "torch"])
def test_small_packed_layers_choose_too(is_faster):
    torch.manual_seed(0)
    small, large = nn.Linear(64, 64), nn.Linear(512, 256)
    with torch.no_grad(), mock.patch.object(linear_vaswani, "_measure", lambda *_: is_faster):
        for module in (small, large):
            packed, states = PackedLinear(module), torch.randn(2, 3, module.in_features)
            residual = torch.randn(2, 3, module.out_features)
            expected = module(states)
            torch.testing.assert_close(packed(states), expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(packed.relu(states), expected.relu(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(packed.plus(states, residual), expected + residual, rtol=1e-4, atol=1e-5)
            assert (packed.plain is None) == (module is large)
    assert len(linear_vaswani._CHOICES) == 3


def test_weights_that_cannot_be_packed_stay_as_they_are():
    from vaswani_transformer.decoding import cpu_inference

    cpu_inference._can_pack.cache_clear()
    try:
        with mock.patch.object(cpu_inference, "_pack", side_effect=RuntimeError("not on this processor")):
            assert type(prepare_for_inference(tiny_model()).lm_head) is nn.Linear
    finally:
        cpu_inference._can_pack.cache_clear()
