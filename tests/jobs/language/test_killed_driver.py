"""The process that a user starts, killed at any moment, and started again."""

from __future__ import annotations

import pathlib
from functools import partial

import pytest

from tests.jobs.language.kit import Job
from tests.jobs.processes import Start

ITERATIONS = 60
"""So many that no run ends before this process, held up for a second, has killed it."""
PROCESS = ("--cluster.backend", "process", "--training.iterations", ITERATIONS)
AHEAD = ("--training.max_staleness", 1, "--training.checkpoint_every", 4)


@pytest.fixture
def start(job: Job, start_driver: Start) -> Start:
    """Starts the job with ``--resume``."""
    command = ("train", job.file, "--out", job.out, "--resume", *PROCESS, *AHEAD)
    return partial(start_driver, *command)


def test_a_killed_driver_leaves_no_worker_and_the_run_comes_to_its_end(
    job: Job, start: Start, temporary: pathlib.Path
) -> None:
    def booked() -> int:
        path = job.out / "metrics.csv"
        return len(path.read_text().splitlines()) - 1 if path.exists() else 0

    driver = start()
    driver.until(lambda: booked() > 6, "six iterations and the evaluation before them")
    driver.kill()
    assert driver.wait() == -9  # once nobody of its session is left
    assert [*temporary.glob("rlinf-async-*")] == []
    assert start().wait() == 0
    summary = job.summary
    assert summary.outcome == "finished"
    assert summary.iterations == ITERATIONS
    assert summary.samples == sum(summary.outcomes.values()) == 8 * ITERATIONS
    assert [row["iteration"] for row in job.iterations] == [str(n) for n in range(ITERATIONS)]
