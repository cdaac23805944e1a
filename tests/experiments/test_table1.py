"""Table 1: paths and memory against the formulas, and the command at tiny scale."""

import pytest
import table1
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table1 import KINDS, Attention, Convolution, fitted_exponent, measure_layer
from torch.utils.flop_counter import FlopCounterMode


class CellOnce(torch.nn.Module):
    """One application of a recurrent cell at all positions: each takes the state of the one before it."""

    def __init__(self, width):
        super().__init__()
        self.cell = torch.nn.RNNCell(width, width)

    def forward(self, states):
        before = torch.nn.functional.pad(states, (0, 0, 1, -1))
        return self.cell(states.flatten(0, 1), before.flatten(0, 1)).view_as(states)


def directly(layer, length: int, width: int) -> torch.Tensor:
    """Which outputs (rows) of one layer depend on which inputs (columns), always on their own; `(length, length)`."""
    states = torch.randn(1, length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    jacobian = torch.autograd.functional.jacobian(lambda inputs: layer(inputs)[0].sum(-1), states)
    return (jacobian[:, 0].abs().amax(-1) > 0) | torch.eye(length, dtype=torch.bool)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.sampled_from(list(KINDS)), st.integers(2, 24), st.sampled_from([3, 5]), st.sampled_from([2, 4, 6, 10]))
def test_paths_found_by_gradients_are_those_of_the_formulas(name, length, kernel, neighbourhood):
    """Layers until every input changes every output, or every later one of a recurrent layer.

    The positions are the middle of a longer sequence, so that dilated convolutions may reach beyond their ends.
    """
    recurrent, middle, width = name == "lstm", slice(length, 2 * length), 2
    paths = torch.ones(length, length, dtype=torch.bool)
    paths = paths.tril() if recurrent else paths
    reached, layers = torch.eye(3 * length, dtype=torch.bool), 0
    while not (reached[middle, middle] | ~paths).all():
        if name == "convolution-dilated":
            layer = Convolution(width, kernel, dilation=kernel**layers)
        else:
            layer = CellOnce(width) if recurrent else KINDS[name].make(width, kernel, neighbourhood)
        reached = (directly(layer.double(), 3 * length, width).double() @ reached.double()) > 0
        layers += 1
    assert layers == KINDS[name].layers_needed(length, kernel, neighbourhood)


def test_path_formulas_by_hand():
    def path(name, n, k=3, r=8):
        return KINDS[name].layers_needed(n, k, r)

    assert path("self-attention", 1000) == 1 and path("lstm", 1000) == 999
    assert [path("convolution-dilated", n) for n in (2, 5, 6, 14, 15)] == [1, 2, 3, 3, 4]  # reach 1, 4, 13, 40
    assert path("self-attention-restricted", 1000, r=100) == 20


def test_rows_are_those_that_the_paper_prints():
    assert {name: (kind.complexity, kind.sequential, kind.path) for name, kind in KINDS.items()} == {
        "self-attention": ("O(n²·d)", "O(1)", "O(1)"),
        "lstm": ("O(n·d²)", "O(n)", "O(n)"),
        "convolution-dilated": ("O(k·n·d²)", "O(1)", "O(log_k(n))"),
        "self-attention-restricted": ("O(r·n·d)", "O(1)", "O(n/r)"),
    }


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("n", "d", "k", "r"), [(7, 6, 3, 4), (20, 4, 5, 2)])
def test_operations_are_those_that_the_layer_does(name, n, d, k, r):
    kind = KINDS[name]
    layer = kind.make(d, k, r)
    assert layer(torch.randn(2, n, d)).shape == (2, n, d)
    if name == "lstm":  # each of n steps multiplies by every weight matrix
        done = n * sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    elif name == "self-attention-restricted":  # each position with r others and itself: scores, then values
        done = n * (r + 1) * 2 * d
    else:
        with FlopCounterMode(display=False) as counter:
            layer(torch.randn(1, n, d))
        done = counter.get_total_flops() // 2
    assert kind.operations(n, d, k, r) == done


def test_restricted_attention_is_masked_full_attention():
    states = torch.randn(2, 150, 6, dtype=torch.float64)
    far = (torch.arange(150)[:, None] - torch.arange(150)).abs() > 5
    scores = (states @ states.transpose(1, 2) / 6**0.5).masked_fill(far, -torch.inf)
    torch.testing.assert_close(Attention(neighbourhood=10)(states), scores.softmax(-1) @ states)


@pytest.fixture
def few_rounds(monkeypatch):
    """Hardly any time for each layer."""
    monkeypatch.setattr(table1, "SECONDS", 0.0)


def test_memory_grows_as_the_table_says(few_rounds):
    def costs(name, *lengths):
        costs = [measure_layer(KINDS[name].make(8, 3, 16), n, 8, torch.device("cpu")) for n in lengths]
        assert all(cost["training_seconds"] > 0 for cost in costs)
        return [cost["training_bytes"] for cost in costs]

    lengths = (256, 512, 1024)
    assert fitted_exponent(lengths, costs("self-attention", *lengths)) == pytest.approx(2, abs=0.1)
    for name in ("self-attention-restricted", "convolution-dilated", "lstm"):
        assert fitted_exponent(lengths, costs(name, *lengths)) == pytest.approx(1, abs=0.15)
    (whole,) = costs("self-attention", 1024)  # the n x n weights in float32, and beside them nothing of this size
    assert 4 * 1024**2 <= whole < 1.1 * 4 * 1024**2


def test_the_whole_table(few_rounds, monkeypatch):
    monkeypatch.setitem(table1.SCALES, "laptop", {"lengths": [16, 32, 64], "width": 4, "widths": [4, 8], "length": 16})
    text = table1.report("laptop")
    assert "| recurrent (LSTM) | O(n·d²) | O(n) | O(n) | 32 |" in text
    row = next(line for line in text.splitlines() if line.startswith("| recurrent (LSTM)") and "O(" not in line)
    columns = row.strip("| ").split(" | ")
    assert (columns[3], columns[6]) == ("1.00", "2.00") and len(columns) == 9  # n and d of the operations
