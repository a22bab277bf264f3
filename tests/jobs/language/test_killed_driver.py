"""The process that a user starts, killed at any moment, and started again."""

from __future__ import annotations

import pathlib
from functools import partial

import pytest

from rlinf_async.observe.samples import read_samples
from rlinf_async.runtime.jobs.language.samples import load_language_progress
from tests.jobs.language.kit import LOSSES, TINY, Job
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
    kept = [one["name"] for one in read_samples(job.out, kind="training")]
    assert kept == [f"{group}/{index}" for group in range(4 * iterations) for index in range(2)]


def test_losses_of_a_real_model_are_those_of_a_run_that_was_not_killed(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], start_driver: Start
) -> None:
    """By SIGKILL, between two checkpoints or while one is written."""
    settings = (
        *("--actor.pipelined", "false", "--training.checkpoint_every", 2),
        *("--data.verifier", "tests.jobs.language.verifiers:letters"),
    )
    runs = []
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
        runs.append(Job(tmp_path / name, capsys, TINY))
    killed, whole = runs
    command = ("train", killed.file, "--out", killed.out, *settings, *PROCESS)
    driver = start_driver(*command, "--training.iterations", ENDLESS)
    driver.until(lambda: booked(killed) > 3, "three iterations and the evaluation before them")
    driver.kill()
    assert driver.wait() == -9
    iterations = booked(killed) + 2
    more = ("--training.iterations", iterations)
    assert start_driver(*command, *more, "--resume").wait() == 0
    whole.succeed(*settings, *more)
    assert [row["iteration"] for row in killed.iterations] == [str(n) for n in range(iterations)]
    for before, after in zip(whole.iterations, killed.iterations, strict=True):
        for name in LOSSES:
            assert float(after[name]) == pytest.approx(float(before[name]), abs=1e-6), name
    assert killed.summary.eval_accuracy == whole.summary.eval_accuracy


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
