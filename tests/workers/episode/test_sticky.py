"""Turns go to the engine that drew the one before, and wait for it only while all others are busy,
too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

import rlinf_async as ra
from rlinf_async.backends.toy.config import ToyEngineConfig
from rlinf_async.episodes import Episode
from rlinf_async.messages.language import EngineUse, Request, Sample
from rlinf_async.testing import run
from rlinf_async.workers.episode import EpisodeConfig, EpisodeWorker
from tests.backends.requests import request
from tests.workers.episode.kit import Acting, task, wait
from tests.workers.rollout.language_kit import Channels, Rollout, right, update

ENGINE = ToyEngineConfig(slots=4, seconds_per_step=1.0, mean_tokens=10)
TURNS = 6


async def calls_tools(episode: Episode) -> float:
    """Turns with tools in between that take shorter and longer."""
    chat = episode.chat()
    for number in range(TURNS):
        await chat.turn(8)
        chat.say(await wait(1.0 + (episode.task.index + number) % 7), "tool")
    return 1.0


async def played(
    episodes: int, *, sticky: bool, agent: Callable[[Episode], Awaitable[float]] = calls_tools
) -> list[EngineUse]:
    """Run so many episodes over two rollout workers; what engines did for each."""
    async with ra.Cluster.local() as cluster:
        tasks = cluster.channel(Request, name="tasks", capacity=1000)
        finished = cluster.channel(Sample, name="episodes", capacity=1000)
        around = Channels(cluster, stealing=sticky)
        config = EpisodeConfig(run="agent", max_turns=99)
        workers = await cluster.launch(Acting, agent, config)
        rollouts = await cluster.launch(Rollout, ENGINE, count=2)
        serving = around.serve(rollouts, range(2), sticky=sticky)
        ends = (
            tasks.receiver, around.requests.sender, around.samples.receiver, finished.sender,
        )  # fmt: skip
        acting = workers.call(EpisodeWorker.run, *ends, sticky=sticky)
        await around.weights.sender.publish(update(0))
        with tasks.sender as sender:
            for number in range(episodes):
                await sender.put(task(number))
        found = [await finished.receiver.get() for _ in range(episodes)]
        await acting
        await serving
    return [one.episode.engines for one in found if one.episode is not None]


def moved(episodes: int, *, sticky: bool) -> float:
    """The share of turns after the first that went to another engine."""
    uses = run(played(episodes, sticky=sticky))
    assert len(uses) == episodes
    return sum(one.moved for one in uses) / (episodes * (TURNS - 1))


def test_with_room_at_all_engines_no_turn_goes_to_another_one() -> None:
    assert moved(6, sticky=True) == 0.0
    assert moved(6, sticky=False) > 0.3


def test_of_engines_that_are_always_full_most_turns_stay() -> None:
    assert moved(60, sticky=True) < 0.6 * moved(60, sticky=False)


@asynccontextmanager
async def two_engines() -> AsyncIterator[tuple[Channels, ra.WorkerGroup[Any], list[Any]]]:
    """Two rollout workers that serve by key of their rank."""
    async with ra.Cluster.local() as cluster:
        around = Channels(cluster, stealing=True)
        rollouts = await cluster.launch(Rollout, ENGINE, count=2)
        serving = [around.serve(rollouts, [rank], sticky=True) for rank in range(2)]
        await around.weights.sender.publish(update(0))
        with around.samples.sender, around.taken.sender, around.requests.receiver:
            yield around, rollouts, serving
            around.requests.sender.close()
            for one in serving:
                await one


async def ask(around: Channels, key: int, *requests: Request) -> None:
    for one in requests:
        await around.requests.sender.put(one, key=key)


async def drawn(around: Channels, count: int) -> dict[str, int]:
    """The rank that drew each of so many samples, by name."""
    found = await around.collect(count)
    for one in found.values():
        right(one, ENGINE)
    return {name: one.rollout_rank for name, one in found.items()}


def test_a_busy_engine_keeps_no_request_from_one_that_is_idle() -> None:
    async def body() -> None:
        async with two_engines() as (around, _, _):
            await ask(around, 0, *(request(index) for index in range(6)))
            began = asyncio.get_running_loop().time()
            ranks = await drawn(around, 6)
            assert sorted(ranks.values()) == [0, 0, 0, 0, 1, 1]  # an engine has four slots
            assert asyncio.get_running_loop().time() - began < 30.0

    run(body())


async def stop(rollouts: ra.WorkerGroup[Any], serving: list[Any]) -> None:
    await rollouts[0].call(Rollout.stop, hand_back=True)


async def interrupt(rollouts: ra.WorkerGroup[Any], serving: list[Any]) -> None:
    await rollouts[0].call(Rollout.interrupt)


async def die(rollouts: ra.WorkerGroup[Any], serving: list[Any]) -> None:
    serving[0].cancel()
    await serving.pop(0).finished(within=1)


@pytest.mark.parametrize("leave", [stop, interrupt, die])
def test_what_an_engine_leaves_behind_is_taken_by_another_at_once(leave: Any) -> None:
    async def body() -> None:
        async with two_engines() as (around, rollouts, serving):
            await ask(around, 0, *(request(index) for index in range(3)))
            await asyncio.sleep(2.5)
            await leave(rollouts, serving)
            await ask(around, 0, *(request(index) for index in range(3, 6)))
            assert set((await drawn(around, 6)).values()) == {1}
            if leave is not die:
                await rollouts[0].call(Rollout.resume)
                await ask(around, 0, request(6))
                assert await drawn(around, 1) == {"0/6": 0}

    run(body())


def test_what_an_engine_waits_for_is_told_by_what_comes_next() -> None:
    async def three_turns(episode: Episode) -> float:
        chat = episode.chat()
        for seconds in (10.0, 20.0, 40.0):  # nothing is asked for after the last wait
            await chat.turn(4)
            await asyncio.sleep(seconds)
            chat.say("and?")
        return 1.0

    [use] = run(played(1, sticky=True, agent=three_turns))
    assert use == msgspec.structs.replace(use, moved=0, idle_seconds=30.0)
    assert use.seconds == pytest.approx(30.0 + 3 * 4.0)
