"""Training's one product for queries, keys and values, and the dtype in which layers pass states on under autocast."""

from unittest import mock

import pytest
import torch
from conftest import tiny_model
from passes import batch_of_three, relative_difference
from test_incremental_decoding import Doubled
from torch import nn

from vaswani_transformer.model import layers_vaswani, linear_vaswani
from vaswani_transformer.model.linear_vaswani import project_together


def layers(bias: bool = True) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, width, bias=bias, dtype=torch.float64) for width in (4, 4, 5)]


def products(modules, states) -> tuple[tuple, int]:
    """The projections, and how many of them came from a product of several matrices."""
    with mock.patch.object(linear_vaswani, "linear", side_effect=nn.functional.linear) as joined:
        return project_together(modules, states), joined.call_count


@pytest.mark.parametrize("bias", [False, True])
def test_equals_separate_products(bias):
    modules, states = layers(bias), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    parameters = [states, *(parameter for module in modules for parameter in module.parameters())]
    expected = [nn.functional.linear(states, module.weight, module.bias) for module in modules]
    actual, count = products(modules, states)
    assert count == 1
    assert [output.shape for output in actual] == [(2, 3, 4), (2, 3, 4), (2, 3, 5)]
    torch.testing.assert_close(list(actual), expected)
    gradients = [torch.autograd.grad(sum((o**2).sum() for o in outputs), parameters) for outputs in (actual, expected)]
    torch.testing.assert_close(*gradients)


def replaced(modules) -> None:
    module = Doubled(6, 4, dtype=torch.float64)
    module.load_state_dict(modules[1].state_dict())
    modules[1] = module


def hooked(modules) -> None:
    modules[1].register_forward_hook(lambda module, inputs, output: 2 * output)


def parametrized(modules) -> None:
    class DoubledWeight(nn.Module):
        def forward(self, weight):
            return 2 * weight

    with torch.no_grad():
        modules[1].bias.zero_()
    nn.utils.parametrize.register_parametrization(modules[1], "weight", DoubledWeight())


@pytest.mark.parametrize("change", [replaced, hooked, parametrized])
def test_calls_changed_layers_one_by_one(change):
    modules, states = layers(), torch.randn(3, 6, dtype=torch.float64)
    change(modules)
    plain = layers()
    if change is parametrized:
        plain[1].bias.detach().zero_()
    actual, count = products(modules, states)
    assert count == 0
    torch.testing.assert_close(list(actual), [plain[0](states), 2 * plain[1](states), plain[2](states)])


def test_one_product_for_each_attention_in_training_alone():
    model, (input_ids, mask, labels, _) = tiny_model(), batch_of_three()
    for training, expected in ((True, 6), (False, 0)):
        with mock.patch.object(linear_vaswani, "linear", side_effect=nn.functional.linear) as joined:
            model.train(training)(input_ids, mask, labels=labels)
        assert joined.call_count == expected  # two encoder layers, two decoder layers with two attentions each


@pytest.mark.parametrize("training", [True, False])
def test_states_between_layers_are_in_the_dtype_of_autocast(training):
    model, (input_ids, mask, labels, _) = tiny_model(add_final_layer_norm=True).train(training), batch_of_three()
    expected = model(input_ids, mask, labels=labels).logits
    seen = []
    for module in model.modules():
        if isinstance(module, layers_vaswani.VaswaniLayer | nn.LayerNorm):
            module.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        actual = model(input_ids, mask, labels=labels)
    assert {dtype for pair in seen for dtype in pair} == {torch.bfloat16 if training else torch.float32}
    assert relative_difference(actual.logits, expected) < 0.03
    actual.loss.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
