"""Attention weights against hand-made ones, tokens as people read them, pictures, the command that shows them."""

import sys

import numpy as np
import pytest
import torch
import translating
from conftest import error_of, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from translating import run

from vaswani_transformer import AttentionWeights, attend, draw_attention, load_model, train_tokenizer
from vaswani_transformer.attention.pictures import attention_figure, save_figure
from vaswani_transformer.attention.weights import KINDS, readable_tokens

folder = translating.model
TEXT = ["the old black dog sees an apple", "der alte schwarze Hund sieht einen Apfel", "naïve 中文 words, a $5 hat."]
SOURCE, TARGET = "the old dog, a $5 hat", "der Hund"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT, vocab_size=300)  # so small that most words are of several pieces


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(seed=1, scale=2.0, vocab_size=len(tokenizer), decoder_layers=3)


@pytest.fixture(scope="module")
def weights(model, tokenizer):
    return attend(model, tokenizer, SOURCE, TARGET)


def weights_by_hand(attention, queries, keys, kind: str) -> np.ndarray:
    """Equation 1 of what left the projections, `(heads, queries, keys)`, with a mask written down here."""
    config, window = attention.config, attention.config.attention_window
    query, key = (one[0].double().unflatten(-1, (config.num_heads, config.d_k)) for one in (queries, keys))
    scores = torch.einsum("qhd,khd->hqk", query, key) / config.d_k**0.5
    for row, column in np.ndindex(*scores.shape[1:]):
        near = window is None or kind == "encoder-decoder" or abs(row - column) <= window / 2
        if not near or (kind == "decoder" and column > row):
            scores[:, row, column] = -torch.inf
    return scores.softmax(dim=-1).numpy()


@pytest.mark.parametrize(
    "changes", [{"attention_window": 4}, {"num_heads": 1, "d_k": 8, "position_encoding": "learned"}]
)
@torch.no_grad()
def test_all_layers_are_those_of_the_pass_that_the_model_runs(tokenizer, changes):
    """That pass, with sdpa, forms no weights: they are made again from what it projects."""
    model = tiny_model(seed=4, scale=1.5, vocab_size=len(tokenizer), attention_bias=True, **changes)
    found = attend(model, tokenizer, SOURCE, TARGET)
    stacks = {"encoder": model.model.encoder, "decoder": model.model.decoder, "encoder-decoder": model.model.decoder}
    seen = {}
    for kind, stack in stacks.items():
        for layer, one in enumerate(stack.layers):
            attention = one.encoder_attn if kind == "encoder-decoder" else one.self_attn
            for name in ("q_proj", "k_proj"):
                attention.get_submodule(name).register_forward_hook(
                    lambda module, given, made, place=(kind, layer, name): seen.update({place: made})
                )
    source, target = ([tokenizer(text)["input_ids"]] for text in (SOURCE, TARGET))
    model(input_ids=torch.tensor(source), decoder_input_ids=torch.tensor([[0, *target[0][:-1]]]), use_cache=False)
    for kind, stack in stacks.items():
        for layer, (array, one) in enumerate(zip(found.of(kind)[0], stack.layers, strict=True)):
            projected = (seen[kind, layer, name] for name in ("q_proj", "k_proj"))
            expected = weights_by_hand(one.self_attn, *projected, kind)
            np.testing.assert_allclose(array, expected, atol=1e-5)
            assert ((array == 0) == (expected == 0)).all()  # drawn as what is not seen


def test_tokens_are_those_that_are_read_and_predicted(weights):
    assert {weights.of(kind)[0].dtype for kind in KINDS} == {np.dtype(np.float32)}
    assert weights.target_tokens[-1] == weights.source_tokens[-1] == "</s>"
    assert weights.decoder_tokens == ["<s>", *weights.target_tokens[:-1]]


def test_without_a_target_it_is_the_one_that_the_search_finds(folder):
    model, tokenizer = load_model(folder)
    source = tokenizer(["the dog sleeps"], return_tensors="pt")
    for options in ({}, {"num_beams": 1, "max_new_tokens": 5}):
        found = model.generate(input_ids=source["input_ids"], **options)
        weights = attend(model, tokenizer, "the dog sleeps", **options)
        assert weights.target == tokenizer.decode(found[0], skip_special_tokens=True)
        assert weights.target_tokens == readable_tokens(tokenizer, found[0, 1:].tolist())
        assert len(weights.target_tokens) == weights.decoder.shape[-1]
    again = attend(model, tokenizer, "the dog sleeps", attend(model, tokenizer, "the dog sleeps").target)
    assert again.target_tokens[-1] == "</s>"


