"""Decisions that move requests: order and migrations are carried out, and lose nothing."""

from __future__ import annotations

from collections import Counter, defaultdict

import msgspec
import pytest

from rlinf_async.backends.cost.engine import CostEngine
from rlinf_async.scheduling import (
    ClusterState,
    InstanceState,
    Migration,
    Resume,
    ScalingDecision,
)
from rlinf_async.simulate import SimulationConfig, simulate
from rlinf_async.simulate.run import SimulationRecord
from tests.simulate.kit import small

SEEN: list[ClusterState] = []
"""states that the policies below were asked about, the newest last"""
DECIDED: list[ScalingDecision] = []
"""what they have decided"""


def run(policy: str, config: SimulationConfig | None = None) -> SimulationRecord:
    SEEN.clear()
    DECIDED.clear()
    config = config or small(iterations=1)
    scheduler = msgspec.structs.replace(config.scheduler, policy=f"{__name__}:{policy}", every=0.05)
    record = simulate(msgspec.structs.replace(config, scheduler=scheduler), check=True)
    assert not record.result.fault
    assert record.result.samples == len(set(record.trained)) == config.samples
    return record


class Moving:
    """Moves the first two requests of the fullest instance to the emptiest one, once."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        SEEN.append(state)
        if state.phase != "step" or DECIDED or state.finished < 8:
            return ScalingDecision()
        serving = sorted(state.serving, key=lambda one: one.load)
        target, source = serving[0], serving[-1]
        names = tuple(one.name for one in source.requests[:2])
        move = Migration(source=source.number, target=target.number, names=names)
        DECIDED.append(ScalingDecision(migrations=(move,)))
        return DECIDED[-1]


def test_requests_move_to_the_instance_that_is_named_with_their_tokens() -> None:
    record = run("Moving")
    [(_, decision)] = record.decisions
    [move] = decision.migrations
    assert record.result.migrated == 2
    before, after = (
        {one.name: one.made for one in state.instances[number or 0].requests}
        for state, number in (
            (next(one for one in SEEN if one.finished >= 8), move.source),
            (SEEN[[one.finished >= 8 for one in SEEN].index(True) + 1], move.target),
        )
    )
    for name in move.names:
        assert after[name] >= before[name] > 0


class Thinning:
    """Sends the requests with the most to come of three instances to whoever else has room."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        if state.phase != "step" or len(DECIDED) > 3:
            return ScalingDecision()
        moves = tuple(
            Migration(source=one.number, count=1) for one in [*state.serving][:3] if one.load
        )
        if moves:
            DECIDED.append(ScalingDecision(migrations=moves))
        return ScalingDecision(migrations=moves)


def test_requests_move_to_whoever_has_room() -> None:
    record = run("Thinning")
    assert len(record.decisions) == 4
    assert record.result.migrated >= 4


class Backwards:
    """Has the last request that waits served first."""

    orders = True

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        SEEN.append(state)
        names = tuple(one.name for one in state.queued_requests)
        if state.phase != "step" or len(names) < 2:
            return ScalingDecision()
        return ScalingDecision(order=names[::-1] if names[0] < names[-1] else ())


def test_requests_that_wait_are_put_in_order() -> None:
    config = small(iterations=1)
    narrow = msgspec.structs.replace(config.generation, slots=2)
    record = run("Backwards", msgspec.structs.replace(config, generation=narrow))
    waited = [{one.name for one in state.queued_requests} for state in SEEN]
    first = next(one for one in waited if one)
    later = [one & first for one in waited[waited.index(first) :] if one & first]
    assert len(later) > 2
    # Those that were last in the queue are gone first.
    groups = [sorted(int(name.split("/")[0]) for name in one) for one in later]
    assert max(groups[-1]) < max(groups[0])
    assert Counter(record.trained).most_common(1)[0][1] == 1


class Waiting:
    """The actor begins nothing before everything is generated."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        SEEN.append(state)
        ready = state.phase == "step" and state.actor.ready
        return ScalingDecision(actor_waits=ready and state.unfinished > 0)


def test_an_actor_waits_at_its_boundary_for_as_long_as_the_policy_says() -> None:
    run("Waiting")
    done = [state.actor.mini_batches_done for state in SEEN if state.unfinished]
    assert len(done) > 3
    assert set(done) == {0}
    assert SEEN[-1].actor.left == 0


class StopsOnce:
    """Stops an instance while the actor trains its first mini-batch."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        SEEN.append(state)
        begun = state.phase == "step" and not state.actor.ready
        if not begun or DECIDED or len(list(state.serving)) < 2:
            return ScalingDecision()
        DECIDED.append(ScalingDecision(stop=(next(iter(state.serving)).number,)))
        return DECIDED[-1]


