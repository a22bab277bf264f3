"""A headless Chromium, and what a person does with a page."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

LIMIT = 120.0
"""seconds that a page may take to show something, on a machine that does other things"""


class Browser:
    """Pages in Chromium.

    Args:
        driver: of selenium.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        """Open the page at the address that was printed, and wait until it is drawn."""
        self.driver.get("about:blank")
        self.driver.get(address)
        self.until("return document.body && document.body.dataset.ready === 'true'")

    def do(self, script: str, *arguments: object) -> Any:
        """Run JavaScript in the page, and return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str, *arguments: object) -> Any:
        """Wait until a script returns something that is true, and return that."""
        end = time.monotonic() + LIMIT
        while not (found := self.do(script, *arguments)):
            assert time.monotonic() < end, f"not so after {LIMIT:.0f} s: {script}"
            time.sleep(0.02)
        return found

    def one(self, selector: str) -> Any:
        """The first element of a CSS selector."""
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """The text of an element as it is seen."""
        return str(self.one(selector).text)

    def tab(self, name: str) -> None:
        """Click a tab."""
        self.one(f"#tab-{name}").click()

    def keys(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def picture(self) -> NDArray[np.int16]:
        """What is seen: height, width, three colours."""
        shot = Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")
        return np.asarray(shot, np.int16)

    def complaints(self) -> list[str]:
        """The errors and warnings in the console since the last look."""
        return [one["message"] for one in self.driver.get_log("browser")]


@contextlib.contextmanager
def started(chromium: str, chromedriver: str, profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",  # tests run as root
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--force-device-scale-factor=1",
        "--window-size=1400,900",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
