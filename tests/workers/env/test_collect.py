"""What env workers hand on, step for step, and what happens when they are interrupted."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.channels import Receiver, Sender
from rlinf_async.channels.queue import statistics_of
from rlinf_async.messages.embodied import (
    Actions,
    Collect,
    Observations,
    Trajectory,
    stage_key,
)
from rlinf_async.testing import explore, nothing_left_waiting, wait_all_blocked
from rlinf_async.workers.env import (
    EnvConfig,
    EnvError,
    EnvFailed,
    EnvReport,
    EnvWorker,
    RolloutGone,
)
from rlinf_async.workers.rollout.policy import RolloutReport
from tests.workers.env.toy import (
    Channels,
    Gated,
    ThreadRollout,
    ToyRollout,
    by_hand,
    counting,
    toy_action,
    weights,
)


def ticket(iteration: int, steps: int, min_version: int = 0) -> Collect:
    return Collect(iteration=iteration, steps=steps, min_version=min_version)


def start(envs: ra.WorkerGroup[EnvWorker], channels: Channels) -> ra.GroupCall[list[EnvReport]]:
    return envs.call(
        EnvWorker.collect,
        channels.tickets.receiver,
        channels.observations.sender,
        channels.actions.receiver,
        channels.trajectories.sender,
    )


def serve(
    rollout: ra.WorkerGroup[ToyRollout], channels: Channels
) -> ra.GroupCall[list[RolloutReport]]:
    return rollout.call(
        ToyRollout.serve,
        channels.observations.receiver,
        channels.actions.sender,
        channels.weights.receiver,
    )


def same(trajectory: Trajectory, expected: dict[str, Any]) -> None:
    """Every field that stepping by hand gives is exactly the trajectory's."""
    for name, value in expected.items():
        np.testing.assert_array_equal(getattr(trajectory, name), value, err_msg=name)


async def answer_once(
    question: Observations, actions: Sender[Actions], version: int = 0, **changed: Any
) -> None:
    """Answer a question as `ToyPolicy` would, but for what is changed."""
    rows = len(question.observation)
    final = question.final_observation
    fields: dict[str, Any] = {
        "incarnation": question.incarnation,
        "sequence": question.sequence,
        "action": None if question.value_only else toy_action(question.observation, version),
        "log_prob": None if question.value_only else np.zeros(rows, np.float32),
        "value": np.zeros(rows, np.float32),
        "final_value": None if final is None else np.zeros(len(final), np.float32),
        "version": version,
    }
    key = stage_key(question.env_rank, question.stage)
    await actions.put(Actions(**(fields | changed)), key=key)


async def answer_all(observations: Receiver[Observations], actions: Sender[Actions]) -> None:
    async for question in observations:
        await answer_once(question, actions)


def test_a_trajectory_is_what_stepping_by_hand_gives_under_every_schedule() -> None:
    tickets = [ticket(0, 7), ticket(1, 4), ticket(2, 6)]

    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            envs = await cluster.launch(EnvWorker, counting(envs=4, stages=2))
            rollout = await cluster.launch(ToyRollout, None)
            serving = serve(rollout, channels)
            collecting = start(envs, channels)
            await channels.weights.sender.publish(weights(3))
            await channels.issue(tickets)
            [report] = await collecting
            await serving
            collected = channels.collected()
            assert [(one.iteration, one.stage) for one in collected] == [
                (iteration, stage) for iteration in range(3) for stage in range(2)
            ]
            for stage in range(2):
                expected = by_hand(2, tickets, version=3)
                for trajectory, values in zip(collected[stage::2], expected, strict=True):
                    same(trajectory, values)
                    assert set(trajectory.version.tolist()) == {3}
                    np.testing.assert_array_equal(
                        trajectory.log_prob, trajectory.action[..., 0] + 7
                    )
            assert report == EnvReport(tickets=3, env_steps=17 * 4, episodes=6 * 4)
            nothing_left_waiting(channels.tickets, channels.observations, channels.actions)

    explore(body, seeds=range(40))


