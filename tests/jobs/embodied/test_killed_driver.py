"""The process that a user starts, killed or interrupted at any moment, and started again."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from functools import partial

import pytest

from tests.jobs.embodied.kit import Job
from tests.jobs.processes import Start

PROCESS = ("--cluster.backend", "process")
STEPS = 64
"""of an iteration"""
GRACE = 600
"""seconds: no machine is so slow that a run is killed for it"""
ENDLESS = ("--training.total_steps", 10**6 * STEPS)
"""No run comes to its end before this process, however long held up, has killed it."""


@pytest.fixture
def start(job: Job, start_driver: Start) -> Start:
    """Starts the job with ``--resume`` and more."""
    return partial(start_driver, "train", job.file, "--out", job.out, "--resume", *PROCESS)


def booked(job: Job) -> int:
    """How many iterations are."""
    path = job.out / "metrics.csv"
    return path.read_text().count("\n") - 1 if path.exists() else 0


def checkpoints(job: Job) -> set[str]:
    """Those that are there, or being written."""
    return {path.name.strip(".") for path in (job.out / "checkpoints").glob("*version-*")}


def a_few_more(job: Job) -> tuple[int, tuple[object, ...]]:
    """How many iterations a job has that ends soon, and the setting that makes it so."""
    iterations = booked(job) + 10
    return iterations, ("--training.total_steps", iterations * STEPS)


def test_killed_while_starting_training_and_saving_a_run_still_comes_to_its_end(
    job: Job, start: Start, temporary: pathlib.Path
) -> None:
    moments: dict[str, Callable[[set[str]], object]] = {
        "starting": lambda before: any(temporary.glob("rlinf-async-*/driver.sock")),
        "training": lambda before: booked(job) >= 3,
        # Perhaps not noted yet, or not even complete.
        "saving": lambda before: checkpoints(job) - before,
    }
    every_fourth = ("--training.checkpoint_every", 4)
    for moment, condition in moments.items():
        left, before = set(temporary.glob("rlinf-async-*")), checkpoints(job)
        driver = start(*every_fourth, *ENDLESS)
        driver.until(partial(condition, before), moment)
        driver.kill()
        assert driver.wait() == -9
        if moment != "starting":  # then there may be no worker yet that could clean up
            assert set(temporary.glob("rlinf-async-*")) == left, moment
    iterations, end = a_few_more(job)
    assert start(*every_fourth, *end).wait() == 0
    job.check_records(iterations, STEPS, resumed=True)
    assert job.summary.outcome == "finished"


def test_ctrl_c_stops_the_run_leaves_nothing_and_the_run_can_be_resumed(
    job: Job, start: Start, temporary: pathlib.Path
) -> None:
    driver = start(*ENDLESS)
    driver.until(lambda: booked(job) >= 5, "five iterations")
    driver.interrupt()
    assert driver.wait() == 130
    assert driver.said.splitlines()[-1] == "interrupted"
    assert "Traceback" not in driver.said
    assert [*temporary.glob("rlinf-async-*")] == []
    assert job.summary.outcome == "stopped"
    assert job.summary.error is None
    done, noted = job.summary.iterations, job.note["version"]
    assert done == booked(job) >= 5
    last = done - done % 2
    assert noted in (last - 2, last)  # the last one may not have been complete yet
    iterations, end = a_few_more(job)
    job.succeed("--resume", *PROCESS, "--cluster.backend", "local", *end)
    job.check_records(iterations, STEPS, resumed=True)
    assert job.trained_in_trace()[0] == noted


NEVER = ("--training.checkpoint_every", 0)
"""Checkpoints after the last iteration, and when they are requested."""


def test_sigterm_writes_a_checkpoint_of_the_last_step_and_the_run_can_be_resumed(
    job: Job, start: Start, temporary: pathlib.Path
) -> None:
    driver = start(*ENDLESS, *NEVER, "--cluster.grace_seconds", GRACE)
    driver.until(lambda: booked(job) >= 5, "five iterations")
    driver.terminate()
    assert driver.wait() == 143
    assert "Traceback" not in driver.said
    assert [*temporary.glob("rlinf-async-*")] == []
    assert (job.summary.outcome, job.summary.error) == ("terminated", None)
    done = job.summary.iterations
    assert done == booked(job) >= 5
    assert job.note["version"] == done
    assert checkpoints(job) == {f"version-{done:06d}"}
    assert (job.out / "timeline.png").exists()
    iterations, end = a_few_more(job)
    assert start(*NEVER, *end).wait() == 0
    job.check_records(iterations, STEPS, resumed=True)
    assert job.trained_in_trace()[0] == done


def test_sigusr1_writes_a_checkpoint_and_the_run_goes_on(job: Job, start: Start) -> None:
    driver = start(*ENDLESS, *NEVER)
    driver.until(lambda: booked(job) >= 3, "three iterations")
    driver.request_checkpoint()
    driver.until(lambda: (job.out / "checkpoints" / "latest.json").exists(), "a checkpoint")
    done = booked(job)
    driver.until(lambda: booked(job) > done + 3, "further iterations")
    driver.kill()
    assert driver.wait() == -9
    assert job.note["version"] >= 3
    assert checkpoints(job) == {f"version-{job.note['version']:06d}"}


def test_sigterm_while_the_workers_start_leaves_nothing_running_and_the_run_can_be_started_again(
    job: Job, start: Start, temporary: pathlib.Path
) -> None:
    driver = start(*ENDLESS, "--cluster.grace_seconds", GRACE)
    driver.until(lambda: any(temporary.glob("rlinf-async-*/driver.sock")), "starting")
    driver.terminate()
    assert driver.wait() == 143
    assert [*temporary.glob("rlinf-async-*")] == []
    iterations, end = a_few_more(job)
    assert start(*end).wait() == 0
    job.check_records(iterations, STEPS, resumed=True)
