"""A real browser for tests of pages: Chromium, driven by selenium; tests skip with a reason where one is missing."""

import os
import shutil

import pytest


@pytest.fixture(scope="module")
def browser():
    """A browser without a window; close what a test opens."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="the page's tests need selenium: pip install selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("the page's tests need chromium and chromedriver, such as Debian's packages of these names")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    words = ["--headless=new", "--window-size=1000,900", "--hide-scrollbars", "--disable-gpu"]
    if os.geteuid() == 0:
        words.append("--no-sandbox")
    for word in words:
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


def look(browser, *, width: int = 1000, height: int = 900, theme: str = "light") -> None:
    """Give the browser a size in pixels and a theme."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
