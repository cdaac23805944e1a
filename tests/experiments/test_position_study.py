"""Section 3.5: the rotation against the encodings themselves, the study of lengths on models of seconds."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from position_study import LengthStudy, accuracy_by_length, offset_matrix, train_on_short

from vaswani_transformer.model.layers_vaswani import sinusoidal_positions

SMALL = {"d_model": 16, "d_ff": 32, "num_heads": 2, "layers": 1, "batch": 16, "warmup_steps": 60, "examples": 20}


@settings(max_examples=60)
@given(st.integers(-300, 300), st.integers(0, 3000), st.integers(1, 40))
def test_an_offset_is_a_rotation_whatever_the_position(offset, position, half):
    matrix = offset_matrix(offset, 2 * half)
    here, there = sinusoidal_positions(torch.tensor([position, position + offset]), 2 * half).numpy()
    assert np.abs(matrix @ here - there).max() < 1e-12
    assert np.abs(matrix.T @ matrix - np.eye(2 * half)).max() < 1e-12
    assert np.linalg.det(matrix) == pytest.approx(1)


@pytest.mark.slow
def test_exact_matches_are_what_greedy_search_writes():
    study = LengthStudy(trained=3, tested=(1, 2, 3, 4), symbols=2, max_steps=150, **SMALL | {"examples": 8})
    model, tests = train_on_short(study, "sinusoidal", seed=0), study.tests()
    rows = accuracy_by_length(model, study)
    model.generation_config.update(num_beams=1, max_extra_tokens=10)
    shares = []
    for row in rows:
        exact = [
            model.generate(input_ids=torch.tensor([pair["input_ids"]]))[0, 1:].tolist() == pair["labels"]
            for pair in tests[row["length"]]
        ]
        assert row["exact_match"] == pytest.approx(100 * sum(exact) / len(exact), abs=1e-4)
        assert row["token_accuracy"] >= row["exact_match"] - 1e-4
        shares.append(row["exact_match"])
    assert max(shares) > 0 and min(shares) < 100  # both kinds of sentences were met


def test_what_is_tested_was_not_drawn_for_training():
    study = LengthStudy()
    tested = {tuple(row["labels"]) for length, rows in study.tests().items() if length >= 10 for row in rows}
    for seed in range(4):  # of 20 symbols there are so many sentences of 10 that none comes twice by chance
        assert not tested & {tuple(row["labels"]) for row in study.draw(random.Random(seed), 1000, 1, study.trained)}
