"""The toy engine lets exactly the time of its cost model pass, and answers by formula."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rlinf_async.backends.language import EngineDied, MicroBatch, PromptTooLong
from rlinf_async.backends.parts import engines
from rlinf_async.backends.toy.config import ToyEngineConfig, ToyTrainerConfig
from rlinf_async.backends.toy.engine import ToyEngine, response_length
from rlinf_async.backends.toy.trainer import ToyTrainer
from rlinf_async.config.registry import UnknownName
from rlinf_async.messages.language import Generated, Sample
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.testing import explore, run
from rlinf_async.workers.inference import with_log_probs
from tests.backends.distributions import RULES, asked, check_kept, sample_of, trained_on
from tests.backends.engine_protocol import refuses_older_weights
from tests.backends.models import VOCABULARY
from tests.backends.requests import request


async def loaded(**config: Any) -> ToyEngine:
    """An engine that serves version 0."""
    engine = ToyEngine(ToyEngineConfig(**config))
    await engine.start()
    await engine.load(WeightUpdate(0, (), 77))
    return engine


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_step_makes_one_token_for_every_running_sequence() -> None:
    async def body() -> None:
        engine = await loaded(seconds_per_step=1.0, seconds_per_sequence=0.5, mean_tokens=10)
        began = now()
        async with asyncio.TaskGroup() as group:
            for index in range(4):
                group.create_task(engine.generate(request(index)))
        assert now() - began == pytest.approx(10 * (1.0 + 4 * 0.5))

    run(body())


def test_requests_beyond_the_slots_wait_by_priority() -> None:
    async def body() -> None:
        engine = await loaded(slots=1, seconds_per_step=1.0, mean_tokens=5)
        done: list[int] = []

        async def one(index: int, priority: int) -> None:
            await engine.generate(request(index, priority=priority))
            done.append(index)

        async with asyncio.TaskGroup() as group:
            for index, priority in [(0, 0), (1, 2), (2, 1)]:
                group.create_task(one(index, priority))
                await asyncio.sleep(0.1)
        assert done == [0, 2, 1]
        assert now() == pytest.approx(15.0)

    run(body())


def test_new_weights_come_between_two_steps_and_every_token_names_its_own() -> None:
    async def body() -> Generated:
        engine = await loaded(seconds_per_step=1.0, mean_tokens=10, load_seconds=3.0)
        began = now()
        running = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(3.5)
        assert await engine.load(WeightUpdate(1, (), 99)) == 99
        assert now() - began == pytest.approx(4.0 + 3.0)
        answer = await running
        assert now() - began == pytest.approx(10.0 + 3.0)
        return answer

    answer = run(body())
    assert answer.version.tolist() == [0] * 4 + [1] * 6
    assert answer.finish == "stop"


def test_weights_that_are_older_than_those_served_are_refused() -> None:
    async def body() -> None:
        older, newer = WeightUpdate(1, (), 98), WeightUpdate(2, (), 99)
        await refuses_older_weights(await loaded(), older, newer)

    run(body())


def test_a_response_made_in_two_engines_is_the_one_of_a_single_engine() -> None:
    async def body() -> None:
        whole = await (await loaded(mean_tokens=20)).generate(request(max_tokens=30))
        first, second = await loaded(mean_tokens=20), await loaded(mean_tokens=20)
        running = asyncio.create_task(first.generate(request(max_tokens=30)))
        await asyncio.sleep(0.075)
        await first.abort()
        part = await running
        assert part.finish == "abort"
        assert 0 < len(part.token_ids) < 20
        rest = await second.generate(request(max_tokens=30, partial=part))
        np.testing.assert_array_equal(rest.token_ids, whole.token_ids)
        np.testing.assert_array_equal(rest.log_prob, whole.log_prob)
        assert rest.finish == whole.finish == "stop"

    explore(body, seeds=range(20))


def test_what_is_under_way_can_be_looked_at_and_gone_on_with_elsewhere() -> None:
    async def body() -> None:
        engine = await loaded(slots=2, seconds_per_step=1.0, mean_tokens=10)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(request(index))) for index in range(3)]
            await asyncio.sleep(4.5)
            found = await engine.so_far()
            assert {name: len(one.token_ids) for name, one in found.items()} == {
                "0/0": 5,
                "0/1": 5,
                "0/2": 0,  # it waits for a slot
            }
        whole = [task.result() for task in tasks]
        assert await engine.so_far() == {}
        other = await loaded(seconds_per_step=1.0, mean_tokens=10)
        began = now()
        again = await other.generate(request(1, partial=found["0/1"]))
        assert now() - began == 5.0
        np.testing.assert_array_equal(again.token_ids, whole[1].token_ids)

    run(body())


def test_a_cancelled_request_gives_its_slot_back() -> None:
    async def body() -> None:
        engine = await loaded(slots=1, seconds_per_step=1.0, mean_tokens=100)
        first = asyncio.create_task(engine.generate(request(0)))
        await asyncio.sleep(0.5)
        second = asyncio.create_task(engine.generate(request(1, max_tokens=2)))
        await asyncio.sleep(1.0)
        first.cancel()
        assert (await second).finish == "length"
        assert now() == pytest.approx(4.0)

    explore(body, seeds=range(20))


def test_a_tail_makes_few_responses_very_long_and_keeps_the_mean() -> None:
    config = ToyEngineConfig(mean_tokens=100, tail=1.0)
    lengths = np.array([response_length(config, seed) for seed in range(4000)])
    assert 90 < lengths.mean() < 110
    assert np.median(lengths) < 70
    assert lengths.max() > 800


def test_what_a_dead_engine_ran_and_is_asked_fails() -> None:
    async def body() -> None:
        engine = await loaded()
        running = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0.05)
        engine.die()
        with pytest.raises(EngineDied, match="was killed"):
            await running
        with pytest.raises(EngineDied):
            await engine.generate(request())
        with pytest.raises(EngineDied):
            await engine.load(WeightUpdate(1, (), 0))

    run(body())


def test_a_prompt_that_does_not_fit_is_named_with_the_numbers() -> None:
    async def body() -> None:
        engine = await loaded(context=20)
        with pytest.raises(PromptTooLong, match=r"prompt 3 has 5 tokens.*21, over.*20"):
            await engine.generate(request(tokens=[1] * 5, max_tokens=16, group=3))

    run(body())


def test_a_wrong_name_lists_the_engines_there_are() -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'vllm'.*toy.*transformers.*vllm"):
        engines.load("vlm")


def test_a_cost_model_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="slots is 0"):
        ToyEngineConfig(slots=0)
    with pytest.raises(ValueError, match="tail is nan"):
        ToyEngineConfig(tail=float("nan"))


@pytest.mark.parametrize("rule", RULES)
def test_the_toy_trainer_trains_what_the_toy_engine_sampled(rule: str) -> None:
    async def body() -> list[Sample]:
        engine = await loaded(vocabulary=VOCABULARY)
        return [sample_of(one, await engine.generate(one)) for one in asked(rule)]

    samples = run(body())
    trainer = ToyTrainer(ToyTrainerConfig(seconds_per_token=0.0, seconds_per_step=0.0), 1, 0)
    answered = with_log_probs(trainer, samples, reference=True)
    for one in answered:
        check_kept(rule, one.generated)
        assert one.prev_log_prob is not None
        assert one.prev_log_prob.tolist() == one.generated.log_prob.tolist()
    batch = trained_on(answered, 1.0)
    found = trainer.training_step([MicroBatch(batch, True)])
    assert found["engine_actor_difference"] == 0.0
    assert found["engine_actor_tokens"] == sum(len(one.response_ids) for one in batch)
