"""Whole simulated runs: exactly once, deterministic, better with a policy, alive under faults."""

from __future__ import annotations

import gc
from collections import Counter

import msgspec
import pytest

from rlinf_async.scheduling import ClusterState, ScalingDecision
from rlinf_async.simulate import Simulated, on_devices, simulate
from rlinf_async.simulate.config import FaultConfig, HardwareConfig
from rlinf_async.testing import VirtualLoop
from tests.simulate.kit import SMALL, small

FAULTS = FaultConfig(crash_every=8.0, slow_every=9.0, host_lost_every=12.0, host_seconds=10.0)


@pytest.mark.parametrize("policy", ["static", "tail", "greedy", "longest_first"])
def test_every_sample_is_trained_once(policy: str) -> None:
    record = simulate(small(policy))
    assert record.result.samples == 2 * small().samples
    assert Counter(record.trained).most_common(1)[0][1] == 1
    assert record.result.lag_max == 0


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_same_seed_gives_the_same_trace_byte_for_byte(shuffled: bool) -> None:
    first, second = (
        simulate(
            small("longest_first", seed=3, faults=FAULTS),
            trace_lines=1_000_000,
            spans=True,
            shuffled=shuffled,
        )
        for _ in range(2)
    )
    assert len(first.trace) > 20_000
    assert first.trace == second.trace
    assert first.spans == second.spans
    assert timeless(first.result) == timeless(second.result)
    other = simulate(small("longest_first", seed=4, faults=FAULTS), trace_lines=1_000_000)
    assert other.trace != first.trace


def test_nothing_of_a_run_outlives_it() -> None:
    """Of 10,000 runs in one process the last takes as long as the first."""
    before = loops()
    for _ in range(2):
        simulate(small("static", iterations=1))
    assert loops() <= before


def loops() -> int:
    return sum(type(one) is VirtualLoop for one in gc.get_objects())


def timeless(result: Simulated) -> Simulated:
    return msgspec.structs.replace(result, real_seconds=0.0)


@pytest.mark.parametrize("policy", ["static", "tail", "longest_first"])
def test_faults_lose_and_double_nothing(policy: str) -> None:
    record = simulate(small(policy, seed=1, faults=FAULTS))
    assert record.result.crashes > 0
    assert record.result.lost_hosts > 0
    assert record.result.samples == len(set(record.trained)) == 2 * small().samples


def test_staleness_is_bounded_by_what_was_asked_for() -> None:
    result = simulate(small("static", iterations=4, max_staleness=1)).result
    assert result.lag_max == 1
    assert result.samples == 4 * small().samples


def test_moving_devices_is_faster_where_the_placement_is_lopsided() -> None:
    static, tail = (
        simulate(small(policy, prompts_per_device=12.0)).result for policy in ("static", "tail")
    )
    assert tail.samples_per_device_hour > 1.3 * static.samples_per_device_hour
    assert tail.decisions > 0
    assert static.decisions == 0


def test_a_policy_that_fails_leaves_the_run_static_and_says_so_once() -> None:
    said: list[str] = []
    record = simulate(small(f"{__name__}:Failing"), report=said.append)
    [message] = said
    assert "in the middle" in message
    assert record.result.samples == 2 * small().samples
    assert record.result.fault == "RuntimeError: in the middle"


class Failing:
    """Lends the actor's devices, and then raises."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        from rlinf_async.scheduling.policies.simple import Tail

        if state.phase == "step":
            raise RuntimeError("in the middle")
        return Tail().decide(state)


def test_other_numbers_of_devices_keep_the_actors_share() -> None:
    assert on_devices(SMALL, 32).hardware.actor_devices == 8


def test_a_placement_that_cannot_share_a_mini_batch_is_refused_with_those_that_can() -> None:
    with pytest.raises(ValueError, match=r"data-parallel size of 3.*sizes that can: \[1, 2, 4\]"):
        msgspec.structs.replace(
            SMALL, hardware=HardwareConfig(devices=8, devices_per_host=2, actor_devices=3)
        )


def test_instances_of_several_devices_decode_as_fast_as_their_costs_say() -> None:
    """Those that never stop, too."""
    one = small("static", iterations=1)
    four = msgspec.structs.replace(
        one,
        hardware=HardwareConfig(
            devices=32, devices_per_host=8, instance_devices=4, actor_devices=8, actor_tp=4
        ),
        work=msgspec.structs.replace(one.work, prompts_per_device=0.25),
    )
    single, wide = simulate(one).result, simulate(four).result
    assert single.samples == wide.samples
    # As many instances, as many requests, a mini-batch on four times the devices.
    assert wide.seconds < single.seconds
