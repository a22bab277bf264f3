"""A rollout engine that is killed in the middle of a step, below its worker."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import signal

import pytest

from tests.jobs.language.checkpoints import save_checkpoint
from tests.jobs.language.kit import Job
from tests.jobs.language.test_checkpoint_folders import check_trained, trains_checkpoint
from tests.jobs.processes import Start

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: make test installs it",
)


def test_a_killed_vllm_engine_is_built_again_with_the_newest_weights_and_no_sample_is_lost(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], start_driver: Start
) -> None:
    """In a run that trains a checkpoint of the user's own: a Llama."""
    checkpoint = save_checkpoint(tmp_path / "checkpoint", "llama")
    run = Job(tmp_path, capsys, trains_checkpoint(checkpoint))
    driver = start_driver(
        *("train", run.file, "--out", run.out, "--rollout.backend", "vllm"),
        *("--cluster.backend", "process", "--training.iterations", 6),
        # The run ends with an error where the engine's log-probs are not the actor's.
        *("--training.check_weights_every", 1, "--actor.optimizer.lr", 1e-3),
        *("--data.verifier", "tests.jobs.language.verifiers:letters"),
        *("--training.prompts", 20, "--training.group_size", 8),
    )
    metrics = run.out / "metrics.csv"
    driver.until(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3,
        "two iterations and the evaluation before them",
        seconds=270.0,  # vLLM takes minutes to start on a busy machine
    )
    [victim] = driver.running(b"EngineCore")
    os.kill(victim, signal.SIGKILL)
    assert driver.wait(240.0) == 0, driver.said
    assert "died" in (run.out / "workers.log").read_text()
    assert run.summary.samples == sum(run.summary.outcomes.values()) == 6 * 20 * 8
    assert run.summary.staleness is not None
    assert run.summary.staleness.max == 0
    assert run.summary.restarts == {}  # the worker lived
    check_trained(run, checkpoint, iterations=6)
