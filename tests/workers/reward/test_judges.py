"""Samples of asynchronous verifiers: as many at a time as there is room, each scored once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal

import psutil
import pytest

import rlinf_async as ra
from rlinf_async.channels.queue import statistics_of
from rlinf_async.messages.language import JudgeUse, Outcome, Sample, Scored
from rlinf_async.testing import ExactlyOnce, explore, wait_all_blocked
from rlinf_async.workers.reward import RewardConfig, RewardWorker
from tests.workers.reward.kit import Channels, custom, sample

NAMED = "tests.rewards.verifiers"


def config(*preload: str, processes: int = 1, calls: int = 256, cache: int = 0) -> RewardConfig:
    names = tuple(f"{NAMED}:{one}" for one in preload)
    return RewardConfig(
        processes=processes, calls=calls, cache=cache, time_limit=60.0, preload=names
    )


async def test_a_worker_takes_as_many_samples_as_may_be_open_in_its_process() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rewards = await cluster.launch(RewardWorker, config("meets", calls=100))
        running = channels.start(rewards)
        await channels.put(*(custom(at, "meets", 100) for at in range(200)))
        scored = [await channels.next() for _ in range(200)]
        assert {one.sample.request.group for one in scored} == set(range(200))
        assert all(isinstance(one.outcome, Scored) for one in scored)
        assert [one.judge for one in scored] == [JudgeUse(calls=1)] * 200
        channels.samples.close()
        [report] = await running
        assert report.judges == JudgeUse(calls=200)
        assert (report.scored, report.samples) == (200, 200)


async def test_a_worker_takes_no_more_samples_than_there_is_room() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rewards = await cluster.launch(RewardWorker, config("meets", calls=10))
        running = channels.start(rewards)
        await channels.put(*(custom(at, "meets", 11) for at in range(30)))
        await wait_all_blocked()
        assert statistics_of(channels.samples.queue).leases_out == 12  # two wait for room
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        seen = statistics_of(channels.samples.queue)
        assert (seen.depth, seen.leases_out) == (30, 0)


async def test_the_same_answers_are_judged_once_and_the_others_cost_nothing() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rewards = await cluster.launch(RewardWorker, config("costly", cache=100))
        running = channels.start(rewards)
        await channels.put(*(custom(at, "costly") for at in range(12)))
        scored = [await channels.next() for _ in range(12)]
        costs = [one.outcome.cost for one in scored if isinstance(one.outcome, Scored)]
        assert sorted(costs) == [0.0] * 11 + [0.25]
        channels.samples.close()
        [report] = await running
        assert report.judges == JudgeUse(calls=1, cache_hits=11)


async def test_samples_of_functions_tell_nothing_of_calls() -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rewards = await cluster.launch(RewardWorker, config())
        running = channels.start(rewards)
        await channels.put(sample(0), custom(1, "length"))
        scored = [await channels.next() for _ in range(2)]
        assert [one.judge for one in scored] == [None, None]
        channels.samples.close()
        await running


@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_dies_or_is_replaced_each_sample_is_scored_once(seed: int) -> None:
    choice = random.Random(seed)
    once = ExactlyOnce[str]()
    settings = config("length_later", processes=2, calls=20)
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rewards = await cluster.launch(RewardWorker, settings)
        running = channels.start(rewards)
        names = [custom(at, "length_later") for at in range(300)]
        for one in names:
            once.sent(one.request.name)
        await channels.put(*names)

        async def disturb() -> None:
            for _ in range(2):
                for process in _scorers():
                    if choice.random() < 0.5:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(process, signal.SIGKILL)
                await asyncio.sleep(choice.random() * 0.05)
                await rewards.replace(RewardWorker, settings)

        disturbing = asyncio.create_task(disturb())
        for _ in names:
            scored = await channels.next()
            once.received(scored.sample.request.name)
            assert scored.outcome == Scored(reward=1.0)
        await disturbing
        channels.samples.close()
        await running
    once.check()


def _scorers() -> list[int]:
    """Scoring processes of this one."""
    found = []
    for one in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "rlinf_async.rewards.process" in " ".join(one.cmdline()):
                found.append(one.pid)
    return found


class Waits(RewardWorker):
    """Judges each sample in a second of virtual time, as if an asynchronous verifier did."""

    async def setup(self) -> None:
        await super().setup()
        self._pool.asynchronous.add("exact")

    async def score(self, sample: Sample) -> Outcome:
        await asyncio.sleep(1.0)
        return Scored(reward=1.0)


async def seconds_for(samples: int, calls: int, workers: int) -> float:
    clock = asyncio.get_running_loop().time
    once = ExactlyOnce[str]()
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rewards = await cluster.launch(Waits, config(calls=calls), count=workers)
        names = [sample(at) for at in range(samples)]
        for one in names:
            once.sent(one.request.name)
        await channels.put(*names)
        channels.samples.close()
        began = clock()
        reports = await channels.start(rewards)
        async for scored in channels.scored.receiver:
            once.received(scored.sample.request.name)
        assert sum(report.samples for report in reports) == samples
        once.check()
        return clock() - began


@pytest.mark.parametrize(("samples", "calls", "workers"), [(256, 256, 1), (60, 18, 2), (40, 8, 1)])
def test_all_that_there_is_room_for_is_judged_in_the_time_of_one(
    samples: int, calls: int, workers: int
) -> None:
    """A worker has ``calls`` samples open, and two beside them, which this one scores, too."""
    took = explore(lambda: seconds_for(samples, calls, workers), seeds=range(3))
    rounds = -(-samples // (workers * (calls + 2)))
    assert all(rounds <= seconds < rounds + 0.1 for seconds in took)
