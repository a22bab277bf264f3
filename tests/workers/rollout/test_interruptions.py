"""What an interruption and an offload leave: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import random

import pytest

import rlinf_async as ra
from rlinf_async.backends.language import GenerationEngine
from rlinf_async.backends.toy.config import ToyEngineConfig
from rlinf_async.backends.toy.engine import ToyEngine
from rlinf_async.channels.queue import statistics_of
from rlinf_async.messages.language import Request
from rlinf_async.testing import explore, nothing_left_waiting
from tests.backends.requests import request
from tests.workers.rollout.language_kit import SLOW, Channels, Rollout, right, served, update


def test_interrupted_requests_go_on_elsewhere_after_the_tokens_they_have() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, SLOW, count=2)
            await channels.weights.sender.publish(update(0))
            with channels.requests.receiver, channels.samples.sender, channels.taken.sender:
                first = channels.serve(rollout, [0])
                await channels.ask(*(request(index, top_k=index) for index in range(6)))
                await asyncio.sleep(5.5)
                returned = await rollout[0].call(Rollout.interrupt)
                assert returned == 4  # the other two wait in the channel
                assert statistics_of(channels.requests.queue).depth == 6
                await channels.weights.sender.publish(update(1))
                await asyncio.sleep(100)
                assert statistics_of(channels.samples.queue).depth == 0  # it takes none meanwhile
                second = channels.serve(rollout, [1])
                samples = await channels.collect(6)
                for sample in samples.values():
                    right(sample, SLOW)
                assert {one.rollout_rank for one in samples.values()} == {1}
                old = [int((one.generated.version == 0).sum()) for one in samples.values()]
                assert sorted(old) == [0, 0, 6, 6, 6, 6]
                await rollout[0].call(Rollout.resume)
                channels.requests.close()
                [report] = await first
                assert (report.samples, report.handed_back) == (0, 4)
                [report] = await second
                assert report.tokens == 4 * 4 + 2 * 10

    explore(body, seeds=range(40))


def test_two_requests_of_one_name_are_both_handed_back() -> None:
    """As after the death of an episode's worker, whose turn is asked for again."""

    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, SLOW)
            await channels.weights.sender.publish(update(0))
            with channels.requests.receiver, channels.samples.sender, channels.taken.sender:
                serving = channels.serve(rollout)
                await channels.ask(request(7), request(7))
                await asyncio.sleep(5.5)
                assert await rollout[0].call(Rollout.interrupt) == 2
                assert statistics_of(channels.requests.queue).depth == 2
                await rollout[0].call(Rollout.resume)
                channels.requests.close()
                [report] = await serving
                assert (report.samples, report.handed_back) == (2, 2)

    explore(body, seeds=range(40))


def test_an_interruption_at_any_moment_loses_and_doubles_nothing() -> None:
    seeds = iter(range(1000))

    async def body() -> None:
        chance = random.Random(next(seeds))
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, SLOW, count=2)
            with channels.requests.receiver, channels.samples.sender, channels.taken.sender:
                serving = channels.serve(rollout, [0, 1])
                await channels.ask(*(request(i, min_version=i % 2) for i in range(12)))
                await channels.weights.sender.publish(update(0))

                async def interrupt() -> None:
                    for _ in range(3):
                        await asyncio.sleep(chance.uniform(0.0, 8.0))
                        one = rollout[chance.randrange(2)]
                        handing = one.call(Rollout.interrupt)
                        if chance.random() < 0.3:  # it is called off
                            await asyncio.sleep(chance.uniform(0.0, 1.0))
                            handing.cancel()
                            await handing.finished(within=9)
                        else:
                            await handing
                        await asyncio.sleep(chance.uniform(0.0, 3.0))
                        await one.call(Rollout.resume)

                async with asyncio.TaskGroup() as group:
                    group.create_task(interrupt())
                    await asyncio.sleep(chance.uniform(0.0, 20.0))
                    await channels.weights.sender.publish(update(1))
                for sample in (await channels.collect(12)).values():
                    right(sample, SLOW)
                channels.requests.close()
                await serving
            nothing_left_waiting(channels.requests, channels.samples)

    explore(body, seeds=range(60))


class SlowToStart(ToyEngine):
    async def start(self) -> None:
        await asyncio.sleep(7.0)


class BuiltSlowly(Rollout):
    def make_engine(self) -> ToyEngine:
        return SlowToStart(SLOW)


def test_an_interruption_while_the_engine_is_built_again_hands_its_requests_back() -> None:
    async def body() -> None:
        async with served(BuiltSlowly, SLOW) as (channels, rollout, _):
            await channels.ask(*(request(index) for index in range(4)))
            await asyncio.sleep(2.5)
            await rollout[0].call(Rollout.kill_engine)
            await asyncio.sleep(1.0)
            began = asyncio.get_running_loop().time()
            call = rollout[0].call(Rollout.interrupt)
            assert await call == 4
            assert asyncio.get_running_loop().time() - began == pytest.approx(6.5)

    explore(body, seeds=range(20))


def test_some_requests_are_interrupted_by_name_or_by_share_and_the_others_go_on() -> None:
    async def body() -> None:
        async with served(Rollout, SLOW) as (channels, rollout, _):
            await channels.ask(*(request(index) for index in range(4)))
            await asyncio.sleep(3.5)
            first = await rollout[0].call(Rollout.progress)
            assert [one.made for one in first.requests] == [4, 4, 4, 4]
            assert [one.most for one in first.requests] == [
                request(index).sampling.max_tokens - 4 for index in range(4)
            ]
            names = [one.name for one in first.requests]
            assert await rollout[0].call(Rollout.interrupt, [names[1], "no request"]) == 1
            assert await rollout[0].call(Rollout.interrupt, share=0.5) == 2
            assert statistics_of(channels.requests.queue).depth == 3
            left = await rollout[0].call(Rollout.progress)
            assert len(left.requests) == 1
            await channels.collect(1)  # it takes none meanwhile
            assert statistics_of(channels.requests.queue).depth == 3
            await rollout[0].call(Rollout.resume)
            for sample in (await channels.collect(3)).values():
                right(sample, SLOW)
            assert (await rollout[0].call(Rollout.progress)).samples == 4

    explore(body, seeds=range(20))


