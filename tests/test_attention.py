"""Attention weights against hand-made ones, and what is made of them: pictures, the page, the command."""

import base64
import json
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from conftest import error_of, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from model_folders import write_model

from vaswani_transformer import (
    AttentionWeights,
    Ensemble,
    attend,
    draw_attention,
    load_model,
    train_tokenizer,
    write_attention_page,
)
from vaswani_transformer.attention_weights import KINDS, readable_tokens
from vaswani_transformer.cli import main
from vaswani_transformer.layers_vaswani import sinusoidal_positions

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


def first_layer_by_hand(model, layer, ids: list[int], causal: bool) -> np.ndarray:
    """Equation 1's weights of a first layer, `(heads, length, length)`, head by head and row by row."""
    config, attention = model.config, layer.self_attn
    embedded = model.model.shared.weight[ids].detach().numpy().astype(np.float64) * config.d_model**0.5
    states = embedded + sinusoidal_positions(torch.arange(len(ids)), config.d_model).numpy()
    query, key = (states @ one.weight.detach().numpy().T for one in (attention.q_proj, attention.k_proj))
    weights = np.zeros((config.num_heads, len(ids), len(ids)))
    for head in range(config.num_heads):
        columns = slice(head * config.d_k, (head + 1) * config.d_k)
        for row in range(len(ids)):
            seen = row + 1 if causal else len(ids)
            scores = key[:seen, columns] @ query[row, columns] / config.d_k**0.5
            weights[head, row, :seen] = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    return weights


def test_first_layers_are_those_of_equation_1(model, tokenizer, weights):
    source, target = (tokenizer(text)["input_ids"] for text in (SOURCE, TARGET))
    encoder = first_layer_by_hand(model, model.model.encoder.layers[0], source, causal=False)
    decoder = first_layer_by_hand(model, model.model.decoder.layers[0], [0, *target[:-1]], causal=True)
    np.testing.assert_allclose(weights.encoder[0], encoder, atol=1e-5)
    np.testing.assert_allclose(weights.decoder[0], decoder, atol=1e-5)


def test_every_kind_has_its_shape_its_tokens_and_rows_that_sum_to_1(model, tokenizer, weights):
    n, m = (len(tokenizer(text)["input_ids"]) for text in (SOURCE, TARGET))
    assert weights.encoder.shape == (2, 3, n, n)
    assert weights.decoder.shape == (3, 3, m, m)
    assert weights.encoder_decoder.shape == (3, 3, m, n)
    for kind in KINDS:
        array, queries, keys = weights.of(kind)
        assert array.dtype == np.float32 and array.shape[2:] == (len(queries), len(keys))
        np.testing.assert_allclose(array.sum(axis=-1), 1, atol=1e-5)
    assert not np.triu(weights.decoder, 1).any()
    assert weights.target_tokens[-1] == weights.source_tokens[-1] == "</s>"
    assert weights.decoder_tokens == ["<s>", *weights.target_tokens[:-1]]
    assert error_of(weights.of, "cross").startswith("kind is 'cross': it must be one of encoder, decoder")


def test_rows_of_encoder_decoder_attention_are_the_tokens_predicted(model, tokenizer, weights):
    # Reading ever longer beginnings, the last row is always that of the token that comes next.
    ids, source = ([0, *tokenizer(TARGET)["input_ids"]], torch.tensor([tokenizer(SOURCE)["input_ids"]]))
    model.set_attn_implementation("eager")
    for row in range(len(ids) - 1):
        output = model(input_ids=source, decoder_input_ids=torch.tensor([ids[: row + 1]]), output_attentions=True)
        for layer, attention in enumerate(output.cross_attentions):
            seen = attention[0, :, -1].detach().numpy()
            np.testing.assert_allclose(weights.encoder_decoder[layer, :, row], seen, atol=1e-5)
    model.set_attn_implementation("sdpa")


