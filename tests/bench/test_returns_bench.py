"""The bench of returns: its own command in a small mode, and its bars."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks.harness.model import Results
from benchmarks.harness.run import BENCHMARKS, bench_named

EXAMPLES = BENCHMARKS.parent / "examples"


def test_a_small_training_prints_its_return(tmp_path: pathlib.Path) -> None:
    command = [
        *(sys.executable, BENCHMARKS / "returns" / "ours.py", EXAMPLES / "sac_pendulum.toml"),
        *(tmp_path / "run", "--training.total_steps", "320", "--training.learning_starts", "240"),
        *("--evaluation.episodes", "2", "--cluster.backend", "local"),
    ]
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured.keys() == {"return", "steps_per_second"}
    assert -2000.0 < measured["return"] < 0.0


@pytest.mark.parametrize(("worst", "held"), [(-170.0, True), (-180.0, False)])
def test_the_lowest_of_the_seeds_has_to_be_in_the_published_range(worst: float, held: bool) -> None:
    bench = bench_named("returns")
    results = Results()
    for value in (-140.0, worst, -150.0):
        results.add("sac, ours", {"return": value})
    bar = bench.bars[0]
    assert bar.held(bar.value(results), bar.target(results)) is held
