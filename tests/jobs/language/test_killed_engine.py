"""A rollout engine that is killed in the middle of a step, below its worker."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest

from tests.jobs.language.kit import Job
from tests.jobs.processes import Start

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: make test installs it",
)


def test_a_killed_vllm_engine_is_built_again_and_no_sample_is_lost(
    tiny: Job, start_driver: Start
) -> None:
    text = tiny.file.read_text().replace("head_dim = 16", "head_dim = 32")  # vLLM's smallest
    tiny.file.write_text(text)
    driver = start_driver(
        *("train", tiny.file, "--out", tiny.out, "--rollout.backend", "vllm"),
        *("--cluster.backend", "process", "--training.iterations", 6),
        *("--data.verifier", "tests.jobs.language.verifiers:letters"),
        *("--training.prompts", 20, "--training.group_size", 8),
    )
    metrics = tiny.out / "metrics.csv"
    driver.until(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3,
        "two iterations and the evaluation before them",
        seconds=270.0,  # vLLM takes minutes to start on a busy machine
    )
    [victim] = driver.running(b"EngineCore")
    os.kill(victim, signal.SIGKILL)
    assert driver.wait(240.0) == 0, driver.said
    assert "died" in (tiny.out / "workers.log").read_text()
    assert tiny.summary.samples == sum(tiny.summary.outcomes.values()) == 6 * 20 * 8
    assert tiny.summary.staleness is not None
    assert tiny.summary.staleness.max == 0
    assert tiny.summary.restarts == {}  # the worker lived
