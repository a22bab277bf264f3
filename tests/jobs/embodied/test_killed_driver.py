"""The process that a user starts, killed or interrupted at any moment, and started again."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from functools import partial

import pytest

from tests.jobs.embodied.kit import Job
from tests.jobs.processes import Start

ITERATIONS = 60
"""So many that no run ends before this process, held up for a second, has killed it."""
PROCESS = ("--cluster.backend", "process", "--training.total_steps", 64 * ITERATIONS)


@pytest.fixture
def start(job: Job, start_driver: Start) -> Start:
    """Starts the job with ``--resume`` and more."""
    return partial(start_driver, "train", job.file, "--out", job.out, "--resume", *PROCESS)


def reached(job: Job, iterations: int) -> bool:
    """Whether so many iterations are booked."""
    path = job.out / "metrics.csv"
    return path.exists() and len(path.read_text().splitlines()) > iterations


def test_killed_while_starting_training_and_saving_a_run_still_comes_to_its_end(
    job: Job, start: Start, temporary: pathlib.Path
) -> None:
    def socket() -> bool:
        return any(temporary.glob("rlinf-async-*/driver.sock"))

    def saving() -> bool:
        """A checkpoint after the first is there, and perhaps not noted yet."""
        return any(
            name.name.strip(".") > "version-000004"
            for name in (job.out / "checkpoints").glob("*version-*")
        )

    moments: dict[str, Callable[[], bool]] = {
        "starting": socket,
        "training": lambda: reached(job, 3),
        "saving": saving,
    }
    for moment, condition in moments.items():
        before = set(temporary.glob("rlinf-async-*"))
        driver = start("--training.checkpoint_every", 4)
        driver.until(condition, moment)
        driver.kill()
        assert driver.wait() == -9
        if moment != "starting":  # then there may be no worker yet that could clean up
            assert set(temporary.glob("rlinf-async-*")) == before, moment
    assert start("--training.checkpoint_every", 4).wait() == 0
    job.check_books(ITERATIONS, 64, resumed=True)
    assert job.summary.outcome == "finished"


def test_ctrl_c_stops_the_run_leaves_nothing_and_the_run_can_be_resumed(
    job: Job, start: Start, temporary: pathlib.Path
) -> None:
    driver = start()
    driver.until(lambda: reached(job, 3), "three iterations")
    driver.interrupt()
    assert driver.wait() == 130
    assert driver.said.splitlines()[-1] == "interrupted"
    assert "Traceback" not in driver.said
    assert [*temporary.glob("rlinf-async-*")] == []
    assert job.summary.outcome == "stopped"
    assert job.summary.error is None
    done = job.summary.iterations
    assert 3 <= done < ITERATIONS
    job.succeed("--resume", *PROCESS, "--cluster.backend", "local")
    job.check_books(ITERATIONS, 64, resumed=True)
    assert job.trained_in_trace()[0] == done - done % 2
