"""A model exported as a site, in headless Chromium: the first translation of a visitor, and words a second.

    python scripts/benchmarks/site.py MODEL --languages en de --sentences FILE

Needs chromium, chromedriver and selenium. Each round is a browser of its own with an empty cache, served from this
machine: until the translation of the first sentence stands there, then 20 more at once. The slowest first translation
and the lowest rate of three rounds are printed, as JSON lines.
"""

import argparse
import functools
import http.server
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from time import perf_counter, sleep

from selenium import webdriver

Handler = http.server.SimpleHTTPRequestHandler
Handler.log_message = lambda *_: None


def measure(port: int, sentences: list[str]) -> tuple[float, float]:
    """Return seconds until the first sentence is translated, and words of the translation a second for the others."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for word in ("--headless=new", "--disable-gpu", "--no-sandbox"):
        options.add_argument(word)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        start = perf_counter()
        browser.get(f"http://127.0.0.1:{port}/")
        type_in(browser, sentences[0], 1)
        first, start = perf_counter() - start, perf_counter()
        type_in(browser, " ".join(sentences[1:]), len(sentences) - 1)
        seconds = perf_counter() - start
        return first, len(browser.find_element("id", "output").text.split()) / seconds
    finally:
        browser.quit()


def type_in(browser, text: str, number: int) -> None:
    """Put a text onto the page, and wait for at least so many sentences of a translation that is not an old one."""
    script = (
        "const box = document.getElementById('text'); box.value = arguments[0]; box.dispatchEvent(new Event('input'))"
    )
    browser.execute_script(script, text)
    done = "return document.querySelectorAll('#output:not(.old) .sentence').length"
    while browser.execute_script(done) < number:
        if error := browser.find_element("id", "error").text:
            sys.exit(error)
        sleep(0.02)


def main() -> None:
    """Print a line for int8 and one for float32."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--languages", nargs=2, required=True)
    parser.add_argument("--sentences", metavar="FILE", required=True, help="a sentence a line")
    given = parser.parse_args()
    sentences = Path(given.sentences).read_text("utf-8").splitlines()[:21]
    for quantization in ("float32", "int8"):
        with tempfile.TemporaryDirectory() as folder:
            site = Path(folder) / "site"
            words = ["--format", "web", "--output", site, "--quantization", quantization, "--languages"]
            subprocess.run(["vaswani", "export", given.model, *words, *given.languages], check=True)
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=site))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            first, rates = zip(*(measure(server.server_port, sentences) for _ in range(3)), strict=True)
            megabytes = sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) / 1e6
            server.shutdown()
        row = {"MB": megabytes, "first_s": max(first), "words_per_second": min(rates)}
        print(json.dumps({"numbers": quantization} | {key: round(value, 1) for key, value in row.items()}))


if __name__ == "__main__":
    main()
