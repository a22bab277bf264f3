"""An actor and a critic that are paired: neither waits for one that failed, or is lost."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from rlinf_async import testing
from rlinf_async.channels import Channel
from rlinf_async.runtime.ray.training import (
    PeerFailed,
    RayTrainGroup,
    RolloutDataError,
    create_placement_group,
)
from rlinf_async.runtime.ray.training.pairs import PairSteps, from_peer
from tests.runtime.ray.training.kit import args, batch, columns

pytestmark = pytest.mark.xdist_group("ray")


def broken(data: dict[str, Any]) -> dict[str, Any]:
    """The same rollout, with a reward too few."""
    return data | {"rewards": data["rewards"][:-1]}


def test_a_failure_of_either_side_ends_the_step_of_the_other(ray: Any) -> None:
    given = args(advantage_estimator="ppo", kl_coef=0.1, critic_lr=2e-3)
    pg = create_placement_group(1)
    actor = RayTrainGroup(given, 1, 1, pg, num_gpus_per_actor=0.4)
    critic = RayTrainGroup(given, 1, 1, pg, num_gpus_per_actor=0.4, role="critic")
    second = None
    first, other = (columns(batch(seed, version=0)) for seed in range(2))
    try:
        ray.get([*actor.async_init(with_ref=True), *critic.async_init()])
        actor.connect(critic)

        training = critic.async_train(0, broken(first)), actor.async_train(0, first)
        with pytest.raises(RolloutDataError, match="rewards has 15 entries"):
            ray.get(training[0])
        with pytest.raises(PeerFailed, match=r"rollout 0: critic\[0\], .*rewards has 15 entries"):
            ray.get(training[1])

        training = critic.async_train(0, first), actor.async_train(0, broken(first))
        with pytest.raises(PeerFailed, match=r"rollout 0: actor\[0\], .*rewards has 15 entries"):
            ray.get(training[0])
        with pytest.raises(RolloutDataError, match="rewards has 15 entries"):
            ray.get(training[1])

        # Other data: what the actor takes is of this attempt, else it would refuse it.
        training = actor.async_train(0, other), critic.async_train(0, other)
        assert [ray.get(one)[0].version for one in training] == [1, 1]

        waiting = actor.async_train(1, first)
        ray.kill(critic.actors[0])
        with pytest.raises(PeerFailed, match=r"rollout 1: critic\[0\], .*its process is lost"):
            ray.get(waiting)
        with pytest.raises(PeerFailed, match=r"rollout 1: critic\[0\], .*its process is lost"):
            ray.get(actor.async_train(1, first))
        critic.shutdown()

        second = RayTrainGroup(given, 1, 1, pg, num_gpus_per_actor=0.4, role="critic")
        ray.get(second.async_init())
        actor.connect(second)
        training = second.async_train(1, other), actor.async_train(1, other)
        assert [ray.get(one)[0].version for one in training] == [1, 2]

        waiting = second.async_train(2, first)
        ray.kill(actor.actors[0])
        with pytest.raises(PeerFailed, match=r"rollout 2: actor\[0\], .*is lost"):
            ray.get(waiting)
    finally:
        for group in (actor, critic, second):
            if group is not None:
                group.shutdown()


def test_a_critic_that_trains_on_does_not_give_its_values_to_the_next_attempt(ray: Any) -> None:
    given = args(advantage_estimator="ppo", critic_lr=2e-3)
    pg = create_placement_group(1)
    actor = RayTrainGroup(given, 1, 1, pg, num_gpus_per_actor=0.4)
    critic = RayTrainGroup(given, 1, 1, pg, num_gpus_per_actor=0.4, role="critic")
    first, other = (columns(batch(seed, version=0)) for seed in range(2))
    try:
        ray.get([*actor.async_init(), *critic.async_init()])
        actor.connect(critic)
        training = critic.async_train(0, first), actor.async_train(0, broken(first))
        assert ray.get(training[0])[0].version == 1  # it needs nothing of its actor
        with pytest.raises(RolloutDataError):
            ray.get(training[1])
        training = critic.async_train(0, other), actor.async_train(0, other)
        assert [ray.get(one)[0].version for one in training] == [2, 1]

        # A rollout that the critic passes over is not waited for, whoever is first.
        alone = actor.async_train(1, first)
        training = critic.async_train(2, first), actor.async_train(2, first)
        with pytest.raises(PeerFailed, match=r"rollout 1: critic\[0\], .*is at a later step"):
            ray.get(alone)
        assert [ray.get(one)[0].version for one in training] == [3, 2]
    finally:
        actor.shutdown()
        critic.shutdown()


def test_calls_of_both_groups_for_a_rollout_are_one_step_and_a_retry_is_another() -> None:
    steps = PairSteps()
    assert [steps.join(role, 0) for role in ("critic", "actor")] == [1, 1]
    assert [steps.join(role, 0) for role in ("actor", "critic")] == [2, 2]


def test_a_side_that_is_called_late_takes_part_in_the_newest_attempt() -> None:
    steps = PairSteps()
    assert [steps.join("critic", 0) for _ in range(2)] == [1, 2]
    assert steps.join("actor", 0) == 2


def test_rollouts_that_are_asked_for_ahead_keep_their_steps() -> None:
    steps = PairSteps()
    assert [steps.join("actor", rollout) for rollout in range(3)] == [1, 2, 3]
    assert [steps.join("critic", rollout) for rollout in range(3)] == [1, 2, 3]


def test_steps_of_both_sides_are_forgotten() -> None:
    steps = PairSteps()
    for rollout in range(100):
        steps.join("critic", rollout)
        steps.join("actor", rollout)
    assert not steps._newest
    assert [steps.join("critic", rollout) for rollout in (100, 101, 100)] == [101, 102, 103]
    assert [steps.join("actor", rollout) for rollout in (101, 100, 101)] == [102, 103, 104]


def test_a_long_wait_for_the_other_side_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        values = Channel(int, name="values of step 7")
        doing = "actor[0] cannot train rollout 3"
        waiting = asyncio.create_task(from_peer("critic[0]", doing, values.receiver.get()))
        await asyncio.sleep(65)  # virtual: the clock jumps
        values.fail("ValueError: no rewards")
        with pytest.raises(
            PeerFailed, match=r"rollout 3: critic\[0\], .*step 7' failed: ValueError: no rewards"
        ):
            await waiting

    with caplog.at_level(logging.WARNING):
        testing.run(main())
    said = [record.getMessage() for record in caplog.records]
    assert [one[: one.index(".")] for one in said] == [
        f"actor[0] cannot train rollout 3 so far: it has waited {seconds} s for critic[0]"
        for seconds in (30, 60)
    ]
