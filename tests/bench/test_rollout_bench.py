"""The rollout bench: its comparison run for real in its small mode."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks.harness.run import BENCHMARKS


@pytest.mark.slow
def test_the_worker_and_bare_vllm_are_measured_over_one_engine(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    script = BENCHMARKS / "rollout" / "generate.py"
    command = [sys.executable, str(script), "--size", "small", "--pairs", "1"]
    compiling = {name: one for name, one in os.environ.items() if name != "TORCH_COMPILE_DISABLE"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=compiling
    )
    assert done.returncode == 0, done.stderr[-1000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["ratio_4"] == pytest.approx(measured["ours_4"] / measured["bare_4"])
