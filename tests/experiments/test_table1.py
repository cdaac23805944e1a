"""Table 1: paths and memory against the formulas, and the command at tiny scale."""

import json
import time

import pytest
import torch
from experimenting import experiment
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from vaswani_transformer.experiments import layer_types as layer_costs
from vaswani_transformer.experiments.layer_types import KINDS, Attention, fitted_exponent, measure_layer, path_length


@pytest.mark.slow
@settings(max_examples=50)
@given(st.sampled_from(list(KINDS)), st.integers(2, 24), st.sampled_from([3, 5]), st.sampled_from([2, 4, 6, 10]))
def test_paths_found_by_gradients_are_those_of_the_formulas(name, length, kernel, neighbourhood):
    expected = KINDS[name].layers_needed(length, kernel, neighbourhood)
    assert path_length(name, length, kernel, neighbourhood, width=2) == expected


def test_path_formulas_by_hand():
    def path(name, n, k=3, r=8):
        return KINDS[name].layers_needed(n, k, r)

    assert path("self-attention", 1000) == 1
    assert path("lstm", 1000) == 999
    assert path("convolution", 1000) == 999  # one position to either side a layer
    assert path("convolution", 1000, k=5) == 500
    assert [path("convolution-dilated", n) for n in (2, 5, 6, 14, 15)] == [1, 2, 3, 3, 4]  # reach 1, 4, 13, 40
    assert path("self-attention-restricted", 1000, r=100) == 20


PAPER = {  # Table 1: complexity, sequential operations, path
    "Self-attention": ("O(n²·d)", "O(1)", "O(1)"),
    "Recurrent": ("O(n·d²)", "O(n)", "O(n)"),
    "Convolutional": ("O(k·n·d²)", "O(1)", "O(log_k(n))"),
    "Self-attention (restricted)": ("O(r·n·d)", "O(1)", "O(n/r)"),
}


def test_every_row_of_the_paper_is_there_as_it_is_printed():
    ours = {(kind.row, kind.complexity, kind.sequential, kind.path) for kind in KINDS.values()}
    assert {(row, *formulas) for row, formulas in PAPER.items()} <= ours
    assert {kind.row for kind in KINDS.values()} == set(PAPER)
    assert {kind.sequential for kind in KINDS.values() if kind.row != "Recurrent"} == {"O(1)"}
    # The paper's text, Section 4: contiguous kernels need O(n/k) layers, separable ones O(k·n·d + n·d²) operations.
    assert KINDS["convolution"].path == KINDS["convolution-separable"].path == "O(n/k)"
    assert KINDS["convolution-separable"].complexity == "O(k·n·d + n·d²)"


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("n", "d", "k", "r"), [(7, 6, 3, 4), (20, 4, 5, 2)])
def test_operations_are_those_that_the_layer_does(name, n, d, k, r):
    kind = KINDS[name]
    layer = kind.make(d, k, r)
    if kind.row == "Recurrent":  # each of n steps multiplies by every weight matrix
        done = n * sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    elif kind.row == "Self-attention (restricted)":  # each position with r others and itself: scores, then values
        done = n * (r + 1) * 2 * d
    else:
        with (
            FlopCounterMode(display=False) as counter,
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        ):
            layer(torch.randn(1, n, d))
        done = counter.get_total_flops() // 2
    assert kind.operations(n, d, k, r) == done


@pytest.mark.parametrize("name", KINDS)
def test_layers_keep_the_shape_of_a_sequence(name):
    layer = KINDS[name].make(6, 3, 4)
    assert layer(torch.randn(2, 11, 6)).shape == (2, 11, 6)


def test_restricted_attention_is_masked_full_attention():
    states = torch.randn(2, 150, 6, dtype=torch.float64)
    far = (torch.arange(150)[:, None] - torch.arange(150)).abs() > 5
    scores = (states @ states.transpose(1, 2) / 6**0.5).masked_fill(far, -torch.inf)
    expected = scores.softmax(-1) @ states
    torch.testing.assert_close(Attention(6, neighbourhood=10)(states), expected)


def test_the_fused_kernel_computes_the_same():
    states = torch.randn(2, 50, 6, dtype=torch.float64)
    torch.testing.assert_close(Attention(6, fused=True)(states), Attention(6)(states))


@pytest.fixture
def few_rounds(monkeypatch):
    """No more rounds than are asked for."""
    monkeypatch.setattr(layer_costs, "ENOUGH", 0.0)


class Unsteady(torch.nn.Module):
    """Every third time it does not wait."""

    calls = 0

    def forward(self, states):
        self.calls += 1
        time.sleep(0.1 if self.calls % 3 else 0)
        return states * 2