async def test_episodes_end_and_begin_in_one_step_and_only_cuts_have_a_final_value() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        await collect_toy(cluster, channels, [ticket(0, 6)], envs=1)
        [made] = channels.collected()
        # Episode 1 terminates at its step 3, episode 2 is cut at its step 2, episode 3 goes on.
        assert made.observation[:, 0].tolist() == [[1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [3, 0]]
        assert made.terminated[:, 0].tolist() == [False, False, True, False, False, False]
        assert made.truncated[:, 0].tolist() == [False, False, False, False, True, False]
        assert made.final_value[:, 0].tolist() == [0, 0, 0, 0, 202, 0]
        assert made.value[:, 0].tolist() == [100, 101, 102, 200, 201, 300, 301]
        assert made.episode_length == [3, 2]
        assert made.episode_success == [True, False]
        assert made.observation.dtype == made.reward.dtype == np.float32


async def test_an_episode_cut_in_the_last_step_has_its_final_value_too() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        await collect_toy(cluster, channels, [ticket(0, 5), ticket(1, 1)], envs=1)
        first, second = channels.collected()
        assert first.truncated[-1, 0]
        assert first.final_value[:, 0].tolist() == [0, 0, 0, 0, 202]
        assert first.value[-1, 0] == 300
        assert second.observation[0, 0].tolist() == [3, 0]
        assert not second.final_value.any()


async def collect_toy(
    cluster: ra.Cluster, channels: Channels, tickets: list[Collect], envs: int
) -> EnvReport:
    """Collect with one stage under weights of version 0."""
    workers = await cluster.launch(EnvWorker, counting(envs=envs, stages=1))
    rollout = await cluster.launch(ToyRollout, None)
    await channels.weights.sender.publish(weights(0))
    serving = serve(rollout, channels)
    collecting = start(workers, channels)
    await channels.issue(tickets)
    [report] = await collecting
    await serving
    return report


def test_with_no_staleness_allowed_every_step_is_exactly_on_policy() -> None:
    explore(lambda: _train(max_staleness=0), seeds=range(40))


def test_staleness_never_exceeds_what_is_allowed() -> None:
    explore(lambda: _train(max_staleness=2), seeds=range(40))


async def _train(max_staleness: int, iterations: int = 5, ranks: int = 2) -> None:
    """A runtime and an actor that count only."""
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        envs = await cluster.launch(EnvWorker, counting(), actor_ranks=2, count=ranks)
        rollout = await cluster.launch(ToyRollout, None, count=2)
        serving = serve(rollout, channels)
        collecting = start(envs, channels)
        await channels.issue(
            [ticket(n, 3, max(0, n - max_staleness)) for n in range(iterations)], ranks
        )
        await channels.weights.sender.publish(weights(0))
        arrived: Counter[tuple[int, int]] = Counter()
        for iteration, actor_rank in itertools.product(range(iterations), (0, 1)):
            while arrived[iteration, actor_rank] < ranks:
                made = await channels.trajectories.receiver.get(key=actor_rank)
                assert made.stage == actor_rank  # an actor rank has one stage of each env worker
                assert made.iteration - max_staleness <= made.version.min()
                assert made.version.max() <= made.iteration
                arrived[made.iteration, actor_rank] += 1
            if actor_rank == 1:
                await channels.weights.sender.publish(weights(iteration + 1))
        await collecting
        await serving


async def test_one_stage_steps_on_while_the_other_waits_for_its_actions() -> None:
    steps = 5
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        envs = await cluster.launch(EnvWorker, counting())
        collecting = start(envs, channels)
        await channels.issue([ticket(0, steps)])
        held: list[Observations] = []
        answered = 0
        while answered < steps + 1:  # stage 0 never gets an answer meanwhile
            question = await channels.observations.receiver.get()
            if question.stage == 0:
                held.append(question)
            else:
                await answer_once(question, channels.actions.sender)
                answered += 1
        assert [question.sequence for question in held] == [1]
        assert not channels.collected()
        await answer_once(held[0], channels.actions.sender)
        for _ in range(steps):
            question = await channels.observations.receiver.get()
            await answer_once(question, channels.actions.sender)
        await collecting
        assert len(channels.collected()) == 2


async def test_a_reset_that_takes_long_stalls_no_other_worker() -> None:
    Gated.gate.clear()
    slow = EnvConfig(entry_point="tests.workers.env.toy:make_gated", envs=2)
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        stalled = await cluster.launch(EnvWorker, slow, name="Slow")
        others = await cluster.launch(EnvWorker, counting(), count=2)
        rollout = await cluster.launch(ToyRollout, None)
        await channels.weights.sender.publish(weights(0))
        serving = serve(rollout, channels)
        with channels.observations.sender, channels.actions.receiver:
            collecting = start(stalled, channels)
            rest = others.call_on(
                [1],
                EnvWorker.collect,
                channels.tickets.receiver,
                channels.observations.sender,
                channels.actions.receiver,
                channels.trajectories.sender,
            )
            for rank in (0, 1):
                await channels.tickets.sender.put(ticket(0, 4), key=rank)
            first = [await channels.trajectories.receiver.get(key=0) for _ in range(2)]
            assert {one.env_rank for one in first} == {1}
            Gated.gate.set()
            channels.tickets.close()
            await collecting
            await rest
        await serving
        assert {one.env_rank for one in channels.collected()} == {0}


async def test_answers_to_other_questions_are_dropped_and_counted() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        envs = await cluster.launch(EnvWorker, counting(stages=1, envs=1))
        collecting = start(envs, channels)
        await channels.issue([ticket(0, 1)])
        question = await channels.observations.receiver.get()
        wrong = np.full((1, 1), 99, np.float32)
        sender = channels.actions.sender
        await answer_once(question, sender, sequence=question.sequence - 1, action=wrong)
        await answer_once(question, sender, incarnation=7, action=wrong)
        await answer_once(question, sender)
        await answer_once(question, sender, action=wrong)  # of a rollout worker that was restarted
        await answer_once(await channels.observations.receiver.get(), sender)
        [report] = await collecting
        assert report.dropped_answers == 3
        [made] = channels.collected()
        assert made.action.tolist() == [[[1.0]]]


def test_a_worker_that_is_cancelled_anywhere_loses_no_ticket() -> None:
    seeds = iter(range(1000))
    redelivered: list[int] = []

    async def body() -> None:
        chance = random.Random(next(seeds))
        tickets = [ticket(n, 3) for n in range(4)]
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            worker = await cluster.launch(EnvWorker, counting())
            answers = asyncio.create_task(
                answer_all(channels.observations.receiver, channels.actions.sender)
            )
            with (  # the runtime holds these ends too, so that no channel ends between two calls
                channels.tickets.receiver,
                channels.observations.sender,
                channels.actions.receiver,
                channels.trajectories.sender,
            ):
                await channels.issue(tickets)
                for _ in range(6):
                    collecting = start(worker, channels)
                    for _ in range(200):
                        if collecting.done() or statistics_of(channels.tickets.queue).leases_out:
                            break
                        await asyncio.sleep(0)
                    for _ in range(chance.randrange(60)):
                        await asyncio.sleep(0)
                    collecting.cancel()
                    await collecting.finished(within=9)
                await start(worker, channels)
                collected = channels.collected()
            await answers
            # A ticket that was not acknowledged comes again, and with it its trajectories may.
            found = {(one.iteration, one.stage) for one in collected}
            assert found == {(n, stage) for n in range(4) for stage in range(2)}
            assert all(one.reward.shape == (3, 1) for one in collected)
            redelivered.append(statistics_of(channels.tickets.queue).redelivered)
            nothing_left_waiting(channels.tickets)

    explore(body, seeds=range(100))
    assert sum(redelivered) > 100


def test_rollout_workers_that_are_cancelled_anywhere_change_no_trajectory() -> None:
    seeds = iter(range(1000))
    tickets = [ticket(0, 7), ticket(1, 5)]
    redelivered: list[int] = []

    async def body() -> None:
        chance = random.Random(next(seeds))
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            worker = await cluster.launch(EnvWorker, counting(envs=4))
            rollout = await cluster.launch(ThreadRollout, None)
            await channels.weights.sender.publish(weights(2))
            collecting = start(worker, channels)
            await channels.issue(tickets)
            with channels.observations.receiver, channels.actions.sender:
                for _ in range(8):
                    serving = serve(rollout, channels)
                    for _ in range(10 + chance.randrange(40)):
                        await asyncio.sleep(0)
                    serving.cancel()
                    await serving.finished(within=9)
                serving = serve(rollout, channels)
                await collecting
                redelivered.append(statistics_of(channels.observations.queue).redelivered)
            await serving
            collected = channels.collected()
            for stage in range(2):
                expected = by_hand(2, tickets, version=2)
                for trajectory, values in zip(collected[stage::2], expected, strict=True):
                    same(trajectory, values)

    explore(body, seeds=range(60))
    assert sum(redelivered) > 20


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"fails_at": 4}, "at step 4 of its life and 1 of its episode, raised ZeroDivisionError"),
        ({"pays": float("nan")}, r"at step 1 of its life and 1 of its episode, returned the rew"),
        ({"shows": float("inf")}, "2 values that are NaN or infinite"),
    ],
)
async def test_an_env_that_fails_is_named_with_its_index_step_and_seed(
    kwargs: dict[str, Any], said: str
) -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        worker = await cluster.launch(EnvWorker, counting(**kwargs))
        answers = asyncio.create_task(
            answer_all(channels.observations.receiver, channels.actions.sender)
        )
        collecting = start(worker, channels)
        await channels.issue([ticket(0, 9)])
        with pytest.raises(ra.WorkerError, match=said) as failed:
            await collecting
        assert isinstance(failed.value.__cause__, EnvFailed)
        assert failed.value.failure.message.startswith("env Counting[")
        assert "seed " in failed.value.failure.message
        with pytest.raises(ra.ChannelError, match="env Counting"):
            await answers


