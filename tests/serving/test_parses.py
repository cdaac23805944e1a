"""A parser that is served: what it answers, and its trees on the page."""

import browser as browsing
import pytest
import served
from browser import look
from children import wait_for
from conftest import tiny_model
from model_folders import save
from served import Limits, ask, running

from vaswani_transformer import Parser, load_model
from vaswani_transformer.parsing.tokenizer import train_parser_tokenizer

folder, make, browser = served.folder, served.make, browsing.browser

SENTENCES = ["the dog sees a cat here .", "( a house )", " "]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a parser that has learned nothing."""
    folder, labels = tmp_path_factory.mktemp("parser"), ("ROOT", "S", "NP", "VP")
    tokens = [*(f"({label}" for label in labels), *(f"){label}" for label in labels), "DT", "NN", "VBZ", "."]
    tokenizer = train_parser_tokenizer(SENTENCES, tokens, 300)
    return save(folder, tiny_model(vocab_size=len(tokenizer), seed=1), tokenizer)


@pytest.fixture
def app(make, model):
    """An application that serves a parser alone."""
    return make(str(model), load=lambda folder: load_model(folder, "cpu"), limits=Limits(characters=1000))


def test_it_answers_with_the_parsers_own_trees(app, model):
    words = [sentence.split() for sentence in SENTENCES]
    expected = [parse.tree and str(parse.tree) for parse in Parser(*load_model(model, "cpu")).parse(words)]
    known = [{"words": own, "tree": tree} for own, tree in zip(words, expected, strict=True)]
    assert known[0]["tree"].startswith("(ROOT (") and known[2]["tree"] is None
    assert ask(app, "POST", "/v1/parses", json={"text": SENTENCES}) == (200, {"parses": known})
    assert ask(app, "POST", "/v1/parses", json={"text": SENTENCES[0]}) == (200, {"parses": known[:1]})


def test_it_is_no_translation_model(app, make, model, folder):
    assert ask(app, "GET", "/languages") == (200, [])
    settings = ask(app, "GET", "/frontend/settings")[1]
    assert settings["parser"] and settings["language"] == {}
    for languages in ({"source": "auto", "target": ""}, {"source": "", "target": ""}, {"source": "en", "target": "de"}):
        status, answer = ask(app, "POST", "/v1/translations", json={"text": "a", **languages})
        assert status == 400 and "not supported" in answer["error"]
    both = make(f"en-de={folder}", str(model))
    assert [place.name for place in both.state.service.models.served] == ["en-de"]
    assert ask(both, "GET", "/frontend/settings")[1]["parser"]


@pytest.mark.parametrize(
    ("text", "message"), [("a" * 1001, "exceeds text limit (1000)"), ([], "Invalid request: text"), ("a\0b", "NUL")]
)
def test_sentences_that_are_refused(app, text, message):
    status, answer = ask(app, "POST", "/v1/parses", json={"text": text})
    assert status == 400 and message in answer["error"]


def test_without_a_parser_and_with_two(make, model):
    status, answer = ask(make(), "POST", "/v1/parses", json={"text": "a"})
    assert status == 400 and "no parser is served" in answer["error"]
    with pytest.raises(ValueError, match="are both for parser"):
        make(str(model), str(model))


@pytest.mark.slow
def test_the_page_draws_trees(browser, make, model, folder):
    app = make(f"en-de={folder}", str(model), load=lambda folder: load_model(folder, "cpu"))
    look(browser, width=320)
    with running(app) as (host, port):
        browser.get(f"http://{host}:{port}/")
        (button,) = wait_for(lambda: browser.find_elements("css selector", "#modes:not([hidden]) [value=parse]"))
        button.click()
        browser.find_element("id", "text").send_keys("The dog (sees) a cat, isn't it <b>?\n\nhere .")
        trees = wait_for(lambda: browser.find_elements("css selector", ".tree"))
        drawn = [leaf.text for leaf in trees[0].find_elements("css selector", ".leaf")]
        assert drawn == ["The", "dog", "(", "sees", ")", "a", "cat", ",", "is", "n't", "it", "<b>", "?"]
        elements = browser.find_elements("css selector", ".brackets")
        brackets = [element.get_property("textContent") for element in elements]
        parsed = list(Parser(*load_model(model, "cpu")).parse([drawn, ["here", "."]]))
        assert brackets == [str(parse.tree) for parse in parsed]
        for tree, parse in zip(trees, parsed, strict=True):
            labels = [node.get_property("textContent") for node in tree.find_elements("css selector", ".label, .tag")]
            assert labels == [node.label for node in parse.tree.nodes()]
        assert browser.execute_script("return document.documentElement.scrollWidth") == 320
        browser.get("about:blank")
