"""Random episodes over real rollout workers, while everything dies and moves."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.backends.toy.config import ToyEngineConfig
from rlinf_async.backends.toy.engine import response_length, response_tokens
from rlinf_async.channels.queue import statistics_of
from rlinf_async.episodes import Episode, tool
from rlinf_async.messages.language import Failed, Request, Sample, Sampling, Scored
from rlinf_async.testing import run
from rlinf_async.workers.episode import EpisodeConfig, EpisodeWorker
from tests.backends.requests import request
from tests.workers.episode.kit import Acting, replaced, task, wait
from tests.workers.rollout import language_kit
from tests.workers.rollout.language_kit import Rollout, update

ENGINE = ToyEngineConfig(slots=3, seconds_per_step=0.1, mean_tokens=8)
MOST = 24
"""tokens of an answer"""


@tool(seconds=1)
async def break_down() -> str:
    """Fail."""
    raise OSError("out of order")


async def wanders(episode: Episode) -> float:
    """Turns, tools that work, fail and hang, forks and errors, as the task's number says."""
    chance = random.Random(episode.task.index)
    chats = [episode.chat(tools=[wait, break_down])]
    for _ in range(chance.randrange(1, 7)):
        chat = chance.choice(chats)
        turn = await chat.turn()
        turn.reward = 0.5 if chance.random() < 0.2 else None
        await asyncio.sleep(chance.choice([0.0, chance.uniform(0.0, 3.0)]))
        seconds, breaks = chance.uniform(0.0, 2.0), chance.random() < 0.3
        try:
            chat.say(await (break_down() if breaks else wait(seconds)), "tool")
        except OSError as error:
            chat.say(f"error: {error}", "tool")
        if chance.random() < 0.3:
            chats.append(chat.fork())
    if chance.random() < 0.1:
        raise LookupError("lost the thread")
    return float(episode.turns)


def drawn(one: Request, turn: int) -> tuple[int, ...]:
    """The tokens of a turn: the toy engine draws by the seed of the request alone."""
    seed = int(np.random.SeedSequence((one.seed, turn)).generate_state(1)[0])
    asked = request(seed=seed, max_tokens=MOST)
    length = min(response_length(ENGINE, seed), MOST)
    return tuple(response_tokens(ENGINE, asked, length).tolist())


def check(sample: Sample, asked: Request) -> None:
    """The episode is whole, and has what was drawn for it, and nothing else."""
    made, record = sample.generated, sample.episode
    assert record is not None
    assert made.drawn is not None or record.turns == 1
    spans = [tuple(made.token_ids[one.start : one.stop].tolist()) for one in sample.turns]
    assert Counter(spans) == Counter(drawn(asked, turn) for turn in range(1, record.turns + 1))
    mask = np.zeros(len(made.token_ids), np.bool_)
    for one in sample.turns:
        mask[one.start : one.stop] = True
    np.testing.assert_array_equal(made.drawn_mask, mask)
    assert made.version[mask].min() >= asked.min_version
    assert set(made.version[~mask].tolist()) <= {-1}
    if isinstance(sample.outcome, Failed):
        assert "lost the thread" in sample.outcome.error
    else:
        assert sample.outcome == Scored(reward=float(record.turns))


class World:
    """Two episode workers and two rollout workers, and what befalls them."""

    def __init__(self, cluster: ra.Cluster, chance: random.Random) -> None:
        self.chance = chance
        self.tasks = cluster.channel(Request, name="tasks", capacity=1000, max_deliveries=1000)
        self.episodes = cluster.channel(Sample, name="episodes", capacity=1000)
        self.around = language_kit.Channels(cluster)
        for one in (self.around.requests, self.around.samples):
            one.queue.max_deliveries = 1000
        self.acting: list[Any] = []
        self.serving: list[Any] = []

    async def start(self, cluster: ra.Cluster) -> None:
        """Start all of them, with weights of version 0."""
        config = EpisodeConfig(run="wanders", concurrent=5, max_turns=99)
        self.workers = await cluster.launch(Acting, wanders, config, count=2)
        self.rollouts = await cluster.launch(Rollout, ENGINE, count=2)
        self.acting = [self._act(rank) for rank in range(2)]
        self.serving = [self.around.serve(self.rollouts, [rank]) for rank in range(2)]
        await self.around.weights.sender.publish(update(0))

    def _act(self, rank: int) -> Any:
        ends = (
            self.tasks.receiver,
            self.around.requests.sender,
            self.around.samples.receiver,
            self.episodes.sender,
        )
        return self.workers.call_on([rank], EpisodeWorker.run, *ends)

    async def disturb(self) -> None:
        """Kill, interrupt, or bring new weights."""
        rank = self.chance.randrange(2)
        rollout = self.rollouts[rank]
        match self.chance.randrange(4):
            case 0:
                self.acting[rank].cancel()
                await self.acting[rank].finished(within=1)
                self.acting[rank] = self._act(rank)
            case 1:
                await rollout.call(Rollout.interrupt)
                await asyncio.sleep(self.chance.uniform(0.0, 1.0))
                await rollout.call(Rollout.resume)
            case 2:
                self.serving[rank].cancel()
                await self.serving[rank].finished(within=1)
                self.serving[rank] = self.around.serve(self.rollouts, [rank])
            case _:
                await rollout.call(Rollout.stop, hand_back=True)
                await asyncio.sleep(self.chance.uniform(0.0, 1.0))
                await rollout.call(Rollout.resume)


async def wander(seed: int, count: int) -> None:
    """Run so many random episodes, and check each of them."""
    chance = random.Random(seed)
    tasks = {}
    for number in range(count):
        sampling = Sampling(max_tokens=MOST)
        one = replaced(task(number, f"{number}?"), seed=1000 * seed + number, sampling=sampling)
        tasks[one.name] = one
    async with ra.Cluster.local() as cluster:
        world = World(cluster, chance)
        await world.start(cluster)
        around = world.around
        with (
            world.tasks.receiver, around.requests.sender, around.requests.receiver,
            around.samples.sender, around.samples.receiver, world.episodes.sender,
            around.taken.sender,
        ):  # fmt: skip
            for one in tasks.values():
                await world.tasks.sender.put(one)
            found: dict[str, Sample] = {}

            async def collect() -> None:
                while len(found) < count:
                    sample = await world.episodes.receiver.get()
                    found[sample.request.name] = sample

            collecting = asyncio.create_task(collect())
            while not collecting.done():
                await asyncio.wait([collecting], timeout=chance.uniform(0.0, 4.0))
                if not collecting.done():
                    await world.disturb()
            await collecting
            world.tasks.sender.close()
            for acting in world.acting:
                await acting
            around.requests.close()
            for serving in world.serving:
                await serving
        assert found.keys() == tasks.keys()
        for name, sample in found.items():
            check(sample, tasks[name])
        left = [statistics_of(one.queue) for one in (world.tasks, around.requests, world.episodes)]
        assert [one.depth + one.leases_out for one in left[:2]] == [0, 0]
        assert statistics_of(around.samples.queue).leases_out == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_episodes_come_once_each_with_what_was_drawn_for_them(seed: int) -> None:
    run(wander(seed, 50), max_steps=100_000_000)
