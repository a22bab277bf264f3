"""What is generated when, under which weights, and by whom."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.backends.language import GenerationEngine, PromptTooLong
from rlinf_async.backends.toy.config import ToyEngineConfig
from rlinf_async.backends.toy.engine import response_length
from rlinf_async.channels.queue import statistics_of
from rlinf_async.testing import explore, nothing_left_waiting, run, wait_all_blocked
from rlinf_async.workers.rollout.language import LanguageRolloutConfig
from rlinf_async.workers.rollout.policy import WeightsEnded
from tests.backends.requests import request
from tests.workers.rollout.language_kit import SLOW, Channels, Rollout, right, served, update


def test_each_sample_goes_on_when_it_is_done() -> None:
    async def body() -> None:
        config = ToyEngineConfig(seconds_per_step=1.0, mean_tokens=20, tail=1.0)
        async with served(Rollout, config) as (channels, _, serving):
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


def test_the_trace_shows_when_the_engine_generates_and_when_weights_are_loaded() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(Rollout, SLOW)
            serving = channels.serve(rollout)
            await channels.weights.sender.publish(update(0))
            await channels.ask(request(0), request(1))
            await wait_all_blocked()
            await channels.weights.sender.publish(update(1))  # in the middle of both
            await channels.collect(2)
            channels.requests.close()
            await serving
            spans = sorted(await cluster.spans(), key=lambda one: one.start)
        assert [one.name for one in spans] == ["load weights", "generate"] * 2
        assert [one.args for one in spans[::2]] == [{"version": 0}, {"version": 1}]

    run(body())


@pytest.mark.parametrize(("most", "asking", "left"), [(None, 4, 6), (1, 1, 9), (3, 3, 7)])
def test_a_few_requests_are_asked_for_at_a_time_and_no_more_are_taken_than_there_is_room(
    most: int | None, asking: int, left: int
) -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            channels = Channels(cluster)
            rollout = await cluster.launch(
                Rollout, SLOW, LanguageRolloutConfig(max_concurrent=most)
            )
            serving = channels.serve(rollout)
            await channels.weights.sender.publish(update(0))
            await wait_all_blocked()
            assert statistics_of(channels.requests.queue).waiting_getters == asking
            await channels.ask(*(request(index) for index in range(10)))
            await wait_all_blocked()
            assert statistics_of(channels.requests.queue).depth == left
            channels.requests.close()
            found = [await channels.samples.receiver.get() for _ in range(10)]
            assert len({one.request.name for one in found}) == 10
            [report] = await serving
            assert report.samples == 10

    run(body())


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
            assert statistics_of(channels.requests.queue).depth == 50 - held
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
            assert statistics_of(channels.samples.queue).depth == 0
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
        async with served(Rollout, config) as (channels, _, serving):
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


def test_a_prompt_that_does_not_fit_ends_the_run_and_is_named() -> None:
    async def body() -> None:
        async with served(Rollout, ToyEngineConfig(context=16)) as (channels, _, serving):
            await channels.ask(request(group=7))
            with pytest.raises(ra.WorkerError, match="prompt 7 has 3 tokens") as got:
                await serving
            assert isinstance(got.value.__cause__, PromptTooLong)

    run(body())


def test_weights_that_will_never_come_are_an_error_and_not_a_hang() -> None:
    async def body() -> None:
        async with served(Rollout, SLOW) as (channels, _, serving):
            await channels.ask(request(min_version=1))
            channels.weights.sender.close()
            with pytest.raises(ra.WorkerError, match="version 1 are asked for, the newest") as got:
                await serving
            assert isinstance(got.value.__cause__, WeightsEnded)

    explore(body, seeds=range(20))


async def _log_probs(rollout: ra.WorkerGroup[Rollout], pairs: Any, version: int) -> Any:
    return await rollout[0].call(Rollout.log_probs, pairs, version)


def test_the_engines_log_probs_are_there_for_a_comparison() -> None:
    async def body() -> None:
        async with served(Rollout, SLOW) as (channels, rollout, serving):
            await channels.ask(request())
            sample = (await channels.collect(1))["0/0"]
            pairs = [(sample.request.prompt.token_ids, sample.generated.token_ids)]
            [log_prob] = await rollout[0].call(Rollout.log_probs, pairs)
            np.testing.assert_array_equal(log_prob, sample.generated.log_prob)
            later = asyncio.create_task(_log_probs(rollout, pairs, version=1))
            await wait_all_blocked()
            assert not later.done()  # this worker has not taken these weights
            await channels.weights.sender.publish(update(1))
            await later
            channels.requests.close()
            await serving

    run(body())


def test_a_config_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="max_concurrent is 0"):
        LanguageRolloutConfig(max_concurrent=0)
    with pytest.raises(ValueError, match="engine_restarts is -1"):
        LanguageRolloutConfig(engine_restarts=-1)
