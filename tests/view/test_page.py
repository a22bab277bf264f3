"""The page in a real browser: every tab, by mouse and by keyboard, without an error."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlinf_async.observe.metrics import CsvLog
from tests.view.browser import Browser
from tests.view.kit import CONFIG, going_on, keep_samples, make_run, served, tell

SCRIPT = "<img src=x onerror=\"document.title='taken over'\">"
ODD = [
    {"loss": 1.0, SCRIPT: 1.0, "single": 2.5, "steep": 1e308, "tokens": 2**63 + 1},
    {"loss": math.nan, SCRIPT: 2.0, "steep": -1e308, "tokens": 2**63 + 3},
    {"loss": math.inf, SCRIPT: 3.0, "steep": 0.0, "tokens": 2**63 + 5},
    {"loss": 4.0, SCRIPT: 4.0, "steep": 5.0, "tokens": 2**63 + 7},
]
CARD = "[data-metric='{}'] "
MARKED = "return document.querySelectorAll(arguments[0]).length"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shown")
    rows = [{"loss": 2.0 / (1 + i), "reward": math.sin(i / 9), "lr": 10.0**-i} for i in range(60)]
    make_run(folder / "first", rows)
    keep_samples(folder / "first", f"<user>{SCRIPT}")
    make_run(folder / "odd", ODD, config=CONFIG.replace("= 8", "= 16") + f"# {SCRIPT}\n")
    make_run(folder / "later", rows[:30], outcome=None)
    (folder / "damaged").mkdir()
    shutil.copy(folder / "first" / "run.json", folder / "damaged")
    (folder / "damaged" / "summary.json").write_text("{")
    (folder / "damaged" / "config.toml").write_text("=")
    return folder


@pytest.fixture
def page(browser: Browser, folder: Path) -> Iterator[Browser]:
    """The page of these runs; what the console said is looked at when the test is over."""
    with served(folder) as address:
        browser.open(address)
        browser.complaints()
        yield browser
        said = browser.complaints()
        assert not said
        assert browser.driver.title == "rlinf-async view"
        browser.driver.get("about:blank")


def choose(page: Browser, run: str) -> None:
    """Click the name of a run."""
    page.do(
        "[...document.querySelectorAll('nav .name')]"
        ".find((one) => one.textContent === arguments[0]).click()",
        run,
    )


def test_every_tab_shows_its_part_and_a_damaged_run_hides_nothing(page: Browser) -> None:
    assert "summary.json cannot be read" in page.text("nav")
    page.until("return document.querySelectorAll('.card canvas').length > 5")
    page.until("return document.querySelector('[data-metric=loss] .values').textContent")
    assert "0.0333333333333 at 59" in page.text(CARD.format("loss") + ".values")
    choose(page, "first")
    page.tab("timeline")
    page.until("return document.querySelector('.legend').textContent.includes('generate')")
    assert page.text("#panel-timeline .count").startswith("210 spans")
    page.tab("graph")
    page.until(MARKED, "#panel-graph .group")
    assert page.do(MARKED, "#panel-graph .channel") == 3
    page.tab("videos")
    page.until("return document.querySelector('#panel-videos .hint')")
    page.tab("settings")
    page.until("return document.querySelectorAll('tr.differs').length")
    assert "training.prompts" in page.text("tr.differs")
    assert "is not TOML" in page.text("#panel-settings .problem")


def test_samples_are_ordered_paged_and_shown_with_their_tokens(page: Browser) -> None:
    choose(page, "first")
    page.tab("samples")
    page.until("return document.querySelectorAll('#panel-samples tbody tr').length === 50")
    assert page.text("#panel-samples .count") == "1 to 50 of 120"
    page.do(
        "[...document.querySelectorAll('#panel-samples th button')]"
        ".find((one) => one.textContent === 'reward').click()"
    )
    page.until("return document.querySelector('[aria-sort=descending] button')?.textContent"
               " === 'reward ▼'")  # fmt: skip
    first = page.text("#panel-samples tbody tr")
    assert first.startswith("14/7 ")
    page.do("document.querySelector('#panel-samples tbody tr').focus()")
    page.keys("\ue007")  # Enter
    page.until("return document.querySelector('.token')")
    assert SCRIPT in page.text(".sample")
    assert page.do(MARKED, "#panel-samples img") == 0
    assert page.do("return [...document.querySelectorAll('.token')].map((o) => o.textContent)") == [
        "a", "<b>", "␣"
    ]  # fmt: skip
    page.do("document.querySelector('.tokens').focus()")
    page.keys("\ue014", "\ue014")  # to the right
    told = page.text(".sample .details")
    assert 'token 1: "<b>" (id 1), log-prob -0.5, recomputed -0.25, ratio 1.284, version 3' in told
    for mode in ("ratio", "version", "mask"):
        page.keys("c")
        assert page.do("return document.querySelector('.sample select').value") == mode
    assert page.do(MARKED, ".token.masked") == 1
    page.one("#panel-samples .bar button:last-of-type").click()
    page.until("return document.querySelector('#panel-samples .count').textContent"
               " === '51 to 100 of 120'")  # fmt: skip


def test_text_of_runs_is_text(page: Browser) -> None:
    page.until("return document.querySelectorAll('.card h3').length > 5")
    titles = page.do("return [...document.querySelectorAll('.card h3')].map((o) => o.textContent)")
    assert SCRIPT in titles
    assert page.do(MARKED, "img") == 0


def test_numbers_at_the_edges_are_drawn_and_told_exactly(page: Browser) -> None:
    page.one("#panel-curves input[type=search]").send_keys("tokens")
    page.until("return document.querySelectorAll('.card:not([hidden])').length === 1")
    page.until("return document.querySelector('[data-metric=tokens] .values').textContent")
    assert page.text(CARD.format("tokens") + ".values") == f"{2**63 + 7} at 3"
    for name in ("steep", "single", "loss"):
        page.do("const f = document.querySelector('#panel-curves input[type=search]');"
                "f.value = arguments[0]; f.dispatchEvent(new Event('input'))", name)  # fmt: skip
        drawn = page.until(
            "const card = document.querySelector(`[data-metric=${arguments[0]}]`);"
            "if (!card || !card.querySelector('.values').textContent) return 0;"
            "const c = card.querySelector('canvas');"
            "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0;"
            "for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 200) n++; return n",
            name,
        )
        assert drawn > 30
    assert page.text(CARD.format("loss") + ".values").count("4 at 3") == 1


def test_the_keyboard_is_enough(page: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    page.keys("/")
    page.keys("los")
    page.until("return document.querySelectorAll('.card:not([hidden])').length === 1")
    page.keys(Keys.ESCAPE, "?")
    page.until("return document.getElementById('help').open")
    page.keys(Keys.ESCAPE)
    page.until("return !document.getElementById('help').open")
    page.until("return document.querySelector('[data-metric=loss] .values').textContent")
    page.do("document.querySelector('[data-metric=loss] canvas').focus()")
    page.keys(Keys.ARROW_RIGHT)
    page.until("return document.querySelector('.values').textContent.includes('2 at 0')")
    page.keys("2")
    assert page.do("return document.activeElement.id") == "tab-timeline"
    page.keys(Keys.ARROW_RIGHT)
    assert page.do("return document.activeElement.id") == "tab-graph"
    assert page.do("return document.activeElement.getAttribute('aria-selected')") == "true"
    before = page.text("nav li.current .name")
    page.keys("]")
    page.until("return document.querySelector('nav li.current .name').textContent != arguments[0]",
               before)  # fmt: skip
    page.keys("[")
    outline = page.do("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_the_timeline_is_moved_and_asked_by_keys(page: Browser) -> None:
    choose(page, "first")
    page.keys("2")
    page.until("return document.querySelector('.legend').textContent.includes('generate')")
    page.do("document.querySelector('.rows canvas').focus()")
    whole = page.picture()
    page.keys("+", "+")
    page.keys("n")
    page.until("return document.querySelector('.details').textContent.includes('Actor[0]: train')")
    assert np.abs(page.picture() - whole).max() > 50


def test_a_reload_shows_the_same(page: Browser) -> None:
    choose(page, "first")
    page.one("#panel-curves input[type=search]").send_keys("r")
    page.one("#panel-curves input[type=checkbox]").click()
    page.do("document.activeElement.blur()")
    page.until("return document.querySelectorAll('.card:not([hidden])').length > 1")
    settle(page)
    before = page.picture()
    page.driver.refresh()
    page.until("return document.body && document.body.dataset.ready === 'true'")
    settle(page)
    after = page.picture()
    assert before.shape == after.shape
    assert (np.abs(before - after).max(axis=2) > 40).mean() < 0.01
    assert len(np.unique(before.reshape(-1, 3), axis=0)) > 20


def settle(page: Browser) -> None:
    """Wait until every card that is near has its values, and two pictures were drawn since."""
    page.until(
        "return [...document.querySelectorAll('.card:not([hidden])')].filter((one) => one.near)"
        ".every((one) => one.querySelector('.values').textContent)"
    )
    page.driver.execute_async_script(
        "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
    )


def test_the_dark_page_has_the_same_parts(page: Browser) -> None:
    page.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": "dark"}]},
    )
    settle(page)
    dark = page.picture()
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    settle(page)
    assert dark.mean() < 80 < page.picture().mean()


def test_what_is_new_is_shown_without_a_reload(browser: Browser, tmp_path: Path) -> None:
    with going_on(tmp_path / "live") as run, served(tmp_path) as address:
        log = CsvLog(run.metrics, keep_to=None)
        log.write(0, {"loss": 8.0})
        browser.open(address)
        browser.until("return document.querySelector('[data-metric=loss] .values').textContent")
        assert browser.text(CARD.format("loss") + ".values") == "8 at 0"
        log.write(1, {"loss": 4.0, "reward": 1.0})
        browser.until(
            "const one = document.querySelector('[data-metric=loss] .values');"
            "return one.textContent === '4 at 1' && document.querySelector('[data-metric=reward]')"
        )
        log.close()
        browser.tab("graph")
        browser.until("return document.querySelector('.channel.blocked')")
        tell(run, 8)
        assert not browser.complaints()
