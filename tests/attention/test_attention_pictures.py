"""Attention weights as pictures and as a page for a browser: what is where, what is too long, what is not there."""

import base64
import dataclasses
import json
import re
import shutil
import subprocess
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
from conftest import error_of, tiny_model
from matplotlib.image import imread

from vaswani_transformer import AttentionWeights, attend, draw_attention, train_tokenizer, write_attention_page
from vaswani_transformer.attention.pictures import attention_figure, save_figure
from vaswani_transformer.attention.weights import KINDS


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the old black dog sees an apple", "der alte schwarze Hund sieht"], vocab_size=300)


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(seed=1, scale=2.0, vocab_size=len(tokenizer), decoder_layers=3)


@pytest.fixture(scope="module")
def weights(model, tokenizer):
    return attend(model, tokenizer, "the old dog, a $5 hat", "der Hund")


# Pictures.


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
    hostile = '</script><script>alert(1)</script><!-- & \u2028 @DATA@ @TITLE@ "\\'
    weights = attend(model, tokenizer, hostile, "der Hund")
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
        levels = np.frombuffer(zlib.decompress(base64.b64decode(one["weights"])), np.uint8).reshape(array.shape)
        assert (np.abs((levels / 255) ** 2 - array) <= (np.sqrt(array) + 0.001) / 255).all()
    assert page.texts["title"].strip() == f"Attention: {' '.join(hostile.split())}" and data["window"] is None
    write_attention_page(dataclasses.replace(weights, window=5), tmp_path / "page.html")
    page = Elements((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert json.loads(page.texts["data"])["window"] == 2  # tokens to each side
    names = {attributes.get("id") for _, attributes in page.elements}
    assert {"kind", "layer", "head", "view", "status", "query", "key", "overview"} <= names


def test_a_page_of_a_layer_or_head_that_is_not_there_is_refused(tmp_path):
    two = made_up(np.zeros((2, 3, 4, 4), np.float32), 4)
    message = error_of(write_attention_page, two, tmp_path / "page.html", layer=3)
    assert message == "there is no layer 3: encoder self-attention has 2 layers, numbered from 1"
    assert "there is no head 0" in error_of(write_attention_page, two, tmp_path / "page.html", head=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium")
def test_a_browser_shows_what_a_token_looks_at(tmp_path, weights):
    windowed = dataclasses.replace(weights, window=4)
    write_attention_page(windowed, tmp_path / "page.html", ["encoder-decoder", "encoder"])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    # What is grey in the first small picture of the second kind; then, of the first kind, layer 2 and head 3 by their
    # small picture, and the second token under the mouse.
    acts = """<script>ready.then(() => {
    choose({kind: 1});
    const canvas = document.querySelector("canvas"), {width, height} = canvas;
    const {data: pixels} = canvas.getContext("2d").getImageData(0, 0, width, height);
    let grey = "";
    for (let place = 0; place < width * height; place++) {
      grey += Number(pixels[4 * place] === 224 && pixels[4 * place + 2] === 224);
    }
    document.querySelector("h1").textContent = grey;
    choose({kind: 0});
    document.querySelector(".thumb[data-layer='2'][data-head='3']").click();
    document.querySelectorAll("#query .token")[1].dispatchEvent(new Event("mouseenter"));
    });</script></body>"""
    (tmp_path / "page.html").write_text(text.replace("</body>", acts), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9000", "--dump-dom"]
    command.append(f"file://{tmp_path}/page.html")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    page = Elements(done.stdout)
    length = len(weights.source_tokens)
    assert page.texts["h1"].strip() == "".join(
        str(int(abs(query - key) > 2)) for query in range(length) for key in range(length)
    )
    row = weights.encoder_decoder[1, 2, 1]
    best = int(row.argmax())
    message = page.texts["status"].translate({0x2068: None, 0x2069: None})  # around tokens, of whatever direction
    assert message.startswith(
        f"Token 2, “{weights.target_tokens[1]}”, looks at: {weights.source_tokens[best]} ({best + 1})"
    )
    shown = float(re.search(r"([0-9.]+)%", message)[1]) / 100
    assert abs(shown - row[best]) <= (np.sqrt(row[best]) + 0.001) / 255 + 0.005
    tokens = [attributes for _, attributes in page.elements if "token" in attributes.get("class", "").split()]
    assert len(tokens) == sum(weights.encoder_decoder.shape[2:])
    pressed = [one for _, one in page.elements if one.get("class") == "thumb" and one["aria-pressed"] == "true"]
    assert [one["aria-label"] for one in pressed] == ["layer 2, head 3"]