def test_what_is_handed_back_comes_before_what_was_not_taken() -> None:
    async def body() -> None:
        async with served(Rollout, SLOW) as (channels, rollout, _):
            await channels.ask(*(request(index) for index in range(8)))
            await asyncio.sleep(2.5)
            assert await rollout[0].call(Rollout.interrupt) == 4
            back = [await channels.requests.receiver.get() for _ in range(8)]
            assert [one.index for one in back] == [request(index).index for index in range(8)]
            assert [_made(one) > 0 for one in back] == [True] * 4 + [False] * 4

    explore(body, seeds=range(20))


def test_an_instance_that_is_offloaded_hands_over_what_it_has_where_that_is_asked() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, SLOW, count=2)
            await channels.weights.sender.publish(update(0))
            with channels.requests.receiver, channels.samples.sender, channels.taken.sender:
                channels.serve(rollout, [0, 1])
                await channels.ask(*(request(index) for index in range(6)))
                await asyncio.sleep(5.5)
                await rollout[0].call(Rollout.stop, hand_back=True)
                samples = await channels.collect(6)
                for sample in samples.values():
                    right(sample, SLOW)
                    assert sample.rollout_rank == 1

    explore(body, seeds=range(20))


class Stalled(ToyEngine):
    """Makes a few tokens of each response, and none of them whole."""

    MADE = 3

    async def _advance(self) -> None:
        behind = [row for row in self._running if row.made < self.MADE]
        for row in behind:
            row.made += 1
            row.versions.append(self.version)
        if not behind:
            await self._changed.wait()


class FirstStalls(Rollout):
    """Rank 0 ends no response."""

    def make_engine(self) -> GenerationEngine:
        return super().make_engine() if self.rank else Stalled(ToyEngineConfig())


async def test_a_request_carries_its_partial_between_processes() -> None:
    async with ra.Cluster.process() as cluster:
        channels = Channels(cluster)
        config = ToyEngineConfig()
        rollout = await cluster.launch(FirstStalls, config, count=2)
        await channels.weights.sender.publish(update(0))
        with channels.requests.receiver, channels.samples.sender, channels.taken.sender:
            first = channels.serve(rollout, [0])
            await channels.ask(*(request(index, max_tokens=100, top_k=index) for index in range(6)))
            begun: list[Request] = []
            while len(begun) < 6:
                under_way = await rollout[0].call(Rollout.partial_requests)
                begun = [one for one in under_way if _made(one) == Stalled.MADE]
            count = await rollout[0].call(Rollout.interrupt)
            assert count == 6
            back = [await channels.requests.receiver.get() for _ in range(count)]
            assert [_made(one) for one in back] == [Stalled.MADE] * 6
            await channels.ask(*back)
            second = channels.serve(rollout, [1])
            for sample in (await channels.collect(6)).values():
                right(sample, config)
                assert sample.rollout_rank == 1
            await rollout[0].call(Rollout.resume)
            channels.requests.close()
            await first
            await second


def _made(request: Request) -> int:
    """Tokens that it has."""
    return 0 if request.partial is None else len(request.partial.token_ids)


def test_offloading_finishes_what_is_here_and_takes_nothing_until_resume() -> None:
    async def body() -> None:
        async with served(Rollout, SLOW) as (channels, rollout, serving):
            await channels.ask(*(request(index) for index in range(6)))
            await asyncio.sleep(0.5)
            await rollout[0].call(Rollout.stop)
            assert statistics_of(channels.samples.queue).depth == 4
            await channels.weights.sender.publish(update(1))
            await asyncio.sleep(100)
            assert statistics_of(channels.samples.queue).depth == 4
            assert await rollout[0].call(Rollout.version) == 0
            await rollout[0].call(Rollout.resume)
            await channels.collect(6)
            channels.requests.close()
            [report] = await serving
            assert report.version == 1

    explore(body, seeds=range(20))


def test_offloading_or_onloading_twice_is_harmless() -> None:
    async def body() -> None:
        async with served(Rollout, SLOW) as (channels, rollout, serving):
            await channels.taken.receiver.get()
            await rollout[0].call(Rollout.resume)
            await asyncio.gather(*(rollout[0].call(Rollout.stop) for _ in range(2)))
            await channels.weights.sender.publish(update(1))
            await rollout[0].call(Rollout.stop)
            assert await rollout[0].call(Rollout.version) == 0
            await asyncio.gather(*(rollout[0].call(Rollout.resume) for _ in range(2)))
            await channels.ask(request(0, min_version=1))
            await channels.collect(1)
            channels.requests.close()
            [report] = await serving
            assert report.version == 1

    explore(body, seeds=range(20))


def test_a_worker_that_nobody_lets_go_on_is_found_to_be_stuck() -> None:
    async def body() -> None:
        async with ra.Cluster.local(deadlock_after=0.2) as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, SLOW)
            await channels.weights.sender.publish(update(0))
            channels.serve(rollout)
            await rollout.call(Rollout.stop)
            await channels.ask(request(0))
            await channels.samples.receiver.get()

    with pytest.raises(ra.Deadlock, match="'samples'"):
        ra.run(body())
