"""Text of tasks that are no translation: parts without a source in common, and checks of outputs that run nothing."""

import random

import pytest
import sympy
import task_data


def test_derivatives_have_the_values_of_sympys():
    for source, target in task_data.derivatives(random.Random(1), 40):
        for point, value in zip(task_data._POINTS, task_data._values(target), strict=True):
            expected = sympy.sympify(source).diff("x").subs("x", sympy.sympify(point)).evalf()
            assert value == pytest.approx(complex(expected), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("output", "valid", "equal"),
    [
        ("2 * x * cos ( x ** 2 )", True, True), ("cos ( x * x ) * ( x + x )", True, True), ("x", True, False),
        ("2 * x * cos (", False, False), ("", False, False), ("open ( 'x' )", False, False), ("x . real", False, False),
        ("exp ( 9 ** 9 ** 9 )", False, False), ("( lambda : 1 ) ( )", False, False), ("x / 0", False, False),
    ],
)  # fmt: skip
def test_an_output_is_checked_as_an_expression(output, valid, equal):
    assert task_data.derivative("sin ( x ** 2 )", output, "2 * x * cos ( x ** 2 )") == {"valid": valid, "equal": equal}


@pytest.mark.parametrize(("output", "errors"), [("T AH M AA T OW", 0), ("T AH M AA T OW Z", 1), ("M AA T", 3), ("", 6)])
def test_phonemes_count_by_the_nearest_pronunciation(monkeypatch, output, errors):
    monkeypatch.setattr(task_data, "_pronunciations", lambda: {"tomato": ["T AH M EY T OW", "T AH M AA T OW"]})
    rates = {"phoneme error rate": (errors, 6), "word error rate": errors > 0}
    assert task_data.phonemes("t o m a t o", output, "") == rates
