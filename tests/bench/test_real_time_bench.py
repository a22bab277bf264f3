"""The bench of a robot's loop: its own command in a small mode, and its bars."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.harness.model import Results
from benchmarks.harness.run import BENCHMARKS, bench_named

pytest.importorskip("mujoco")


def test_a_short_episode_counts_each_miss_and_sends_nothing_unsafe() -> None:
    command = [sys.executable, BENCHMARKS / "real_time" / "arm.py", "3", "--delayed", "0.3"]
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["steps"] >= 150 * 0.9
    assert (measured["uncounted"], measured["unsafe"]) == (0, 0)
    assert measured["missed"] > 0
    assert measured["clipped"] > 0


@pytest.mark.parametrize(
    ("found", "held"),
    [
        ({"missed_share": 0.0005, "unsafe": 0.0, "uncounted": 0.0}, True),
        ({"missed_share": 0.002, "unsafe": 1.0, "uncounted": 1.0}, False),
    ],
)
def test_its_bars_are_on_shares_and_counts(found: dict[str, float], held: bool) -> None:
    bench, results = bench_named("real_time"), Results()
    for case in bench.cases:
        results.add(case.name, found)
    for bar in bench.bars:
        assert bar.held(bar.value(results), bar.target(results)) is held