def test_mistakes_are_one_line(model, tokenizer):
    assert error_of(attend, model, tokenizer, " ") == "the source is empty: give a sentence"
    assert error_of(attend, model, tokenizer, "dog", "\t") == "the target is empty: give a sentence"
    short = tiny_model(vocab_size=len(tokenizer), position_encoding="learned", max_position_embeddings=8)
    assert "at most 8 are taken" in error_of(attend, short, tokenizer, TEXT[0], "a")
    assert error_of(attend, model, tokenizer, "caf\udce9").startswith("the source: ")


def test_readable_tokens_of_a_vocabulary_of_letters():
    letters = train_tokenizer(["ab"], vocab_size=260)
    tokens = readable_tokens(letters, letters("ab, b\tü $")["input_ids"])
    assert [token for token in tokens if token != "␣"] == ["a", "·b", ",", "b", "ü", "·", "$", "</s>"]
    assert readable_tokens(letters, [0, 3, 2]) == ["<s>", "<unk>", "</s>"]
    for text, shown in {  # a vowel sign and an accent are no new words, nor is what follows them; a joiner is no space
        "किब": ["क", "·ि", "·ब"],
        "aq\u0301b": ["a", "·q", "·\u0301", "·b"],
        "می\u200cخ": ["م", "·ی", "·U+200C", "·خ"],
        "\u200b": ["U+200B"],
    }.items():
        tokens = readable_tokens(letters, letters(text)["input_ids"])
        assert [token for token in tokens if token not in "·␣"] == [*shown, "</s>"]


@settings(max_examples=60)
@given(words=st.lists(st.text("adehlorst", min_size=1, max_size=6), min_size=1, max_size=6))
def test_pieces_with_marks_make_up_the_words(tokenizer, words):
    tokens = readable_tokens(tokenizer, tokenizer(" ".join(words))["input_ids"])
    assert tokens.pop() == "</s>"
    together = "".join(token[1:] if token.startswith("·") else f" {token}" for token in tokens if token != "␣")
    assert together.replace(" ", "") == "".join(words)
    assert sum(not token.startswith("·") for token in tokens if token != "␣") == len(words)


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
    even = np.full((1, 1, 8, 8), 1 / 8, np.float32)
    for kind, hidden in (("encoder", 0), ("decoder", 28)):
        weights = made_up(np.tril(even) if hidden else even, 8)
        pixels, size = panel_pixels(weights, kind, tmp_path / "one.png")
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


def test_the_command_draws_all_and_replaces_nothing_unasked(folder, tmp_path, capsys, fails):
    output = tmp_path / "new" / "here"
    assert run("attention", folder, "the dog sleeps", "--target", "der Hund", "--output", output) == 0
    assert capsys.readouterr().out.splitlines()[0] == "target: der Hund"
    assert {path.name for path in output.iterdir()} == {f"{kind}.png" for kind in KINDS}
    before = (output / "encoder.png").read_bytes()
    words = (folder, "a cat", "--target", "die", "--output", output)
    assert "exists: give another --output, or --overwrite" in fails("attention", *words)
    assert (output / "encoder.png").read_bytes() == before
    assert run("attention", *words, "--kind", "encoder", "--overwrite") == 0
    assert (output / "encoder.png").read_bytes() != before
    below = output / "encoder.png" / "new"
    assert f"error: {below}: Not a directory" in fails("attention", *words[:-1], below)


def test_mistakes_in_the_command_are_one_line_and_write_nothing(folder, tmp_path, monkeypatch, fails):
    command = "attention", folder, "--output", tmp_path / "all"
    assert "there is no layer 3: encoder self-attention has 2 layers" in fails(*command, "a dog", "--layer", "3")
    assert "tokens, too many to show, at most 400" in fails(*command, "dog " * 1000)
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    assert "pip install 'vaswani_transformer[plots]'" in fails(*command, "the dog")
    assert not (tmp_path / "all").exists()