def test_without_a_target_it_is_the_one_that_the_search_finds(tmp_path):
    model, tokenizer = load_model(write_model(tmp_path / "model"))
    source = tokenizer(["the dog sleeps"], return_tensors="pt")
    for options in ({}, {"num_beams": 1, "max_new_tokens": 5}):
        found = model.generate(input_ids=source["input_ids"], **options)
        weights = attend(model, tokenizer, "the dog sleeps", **options)
        text = tokenizer.decode(found[0], skip_special_tokens=True)
        assert weights.target == text
        assert weights.target_tokens == readable_tokens(tokenizer, found[0, 1:].tolist())
        assert len(weights.target_tokens) == weights.decoder.shape[-1]
    again = attend(model, tokenizer, "the dog sleeps", attend(model, tokenizer, "the dog sleeps").target)
    assert again.target_tokens[-1] == "</s>"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_leaves_the_model_as_it_was(tokenizer, implementation):
    model = tiny_model(vocab_size=len(tokenizer), attn_implementation=implementation).train()
    same = tiny_model(vocab_size=len(tokenizer))
    assert (attend(model, tokenizer, SOURCE, TARGET).encoder == attend(same, tokenizer, SOURCE, TARGET).encoder).all()
    attend(model, tokenizer, SOURCE, max_new_tokens=2)
    assert model.training and model.config._attn_implementation == implementation


def test_stacks_without_layers_have_no_weights(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer), encoder_layers=0)
    assert attend(model, tokenizer, "dog", "Hund").encoder.shape[:2] == (0, 3)


def test_mistakes_are_one_line(model, tokenizer):
    assert error_of(attend, model, tokenizer, " ") == "the source is empty: give a sentence"
    assert error_of(attend, model, tokenizer, "dog", "\t").startswith("the target is empty: give its text, or none")
    short = tiny_model(vocab_size=len(tokenizer), position_encoding="learned", max_position_embeddings=8)
    assert "the model has learned 8 positions" in error_of(attend, short, tokenizer, TEXT[0], "a")
    assert "give a member of an ensemble" in error_of(attend, Ensemble([model, model]), tokenizer, "dog", "Hund")


# Tokens.


def test_readable_tokens_of_a_vocabulary_of_letters():
    letters = train_tokenizer(["ab"], vocab_size=260)
    ids = letters("ab, b\tü $")["input_ids"]
    expected = ["␣", "a", "·b", ",", "␣", "b", "␣", "ü", "·", "␣", "$", "</s>"]
    found = readable_tokens(letters, ids)
    assert [one for one in found if one != "␣"] == [one for one in expected if one != "␣"]
    assert readable_tokens(letters, [0, 3, 2]) == ["<s>", "<unk>", "</s>"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("adehlorst", min_size=1, max_size=6), min_size=1, max_size=6))
def test_pieces_with_marks_make_up_the_words(words):
    tokenizer = test_pieces_with_marks_make_up_the_words.tokenizer
    tokens = readable_tokens(tokenizer, tokenizer(" ".join(words))["input_ids"])
    assert tokens.pop() == "</s>"
    together = "".join(token[1:] if token.startswith("·") else f" {token}" for token in tokens if token != "␣")
    assert together.replace(" ", "") == "".join(words)
    assert sum(not token.startswith("·") for token in tokens if token != "␣") == len(words)


test_pieces_with_marks_make_up_the_words.tokenizer = train_tokenizer(TEXT, vocab_size=300)


# Pictures.


def made_up(array: np.ndarray, words: int) -> AttentionWeights:
    """Weights that are the same for all kinds."""
    tokens = [f"w{number}" for number in range(words)]
    return AttentionWeights("source", "target", tokens, tokens, tokens, array, array, array)


def test_a_picture_shows_the_weights_of_the_head_asked_for(tmp_path):
    weights = np.zeros((1, 2, 4, 4), np.float32)
    weights[0, 0], weights[0, 1] = np.eye(4), 0.25
    shares = []
    for head in (1, 2):
        draw_attention(made_up(weights, 4), "encoder", tmp_path / "one.png", [1], [head])
        pixels = imread(tmp_path / "one.png")[..., :3]
        full = np.abs(pixels - np.array([8, 48, 107]) / 255).max(axis=-1) < 0.02  # a weight of 1
        shares.append(full.sum() / 220**2)  # the panel has two inches each way, 110 pixels an inch
    assert shares[0] == pytest.approx(0.25, abs=0.02) and shares[1] < 0.01


def test_more_panels_and_more_tokens_make_a_larger_picture(tmp_path, weights):
    sizes = {}
    for name, options in {"all": {}, "row": {"layers": [2]}, "one": {"layers": [2], "heads": [3]}}.items():
        assert draw_attention(weights, "decoder", tmp_path / f"{name}.png", **options) == []
        sizes[name] = imread(tmp_path / f"{name}.png").shape[:2]
    assert sizes["all"][0] > sizes["row"][0] and sizes["row"][1] > sizes["one"][1]


