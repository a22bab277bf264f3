"""How quickly the page answers for a large run: ``python -m tests.view.measure``.

The run has 5,000 iterations of 60 metrics, 400,000 spans and 100,000 samples. It is written once
into the folder that ``--folder`` names (300 MB), else into a temporary one. Printed are the time to
the first paint, and of each click the time until what it shows is drawn; the exit code is 1 where
the page takes longer than 1 s for the first paint or 200 ms for a click.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_async.observe.run_folder import RunFolder, check_is_run
from rlinf_async.observe.samples import KeptSample, SamplesConfig, SampleWriter
from rlinf_async.observe.summary import LanguageSummary, write_summary
from rlinf_async.observe.trace import Counter, Span, write_perfetto
from rlinf_async.runtime.jobs.language.kept import KeptLanguageSample
from tests.view.browser import Browser, started
from tests.view.conftest import CHROMIUM, DRIVER
from tests.view.kit import CONFIG, served

ITERATIONS, METRICS, SPANS, SAMPLES, TOKENS = 5_000, 60, 400_000, 100_000, 64
FIRST_PAINT, CLICK = 1000.0, 200.0
"""milliseconds, at most"""

Clicks = list[tuple[str, str, str]]
"""name, script that clicks, script that is true once it is shown"""


def write_run(path: Path) -> None:
    """Write the run."""
    random = np.random.default_rng(0)
    with RunFolder.create(path, config_text=CONFIG) as folder:
        values = random.normal(size=(ITERATIONS, METRICS)).cumsum(axis=0)
        names = ["step", *(f"metric_{one}" for one in range(METRICS))]
        lines = [
            f"{step}," + ",".join(f"{one:.12g}" for one in row) for step, row in enumerate(values)
        ]
        folder.metrics.write_text("\n".join([",".join(names), *lines, ""]))
        write_summary(folder.summary, LanguageSummary(
            run="large", outcome="succeeded", seed=0, iterations=ITERATIONS, train_seconds=9.0,
            samples=SAMPLES))  # fmt: skip
        workers, kinds = 20, ("generate", "wait requests", "load weights", "score", "train")
        spans = [
            Span(f"Rollout[{at % workers}]", kinds[at // workers % 5], at // workers * 1_000_000,
                 900_000, {"iteration": at // 80})
            for at in range(SPANS)
        ]  # fmt: skip
        counters = [
            Counter(f"channel {name}", at * 5_000_000, {"depth": float(at % 13)})
            for name in ("requests", "generated", "scored") for at in range(4_000)
        ]  # fmt: skip
        write_perfetto(spans, folder.trace, counters=counters)
        writer = SampleWriter(path, SamplesConfig(limit="20 GB"), keep_to=None)
        each = SAMPLES // 100
        for first in range(0, SAMPLES, each):
            writer.put(lambda first=first: records(first, each, random), each)  # type: ignore[misc]
            assert writer.flushed(600)
        assert writer.close(600) == {}


def records(first: int, count: int, random: np.random.Generator) -> Iterator[KeptSample]:
    """Samples, of 20 to an iteration."""
    for number in range(first, first + count):
        size = int(random.integers(8, TOKENS))
        yield KeptLanguageSample(
            name=f"{number // 8}/{number % 8}", kind="training", step=number // 20,
            iteration=number // 20, trained=True, outcome="scored",
            reward=float(random.random()), size=size, prompt=f"What is {number} + 1?",
            completion=f"It is {number + 1}.", finish="stop", detail="", reward_parts={},
            verifier="exact", reference=str(number + 1), prompt_tokens=list(range(12)),
            tokens=random.integers(0, 1000, size).tolist(),
            log_probs=np.round(-random.random(size), 5).tolist(), versions=[number // 20] * size,
            mask=[1] * size, rollout_rank=0, scoring_seconds=0.001,
        )  # fmt: skip


def shows(tab: str) -> str:
    """JavaScript: whether a tab has what it shows."""
    return {
        "curves": "[...document.querySelectorAll('.card:not([hidden])')].slice(0, 4)"
        ".every((one) => one.querySelector('.values').textContent)",
        "timeline": "document.querySelector('#panel-timeline .count').textContent",
        "graph": "document.querySelector('#panel-graph .group')",
        "samples": "document.querySelector('#panel-samples tbody tr')",
        "videos": "document.querySelector('#panel-videos .hint')",
        "settings": "document.querySelector('#panel-settings tbody tr')",
    }[tab]


SAMPLE_COUNT = "document.querySelector('#panel-samples .count').textContent"
BUTTON = "[...document.querySelectorAll('#panel-samples th button')]"
SEARCH = (
    "const f = document.querySelector('#panel-{0} input[type=search]'); f.value = '{1}';"
    "f.dispatchEvent(new Event('input'))"
)


def clicks() -> Clicks:
    """What is clicked, in this order."""
    found: Clicks = []
    for tab in ("timeline", "graph", "samples", "videos", "settings", "curves"):
        click = f"document.getElementById('tab-{tab}').click()"
        found.append((f"tab {tab}", click, f"return {shows(tab)}"))
    cards = "document.querySelectorAll('#panel-curves .card:not([hidden])')"
    drawn = f"return {cards}.length === {{0}} && {shows('curves')}"
    found.append(("search a metric", SEARCH.format("curves", "metric_1"), drawn.format(11)))
    found.append(("all metrics again", SEARCH.format("curves", ""), drawn.format(METRICS)))
    log = "document.querySelector('#panel-curves input[type=checkbox]').click()"
    found.append(("log scale", log, f"return {shows('curves')}"))
    samples = "document.getElementById('tab-samples').click()"
    found.append(("tab samples again", samples, f"return {shows('samples')}"))
    for name in ("reward", "tokens", "reward"):
        click = f"{BUTTON}.find((one) => one.textContent.startsWith('{name}')).click()"
        done = f"return {BUTTON}.some((one) => one.textContent === '{name} ▼')"
        found.append((f"order by {name}", click, done))
    turn = "[...document.querySelectorAll('#panel-samples .bar button')].at(-1).click()"
    found.append(("next page", turn, f"return {SAMPLE_COUNT}.startsWith('51')"))
    found.append(("next page", turn, f"return {SAMPLE_COUNT}.startsWith('101')"))
    one = "document.querySelectorAll('#panel-samples tbody tr')[3].click()"
    found.append(("a sample", one, "return document.querySelector('#panel-samples .token')"))
    some = SEARCH.format("samples", "77")
    found.append(("samples of a prompt", some, f"return {SAMPLE_COUNT}.includes('of 8 ')"))
    return found


ONCE = """
const done = arguments[arguments.length - 1], began = performance.now();
new Function(arguments[0])();
const shown = new Function(arguments[1]);
const look = () => {
  if (shown()) requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
  else setTimeout(look, 1);
};
look();
"""


def measure(browser: Browser, address: str, say: Callable[[str], None]) -> bool:
    """Print the times; whether all are short enough."""
    browser.driver.get("about:blank")
    browser.driver.get(address)
    browser.until("return document.body && document.body.dataset.ready === 'true'")
    paint: Any = browser.do(
        "const [one] = performance.getEntriesByName('first-contentful-paint');"
        "return one && one.startTime"
    )
    whole: Any = browser.driver.execute_async_script(ONCE, "", f"return {shows('curves')}")
    since = browser.do("return performance.now()")
    say(f"first paint {paint:.0f} ms; curves drawn at most {since:.0f} ms after it was asked for")
    say(f"({whole:.0f} ms of these after the page was ready)")
    began = time.monotonic()
    browser.driver.set_script_timeout(300)
    browser.driver.execute_async_script(
        "const done = arguments[0]; import('/static/timeline.js').then(async ({timeline}) => {"
        "await [...timeline.known.values()][0]; done() })"
    )
    say(f"the trace was read {time.monotonic() - began:.1f} s later, beside the page")
    good = paint <= FIRST_PAINT
    for name, click, shown in clicks():
        took: float = browser.driver.execute_async_script(ONCE, click, shown)
        good &= took <= CLICK
        say(f"{name:22}{took:6.0f} ms{'' if took <= CLICK else '   longer than 200 ms'}")
    browser.tab("timeline")
    for name, key in (("zoom", "zoom(0.5)"), ("all of it", "all()")):
        script = (
            "const done = arguments[0]; import('/static/timeline.js').then(({timeline}) => {"
            f"timeline.{key};"
            "requestAnimationFrame(() => setTimeout(() => done(timeline.painted))) })"
        )
        took = browser.driver.execute_async_script(script)
        good &= took <= CLICK
        say(f"timeline: {name:12}{took:6.0f} ms for {SPANS:,} spans")
    return bool(good)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the run is, or is written")
    with tempfile.TemporaryDirectory() as temporary:
        folder = parser.parse_args().folder or Path(temporary)
        run = folder / "large"
        if not run.exists():
            write_run(run)
        check_is_run(run)
        if CHROMIUM is None or DRIVER is None:
            sys.exit("no chromium or no chromedriver: apt install chromium chromium-driver")
        with (
            tempfile.TemporaryDirectory() as profile,
            served(folder) as address,
            started(CHROMIUM, DRIVER, Path(profile)) as browser,
        ):
            good = measure(browser, address, print)
            for line in browser.complaints():
                print(line)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
