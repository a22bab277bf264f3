"""What is generated when, under which weights, by whom, and what an interruption leaves."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import ClassVar

import msgspec
import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.backends.language import EngineDied, GenerationEngine, PromptTooLong
from rlinf_async.backends.toy.config import ToyEngineConfig
from rlinf_async.backends.toy.engine import ToyEngine
from rlinf_async.backends.toy.responses import response_length, response_tokens, text
from rlinf_async.messages.language import Request, Sample
from rlinf_async.testing import explore, nothing_left_waiting, run, wait_all_blocked
from rlinf_async.workers.rollout.errors import WeightsEnded
from rlinf_async.workers.rollout.language import LanguageRolloutConfig
from tests.backends.requests import request
from tests.workers.rollout.language_kit import Channels, Rollout, update

SLOW = ToyEngineConfig(slots=4, seconds_per_step=1.0, mean_tokens=10)


def right(sample: Sample, config: ToyEngineConfig) -> None:
    """The sample is what the toy engine makes of its request, in however many pieces."""
    asked = sample.request
    length = min(response_length(config, asked.seed), asked.sampling.max_tokens)
    expected = response_tokens(config, asked, length)
    np.testing.assert_array_equal(sample.generated.token_ids, expected)
    assert sample.text == text(expected)
    assert len(sample.generated.version) == len(sample.generated.log_prob) == length
    assert sample.generated.version.min() >= asked.min_version
    assert sample.generated.finish in ("stop", "length")
    assert asked.partial is None


def test_each_sample_goes_on_when_it_is_done() -> None:
    async def body() -> None:
        config = ToyEngineConfig(seconds_per_step=1.0, mean_tokens=20, tail=1.0)
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, config)
            serving = channels.serve(rollout)
            await channels.weights.sender.publish(update(0))
            began = asyncio.get_running_loop().time()
            asked = [request(index, max_tokens=1000) for index in range(8)]
            await channels.ask(*asked)
            channels.requests.close()
            for one in sorted(asked, key=lambda one: response_length(config, one.seed)):
                sample = await channels.samples.receiver.get()
                passed = asyncio.get_running_loop().time() - began
                assert passed == pytest.approx(response_length(config, one.seed))
                assert len(sample.generated.token_ids) == response_length(config, one.seed)
                right(sample, config)
            [report] = await serving
            assert report.samples == 8
            assert report.tokens == sum(response_length(config, one.seed) for one in asked)

    run(body())


def test_a_worker_that_nobody_lets_go_on_is_found_to_be_stuck() -> None:
    async def body() -> None:
        async with ra.Cluster.local(deadlock_after=0.2) as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, SLOW)
            await channels.weights.sender.publish(update(0))
            channels.serve(rollout)
            await rollout.call(Rollout.offload)
            await channels.ask(request(0))
            await channels.samples.receiver.get()

    with pytest.raises(ra.Deadlock, match="'samples'"):
        ra.run(body())


class Rebuilt(Rollout):
    """Tells in which thread its engine is made."""

    made_in: ClassVar[list[int]] = []

    def make_engine(self) -> GenerationEngine:
        """What it imports takes seconds."""
        self.made_in.append(threading.get_ident())
        return super().make_engine()


def test_the_engines_module_is_not_imported_in_the_event_loop() -> None:
    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            await cluster.launch(Rebuilt, ToyEngineConfig())

    asyncio.run(main())
    [thread] = Rebuilt.made_in
    assert thread != threading.get_ident()


def test_of_two_workers_the_faster_one_gets_more() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            await channels.weights.sender.publish(update(0))
            speeds = [1.0, 3.0]
            groups = [
                await cluster.launch(
                    Rollout, ToyEngineConfig(slots=4, seconds_per_step=speed), name=f"of {speed}"
                )
                for speed in speeds
            ]
            servings = [channels.serve(group) for group in groups]
            await channels.ask(*(request(index) for index in range(80)))
            channels.requests.close()
            reports = [(await serving)[0] for serving in servings]
            assert reports[0].samples == pytest.approx(60, abs=4)
            assert reports[0].samples + reports[1].samples == 80

    explore(body, seeds=range(10))


@pytest.mark.parametrize(
    ("slots", "config", "held"),
    [(32, None, 34), (8, None, 8), (32, LanguageRolloutConfig(max_concurrent=32), 32)],
)
def test_one_request_more_is_held_for_every_sixteen_slots(
    slots: int, config: LanguageRolloutConfig | None, held: int
) -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, ToyEngineConfig(slots=slots), config)
            serving = channels.serve(rollout)
            await channels.ask(*(request(index) for index in range(50)))
            await wait_all_blocked()  # without weights none is answered
            assert channels.requests.statistics().depth == 50 - held
            await channels.weights.sender.publish(update(0))
            channels.requests.close()
            [report] = await serving
            assert report.samples == 50

    run(body())


def test_a_request_waits_for_the_weights_that_it_asks_for() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, SLOW)
            serving = channels.serve(rollout)
            await channels.ask(request(0), request(1, min_version=2))
            await wait_all_blocked()
            assert channels.samples.statistics().depth == 0
            await channels.weights.sender.publish(update(0))
            first = await channels.collect(1)
            right(first["0/0"], SLOW)
            await channels.weights.sender.publish(update(2))
            late = (await channels.collect(1))["0/1"]
            assert set(late.generated.version.tolist()) == {2}
            taken = [await channels.taken.receiver.get() for _ in range(2)]
            assert [(one.version, one.checksum) for one in taken] == [(0, 1000), (2, 1002)]
            channels.requests.close()
            [report] = await serving
            assert (report.samples, report.weight_updates, report.version) == (2, 2, 2)
            nothing_left_waiting(channels.requests, channels.samples)

    explore(body, seeds=range(40))


def test_new_weights_come_in_flight_and_no_request_is_dropped() -> None:
    async def body() -> None:
        config = ToyEngineConfig(slots=4, seconds_per_step=1.0, mean_tokens=10, load_seconds=2.0)
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, config)
            serving = channels.serve(rollout)
            await channels.weights.sender.publish(update(0))
            await channels.ask(*(request(index) for index in range(4)))
            await asyncio.sleep(6.5)
            await channels.weights.sender.publish(update(1))
            samples = await channels.collect(4)
            for sample in samples.values():
                right(sample, config)
                versions = sample.generated.version.tolist()
                assert versions == sorted(versions)
                assert set(versions) == {0, 1}
            channels.requests.close()
            await serving

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
                redelivered.append(channels.requests.statistics().redelivered)
                channels.requests.close()
                await second

    explore(body, seeds=range(40))
    assert sum(redelivered) > 40


def test_interrupted_requests_go_on_elsewhere_after_the_tokens_they_have() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, SLOW, count=2)
            await channels.weights.sender.publish(update(0))
            with channels.requests.receiver, channels.samples.sender, channels.taken.sender:
                first = channels.serve(rollout, [0])
                await channels.ask(*(request(index) for index in range(6)))
                await asyncio.sleep(5.5)
                returned = await rollout[0].call(Rollout.interrupt, channels.requests.sender)
                assert returned == 4  # the other two wait in the channel
                assert channels.requests.statistics().depth == 6
                await channels.weights.sender.publish(update(1))
                await asyncio.sleep(100)
                assert channels.samples.statistics().depth == 0  # it takes none meanwhile
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
                        handing = one.call(Rollout.interrupt, channels.requests.sender)
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

    async def close_unfinished(self) -> None:
        """What the end of a call does, if the call could not be told so."""
        assert self._unfinished is not None
        self._unfinished.close()


def test_an_interruption_while_the_engine_is_built_again_hands_its_requests_back() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(BuiltSlowly, SLOW)
            channels.serve(rollout)
            await channels.weights.sender.publish(update(0))
            await channels.ask(*(request(index) for index in range(4)))
            await asyncio.sleep(2.5)
            await rollout[0].call(Rollout.kill_engine)
            await asyncio.sleep(1.0)
            began = asyncio.get_running_loop().time()
            call = rollout[0].call(Rollout.interrupt, channels.requests.sender)
            assert await call == 4
            assert asyncio.get_running_loop().time() - began == pytest.approx(6.5)

    explore(body, seeds=range(20))


def test_an_interruption_whose_channel_is_closed_lets_the_requests_go_on() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            unfinished = cluster.channel(Request, name="unfinished", capacity=1)
            rollout = await cluster.launch(BuiltSlowly, SLOW)
            channels.serve(rollout)
            await channels.weights.sender.publish(update(0))
            await channels.ask(*(request(index) for index in range(4)))
            await asyncio.sleep(2.5)
            interrupting = rollout[0].call(Rollout.interrupt, unfinished.sender)
            await asyncio.sleep(2.0)  # one is in the channel, the others wait for room
            await rollout[0].call(BuiltSlowly.close_unfinished)
            for sample in (await channels.collect(3)).values():
                right(sample, SLOW)
            assert await interrupting == 1

    explore(body, seeds=range(20))


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
            channels.requests.close()
            [report] = await serving
            assert (report.samples, report.engine_restarts) == (8, 2)

    explore(body, seeds=range(40))


def test_an_engine_that_dies_within_a_load_is_built_again_with_the_newest_weights() -> None:
    config = msgspec.structs.replace(SLOW, load_seconds=4.0)

    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, config)
            serving = channels.serve(rollout)
            await channels.weights.sender.publish(update(0))
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
            while channels.taken.statistics().depth:
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
                with pytest.raises(ra.WorkerError, match="the toy engine was killed") as got:
                    await serving
                await killing
                assert isinstance(got.value.__cause__, EngineDied)
                assert channels.requests.statistics().depth == 4

    run(body())


def test_offloading_finishes_what_is_here_and_takes_nothing_until_onload() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, SLOW)
            serving = channels.serve(rollout)
            await channels.weights.sender.publish(update(0))
            await channels.ask(*(request(index) for index in range(6)))
            await asyncio.sleep(0.5)
            await rollout[0].call(Rollout.offload)
            assert channels.samples.statistics().depth == 4
            await channels.weights.sender.publish(update(1))
            await asyncio.sleep(100)
            assert channels.samples.statistics().depth == 4
            assert await rollout[0].call(Rollout.version) == 0
            await rollout[0].call(Rollout.onload)
            await channels.collect(6)
            channels.requests.close()
            [report] = await serving
            assert report.version == 1

    explore(body, seeds=range(20))


def test_offloading_or_onloading_twice_is_harmless() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, SLOW)
            serving = channels.serve(rollout)
            await channels.weights.sender.publish(update(0))
            await channels.taken.receiver.get()
            await rollout[0].call(Rollout.onload)
            await asyncio.gather(*(rollout[0].call(Rollout.offload) for _ in range(2)))
            await channels.weights.sender.publish(update(1))
            await rollout[0].call(Rollout.offload)
            assert await rollout[0].call(Rollout.version) == 0
            await asyncio.gather(*(rollout[0].call(Rollout.onload) for _ in range(2)))
            await channels.ask(request(0, min_version=1))
            await channels.collect(1)
            channels.requests.close()
            [report] = await serving
            assert report.version == 1

    explore(body, seeds=range(20))


def test_a_prompt_that_does_not_fit_ends_the_run_and_is_named() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, ToyEngineConfig(context=16))
            serving = channels.serve(rollout)
            await channels.weights.sender.publish(update(0))
            await channels.ask(request(group=7))
            with pytest.raises(ra.WorkerError, match="prompt 7 has 3 tokens") as got:
                await serving
            assert isinstance(got.value.__cause__, PromptTooLong)

    run(body())


def test_weights_that_will_never_come_are_an_error_and_not_a_hang() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, SLOW)
            serving = channels.serve(rollout)
            await channels.weights.sender.publish(update(0))
            await channels.ask(request(min_version=1))
            await channels.weights.sender.close()
            with pytest.raises(ra.WorkerError, match="version 1 are asked for, the newest") as got:
                await serving
            assert isinstance(got.value.__cause__, WeightsEnded)

    explore(body, seeds=range(20))


def test_the_engines_log_probs_are_there_for_a_comparison() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, SLOW)
            serving = channels.serve(rollout)
            await channels.weights.sender.publish(update(0))
            await channels.ask(request())
            sample = (await channels.collect(1))["0/0"]
            pairs = [(sample.request.prompt.token_ids, sample.generated.token_ids)]
            [log_prob] = await rollout[0].call(Rollout.log_probs, pairs)
            np.testing.assert_array_equal(log_prob, sample.generated.log_prob)
            channels.requests.close()
            await serving

    run(body())


def test_a_config_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="max_concurrent is 0"):
        LanguageRolloutConfig(max_concurrent=0)
    with pytest.raises(ValueError, match="engine_restarts is -1"):
        LanguageRolloutConfig(engine_restarts=-1)


async def test_a_request_carries_its_partial_between_processes() -> None:
    async with ra.Cluster.process() as cluster:
        channels = Channels(cluster)
        config = ToyEngineConfig(seconds_per_step=0.05, mean_tokens=60)
        rollout = await cluster.launch(Rollout, config, count=2)
        await channels.weights.sender.publish(update(0))
        with channels.requests.receiver, channels.samples.sender, channels.taken.sender:
            first = channels.serve(rollout, [0])
            await channels.taken.receiver.get()
            await channels.ask(request(6, max_tokens=2))
            await channels.ask(*(request(index, max_tokens=100) for index in range(6)))
            await channels.samples.receiver.get()
            unfinished = cluster.channel(Request, name="unfinished", capacity=10)
            count = await rollout[0].call(Rollout.interrupt, unfinished.sender)
            assert count == 6
            back: list[Request] = [await unfinished.receiver.get() for _ in range(count)]
            await channels.ask(*back)
            second = channels.serve(rollout, [1])
            for sample in (await channels.collect(6)).values():
                right(sample, config)
                assert sample.rollout_rank == 1
            await rollout[0].call(Rollout.resume)
            channels.requests.close()
            await first
            await second
