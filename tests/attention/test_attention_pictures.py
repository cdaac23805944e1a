"""Attention weights as pictures: what is where, what is too long, what is not there."""

import dataclasses

import numpy as np
import pytest
from conftest import error_of, tiny_model
from matplotlib.image import imread

from vaswani_transformer import AttentionWeights, attend, draw_attention, train_tokenizer
from vaswani_transformer.attention.pictures import attention_figure, save_figure


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the old black dog sees an apple", "der alte schwarze Hund sieht"], vocab_size=300)


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(seed=1, scale=2.0, vocab_size=len(tokenizer), decoder_layers=3)


@pytest.fixture(scope="module")
def weights(model, tokenizer):
    return attend(model, tokenizer, "the old dog, a $5 hat", "der Hund")


def made_up(array: np.ndarray, words: int) -> AttentionWeights:
    """Weights that are the same for all kinds."""
    tokens = [f"w{number}" for number in range(words)]
    return AttentionWeights("source", "target", tokens, tokens, tokens, array, array, array)


def panel_pixels(weights, kind, picture, *choice) -> np.ndarray:
    """The pixels of a picture, and how many its one panel has."""
    figure = attention_figure(weights, kind, *choice)
    save_figure(figure, picture)
    pixels = imread(picture)[..., :3]
    extent = figure.axes[0].get_window_extent()
    return pixels, extent.width * extent.height


def test_a_picture_shows_the_weights_of_the_head_asked_for(tmp_path):
    weights = np.zeros((1, 2, 4, 4), np.float32)
    weights[0, 0], weights[0, 1] = np.eye(4), 0.25
    shares = []
    for head in (1, 2):
        pixels, size = panel_pixels(made_up(weights, 4), "encoder", tmp_path / "one.png", [1], [head])
        full = np.abs(pixels - np.array([8, 48, 107]) / 255).max(axis=-1) < 0.02  # a weight of 1
        shares.append(full.sum() / size)
    assert shares[0] == pytest.approx(0.25, abs=0.02) and shares[1] < 0.02


def test_what_a_token_cannot_see_is_grey(tmp_path):
    even = made_up(np.full((1, 1, 8, 8), 1 / 8, np.float32), 8)
    for kind, window, hidden in (("encoder", None, 0), ("decoder", None, 28), ("encoder", 4, 30), ("decoder", 4, 43)):
        pixels, size = panel_pixels(dataclasses.replace(even, window=window), kind, tmp_path / "one.png")
        grey = np.abs(pixels - 0.88).max(axis=-1) < 0.01
        assert grey.sum() / size == pytest.approx(hidden / 64, abs=0.02)


def test_labels_are_the_tokens_and_no_formulas():
    labels = ["MWMWMWMWMWMWMWMWMWMWMWMWMWMW", "$\\alpha$", "·gypsy", "."]
    array = np.full((1, 1, 4, 4), 1 / 4, np.float32)
    axes = attention_figure(AttentionWeights("s", "t", labels, labels, labels, array, array, array), "encoder").axes[0]
    for axis in (axes.xaxis, axes.yaxis):
        shown = axis.get_ticklabels()
        assert [label.get_text() for label in shown] == [labels[0][:17] + "…", *labels[1:]]
        assert not any(label.get_parse_math() for label in shown)


def test_what_cannot_be_drawn_is_one_line(tmp_path, weights):
    picture = tmp_path / "no.png"
    message = error_of(draw_attention, weights, "encoder", picture, layers=[3])
    assert message == "there is no layer 3: encoder self-attention has 2 layers, numbered from 1"
    assert "there is no head 0" in error_of(draw_attention, weights, "encoder-decoder", picture, heads=[1, 0])
    for size, heads, panels in ((41, 2, "2 panels"), (121, 1, "1 panels")):
        long = made_up(np.full((1, heads, size, size), 1 / size, np.float32), size)
        assert f"{size} tokens are too many to read in {panels}" in error_of(draw_attention, long, "encoder", picture)
    assert not picture.exists()
