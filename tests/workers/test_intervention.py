"""A person who may act in place of the policy: whose action is executed and recorded, and what
comes of an answer that is late."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.config import ConfigError
from rlinf_async.embodied import (
    EmbodiedConfig,
    EmbodiedTrainingConfig,
    EnvConfig,
    ReplayConfig,
    SacConfig,
    SacTrainingConfig,
)
from rlinf_async.messages.embodied import (
    GOES_ON,
    Actions,
    Collect,
    Intervention,
    Proposal,
    Trajectory,
    Verdict,
)
from rlinf_async.testing import explore
from rlinf_async.workers.base import WorkerDied
from rlinf_async.workers.env import EnvReport, EnvWorker
from rlinf_async.workers.intervention import Attention, InterventionWorker
from rlinf_async.workers.replay.store import transitions_of
from tests.workers.env.toy import Channels, ToyRollout, counting, toy_action, weights

HERE = "tests.workers.test_intervention"


def at_the_start(observation: Any, proposed: Any) -> Any:
    """Acts at the first step of each episode."""
    return np.array([-5.0], np.float32) if observation[1] == 0 else None


async def at_the_start_later(observation: Any, proposed: Any) -> Any:
    await asyncio.sleep(0)
    return at_the_start(observation, proposed)


class Later:
    """A person who is no function, and whose answer is awaited all the same."""

    async def __call__(self, observation: Any, proposed: Any) -> Any:
        return await at_the_start_later(observation, proposed)


later = Later()


def no_action(observation: Any, proposed: Any) -> Any:
    return np.zeros(3, np.float32)


def not_finite(observation: Any, proposed: Any) -> Any:
    return np.array([np.nan], np.float32)


def judges_at_the_second(observation: Any, proposed: Any) -> Any:
    """Ends each episode with its second step; every second one is a success."""
    return Verdict(bool(observation[0] % 2 == 0), [-5.0]) if observation[1] == 1 else None


def is_not_sure(observation: Any, proposed: Any) -> Any:
    return Verdict("perhaps")  # type: ignore[arg-type]


def dies(observation: Any, proposed: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


async def collected(
    person: str, *, transitions: bool = True, unjudged: str = "", simulator: str = "single"
) -> tuple[list[Trajectory], EnvReport]:
    """One ticket of 6 steps in 2 environments of one stage."""
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        proposals = cluster.channel(Proposal, name="proposals", capacity=4, max_deliveries=3)
        interventions = cluster.channel(Intervention, name="interventions", capacity=4)
        wanted = msgspec.structs.replace(counting(envs=2, stages=1), simulator=simulator)
        envs = await cluster.launch(EnvWorker, wanted, person_seconds=60.0)
        people = await cluster.launch(InterventionWorker, person, unjudged=unjudged)
        rollout = await cluster.launch(ToyRollout, None)
        serving = rollout.call(
            ToyRollout.serve,
            channels.observations.receiver,
            channels.actions.sender,
            channels.weights.receiver,
        )
        watching = people.call(InterventionWorker.serve, proposals.receiver, interventions.sender)
        collecting = envs.call(
            EnvWorker.collect,
            channels.tickets.receiver,
            channels.observations.sender,
            channels.actions.receiver,
            channels.trajectories.sender,
            proposals.sender,
            interventions.receiver,
        )
        await channels.weights.sender.publish(weights(0))
        await channels.issue(
            [Collect(iteration=0, steps=6, min_version=0, transitions=transitions)]
        )
        (report,) = await collecting
        made = channels.collected()
        await watching
        await serving
        return made, report


@pytest.mark.parametrize("person", ["at_the_start", "at_the_start_later", "later"])
def test_the_action_of_the_person_is_executed_and_recorded(person: str) -> None:
    (made,), report = asyncio.run(collected(f"{HERE}:{person}"))
    first = made.observation[..., 1] == 0
    assert made.intervened is not None
    np.testing.assert_array_equal(made.intervened, first)
    own = np.stack([toy_action(row, 0) for row in made.observation])
    np.testing.assert_array_equal(made.action, np.where(first[..., None], -5.0, own))
    # The environment pays 10 x the action that it gets, and the number of the step.
    np.testing.assert_array_equal(
        made.reward, made.action[..., 0] * 10 + made.observation[..., 1] + 1
    )
    assert (report.env_steps, made.late_interventions, made.unanswered) == (12, 0, 0)
    stored = transitions_of(made, n_step=1, gamma=0.9)
    np.testing.assert_array_equal(stored.action, made.action.reshape(-1, 1))
    np.testing.assert_array_equal(stored.reward, made.reward.reshape(-1))


@pytest.mark.parametrize("simulator", ["single", "pool"])
def test_a_person_ends_episodes_and_says_what_they_were(simulator: str) -> None:
    person = f"{HERE}:judges_at_the_second"
    (made,), report = asyncio.run(collected(person, simulator=simulator))
    # Left alone, odd episodes terminate after three steps, even ones are cut after two.
    shown = [[episode, at] for episode in (1, 2, 3) for at in (0, 1)]
    np.testing.assert_array_equal(made.observation[:, 0], shown)
    second = made.observation[..., 1] == 1
    np.testing.assert_array_equal(made.terminated, second)
    assert not made.truncated.any()
    np.testing.assert_array_equal(made.reward[second], made.observation[..., 0][second] % 2 == 0)
    np.testing.assert_array_equal(made.action[second], [[-5.0]] * 6)
    own = made.action[..., 0] * 10 + 1
    np.testing.assert_array_equal(made.reward[~second], own[~second])
    assert made.episode_success == [False, False, True, True, False, False]
    assert made.episode_length == [2] * 6
    assert made.episode_return[2] == made.reward[2, 0] + 1.0
    assert report.episodes == 6
    stored = transitions_of(made, n_step=1, gamma=0.9)
    np.testing.assert_array_equal(stored.discount == 0.0, second.reshape(-1))


def test_a_verdict_is_refused_where_nobody_can_end_an_episode() -> None:
    with pytest.raises(ra.WorkerError, match=r"InterventionError.*judges_at.*Verdict.*: no reason"):
        asyncio.run(collected(f"{HERE}:judges_at_the_second", unjudged="no reason"))
    many = EnvConfig(id="CartPole-v1", simulator="vector")
    job = EmbodiedConfig(
        env=many, training=EmbodiedTrainingConfig(total_steps=8, steps_per_iteration=8)
    )
    assert job.unjudged == "env.simulator = 'vector' ends episodes by itself, and nobody else"
    sac = SacConfig(
        env=EnvConfig(id="FetchReach-v4"),
        training=SacTrainingConfig(total_steps=8, steps_per_iteration=8, learning_starts=4),
        replay=ReplayConfig(hindsight="future"),
    )
    assert sac.unjudged.startswith("with replay.hindsight = 'future' the goals say what is paid")


def test_a_person_who_always_dies_ends_the_run_by_name() -> None:
    async def main() -> None:
        async with ra.Cluster.process() as cluster:
            proposals = cluster.channel(Proposal, name="proposals", max_deliveries=3)
            interventions = cluster.channel(Intervention, name="interventions")
            people = await cluster.launch(
                InterventionWorker, f"{HERE}:dies", restart=ra.Restart(max=1)
            )
            await proposals.sender.put(asked_at(0, 1))
            await people.call(InterventionWorker.serve, proposals.receiver, interventions.sender)

    with pytest.raises(WorkerDied, match="InterventionWorker"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("person", "said"),
    [
        ("no_action", r"shape \[3\]"),
        ("not_finite", "NaN or infinity"),
        ("is_not_sure", "success is True or False"),
    ],
)
def test_what_is_no_action_is_named(person: str, said: str) -> None:
    with pytest.raises(ra.WorkerError, match=rf"InterventionError.*{said}"):
        asyncio.run(collected(f"{HERE}:{person}"))


def test_a_person_is_refused_where_actions_are_taken_for_draws_of_the_policy() -> None:
    with pytest.raises(ra.WorkerError, match=r"EnvError.*draws of the policy"):
        asyncio.run(collected(f"{HERE}:at_the_start", transitions=False))


OBSERVATION = np.zeros((2, 2), np.float32)


def asked_at(stage: int, sequence: int) -> Proposal:
    return Proposal(
        env_rank=0,
        stage=stage,
        incarnation=0,
        sequence=sequence,
        observation=OBSERVATION,
        action=np.zeros((2, 1), np.float32),
    )


def policy_answer(number: int) -> Actions:
    zeros = np.zeros(2, np.float32)
    action = np.full((2, 1), number, np.float32)
    return Actions(
        incarnation=0,
        sequence=number,
        action=action,
        log_prob=zeros,
        value=zeros,
        final_value=None,
        version=0,
    )


def act(question: Proposal, value: float) -> Intervention:
    return Intervention(
        incarnation=question.incarnation,
        sequence=question.sequence,
        action=np.full((2, 1), value, np.float32),
        acts=np.array([True, False]),
        verdict=np.array([GOES_ON, 1]),
    )


Behaviour = Callable[[Any, Any], Coroutine[Any, Any, None]]


async def steps(
    person: Behaviour, count: int = 4, **kwargs: Any
) -> tuple[list[list[float]], tuple[int, int], list[float]]:
    """What is executed in steps of a quarter of a second, by a person with this behaviour, with a
    deadline of 1 s; answers that were late, and questions without one; seconds of each step."""
    async with ra.Cluster.local() as cluster:
        proposals = cluster.channel(Proposal, name="proposals", capacity=3)
        interventions = cluster.channel(Intervention, name="interventions", capacity=8)
        attention = Attention(0, 0, 0, seconds=1.0, **kwargs)
        done: list[list[float]] = []
        took: list[float] = []
        clock = asyncio.get_running_loop().time
        behaving = asyncio.create_task(person(proposals.receiver, interventions.sender))
        ends = proposals.sender, interventions.receiver
        for number in range(1, count + 1):
            before = clock()
            answer = await attention.act(*ends, OBSERVATION, policy_answer(number))
            took.append(clock() - before)
            await asyncio.sleep(0.25)  # of virtual time: the step of the environment
            assert answer.action is not None
            assert answer.intervened is not None
            if answer.verdict is not None:  # as late as the action, or as early
                assert answer.verdict.tolist() == [GOES_ON, 1]
            assert (answer.verdict is None) is (not answer.intervened.any())
            np.testing.assert_array_equal(answer.intervened, answer.action[:, 0] != number)
            done.append(answer.action[:, 0].tolist())
        attention.close()
        behaving.cancel()
        await asyncio.gather(behaving, return_exceptions=True)
        return done, attention.take_counts(), took


async def test_the_person_sees_the_newest_question_of_each_stage() -> None:
    async with ra.Cluster.local() as cluster:
        proposals = cluster.channel(Proposal, name="proposals")
        interventions = cluster.channel(Intervention, name="interventions")
        people = await cluster.launch(InterventionWorker, f"{HERE}:at_the_start")
        with proposals.sender as sender:
            for stage, sequence in ((0, 1), (1, 7), (0, 2), (0, 3)):
                await sender.put(asked_at(stage, sequence))
        [report] = await people.call(
            InterventionWorker.serve, proposals.receiver, interventions.sender
        )
        assert (report.questions, report.skipped, report.acted) == (2, 2, 4)
        said = [interventions.receiver.get_nowait(key=f"0/{stage}") for stage in (0, 1)]
        assert [one.sequence for one in said] == [3, 7]


def test_a_late_answer_is_not_mixed_with_the_next_step() -> None:
    async def slow_once(asked: Any, says: Any) -> None:
        first = await asked.get()
        second = await asked.get()  # the first step is over
        await says.put(act(first, 101.0), key="0/0")
        await says.put(act(second, 102.0), key="0/0")
        async for question in asked:
            await says.put(act(question, 100.0 + question.sequence), key="0/0")

    async def body() -> None:
        done, counts, _ = await steps(slow_once)
        assert done == [[1.0, 1.0], [102.0, 2.0], [103.0, 3.0], [104.0, 4.0]]
        assert counts == (1, 1)

    explore(body, seeds=range(20))


def test_a_person_who_reads_nothing_costs_three_deadlines_and_no_more() -> None:
    async def away(asked: Any, says: Any) -> None:
        await asyncio.Event().wait()

    async def body() -> None:
        done, counts, took = await steps(away, 20)
        assert done == [[float(n)] * 2 for n in range(1, 21)]
        assert counts == (0, 3)
        assert took == pytest.approx([1.0] * 3 + [0.0] * 17)

    explore(body, seeds=range(5))


def test_a_person_who_was_away_is_asked_again_once_an_answer_comes() -> None:
    async def back_after_five_seconds(asked: Any, says: Any) -> None:
        first = await asked.get()
        await asyncio.sleep(5.0)
        await says.put(act(first, 666.0), key="0/0")
        async for question in asked:
            await says.put(act(question, 100.0 + question.sequence), key="0/0")

    async def body() -> None:
        done, counts, took = await steps(back_after_five_seconds, 15)
        mine = [one[0] for one in done if one[0] >= 100.0]
        assert [one[0] for one in done] == [*map(float, range(1, 16 - len(mine))), *mine]
        assert mine == [104.0 + number for number in range(len(mine))]
        assert len(mine) >= 3
        assert counts == (3, 3)
        assert sum(took) == pytest.approx(3.0)

    explore(body, seeds=range(20))


@pytest.mark.parametrize("room", [1, 2])
def test_a_person_who_was_away_is_asked_again_where_there_was_no_room_for_questions(
    room: int,
) -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            proposals = cluster.channel(Proposal, name="proposals", capacity=room)
            interventions = cluster.channel(Intervention, name="interventions", capacity=8)
            attention = Attention(0, 0, 0, seconds=1.0)
            ends = proposals.sender, interventions.receiver
            for number in range(1, 6):
                await attention.act(*ends, OBSERVATION, policy_answer(number))
            asked, says = proposals.receiver, interventions.sender
            while True:  # the last question may still wait for room
                question = await asked.get()
                await says.put(act(question, 101.0), key="0/0")
                if question.sequence == 3:
                    break
            acting = asyncio.create_task(attention.act(*ends, OBSERVATION, policy_answer(6)))
            question = await asked.get()
            await says.put(act(question, 106.0), key="0/0")
            answer = await acting
            assert answer.action is not None
            assert answer.action[:, 0].tolist() == [106.0, 6.0]
            attention.close()

    explore(body, seeds=range(10))


def test_answers_to_an_earlier_life_and_second_answers_are_dropped() -> None:
    async def twice(asked: Any, says: Any) -> None:
        async for question in asked:
            earlier = act(question, 666.0)
            earlier.incarnation = -1
            await says.put(earlier, key="0/0")
            await says.put(act(question, 100.0 + question.sequence), key="0/0")
            await says.put(act(question, 777.0), key="0/0")

    async def body() -> None:
        done, (_, unanswered), _ = await steps(twice)
        assert done == [[100.0 + n, float(n)] for n in range(1, 5)]
        assert unanswered == 0

    explore(body, seeds=range(20))


async def test_who_only_says_what_they_would_do_changes_no_action() -> None:
    async def says(asked: Any, answers: Any) -> None:
        async for question in asked:
            said = act(question, 100.0)
            said.says = True
            await answers.put(said, key="0/0")

    async with ra.Cluster.local() as cluster:
        proposals = cluster.channel(Proposal, name="proposals")
        interventions = cluster.channel(Intervention, name="interventions")
        attention = Attention(0, 0, 0, seconds=60.0)
        saying = asyncio.create_task(says(proposals.receiver, interventions.sender))
        ends = proposals.sender, interventions.receiver
        answer = await attention.act(*ends, OBSERVATION, policy_answer(1))
        assert answer.action is not None
        assert answer.label is not None
        assert answer.intervened is not None
        assert answer.action[:, 0].tolist() == [1.0, 1.0]
        assert answer.label[0, 0] == 100.0
        assert answer.intervened.tolist() == [True, False]
        saying.cancel()


def test_what_is_recorded_is_clipped_as_the_environment_clips() -> None:
    async def far(asked: Any, says: Any) -> None:
        async for question in asked:
            await says.put(act(question, -99.0), key="0/0")

    async def body() -> None:
        done, _, _ = await steps(far, limit=1.0)
        assert [row[0] for row in done] == [-1.0] * 4

    explore(body, seeds=range(3))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_wrong_deadline_is_named(seconds: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        Attention(0, 0, 0, seconds=seconds)
