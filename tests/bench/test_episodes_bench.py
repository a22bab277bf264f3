"""The bench of episodes: its comparison run for real in its small mode."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks.harness.run import BENCHMARKS


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["toy", "vllm"])
def test_the_same_requests_are_measured_with_tools_and_without(
    engine: str, tmp_path: pathlib.Path
) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    script = BENCHMARKS / "episodes" / "tools.py"
    command = [sys.executable, str(script), "--size", "small", "--pairs", "1", "--engine", engine]
    compiling = {name: one for name, one in os.environ.items() if name != "TORCH_COMPILE_DISABLE"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=compiling
    )
    assert done.returncode == 0, done.stderr[-1000:]
    pair, result = done.stdout.splitlines()[-2:]
    measured = json.loads(result)
    assert measured["ratio"] == pytest.approx(measured["tools"] / measured["without"])
    assert f"{measured['ratio']:.3f} x" in pair
    assert 0.3 < measured["ratio"] < 3.0
