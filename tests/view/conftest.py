"""One headless Chromium for all tests of the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.view.browser import Browser, started

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser, whose pages are opened by `Browser.open`."""
    pytest.importorskip("selenium")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium or no chromedriver: apt install chromium chromium-driver")
    profile: Path = tmp_path_factory.mktemp("chromium")
    with started(CHROMIUM, DRIVER, profile) as one:
        yield one
