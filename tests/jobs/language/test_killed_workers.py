"""Workers of a language run that are killed in the middle of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.jobs.killing import nothing_left_behind
from tests.jobs.language.killing import Killer
from tests.jobs.language.kit import Job

PROCESS = ("--cluster.backend", "process")


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    return Killer(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_left(job: Job) -> Iterator[None]:
    with nothing_left_behind():  # after `job`: its folder must not be made in the one here
        yield


def check_records(job: Job, iterations: int) -> None:
    """Every sample was trained once, whatever died."""
    assert job.summary.outcome == "finished"
    assert job.summary.iterations == iterations
    assert job.summary.samples == sum(job.summary.outcomes.values()) == 8 * iterations
    assert [row["iteration"] for row in job.iterations] == [str(n) for n in range(iterations)]
    assert [int(float(row["samples"])) for row in job.iterations] == [
        8 * count for count in range(1, iterations + 1)
    ]


def test_killed_rollout_reward_and_inference_workers_are_replaced_and_nothing_is_doubled(
    job: Job, killer: Killer
) -> None:
    killer.victims = {1: "Rollout[0]", 3: "Reward[0]", 5: "Inference[0]"}
    summary = job.succeed(
        *PROCESS,
        *("--cluster.inference_workers", 1, "--training.iterations", 8),
        *("--training.max_staleness", 1),  # so that there is something under way to lose
    )
    assert summary.restarts == {"Rollout[0]": 1, "Reward[0]": 1, "Inference[0]": 1}
    check_records(job, 8)
    assert killer.dead_letters == []


def test_a_killed_rollout_worker_of_a_real_model_comes_back_with_the_newest_weights(
    tiny: Job, killer: Killer
) -> None:
    killer.victims = {1: "Rollout[0]"}
    summary = tiny.succeed(
        *PROCESS,
        "--data.verifier",
        "tests.jobs.language.verifiers:letters",
        "--evaluation.samples",
        0,
    )
    assert summary.restarts == {"Rollout[0]": 1}
    assert summary.staleness is not None
    assert summary.staleness.max == 0
    check_records(tiny, 4)


@pytest.mark.parametrize("victim", ["Actor[0]", "Critic[0]"])
def test_a_killed_learner_ends_the_run_with_its_name_and_the_run_can_be_resumed(
    job: Job, killer: Killer, victim: str
) -> None:
    killer.victims = {2: victim}
    gae = ("--actor.advantage.name", "gae", "--cluster.critics", 1)
    ended = job.train(*PROCESS, *gae)
    assert ended.code == 1
    assert ended.err.count("error:") == 1
    assert f"{victim} failed in its process" in ended.err
    assert "killed by SIGKILL" in ended.err
    assert "Traceback" not in ended.err
    assert job.summary.outcome == "failed"
    assert victim in str(job.summary.error)
    job.succeed("--resume", "--cluster.backend", "local", *gae)
    check_records(job, 4)


def test_a_checkpoint_that_a_killed_run_never_named_is_replaced_with_its_critic(job: Job) -> None:
    gae = ("--actor.advantage.name", "gae", "--cluster.critics", 1)
    job.succeed(*gae)
    (job.out / "checkpoints" / "latest.json").unlink()
    job.succeed("--resume", *gae)
    check_records(job, 4)
