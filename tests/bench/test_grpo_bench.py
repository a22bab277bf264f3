"""The GRPO bench: its task, and our side of it run for real in its small mode."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks.grpo import task
from benchmarks.harness.run import BENCHMARKS, bench_named
from rlinf_async.rewards import Answer

HERE = BENCHMARKS / "grpo"


def test_the_numbers_are_long_tailed_and_follow_from_the_seed() -> None:
    drawn = sorted(task.numbers(1000, seed=1))
    assert drawn == sorted(task.numbers(1000, seed=1)) != sorted(task.numbers(1000, seed=2))
    assert drawn[500] == pytest.approx(task.MEDIAN, abs=2)
    assert drawn[-1] > 5 * drawn[500]
    assert drawn[-1] <= task.LONGEST < task.MAX_TOKENS


@pytest.mark.parametrize(
    ("text", "number", "expected"),
    [("bbbb", 4, 1.0), ("bbb", 4, 0.75), ("bbab", 4, 0.75), ("", 4, 0.0), ("b" * 20, 4, 0.0)],
)
def test_the_reward_falls_with_the_relative_error(text: str, number: int, expected: float) -> None:
    assert task.reward(text, number) == pytest.approx(expected)
    answer = Answer(prompt=task.prompt(number), text=text, reference=str(number))
    assert task.score(answer) == pytest.approx(expected)


@pytest.mark.parametrize("script", ["task.py", "model.py", "trl_grpo.py"])
def test_what_a_peers_interpreter_runs_needs_nothing_of_ours(script: str) -> None:
    assert "rlinf_async" not in (HERE / script).read_text(encoding="utf-8")


def test_bars_are_held_against_trl_and_evaluations_against_none() -> None:
    bench = bench_named("grpo")
    of_trl, of_lora = ("ours", "trl, 2 threads"), ("ours, LoRA", "trl, LoRA")
    evaluated = ("ours, evaluated", "ours")
    assert [bar.cases for bar in bench.bars] == [of_trl, evaluated, of_lora, of_trl]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [("--lora",), ("--evaluated", "--steps", "5")], ids=lambda how: how[0]
)
def test_our_side_trains_in_its_small_mode(tmp_path: pathlib.Path, how: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    ours = (sys.executable, str(HERE / "ours.py"), "--size", "small", "--out", str(tmp_path))
    command = [*ours, *how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-1000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["samples_per_second"] > 0.0
    assert 0.0 <= measured["reward"] <= 1.0
    rows = (tmp_path / "run" / "metrics.csv").read_text()
    assert ("eval_wait_seconds" in rows) == ("--evaluated" in how)
