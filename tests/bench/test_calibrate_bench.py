"""The calibrate bench, with real engines: a short run is calibrated and simulated."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks.harness.run import BENCHMARKS
from rlinf_async.cli import main


@pytest.mark.slow
def test_a_run_of_vllm_and_fsdp_is_calibrated(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    script = BENCHMARKS / "calibrate" / "real.py"
    command = [sys.executable, str(script), "vllm", str(tmp_path), "--iterations", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-1000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["missing"] == 0
    assert measured["step_seconds"] > 0.0 < measured["simulated_step_seconds"]
    assert main(["calibrate", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert f"# step: {measured['step_seconds']:.4f} s real" in printed
    assert "[generation.lengths]" in printed
