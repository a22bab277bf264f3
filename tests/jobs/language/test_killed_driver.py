"""The process that a user starts, killed at any moment, and started again."""

from __future__ import annotations

import pathlib
from functools import partial

import pytest

from rlinf_async.runtime.jobs.language.checkpoints import load_language_progress
from tests.jobs.language.kit import Job
from tests.jobs.processes import Start

ENDLESS = 10**6
"""iterations: the run does not end before this process, however long held up, has killed it"""
PROCESS = ("--cluster.backend", "process")
AHEAD = ("--training.max_staleness", 1, "--training.checkpoint_every", 4)


def booked(job: Job) -> int:
    """How many rows of metrics there are."""
    path = job.out / "metrics.csv"
    return path.read_text().count("\n") - 1 if path.exists() else 0


@pytest.fixture
def start(job: Job, start_driver: Start) -> Start:
    """Starts the job with ``--resume``, and so many iterations."""
    command = ("train", job.file, "--out", job.out, "--resume", *PROCESS, *AHEAD)
    return partial(start_driver, *command, "--training.iterations")


def test_a_killed_driver_leaves_no_worker_and_the_run_comes_to_its_end(
    job: Job, start: Start, temporary: pathlib.Path
) -> None:
    driver = start(ENDLESS)
    driver.until(lambda: booked(job) > 6, "six iterations and the evaluation before them")
    driver.kill()
    assert driver.wait() == -9  # once no worker of it is left
    assert [*temporary.glob("rlinf-async-*")] == []
    iterations = booked(job) + 10
    assert start(iterations).wait() == 0
    summary = job.summary
    assert summary.outcome == "finished"
    assert summary.iterations == iterations
    assert summary.samples == sum(summary.outcomes.values()) == 8 * iterations
    assert [row["iteration"] for row in job.iterations] == [str(n) for n in range(iterations)]


def test_sigterm_writes_a_checkpoint_of_the_last_step_and_the_run_comes_to_its_end(
    job: Job, start: Start, temporary: pathlib.Path
) -> None:
    never = ("--training.checkpoint_every", 0, "--cluster.grace_seconds", 600)
    driver = start(ENDLESS, *never)
    driver.until(lambda: booked(job) > 6, "six iterations and the evaluation before them")
    driver.terminate()
    assert driver.wait() == 143
    assert "Traceback" not in driver.said
    assert [*temporary.glob("rlinf-async-*")] == []
    assert (job.summary.outcome, job.summary.error) == ("terminated", None)
    done = job.summary.iterations
    progress = load_language_progress(job.out / "checkpoints")
    assert progress is not None
    assert progress.version == done == booked(job) - 1
    iterations = done + 4
    assert start(iterations, *never).wait() == 0
    assert job.summary.samples == 8 * iterations
    assert [row["iteration"] for row in job.iterations] == [str(n) for n in range(iterations)]