def test_a_boundary_that_is_reached_while_a_decision_is_carried_out_is_asked_about() -> None:
    config = small(iterations=1, mini_batches=4)
    slow = msgspec.structs.replace(config.generation, move_seconds=30.0)
    run("StopsOnce", msgspec.structs.replace(config, generation=slow))
    assert len(DECIDED) == 1
    asked = {state.actor.mini_batches_done for state in SEEN if state.actor.ready}
    assert asked == {0, 1, 2, 3, 4}


class MergesOnce:
    """Has the two instances of each host go on as one, in the middle of generating."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        if state.phase != "step" or DECIDED or not state.finished:
            return ScalingDecision()
        hosts = defaultdict[int, list[InstanceState]](list)
        for one in state.serving:
            hosts[state.hosts[one.devices[0]]].append(one)
        pairs = [pair for pair in hosts.values() if len(pair) == 2]
        wide = tuple(
            Resume(instance=stays.number, devices=(*stays.devices, *leaves.devices))
            for stays, leaves in pairs
        )
        DECIDED.append(
            ScalingDecision(stop=tuple(leaves.number for _, leaves in pairs), resume=wide)
        )
        return DECIDED[-1]


def test_instances_that_become_wider_take_what_others_hand_back_once_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths: list[float] = []
    admit = CostEngine._admit

    def noting(engine: CostEngine) -> None:
        before = set(engine._running)
        admit(engine)
        moved = [row for row in engine._running if row not in before and row.brought]
        widths.extend(engine.width for _ in moved)

    monkeypatch.setattr(CostEngine, "_admit", noting)
    run("MergesOnce")
    assert len(widths) > 3
    assert set(widths) == {2.0}


def test_publishing_takes_its_time() -> None:
    config = small("static", iterations=2)
    slow = msgspec.structs.replace(config.actor, publish_seconds=5.0)
    fast, late = (
        simulate(msgspec.structs.replace(config, actor=actor)).result
        for actor in (config.actor, slow)
    )
    assert late.seconds == pytest.approx(fast.seconds + 2 * 5.0)
    assert late.spent["publishing"] == pytest.approx(2 * 5.0 * 2 / (8 * late.seconds))


def test_environment_steps_come_between_the_last_token_and_training() -> None:
    config = small("static", iterations=1, mini_batches=1)
    env = msgspec.structs.replace(config.env, steps=10, step_seconds=0.5)
    one_by_one = msgspec.structs.replace(env, workers=1)
    fast, late, queued = (
        simulate(msgspec.structs.replace(config, env=each)).result
        for each in (config.env, env, one_by_one)
    )
    # Groups come one by one, and are spread otherwise over the data ranks.
    assert 0.0 <= late.seconds - fast.seconds - 10 * 0.5 < 0.5
    assert queued.seconds >= config.samples * 10 * 0.5


def test_log_probs_are_computed_on_devices_of_their_own() -> None:
    config = small("longest_first", iterations=1)
    inference = msgspec.structs.replace(config.inference, devices=2, token_seconds=1e-3)
    record = simulate(msgspec.structs.replace(config, inference=inference), check=True)
    result = record.result
    tokens = result.tokens + result.samples * config.work.prompt_tokens
    assert result.samples == len(set(record.trained)) == config.samples
    assert result.spent["inference"] == pytest.approx(tokens * 1e-3 / (8 * result.seconds))
    held = max(sum(moment.held.values()) for moment in record.history)
    assert held == 6


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"devices": 2}, "set both, or neither"),
        ({"devices": 7, "token_seconds": 1.0}, "more than hardware.actor_devices = 2"),
        ({"batch": 0}, "batch is 0; it must be at least 1"),
    ],
)
def test_inference_that_cannot_be_is_refused(values: dict[str, float], text: str) -> None:
    settings = msgspec.to_builtins(small()) | {"inference": values}
    with pytest.raises(msgspec.ValidationError, match=text):
        msgspec.convert(settings, SimulationConfig)
