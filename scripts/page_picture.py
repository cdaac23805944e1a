"""A picture of the page of a running `vaswani serve`, for the documentation.

python scripts/page_picture.py http://127.0.0.1:5000 docs/pictures/page.png

It needs selenium, Chromium and its driver (Debian: chromium, chromium-driver).
"""

import argparse
import os
import shutil
import time

from selenium import webdriver

TEXT = "Two dogs are playing in the snow. An old man with a hat is selling fruit at a market."


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", metavar="ADDRESS", help="of the server")
    parser.add_argument("picture", metavar="PICTURE", help="the PNG file to write")
    arguments = parser.parse_args()
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for word in ("--headless=new", "--hide-scrollbars", *(["--no-sandbox"] if os.geteuid() == 0 else [])):
        options.add_argument(word)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        draw(browser, arguments.address)
        browser.save_screenshot(arguments.picture)
    finally:
        browser.quit()


def draw(browser, address: str) -> None:
    """Type the text and open the alternatives of its last sentence."""

    def size(height: int) -> None:
        metrics = {"width": 1000, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def run(code: str):
        return browser.execute_script(code)

    def wait(code: str) -> None:
        while not run(f"return {code}"):
            time.sleep(0.1)

    size(800)
    browser.get(address)
    wait("document.getElementById('from-name').textContent")
    browser.find_element("id", "text").send_keys(TEXT)
    wait("document.querySelector('.sentence') && !document.querySelector('.old')")
    run("document.getElementById('alternatives').click(); document.getElementById('next').click()")
    wait("document.querySelector('#list .scores')")
    run("const words = document.querySelectorAll('#target-words .word'); words[Math.floor(words.length / 2)].focus()")
    size(run("return document.documentElement.scrollHeight"))


if __name__ == "__main__":
    main()
