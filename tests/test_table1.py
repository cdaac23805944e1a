"""Table 1: paths and memory against the formulas, and the command at tiny scale."""

import pytest
import torch
from experimenting import experiment
from hypothesis import given, settings
from hypothesis import strategies as st

from vaswani_transformer.layer_costs import fitted_exponent, measure_layer
from vaswani_transformer.layer_kinds import KINDS, Attention, path_length


@settings(max_examples=12, deadline=None)
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


def test_memory_grows_as_the_table_says():
    def exponent(name):
        lengths = (128, 256, 512)
        costs = [measure_layer(KINDS[name].make(8, 3, 16), n, 8, torch.device("cpu"), rounds=1) for n in lengths]
        assert all(cost.forward_seconds > 0 and cost.forward_bytes < cost.training_bytes for cost in costs)
        return fitted_exponent(lengths, [cost.training_bytes for cost in costs])

    assert exponent("self-attention") == pytest.approx(2, abs=0.1)
    for name in ("self-attention-restricted", "convolution", "gru"):
        assert exponent(name) == pytest.approx(1, abs=0.15)


@given(st.floats(-1, 4), st.floats(0.1, 100), st.integers(3, 8))
def test_exponents_of_exact_powers_are_found(exponent, factor, number):
    sizes = [2.0**place for place in range(number)]
    values = [factor * size**exponent for size in sizes]
    values[0] *= 3  # small sizes are ruled by other things, and do not count
    found = fitted_exponent(sizes, values, points=min(3, number - 1))
    assert found == pytest.approx(exponent, abs=1e-6)


def test_table1_command(tmp_path, capsys):
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
    written = (folder / "lstm/result.json").stat().st_mtime_ns
    assert experiment(capsys, *words)[1] == output
    assert (folder / "lstm/result.json").stat().st_mtime_ns == written
    for bad, message in (
        ("lengths=8", "two whole numbers or more"), ("kernel=4", "must be odd"), ("neighbourhood=3", "must be even"),
        ("rounds=x", "a whole number of 1 or more"), ("depth=3", "no setting 'depth'"), ("rounds", "write FIELD=VALUE"),
    ):  # fmt: skip
        status, _, errors = experiment(capsys, "table1", "--output", tmp_path, "--set", bad)
        assert status == 2 and message in errors and errors.count("\n") == 1
    status, _, errors = experiment(capsys, *words, "--jobs", "2")
    assert status == 2 and "measures time" in errors
