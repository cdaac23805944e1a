"""The page for people: its files, and in a real browser what it does."""

import contextlib
import json
import math
import re
from itertools import islice
from urllib.parse import urlencode

import browser as browsing
import pytest
import served
from browser import look
from children import wait_for
from served import SENTENCES, Limits, request, running, translated

from vaswani_transformer import align
from vaswani_transformer.decoding.scoring import score_tokens

folder, loaded, make, browser = served.folder, served.loaded, served.make, browsing.browser

TEXT = [SENTENCES[number] for number in (0, 32, 23)]  # whose translations have several words
PATHS = ("/", "/page.css", "/page.js")
HOSTILE = "<script>document.title='taken'</script> <img src=x onerror=alert(1)>"


def test_the_files_need_nothing_from_elsewhere_and_run_no_code_of_others(make):
    app = make()
    texts = {}
    for path in PATHS:
        response = request(app, "GET", path)
        policy = response.headers["content-security-policy"]
        assert response.status_code == 200 and "default-src 'none'" in policy and "unsafe" not in policy
        assert "script-src 'self';" in policy and response.headers["x-content-type-options"] == "nosniff"
        texts[path] = response.text
    together = "".join(texts.values()).replace("http://www.w3.org/2000/svg", "")  # a name, of the icon
    assert not re.search(r"https?:|//\S", together)
    assert not re.search(r"\bon\w+=|\bstyle=|<style|<script(?! src=\"page.js\")", texts["/"])
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\("
    assert not re.search(unsafe, texts["/page.js"])


@contextlib.contextmanager
def opened(browser, app, query: str = ""):
    """The page of an application."""
    look(browser)
    with running(app) as (host, port):
        browser.get(f"http://{host}:{port}/{query}")
        wait_for(lambda: text_of(browser, "#from-name"))
        browser.get_log("browser")
        yield
        browser.execute_script("sessionStorage.clear()")
        assert problems(browser) == []
        browser.get("about:blank")


def problems(browser) -> list[str]:
    """What the browser complains of."""
    return [entry["message"] for entry in browser.get_log("browser")]


def elements(browser, selector: str) -> list:
    return browser.find_elements("css selector", selector)


def text_of(browser, selector: str) -> str:
    return " ".join(element.text for element in elements(browser, selector) if element.is_displayed())


def write(browser, text: str) -> None:
    (box,) = elements(browser, "#text")
    box.clear()
    box.send_keys(text)


def output_of(browser) -> str:
    """The translation when it is complete."""
    wait_for(lambda: not elements(browser, ".old") and (text_of(browser, "#output") or text_of(browser, "#error")))
    return browser.execute_script("return document.getElementById('output').textContent")


def translate(browser, text: str, expected: str) -> None:
    write(browser, text)
    wait_for(lambda: output_of(browser) == expected)


def press(browser, *keys) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


@pytest.fixture
def expected(loaded) -> list[str]:
    lines = translated(loaded, TEXT)
    assert all(" " in line for line in lines)
    return lines


@pytest.mark.slow
def test_what_is_typed_is_translated(browser, make, expected):
    with opened(browser, make()):
        assert [text_of(browser, f"#{side}-name") for side in ("from", "to")] == ["English", "German"]
        assert not any(element.is_displayed() for element in elements(browser, "select, #swap, #key-form"))
        text = f"{TEXT[0]}  {TEXT[1]}\n\n {TEXT[2]} "
        translate(browser, text, f"{expected[0]}  {expected[1]}\n\n {expected[2]} ")
        assert text_of(browser, "#count") == f"{len(text)} of 50,000 characters"
        translate(browser, TEXT[1], expected[1])
        elements(browser, "#clear")[0].click()
        wait_for(lambda: browser.execute_script("return document.getElementById('output').textContent") == "")
        assert not elements(browser, "#inside")[0].is_displayed()


@pytest.mark.slow
@pytest.mark.parametrize("separator", [" ", "\n", "\n\n 12. 🎈 "])
def test_only_what_changes_is_sent_again(browser, make, loaded, separator):
    app, lines, wanted = make(), [], dict(zip(SENTENCES, translated(loaded, SENTENCES), strict=True))
    sent = app.state.metrics.characters.labels("en-de")._value.get
    enter = """$('text').value = arguments[0], $('text').dispatchEvent(new Event('input'));
        return [$('output').textContent, getComputedStyle($('output')).opacity];"""
    # Sentences from, to, and how many new ones instead.
    changes = [(0, 0, 30), (17, 17, 1), (31, 31, 1), (0, 0, 1), (8, 9, 0), (31, 32, 0), (20, 21, 1)]
    unused = iter(SENTENCES)
    with opened(browser, app):
        for start, end, new in changes:
            lines[start:end] = islice(unused, new)
            before, text, output = sent(), separator.join(lines), separator.join(wanted[line] for line in lines)
            shown, opacity = browser.execute_script(enter, text)
            assert float(opacity) < 0.7 or not shown  # at once
            wait_for(lambda output=output: output_of(browser) == output)
            assert sent() - before <= (200 if shown else len(text))


@pytest.mark.slow
def test_an_address_may_hold_a_text_and_its_languages(browser, make, folder, expected):
    app = make(f"de-en={folder}", f"en-de={folder}", f"en-pt-BR={folder}")
    text = f"{TEXT[1]}\n& 100 % + x"
    for source, target in (("en", "pt"), ("EN_us", "pt-br")):
        with opened(browser, app, f"?{urlencode({'q': text, 'source': source, 'target': target})}"):
            wait_for(lambda: output_of(browser).startswith(expected[1] + "\n"))
            values = [elements(browser, name)[0].get_property("value") for name in ("#from", "#to", "#text")]
            assert values == ["en", "pt-BR", text]


@pytest.mark.slow
def test_words_show_what_they_belong_to_and_how_sure_the_model_is(browser, make, loaded, expected):
    from selenium.webdriver import ActionChains

    (links,) = align(*loaded, TEXT[:1], expected[:1])
    (score,) = score_tokens(*loaded, TEXT[:1], expected[:1])
    words = {"source": TEXT[0].split(), "target": expected[0].split()}
    shares, text = [], ""
    for token, log_probability in zip(score.tokens[:-1], score.log_probabilities[:-1], strict=True):
        if not text or token.startswith(" "):
            shares.append(0.0)
        shares[-1] += log_probability
        text += token
    assert len(shares) == len(words["target"]) > 1
    with opened(browser, make()):
        translate(browser, TEXT[0], expected[0])
        for side, other in (("source", "target"), ("target", "source")):
            for place, word in enumerate(elements(browser, f"#{side}-words .word")):
                belonging = {link[other == "target"] for link in links if link[side == "target"] == place}
                for how in ("pointer", "focus"):
                    if how == "pointer":
                        ActionChains(browser).move_to_element(word).perform()
                    else:
                        browser.execute_script("arguments[0].focus()", word)
                    marked = elements(browser, f"#{other}-words .linked")
                    assert {int(one.get_attribute("data-number")) for one in marked} == belonging
                    about = text_of(browser, "#about").replace("\u2068", "").replace("\u2069", "")
                    assert about.startswith(f"“{words[side][place]}”: ")
                    assert all(words[other][one] in about for one in belonging)
                    sure = [place] if side == "target" else belonging
                    assert all(f"{round(100 * math.exp(shares[one]))} % sure" in about for one in sure)
                    browser.execute_script("document.activeElement.blur()")
                assert word.get_attribute("aria-label").startswith(f"{words[side][place]}: ")
        first = elements(browser, "#output .word")[0]
        ActionChains(browser).move_to_element(first).perform()
        assert "chosen" in elements(browser, "#target-words .word")[0].get_attribute("class")
        assert f"{round(100 * math.exp(shares[0]))} % sure" in first.get_attribute("title")
        marks = [word.get_attribute("class") for word in elements(browser, "#target-words .word")]
        for share, names in zip(shares, marks, strict=True):
            sure = math.exp(share)
            assert ("very-unsure" in names.split(), "unsure" in names.split()) == (sure < 0.5, 0.5 <= sure < 0.8)


@pytest.mark.slow
def test_errors_are_shown_in_words_and_what_helps_is_tried(browser, make, expected):
    limits = Limits(characters=60, queue=0)
    with opened(browser, make(limits=limits, keys=["right"])):
        assert elements(browser, "#key-form")[0].is_displayed()
        write(browser, TEXT[0])
        wait_for(lambda: text_of(browser, "#error") == "Give the API key above first.")
        busy = "The server is overloaded. The next try is in 1 s."
        for key, error in (("wrong", busy), ("right", "")):
            elements(browser, "#key")[0].clear()
            elements(browser, "#key")[0].send_keys(key)
            elements(browser, "#key-form button")[0].click()
            wait_for(lambda error=error: text_of(browser, "#error") == error)
            if error == busy:
                object.__setattr__(limits, "queue", 100)  # it tries again by itself
                wait_for(lambda: text_of(browser, "#error") == "Invalid API key.")
        wait_for(lambda: output_of(browser) == expected[0])
        write(browser, "a" * 61)
        wait_for(lambda: text_of(browser, "#error") == "The text is 1 characters too long.")
        assert [line.rpartition("status of ")[2][:3] for line in problems(browser)] == ["503", "403"]
        # A server that is away, at first behind a proxy; and one that comes back, also when the page is new.
        browser.execute_script("""window.own = window.fetch;
            window.fetch = async () => new Response("<h1>Bad gateway</h1>", {status: 502})""")
        write(browser, TEXT[1])
        wait_for(lambda: text_of(browser, "#error").endswith(" status 502. The next try is in 1 s."))
        browser.execute_script("window.fetch = () => Promise.reject(new TypeError()); state.details = null")
        wait_for(lambda: text_of(browser, "#error").startswith("The server cannot be reached. The next try is in"))
        browser.execute_script("window.fetch = window.own")
        wait_for(lambda: output_of(browser) == expected[1] and not text_of(browser, "#error"))


@pytest.mark.slow
def test_hostile_text_stays_text(browser, make, loaded):
    with opened(browser, make()):
        translate(browser, HOSTILE, translated(loaded, [HOSTILE])[0])
        assert " ".join(word.text for word in elements(browser, "#source-words .word")) == HOSTILE
        # And where it comes out of a model.
        known = {"text": HOSTILE, "alignment": [[0, 0]]}
        answer = {"text": 0, "before": " ", "source": HOSTILE, "translations": [known]}
        events = f"event: sentence\ndata: {json.dumps(answer)}\n\n"
        events += f"event: end\ndata: {json.dumps({'after': [HOSTILE]})}\n\n"
        browser.execute_script("const events = arguments[0]; window.fetch = async () => new Response(events)", events)
        translate(browser, "x", f" {HOSTILE}{HOSTILE}")
        browser.execute_script("document.querySelector('#target-words .word').focus()")
        assert not elements(browser, "main script, main img") and browser.title == "Translate"


@pytest.mark.slow
def test_everything_is_reached_by_keyboard(browser, make, folder, expected):
    from selenium.webdriver import Keys

    with opened(browser, make(f"en-de={folder}", f"de-en={folder}", keys=["right"])):
        browser.execute_script("sessionStorage.apiKey = 'right'")
        translate(browser, " ".join(TEXT), " ".join(expected))
        browser.execute_script("document.activeElement.blur()")
        selector = "a, button:not([tabindex='-1'].word), input, select, textarea"
        seen = "(one) => one.checkVisibility() && !one.disabled"
        code = f"return [...document.querySelectorAll(arguments[0])].filter({seen})"
        wanted = set(browser.execute_script(code, selector))
        reached = set()
        for _ in range(2 * len(wanted)):
            press(browser, Keys.TAB)
            element = browser.switch_to.active_element
            reached.add(element)
            shown = "arguments[0].id === 'text' ? arguments[0].parentElement : arguments[0]"
            code = f"const s = getComputedStyle({shown}); return [s.outlineStyle, s.boxShadow]"
            style = browser.execute_script(code, element)
            assert element.tag_name == "body" or style != ["none", "none"]  # one sees where one is
        assert wanted - reached == set() and len(wanted) > 12
        words = elements(browser, "#target-words .word")
        browser.execute_script("arguments[0].focus()", words[0])
        for place in range(1, len(words)):
            press(browser, Keys.ARROW_RIGHT)
            assert browser.switch_to.active_element == words[place]
            assert expected[0].split()[place] in text_of(browser, "#about")
        press(browser, Keys.HOME)
        assert browser.switch_to.active_element == words[0]
        browser.execute_script("document.getElementById('alternatives').focus()")
        press(browser, Keys.ENTER)
        wait_for(lambda: elements(browser, "#list .scores"))
        for _ in range(2):
            press(browser, Keys.TAB)
        assert browser.switch_to.active_element == elements(browser, "#list button")[1]
        press(browser, Keys.SPACE)
        wait_for(lambda: elements(browser, "#list button")[1].get_attribute("aria-pressed") == "true")
        assert browser.switch_to.active_element == elements(browser, "#list button")[1]
