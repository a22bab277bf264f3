"""Reward workers are replaced 50 times in a run: nothing is lost, doubled, or late."""

from __future__ import annotations

import asyncio

import pytest

import rlinf_async as ra
from rlinf_async.channels.queue import statistics_of
from rlinf_async.messages.language import Outcome, Sample, Scored
from rlinf_async.rewards import Answer
from rlinf_async.testing import ExactlyOnce, explore
from rlinf_async.workers.reward import RewardConfig, RewardWorker
from tests.workers.reward.kit import Channels, sample

SCORING = 1.0
"""seconds, of virtual time"""
SWAPS = 50
SAMPLES = 400


class Slow(RewardWorker):
    """Takes a second for each sample, with as many at a time as it has processes."""

    def __init__(self, config: RewardConfig, reward: float) -> None:
        super().__init__(config)
        self._reward = reward
        self._free = asyncio.Semaphore(config.processes)

    async def score(self, sample: Sample) -> Outcome:
        async with self._free:
            await asyncio.sleep(SCORING)
        return Scored(reward=self._reward)


async def largest_gap(swaps: int, workers: int, pause: float) -> float:
    """Seconds between two scores, at most, while workers are replaced again and again."""
    once = ExactlyOnce[str]()
    clock = asyncio.get_running_loop().time
    config = RewardConfig(processes=2)
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rewards = await cluster.launch(Slow, config, 0.0, count=workers, name="Reward")
        running = channels.start(rewards)
        names = [sample(number) for number in range(SAMPLES)]
        for one in names:
            once.sent(one.request.name)
        await channels.put(*names)

        async def swap() -> None:
            for number in range(swaps):
                await asyncio.sleep(pause)
                await rewards.replace(Slow, config, float(number + 1))

        swapping = asyncio.create_task(swap())
        gaps: list[float] = []
        newest = 0.0
        last = clock()
        for _ in range(SAMPLES):
            scored = await channels.next()
            once.received(scored.sample.request.name)
            gaps.append(clock() - last)
            last = clock()
            assert isinstance(scored.outcome, Scored)
            newest = max(newest, scored.outcome.reward)
        await swapping
        channels.samples.close()
        await running
        assert rewards.replaced == swaps * workers
        assert statistics_of(channels.samples.queue).redelivered == 0
        assert newest >= swaps / 2
    once.check()
    return max(gaps)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("pause", [0.0, 0.7])
def test_fifty_swaps_lose_nothing_and_pause_for_no_longer_than_one_scoring(
    workers: int, pause: float
) -> None:
    [undisturbed] = explore(lambda: largest_gap(0, workers, pause), seeds=[1])
    [swapped] = explore(lambda: largest_gap(SWAPS, workers, pause), seeds=[1])
    assert swapped - undisturbed <= SCORING + 0.01


@pytest.mark.parametrize("loop_kind", ["uvloop"])
async def test_samples_that_processes_score_are_scored_once_though_workers_are_replaced(
    loop_kind: str,
) -> None:
    once = ExactlyOnce[str]()
    verifier = "tests.workers.reward.test_replaced:halves"
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rewards = await cluster.launch(RewardWorker, RewardConfig(processes=2))
        running = channels.start(rewards)
        names = [sample(number, "tests.rewards.verifiers:length") for number in range(60)]
        for one in names:
            once.sent(one.request.name)
        await channels.put(*names)
        preloaded = RewardConfig(processes=1, preload=(verifier,))
        values = set[float]()
        swapping = asyncio.create_task(rewards.replace(RewardWorker, preloaded, verifier))
        for _ in names[:-1]:
            scored = await channels.next()
            once.received(scored.sample.request.name)
        await swapping
        await channels.put(sample(1000))
        once.sent(sample(1000).request.name)
        for _ in range(2):
            scored = await channels.next()
            once.received(scored.sample.request.name)
            assert isinstance(scored.outcome, Scored)
            values.add(scored.outcome.reward)
        assert 0.5 in values  # whatever the sample's record says
        channels.samples.close()
        await running
    once.check()


def halves(answer: Answer) -> float:
    """A verifier that takes the place of another."""
    return 0.5
