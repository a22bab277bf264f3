"""Runs whose transitions get other goals in hindsight."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from tests.jobs.embodied_sac.kit import STEPS, Job
from tests.jobs.embodied_sac.test_runs import PROCESS, Killer
from tests.jobs.killing import nothing_left_behind
from tests.workers.replay import test_hindsight as hindsight

ROAD = ("--env.id", "", "--env.entry_point", f"{hindsight.__name__}:Broad", "--env.kwargs.ends", 1)
GOALS = (*ROAD, "--replay.hindsight", "future")
POOL = ("--env.simulator", "pool")
WORKERS = ("--cluster.env_workers", 2, "--env.envs", 2, "--env.stages", 1)


def road(env: Any, seed: int) -> Any:
    """A scripted policy, and a good one."""
    return lambda seen: np.clip(seen["desired_goal"] - seen["achieved_goal"], -1.0, 1.0)


def check_store(job: Job, count: int) -> None:
    """Each step is there once, in its episode, and followed by what its episode showed next."""

    def column(name: str, dtype: Any = np.float32) -> Any:
        found = np.fromfile(job.out / "replay" / f"{name}.bin", dtype)
        return found.reshape(-1, 4) if "observation" in name else found

    numbers = np.arange(count - 80, count)
    slots = numbers % len(column("reward"))
    episode = column("episode", np.int64)[slots]
    seen, following = column("observation")[slots], column("next_observation")[slots]
    ended = column("discount")[slots] == 0.0
    assert ended.any()
    for one in np.unique(episode):
        steps = np.flatnonzero(episode == one)
        np.testing.assert_array_equal(seen[steps[1:]], following[steps[:-1]])
        assert not ended[steps[:-1]].any()
        length = seen[steps, 3]  # steps of the episode
        np.testing.assert_array_equal(length, length[0] + np.arange(len(steps)))
        np.testing.assert_array_equal(following[steps, 3], length + 1)
    assert len(np.unique(np.concatenate([seen, numbers[:, None]], 1), axis=0)) == 80


@pytest.mark.parametrize(
    "form", [(), ("--cluster.rollout_workers", 1), POOL], ids=["together", "apart", "pool"]
)
def test_a_run_exchanges_goals_and_goes_on(job: Job, form: tuple[object, ...]) -> None:
    job.succeed(*GOALS, *form, "--training.total_steps", 4 * STEPS)
    job.check_books(4)
    check_store(job, 4 * STEPS)
    job.succeed(*GOALS, *form, "--resume")
    job.check_books(6)
    check_store(job, 6 * STEPS)
    assert [*job.store.going_on] == ["0/0", "0/1"]


def test_demonstrations_memory_and_n_steps_go_with_it(job: Job) -> None:
    script = ("--demonstrations.policy", f"{__name__}:road", "--demonstrations.episodes", 2)
    form = ("--replay.storage", "memory", "--replay.n_step", 3)
    job.succeed(*GOALS, *script, *form, "--training.total_steps", 4 * STEPS)
    job.check_books(4)
    assert {row["demonstrations_share"] for row in job.iterations} == {"", "0.5"}
    job.succeed(*GOALS, *script, *form, "--resume")
    job.check_books(6)


def test_killed_workers_lose_no_step_and_store_none_twice(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(monkeypatch)
    killer.victims = {1: "Replay[0]", 2: "Env[0]", 4: "Replay[0]"}
    with nothing_left_behind():
        summary = job.succeed(*GOALS, *PROCESS, *WORKERS, "--training.total_steps", 8 * STEPS)
    assert summary.restarts == {"Replay[0]": 2, "Env[0]": 1}
    job.check_books(8)
    check_store(job, 8 * STEPS)
    assert job.store.going_on["0/0"].incarnation == 1
    assert killer.dead_letters == []


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--replay.hindsight_share", 0.5),
            "hindsight_share: 0.5 was given, but no goals are exch",
        ),
        (
            (*GOALS, "--replay.sampling", "prioritized"),
            "replay.hindsight: 'future', but with replay.sampling = 'prioritized'",
        ),
        (
            (*GOALS, "--curriculum.levels", "[{ends = 1}, {ends = 2}]"),
            "replay.hindsight: 'future', but with curriculum.levels nobody knows",
        ),
        ((*GOALS, "--replay.hindsight_share", 0.01), "0.01 of 16 transitions are none"),
        ((*GOALS, "--replay.hindsight_share", 1.5), "hindsight_share is 1.5; it must be at most 1"),
        (("--replay.hindsight", "future"), "env.id: env Pendulum-v1 is no goal environment: it sh"),
        (("--replay.hindsight", "past"), "replay.hindsight"),
        ((*GOALS, "--env.simulator", "vector"), "with env.simulator = 'vector' what a step pays"),
        (
            (*GOALS, "--env.envs", 1, "--env.stages", 1, "--env.control.hz", 100),
            "with env.control.hz what a step pays",
        ),
        (
            (*GOALS, *PROCESS, "--cluster.placement.env.python", sys.executable),
            "replay.hindsight: 'future', but the environments have a Python of their own",
        ),
        (
            (*ROAD[:3], f"{hindsight.__name__}:mute", "--replay.hindsight", "final"),
            "hindsight:mute is no goal environment: it has no compute_reward",
        ),
    ],
)
def test_goals_that_nobody_could_exchange_are_named(
    job: Job, words: tuple[object, ...], message: str
) -> None:
    for command in (("check", job.file), ("train", job.file, "--out", job.out)):
        ended = job.command(*command, *words)
        assert ended.code == 2, ended.err
        [line] = ended.err.splitlines()
        assert message in line
    assert not job.out.exists()


def test_rewards_that_are_not_those_of_goals_end_the_run(job: Job) -> None:
    ended = job.train(*GOALS, "--env.kwargs.extra", 0.5)
    assert ended.code == 1
    assert "other rewards than that in 16 of 16 steps" in ended.err