def test_letters_without_a_font_are_told(tmp_path, model, tokenizer):
    private = attend(model, tokenizer, "dog \ue123", "Hund")  # no font has what everyone may define
    assert draw_attention(private, "decoder", tmp_path / "fine.png") == []
    assert draw_attention(private, "encoder", tmp_path / "box.png", [1], [1]) == []  # not printable: shown as a space
    chinese = AttentionWeights("\U0001f9ff\u4e2d", "", ["\U00013000"], ["a"], ["a"], *[np.ones((1, 1, 1, 1))] * 3)
    assert "\U00013000" in draw_attention(chinese, "encoder", tmp_path / "box.png")


def test_what_cannot_be_drawn_is_one_line(tmp_path, weights):
    picture = tmp_path / "no.png"
    told = error_of(draw_attention, weights, "encoder", picture, layers=[3])
    assert told == "layer 3 is not there: encoder self-attention has 2 layers, counted from 1"
    told = error_of(draw_attention, weights, "encoder-decoder", picture, heads=[1, 0])
    assert told == "head 0 is not there: encoder-decoder attention has 3 heads, counted from 1"
    long = made_up(np.full((1, 2, 41, 41), 1 / 41, np.float32), 41)
    assert "41 tokens are too many to read in 2 panels" in error_of(draw_attention, long, "encoder", picture)
    assert draw_attention(long, "encoder", tmp_path / "yes.png", heads=[2]) == []
    longer = made_up(np.full((1, 1, 121, 121), 1 / 121, np.float32), 121)
    assert "121 tokens are too many to read in one panel" in error_of(draw_attention, longer, "encoder", picture)
    none = made_up(np.zeros((0, 2, 4, 4), np.float32), 4)
    assert "encoder self-attention has no layers" in error_of(draw_attention, none, "encoder", picture)
    assert not picture.exists()


# The page.


class Elements(HTMLParser):
    """What a browser finds in a page: its elements with their attributes, and the text inside each kind."""

    def __init__(self, text: str):
        super().__init__()
        self.elements, self.texts, self._open = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open = dict(attrs).get("id", tag)

    def handle_data(self, data):
        self.texts[self._open] = self.texts.get(self._open, "") + data


def test_the_page_holds_the_arrays_and_needs_nothing_else(tmp_path, model, tokenizer):
    hostile = "</script><script>alert(1)</script><!-- & \u2028"
    weights = attend(model, tokenizer, hostile, TARGET)
    write_attention_page(weights, tmp_path / "page.html", layer=2, head=1)
    page = Elements((tmp_path / "page.html").read_text(encoding="utf-8"))
    scripts = [attributes for tag, attributes in page.elements if tag == "script"]
    assert len(scripts) == 2  # the data and the program, none from the sentence
    assert not any({"src", "href"} & attributes.keys() for _, attributes in page.elements)
    policy = next(one["content"] for tag, one in page.elements if "http-equiv" in one)
    assert policy.startswith("default-src 'none'")
    data = json.loads(page.texts["data"])
    assert data["source"] == hostile and data["start"] == {"layer": 2, "head": 1}
    assert [one["name"] for one in data["kinds"]] == list(KINDS.values())
    for one in data["kinds"]:
        array, queries, keys = weights.of(one["kind"])
        assert (one["queries"], one["keys"]) == (queries, keys)
        levels = np.frombuffer(base64.b64decode(one["weights"]), "<u2").reshape(array.shape)
        assert np.abs(levels / 65_535 - array).max() <= 1 / 131_070 + 1e-9
    names = {attributes.get("id") for _, attributes in page.elements}
    assert {"kind", "layer", "head", "view", "told", "query", "key", "overview"} <= names


def test_a_page_that_no_browser_opens_is_refused(tmp_path):
    long = made_up(np.zeros((6, 8, 800, 800), np.float32), 800)
    told = error_of(write_attention_page, long, tmp_path / "page.html", ["encoder"])
    assert told == "800 tokens make a page of 59 MB of weights, at most 48: give shorter sentences"
    none = made_up(np.zeros((0, 2, 4, 4), np.float32), 4)
    assert "no layers to show" in error_of(write_attention_page, none, tmp_path / "page.html")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium")
