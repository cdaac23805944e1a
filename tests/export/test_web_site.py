"""A model exported as a site, in a real browser: what it translates, from whose files, and without a network."""

import functools
import http.server
import json
import re
import shutil
import threading

import browser as browsing
import pytest
from children import wait_for
from conftest import ROOT, error_of
from exporting_models import PAIRS, save_trained_model, small_tokenizer

from vaswani_transformer import Translator, align, load_model
from vaswani_transformer.cli.main import main
from vaswani_transformer.decoding.scoring import score_tokens

pytest.importorskip("onnxscript")
from vaswani_transformer.export import to_web

browser = browsing.browser
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_trained_model(tmp_path_factory.mktemp("model") / "model", small_tokenizer(), steps=400)


@pytest.fixture(scope="module")
def site(model, tmp_path_factory):
    """In float32, so that the model's own outputs are what is expected."""
    output = tmp_path_factory.mktemp("site") / "site"
    options = ["--format", "web", "--languages", "en", "de", "--quantization", "float32"]
    if main(["export", str(model), "--output", str(output), *options]):
        pytest.skip("needs the registry of npm")
    return output


def test_the_files(site):
    page, worker = ((site / name).read_text("utf-8") for name in ("index.html", "service-worker.js"))
    assert "default-src 'none'" in page and not re.search(r"https?:(?!//www.w3.org)", page)
    kept = set(json.loads(re.search(r"FILES = (\{.*?\})", worker)[1]))
    there = {str(path.relative_to(site)) for path in site.rglob("[!.]*") if path.is_file() and path.parent != site}
    assert there <= kept and {"./", "index.html", "page.js", "engine.js", "worker.js", "site.json"} <= kept
    assert "README.md" not in kept and not any("/." in name for name in kept) and 'cache: "reload"' in worker
    graphs = {path.name for path in (site / "model" / "onnx").iterdir()}
    assert graphs == {"decoder_model_merged.onnx", "encoder_model.onnx"}


