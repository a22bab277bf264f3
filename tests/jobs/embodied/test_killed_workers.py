"""Workers that are killed in the middle of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlinf_async.messages.embodied import TrainReport
from rlinf_async.runtime.jobs.embodied.run import EmbodiedRun
from tests.jobs import killing
from tests.jobs.embodied.kit import Job
from tests.jobs.killing import nothing_left_behind

PROCESS = ("--cluster.backend", "process")


class Killer(killing.Killer):
    """Kills workers as soon as a certain iteration is booked.

    The next one may be trained by then, or more of them with ``max_staleness``, but no further one:
    its tickets are issued afterwards.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        write_row = EmbodiedRun._write_row

        def writing(run: EmbodiedRun, report: TrainReport, *rest: Any) -> None:
            write_row(run, report, *rest)
            self._kill(self.victims.pop(report.iteration, None))

        monkeypatch.setattr(EmbodiedRun, "_write_row", writing)


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    return Killer(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_left(job: Job) -> Iterator[None]:
    with nothing_left_behind():  # after `job`: its folder must not be made in the one here
        yield


def test_killed_env_and_rollout_workers_are_replaced_and_nothing_is_lost_or_trained_twice(
    job: Job, killer: Killer
) -> None:
    killer.victims = {1: "Env[0]", 4: "Rollout[0]", 6: "Env[1]"}
    two = ("--cluster.env_workers", 2, "--training.total_steps", 1280)
    summary = job.succeed(*PROCESS, *two, "--training.max_staleness", 1)
    assert summary.restarts == {"Env[0]": 1, "Rollout[0]": 1, "Env[1]": 1}
    job.check_records(10, 128)
    assert killer.dead_letters == []


def test_a_killed_collocated_worker_is_replaced(job: Job, killer: Killer) -> None:
    killer.victims = {1: "Env[0]"}
    summary = job.succeed(*PROCESS, "--cluster.rollout_workers", 0)
    assert summary.restarts == {"Env[0]": 1}
    job.check_records(6, 64)
    assert killer.dead_letters == []


def test_a_killed_actor_ends_the_run_with_its_name_and_the_run_can_be_resumed(
    job: Job, killer: Killer
) -> None:
    killer.victims = {3: "Actor[0]"}
    ended = job.train(*PROCESS)
    assert ended.code == 1
    assert ended.err.count("error:") == 1
    assert "Actor[0] failed in its process" in ended.err
    assert "killed by SIGKILL" in ended.err
    assert "Traceback" not in ended.err
    assert job.summary.outcome == "failed"
    assert "Actor[0]" in str(job.summary.error)
    noted = job.note["version"]
    assert noted in (2, 4)  # the second one is being written, the first one is complete before
    job.succeed("--resume", "--cluster.backend", "local")
    job.check_records(6, 64, resumed=True)
    assert job.trained_in_trace() == [*range(noted, 6)]


def test_a_worker_that_dies_again_and_again_ends_the_run(job: Job, killer: Killer) -> None:
    killer.victims = {1: "Env[0]", 3: "Env[0]"}  # iteration 3 is of the second one
    ended = job.train(*PROCESS, "--cluster.rollout_workers", 0, "--cluster.max_restarts", 1)
    assert ended.code == 1
    assert "Env[0] failed in its process" in ended.err
    assert "killed by SIGKILL" in ended.err
