"""The embodied bench: its own commands in their small mode, and its bars."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.harness.model import Results
from benchmarks.harness.run import BENCHMARKS, SKIPPED

HERE = BENCHMARKS / "embodied"
SMALL = ("--training.total_steps", "128", "--training.steps_per_iteration", "16")
SIZES = ("--env.envs", "4", "--actor.ppo.minibatch_size", "32", "--cluster.backend", "local")
QUICK = ("--env.kwargs", "{seconds = 0.0}", "--env.probe", "false")


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "how",
    [
        ("--env.stages", "4"),
        (
            *("--env.simulator", "vector", "--env.entry_point", "slow_steps:LockStep"),
            *("--env.stages", "1", "--env.parallel", "false"),
        ),
    ],
    ids=["each by itself", "lock-step"],
)
def test_slow_steps_are_trained_both_ways(how: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    file = HERE / "slow_steps.toml"
    done = run("ours.py", file, tmp_path / "run", *SMALL, *SIZES, *QUICK, *how)
    assert done.returncode == 0, done.stderr[-1000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["steps_per_second"] > 0
    assert math.isfinite(measured["return"])


def test_a_case_without_its_simulator_is_skipped_with_what_to_install(
    tmp_path: pathlib.Path,
) -> None:
    if importlib.util.find_spec("envpool") is not None:
        pytest.skip("EnvPool is installed")
    done = run("ours.py", HERE / "half_cheetah_envpool.toml", tmp_path / "run")
    assert done.returncode == SKIPPED
    assert "rlinf-async[envpool]" in done.stderr
    assert run("cleanrl_style.py", 0, 1).returncode == SKIPPED


def test_cleanrl_s_recipe_trains_over_envpool() -> None:
    pytest.importorskip("envpool")
    done = run("cleanrl_style.py", 0, 1, 4096)
    assert done.returncode == 0, done.stderr[-1000:]
    assert json.loads(done.stdout.splitlines()[-1])["steps_per_second"] > 0


def results(**seconds: float) -> Results:
    bench = importlib.import_module("benchmarks.embodied.bench")
    found = Results()
    for case, value in zip((bench.REACH, *bench.REACH_SB3), seconds.values(), strict=True):
        found.add(case, {bench.SECONDS: value, bench.SPEED: 1.0})
    return found


def test_seconds_to_success_count_against_whoever_never_succeeds() -> None:
    bench: Any = importlib.import_module("benchmarks.embodied.bench")
    sooner = next(bar for bar in bench.BENCH.bars if "seconds to success" in bar.name).value
    assert sooner(results(ours=10.0, one=20.0, two=30.0)) == 2.0
    assert sooner(results(ours=math.inf, one=20.0, two=30.0)) == 0.0
    assert sooner(results(ours=10.0, one=math.inf, two=math.inf)) == math.inf