async def test_actions_that_do_not_fit_say_what_the_policy_needs() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        worker = await cluster.launch(EnvWorker, counting(stages=1))
        collecting = start(worker, channels)
        await channels.issue([ticket(0, 1)])
        question = await channels.observations.receiver.get()
        await answer_once(question, channels.actions.sender, action=np.zeros((2, 3), np.float32))
        with pytest.raises(ra.WorkerError, match=r"shape \[2, 3\].*take \[2, 1\].*action_size = 1"):
            await collecting


async def test_an_answer_without_actions_is_an_error() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        worker = await cluster.launch(EnvWorker, counting(stages=1))
        collecting = start(worker, channels)
        await channels.issue([ticket(0, 1)])
        question = await channels.observations.receiver.get()
        await answer_once(question, channels.actions.sender, action=None)
        with pytest.raises(ra.WorkerError, match="question for actions") as failed:
            await collecting
        assert isinstance(failed.value.__cause__, EnvError)


async def test_rollout_workers_that_leave_first_are_an_error_and_not_the_end_of_the_tickets() -> (
    None
):
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        worker = await cluster.launch(EnvWorker, counting(stages=1))
        collecting = start(worker, channels)
        await channels.issue([ticket(0, 1)])
        with channels.actions.sender:
            await channels.observations.receiver.get()
            await wait_all_blocked()
        with pytest.raises(ra.WorkerError, match="stage 0/0 waits for its actions") as failed:
            await collecting
        assert isinstance(failed.value.__cause__, RolloutGone)