def test_what_the_page_knows(tmp_path):
    """Regions are as browsers write them."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text("{}")
    to_web._add_page(tmp_path, ("en_US", "de"), 99, "fp32", "")
    site = json.loads((tmp_path / "site.json").read_text())
    assert (site["source"], site["target"], site["extra"]) == ("en-US", "de", 50)


def serve(site) -> http.server.ThreadingHTTPServer:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_it_translates_with_and_without_a_network(site, model, browser):
    server, pairs = serve(site), greedy_pairs(model)
    browser.get(f"http://127.0.0.1:{server.server_port}/")
    translated(browser, *(" ".join(side) for side in zip(*pairs, strict=True)))
    shown = browser.execute_script("return state.sentences.map((sentence) => sentence.shown)")
    sides = load_model(model, "cpu"), *map(list, zip(*pairs, strict=True))
    assert [list(map(tuple, one["alignment"])) for one in shown] == align(*sides[0], *sides[1:])
    for one, score in zip(shown, score_tokens(*sides[0], *sides[1:]), strict=True):
        assert [token["log_probability"] for token in one["tokens"]] == pytest.approx(score.log_probabilities, abs=1e-3)
    wait_for(lambda: browser.execute_script("return navigator.serviceWorker.controller !== null"))
    server.shutdown()
    server.server_close()
    browser.refresh()
    translated(browser, *pairs[0])
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


INSTALL = """const [done] = arguments;
    navigator.serviceWorker.register("service-worker.js").then(({installing}) => {
        installing.addEventListener("statechange", () => installing.state === "installed" || done(installing.state));
    });"""


@pytest.mark.parametrize("name", ["lib/ort-wasm-simd-threaded.asyncify.wasm", "worker.js"])
def test_files_that_arrive_late_or_are_of_another_version(site, model, browser, tmp_path, name):
    folder = shutil.copytree(site, tmp_path / "site")
    icon, late = (folder / "icon.svg").rename(tmp_path / "icon"), (folder / name).rename(tmp_path / "late")
    (folder / "icon.svg").write_text("<svg/>")
    browser.get(f"http://127.0.0.1:{serve(folder).server_port}/")
    (source, expected), *_ = greedy_pairs(model)
    wait_for(lambda: browser.find_element("id", "from-name").text == "English")
    browser.find_element("id", "text").send_keys("A")
    wait_for(lambda: "did not arrive" in browser.find_element("id", "error").text)
    assert "ERR" not in browser.find_element("id", "error").text
    late.rename(folder / name)
    browser.find_element("id", "text").clear()
    translated(browser, source, expected)
    assert browser.execute_async_script(INSTALL) == "redundant"  # refused, or it would be kept
    icon.replace(folder / "icon.svg")
    assert browser.execute_async_script(INSTALL) == "activating"


def test_the_documented_page_translates(site, model, browser, tmp_path):
    """With transformers.js and onnxruntime-web from this machine, and not from a content delivery network."""
    text, [(source, expected), *_] = (ROOT / "docs/how-to/export.md").read_text("utf-8"), greedy_pairs(model)
    page = re.search(r'<script type="module">.*?</script>', text, re.DOTALL)[0]
    for old, new in {
        "https://cdn.jsdelivr.net/npm/@huggingface/transformers@4": "/lib/transformers.min.js",
        "env.allowRemoteModels": "env.backends.onnx.wasm.wasmPaths = '/lib/'; env.allowRemoteModels",
        "q8": "fp32",
        "Two dogs are playing in the snow.": source,
        "console.log(": "document.title = (",
    }.items():
        assert old in page
        page = page.replace(old, new)
    engine = shutil.copytree(site / "lib", tmp_path / "lib") / "ort-wasm-simd-threaded.asyncify.js"
    engine.rename(engine.with_suffix(".mjs"))  # as onnxruntime names it
    shutil.copytree(site / "model", tmp_path / "models" / "js")
    (tmp_path / "page.html").write_text(f'<!doctype html><meta charset="utf-8">{page}', "utf-8")
    browser.get(f"http://127.0.0.1:{serve(tmp_path).server_port}/page.html")
    wait_for(lambda: browser.title == expected)


def greedy_pairs(model) -> list[tuple[str, str]]:
    """Three sentences and what the model makes of them."""
    sources = [source for source, _ in PAIRS[:60]]
    outputs = Translator(*load_model(model, "cpu"), num_beams=1).translate(sources)
    return [pair for pair in zip(sources, outputs, strict=True) if len(pair[1]) < 60 and pair[1].endswith(".")][:3]


def test_a_static_space(site, model, hub, browser, capsys):
    words = ["--space", "--static", "--language", "en", "--language", "de"]
    for result in ("pushed to", "nothing was changed"):
        assert main(["push", str(model), "tester/page", *words]) == 0
        assert result in capsys.readouterr().out
    browser.get(f"{hub.endpoint}/spaces/tester/page/resolve/main/index.html")
    translated(browser, greedy_pairs(model)[0][0])  # in int8, which may have other words
    hub.repositories["spaces/tester/page"].commit("main", "another program", {"app.py": b""})
    assert main(["push", str(model), "tester/page", *words]) == 2
    assert "tester/page has another program" in capsys.readouterr().err
    assert main(["push", str(model), "tester/page", *words, "--license", "mit"]) == 2
    assert "--space and --license cannot be combined" in capsys.readouterr().err


def translated(browser, text: str, expected: str | None = None) -> None:
    """What is typed comes out as this, or as some sentence."""
    wait_for(lambda: browser.find_element("id", "from-name").text == "English")
    browser.find_element("id", "text").send_keys(text)
    output = browser.find_element("id", "output")
    wait_for(lambda: output.text == expected if expected else output.text.endswith("."))


def test_what_is_refused(model, tmp_path, monkeypatch, capsys):
    assert main(["export", str(model), "--format", "web", "--output", str(tmp_path / "a")]) == 2
    assert f"the languages of {model} are not known: give --languages" in capsys.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", (tmp_path / "registry").as_uri())
    [(package, (integrity, _)), _] = to_web._PACKAGES.items()
    add = functools.partial(to_web._add_package, tmp_path / "lib", package, integrity, ("x",))
    assert "transformers-4.3.1.tgz" in error_of(add)
    (tmp_path / "registry" / package).parent.mkdir(parents=True)
    (tmp_path / "registry" / package).write_bytes(b"another")
    assert "its hash is another" in error_of(add)
    monkeypatch.setattr(to_web, "_LARGEST", 1000)
    message = error_of(to_web.export_site, model, tmp_path / "site", ("en", "de"))
    assert "too large" in message and not (tmp_path / "site").exists()
