"""No policy is faster than the bound, whatever things cost; and the bound is what it says."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_async.backends.cost.config import Empirical, LogNormal
from rlinf_async.scheduling import POLICIES
from rlinf_async.simulate import SimulationConfig, simulate
from rlinf_async.simulate.bounds import at_best, token_costs
from tests.simulate.kit import SMALL, small

SECONDS = st.sampled_from([0.0, 0.1, 2.0])


@st.composite
def configs(draw: st.DrawFn) -> SimulationConfig:
    """Small runs with costs of every relation."""
    config = small(
        draw(st.sampled_from(sorted(POLICIES))),
        seed=draw(st.integers(0, 1000)),
        iterations=draw(st.integers(1, 2)),
        prompts_per_device=draw(st.sampled_from([0.5, 1.0])),
        max_staleness=draw(st.integers(0, 1)),
        prompt_tokens=draw(st.sampled_from([1, 300])),
    )
    generation = msgspec.structs.replace(
        config.generation,
        decode_seconds=draw(st.sampled_from([1e-4, 0.01])),
        sequence_seconds=draw(st.sampled_from([0.0, 1e-4, 5e-3])),
        prefill_seconds=draw(st.sampled_from([0.0, 1e-4])),
        load_seconds=draw(SECONDS),
        move_seconds=draw(SECONDS),
        wider=draw(st.sampled_from([0.0, 0.6, 1.0, 1.3])),
        slots=draw(st.sampled_from([1, 4, 32])),
        lengths=LogNormal(
            median=draw(st.sampled_from([1.0, 300.0])),
            ratio=draw(st.sampled_from([1.0, 8.0])),
            longest=1500,
        ),
    )
    actor = msgspec.structs.replace(
        config.actor,
        token_seconds=draw(st.sampled_from([1e-6, 3e-4, 1e-2])),
        step_seconds=draw(SECONDS),
        rescale_seconds=draw(SECONDS),
        move_seconds=draw(SECONDS),
        publish_seconds=draw(SECONDS),
    )
    return msgspec.structs.replace(config, generation=generation, actor=actor)


@settings(max_examples=40, deadline=None)
@given(config=configs())
def test_no_policy_beats_the_bound_whatever_things_cost(config: SimulationConfig) -> None:
    record = simulate(config, check=True)
    least = at_best(config, record.lengths)
    assert 0.0 < least <= record.result.seconds * (1.0 + 1e-6)
    assert sum(record.result.spent.values()) == pytest.approx(1.0)
    assert min(record.result.spent.values()) > -1e-6


def test_one_sample_takes_its_time_on_the_widest_instance_and_its_training_on_all_ranks() -> None:
    work = msgspec.structs.replace(SMALL.work, prompts_per_device=0.125, group_size=1)
    work = msgspec.structs.replace(work, mini_batches=1, iterations=1)
    hardware = msgspec.structs.replace(SMALL.hardware, actor_devices=1)
    config = msgspec.structs.replace(SMALL, work=work, hardware=hardware)
    costs = config.generation
    token = (costs.decode_seconds + costs.sequence_seconds) / 8**costs.wider
    prompt = config.work.prompt_tokens
    train = config.actor.token_seconds * (1000 + prompt) + config.actor.step_seconds
    prefill = prompt * costs.prefill_seconds / 8**costs.wider
    expected = costs.load_seconds + prefill + 1000 * token + train
    assert at_best(config, [[1000]]) == pytest.approx(expected)


def test_where_there_is_much_to_do_all_devices_work_all_the_time() -> None:
    config = msgspec.structs.replace(
        small(iterations=1, prompts_per_device=64.0),
        generation=msgspec.structs.replace(
            SMALL.generation, lengths=Empirical(tokens=(50,)), load_seconds=0.0
        ),
    )
    count = config.samples
    _, costs = token_costs(config.generation, hardware=config.hardware, samples=count)
    tokens = 50 + config.work.prompt_tokens
    work = count * 50 * costs[-1] + count * tokens * config.actor.token_seconds
    work += count * config.work.prompt_tokens * config.generation.prefill_seconds
    seconds = work / config.hardware.devices
    assert seconds <= at_best(config, [[50] * count]) <= 1.02 * seconds


def test_fast_tokens_cost_more() -> None:
    seconds, costs = token_costs(SMALL.generation, hardware=SMALL.hardware, samples=100)
    assert (np.diff(seconds) > 0).all()
    assert (np.diff(costs) < 0).all()
    slopes = np.diff(costs) / np.diff(seconds)
    assert (np.diff(slopes) >= -1e-12).all()  # convex
    one, eight = (
        SMALL.generation.decode_seconds + n * SMALL.generation.sequence_seconds for n in (1, 8)
    )
    assert costs[-1] == pytest.approx(eight / 8)
    assert seconds[0] == pytest.approx(one / 8**0.6)
