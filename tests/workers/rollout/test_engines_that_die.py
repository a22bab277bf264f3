"""What was asked of an engine that dies, or of a worker that does, is answered."""

from __future__ import annotations

import asyncio
import random
from typing import ClassVar

import msgspec
import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.backends.language import EngineDied
from rlinf_async.backends.toy.engine import ToyEngine, token_log_probs
from rlinf_async.channels.queue import statistics_of
from rlinf_async.messages.language import Generated, Request
from rlinf_async.testing import explore, run
from rlinf_async.workers.rollout.language import LanguageRolloutConfig
from tests.backends.requests import request
from tests.workers.rollout.language_kit import SLOW, Channels, Rollout, right, served, update


def test_an_engine_that_dies_is_built_again_and_everything_is_answered() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, SLOW)
            serving = channels.serve(rollout)
            await channels.weights.sender.publish(update(5))
            await channels.ask(*(request(index) for index in range(8)))
            for _ in range(2):
                await asyncio.sleep(6.5)
                await rollout[0].call(Rollout.kill_engine)
            samples = await channels.collect(8)
            for sample in samples.values():
                right(sample, SLOW)
                assert set(sample.generated.version.tolist()) == {5}  # the weights came back
            await rollout[0].call(Rollout.kill_engine)
            response = np.arange(3, dtype=np.int32)
            [[found]] = await rollout.call(Rollout.log_probs, [(response, response)])
            np.testing.assert_array_equal(found, token_log_probs(response, np.full(3, 5, np.int32)))
            channels.requests.close()
            [report] = await serving
            assert (report.samples, report.engine_restarts) == (8, 3)

    explore(body, seeds=range(40))


def test_an_engine_that_dies_within_a_load_is_built_again_with_the_newest_weights() -> None:
    config = msgspec.structs.replace(SLOW, load_seconds=4.0)

    async def body() -> None:
        async with served(Rollout, config) as (channels, rollout, serving):
            await channels.ask(*(request(index) for index in range(8)))
            await asyncio.sleep(6.5)
            await channels.weights.sender.publish(update(1))  # is loaded at second 7
            await asyncio.sleep(2.0)
            await rollout[0].call(Rollout.kill_engine)  # dies in the middle of the load
            told = [await channels.taken.receiver.get()]
            while told[-1].version < 1:
                told.append(await channels.taken.receiver.get())
            await asyncio.sleep(1.5)
            await rollout[0].call(Rollout.kill_engine)  # and its successor while it generates
            for version in (2, 3):
                await asyncio.sleep(1.0)
                await channels.weights.sender.publish(update(version))
            await rollout[0].call(Rollout.kill_engine)  # and the next one while it is given 1
            for sample in (await channels.collect(8)).values():
                right(sample, config)
                assert (np.diff(sample.generated.version) >= 0).all()
            channels.requests.close()
            [report] = await serving
            assert (report.samples, report.engine_restarts, report.version) == (8, 3, 3)
            while statistics_of(channels.taken.queue).depth:
                told.append(await channels.taken.receiver.get())
            versions = [one.version for one in told]
            assert versions == sorted(versions)
            assert versions[-1] == 3

    explore(body, seeds=range(40))


def test_an_engine_that_dies_too_often_ends_the_run_and_the_requests_are_still_there() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            config = LanguageRolloutConfig(engine_restarts=1)
            rollout = await cluster.launch(Rollout, SLOW, config)
            with channels.requests.receiver, channels.samples.sender, channels.taken.sender:
                serving = channels.serve(rollout)
                await channels.weights.sender.publish(update(0))
                await channels.ask(*(request(index) for index in range(4)))

                async def kill() -> None:
                    for _ in range(2):
                        await asyncio.sleep(3.5)
                        await rollout[0].call(Rollout.kill_engine)

                killing = asyncio.create_task(kill())
                with pytest.raises(ra.WorkerError, match=r"the toy engine (was|is)") as got:
                    await serving
                await killing
                assert isinstance(got.value.__cause__, EngineDied)
                assert statistics_of(channels.requests.queue).depth == 4

    run(body())


class Slow(ToyEngine):
    """Takes a while to start, and cannot do anything before that, as real ones."""

    held: ClassVar[set[ToyEngine]] = set()
    """with processes that nobody has ended"""
    ready = False

    async def start(self) -> None:
        self.held.add(self)
        await asyncio.sleep(7.0)
        self.ready = True

    async def generate(self, request: Request) -> Generated:
        self._check_alive()
        assert self.ready
        return await super().generate(request)

    async def close(self) -> None:
        await super().close()
        self.held.discard(self)


class SlowRollout(Rollout):
    def make_engine(self) -> ToyEngine:
        return Slow(SLOW)


def test_an_engine_whose_start_is_cancelled_is_closed_and_the_next_call_makes_another() -> None:
    async def body() -> None:
        Slow.held.clear()
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            once = LanguageRolloutConfig(engine_restarts=1)
            rollout = await cluster.launch(SlowRollout, SLOW, once)
            await channels.weights.sender.publish(update(0))
            with channels.requests.receiver, channels.samples.sender, channels.taken.sender:
                first = channels.serve(rollout)
                await channels.ask(*(request(index) for index in range(4)))
                await asyncio.sleep(2.5)
                await rollout[0].call(Rollout.kill_engine)
                await asyncio.sleep(1.0)
                assert len(Slow.held) == 1  # it is starting
                first.cancel()
                await first.finished(within=9)
                assert Slow.held == set()
                second = channels.serve(rollout)
                for sample in (await channels.collect(4)).values():
                    right(sample, SLOW)
                channels.requests.close()
                [report] = await second
                assert (report.samples, report.engine_restarts) == (4, 1)
        assert Slow.held == set()

    explore(body, seeds=range(20))


def test_whoever_takes_a_dead_workers_requests_answers_them() -> None:
    seeds = iter(range(1000))
    redelivered: list[int] = []

    async def body() -> None:
        chance = random.Random(next(seeds))
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, SLOW, count=2)
            await channels.weights.sender.publish(update(0))
            with channels.requests.receiver, channels.samples.sender, channels.taken.sender:
                first = channels.serve(rollout, [0])
                await channels.ask(*(request(index) for index in range(10)))
                await asyncio.sleep(chance.uniform(0.5, 25))
                first.cancel()
                await first.finished(within=9)
                second = channels.serve(rollout, [1])
                for sample in (await channels.collect(10)).values():
                    right(sample, SLOW)
                redelivered.append(statistics_of(channels.requests.queue).redelivered)
                channels.requests.close()
                await second

    explore(body, seeds=range(40))
    assert sum(redelivered) > 40