def test_the_shortest_round_counts(few_rounds):
    layer = Unsteady()
    cost = measure_layer(layer, 2, 3, torch.device("cpu"), rounds=3)
    assert cost.forward_seconds < 0.1 and cost.training_seconds < 0.1
    assert layer.calls == 2 * (1 + 3) + 2 * (1 + 3)  # one before the rounds; four for memory


@pytest.mark.slow
def test_memory_grows_as_the_table_says(few_rounds):
    def costs(name, *lengths):
        return [measure_layer(KINDS[name].make(8, 3, 16), n, 8, torch.device("cpu"), rounds=1) for n in lengths]

    def exponent(name):
        lengths = (128, 256, 512)
        found = costs(name, *lengths)
        assert all(cost.forward_seconds > 0 and cost.forward_bytes < cost.training_bytes for cost in found)
        return fitted_exponent(lengths, [cost.training_bytes for cost in found])

    assert exponent("self-attention") == pytest.approx(2, abs=0.1)
    for name in ("self-attention-restricted", "convolution", "gru"):
        assert exponent(name) == pytest.approx(1, abs=0.15)
    (whole,), (fused,) = costs("self-attention", 1024), costs("self-attention-fused", 1024)
    assert fused.training_bytes < whole.training_bytes / 5  # it keeps no n x n weights


@given(st.floats(-1, 4), st.floats(0.1, 100), st.integers(3, 8))
def test_exponents_of_exact_powers_are_found(exponent, factor, number):
    sizes = [2.0**place for place in range(number)]
    values = [factor * size**exponent for size in sizes]
    values[0] *= 3  # small sizes are ruled by other things, and do not count
    found = fitted_exponent(sizes, values, points=min(3, number - 1))
    assert found == pytest.approx(exponent, abs=1e-6)
    assert fitted_exponent(sizes[::-1], values[::-1], points=min(3, number - 1)) == pytest.approx(found)


@pytest.mark.slow
def test_table1_command(tmp_path, capsys, few_rounds):
    sizes = [
        "lengths=16,32,64",
        "widths=4,8",
        "length=16",
        "width=4",
        "rounds=1",
        "neighbourhood=4",
        "path_positions=5",
    ]
    words = ["table1", "--output", tmp_path, "--set", *sizes]
    status, output, _ = experiment(capsys, *words)
    assert status == 0
    assert "| recurrent (GRU) | O(n·d²) | O(n) | O(n) | 4 | 4 |" in output
    folder = tmp_path / "table1/laptop"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(KINDS)
    assert (folder / "table1.png").is_file() and (folder / "lstm/recipe.yaml").is_file()
    row = next(line for line in output.splitlines() if line.startswith("| recurrent (LSTM)") and "O(" not in line)
    figures = json.loads((folder / "lstm/result.json").read_text())["figures"]
    costs, most = figures["over_lengths"], figures["over_lengths"][-1]
    assert [cost["length"] for cost in costs] == [16, 32, 64] and {cost["width"] for cost in costs} == {4}
    assert [(cost["length"], cost["width"]) for cost in figures["over_widths"]] == [(16, 4), (16, 8)]
    exponents = {
        name: f"{fitted_exponent([cost[size] for cost in costs], [cost[what] for cost in costs]):.2f}"
        for name, costs, size in (("n", costs, "length"), ("d", figures["over_widths"], "width"))
        for name, what in ((f"{name} time", "training_seconds"), (f"{name} memory", "training_bytes"))
    }
    assert row.split(" | ")[1:5] == [exponents["n time"], "1.00", exponents["d time"], "2.00"]
    assert row.split(" | ")[5:7] == [exponents["n memory"], exponents["d memory"]]
    shown = [1e3 * most["forward_seconds"], 1e3 * most["training_seconds"]]
    shown += [most["forward_bytes"] / 1e6, most["training_bytes"] / 1e6]
    assert row.strip("| ").split(" | ")[7:] == [f"{number:.1f}" for number in shown]
    written = (folder / "lstm/result.json").stat().st_mtime_ns
    assert experiment(capsys, *words)[1] == output
    assert (folder / "lstm/result.json").stat().st_mtime_ns == written
    for bad, message in (
        ("lengths=8", "two whole numbers or more"), ("kernel=4", "must be odd"), ("neighbourhood=3", "must be even"),
        ("lengths=0,8", "two whole numbers or more"), ("widths=8,8", "two whole numbers"), ("width=0", "1 or more"),
        ("rounds=x", "a whole number of 1 or more"), ("depth=3", "no setting 'depth'"), ("rounds", "write FIELD=VALUE"),
    ):  # fmt: skip
        status, _, errors = experiment(capsys, "table1", "--output", tmp_path, "--set", bad)
        assert status == 2 and message in errors and errors.count("\n") == 1
    status, _, errors = experiment(capsys, *words, "--jobs", "2")
    assert status == 2 and "measures time" in errors