def test_a_browser_shows_what_a_token_looks_at(tmp_path, weights):
    write_attention_page(weights, tmp_path / "page.html", ["encoder-decoder", "encoder"])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    # Layer 2 and head 3 by their small picture, then the second token under the mouse.
    acts = """<script>
    document.querySelector(".thumb[data-layer='2'][data-head='3']").click();
    document.querySelectorAll("#query .token")[1].dispatchEvent(new Event("mouseenter"));
    </script></body>"""
    (tmp_path / "page.html").write_text(text.replace("</body>", acts), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{tmp_path}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    page = Elements(done.stdout)
    row = weights.encoder_decoder[1, 2, 1]
    best = int(row.argmax())
    told = page.texts["told"]
    assert told.startswith(
        f"Token 2, “{weights.target_tokens[1]}”, looks at: {weights.source_tokens[best]} ({best + 1})"
    )
    assert f"{100 * row[best]:.1f}%" in told
    tokens = [attributes for _, attributes in page.elements if "token" in attributes.get("class", "").split()]
    assert len(tokens) == sum(weights.encoder_decoder.shape[2:])
    pressed = [one for _, one in page.elements if one.get("class") == "thumb" and one["aria-pressed"] == "true"]
    assert [one["aria-label"] for one in pressed] == ["layer 2, head 3"]


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "model")


def run(*arguments) -> int:
    try:
        return main(["attention", *map(str, arguments)])
    except SystemExit as exit_:
        return exit_.code


def test_the_command_draws_all_and_replaces_nothing_unasked(folder, tmp_path, capsys):
    output = tmp_path / "new" / "here"
    assert run(folder, "the dog sleeps", "--target", "der Hund", "--output", output) == 0
    assert capsys.readouterr().out.splitlines()[0] == "target: der Hund"
    assert {path.name for path in output.iterdir()} == {"attention.html", *(f"{kind}.png" for kind in KINDS)}
    before = (output / "encoder.png").read_bytes()
    assert run(folder, "a cat", "--target", "die", "--output", output) == 2
    assert "exists: give another --output, or --overwrite" in capsys.readouterr().err
    assert (output / "encoder.png").read_bytes() == before
    assert run(folder, "a cat", "--target", "die", "--output", output, "--kind", "encoder", "--overwrite") == 0
    assert (output / "encoder.png").read_bytes() != before


def test_the_command_draws_one_file(folder, tmp_path, capsys):
    for name in ("one.png", "one.html"):
        options = ["--layer", 1, "--head", 2, "--max-new-tokens", 3, "--output", tmp_path / name]
        assert run(folder, "the dog", *options) == 0
        assert [path.name for path in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()


def test_without_matplotlib_there_is_still_the_page(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vaswani_transformer.attention_pictures.importlib.util.find_spec", lambda name: None)
    assert run(folder, "the dog", "--output", tmp_path / "all") == 2
    assert "pip install 'vaswani_transformer[plots]', or give --output FILE.html" in capsys.readouterr().err
    assert not (tmp_path / "all").exists()
    assert run(folder, "the dog", "--target", "der", "--output", tmp_path / "page.html") == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["a dog", "--layer", "3"], "layer 3 is not there: encoder self-attention has 2 layers, counted from 1"),
        (["a dog", "--head", "9"], "head 9 is not there: encoder self-attention has 3 heads, counted from 1"),
        (["a dog", "--target", ""], "the target is empty: give its text, or none for the model's own translation"),
        ([" "], "the source is empty: give a sentence"),
        ([], "give a SENTENCE, or a file of them with --report FILE: one of the two"),
        (["a dog", "--report", "x"], "give a SENTENCE, or a file of them with --report FILE: one of the two"),
        (["a dog", "--alignments", "x"], "--alignments goes with --report FILE: leave it out"),
        (["a dog", "--output", "x.svg"], "--output x.svg is no kind of file that is written here"),
        (["x " * 41, "--target", "y"], "tokens are too many to read in 6 panels of encoder self-attention, at most 40"),
        (["dog " * 1000], "is too long to show, at most 1,000"),
        (["--report", "missing"], "missing cannot be read"),
        (["--report", "x", "--layer", "1"], "--layer is for one sentence"),
    ],
)
def test_mistakes_in_the_command_are_one_line_and_write_nothing(folder, arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(folder, *arguments) == 2
    error = capsys.readouterr().err
    assert told in error and error.startswith("error: ") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_exported_model_is_refused(tmp_path, capsys):
    (tmp_path / "export.json").write_text("{}")
    assert run(tmp_path, "a dog") == 2
    assert "an exported model gives no attention weights" in capsys.readouterr().err
