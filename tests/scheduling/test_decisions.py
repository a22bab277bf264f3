"""What is wrong with a decision is named; what is right travels."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import (
    ClusterState,
    InvalidDecision,
    Migration,
    Resume,
    ScalingDecision,
    check,
    holdings_after,
    validate,
)
from tests.scheduling.kit import cluster, with_load

MIDDLE = with_load(cluster(), 20)


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (ScalingDecision(stop=(17,)), "stop names instance 17: there is none of this number"),
        (ScalingDecision(stop=(6,)), "stop names instance 6, which is stopped already"),
        (ScalingDecision(stop=(1, 1)), "stop names instance 1 more than once"),
        (
            ScalingDecision(stop=(1,), resume=(Resume(instance=1, devices=(3,)),)),
            "instance 1 is to stop and to resume in one decision",
        ),
        (
            ScalingDecision(resume=(Resume(instance=6, devices=(0,)),)),
            "device 0 is given to both actor and rollout[6]",
        ),
        (
            ScalingDecision(resume=(Resume(instance=0, devices=(2, 3, 4)),)),
            "instance 0 cannot serve on 3 devices (it can on: [1, 2])",
        ),
        (
            ScalingDecision(resume=(Resume(instance=6, devices=(99,)),)),
            "rollout[6] is given device 99: there is none of this number",
        ),
        (
            ScalingDecision(actor=Strategy(dp=3)),
            (
                "the actor's strategy dp=3 tp=1 pp=1 is not one that fits model and mini-batch "
                "(data-parallel sizes that do: [1, 2, 4, 8])"
            ),
        ),
        (ScalingDecision(actor=Strategy(dp=4)), "device 2 is given to both actor and rollout[0]"),
        (
            ScalingDecision(migrations=(Migration(source=6, count=1),)),
            "a migration leaves instance 6, which does not serve",
        ),
        (
            ScalingDecision(stop=(1,), migrations=(Migration(source=0, target=1, count=1),)),
            "a migration goes to instance 1, which will not serve",
        ),
        (
            ScalingDecision(migrations=(Migration(source=0),)),
            "a migration of instance 0 names no requests",
        ),
        (ScalingDecision(order=("a", "a")), "order names a request more than once"),
        (
            ScalingDecision(stop=tuple(range(6))),
            "no instance would serve, but 20 samples are unfinished",
        ),
    ],
)
def test_a_fault_is_named(decision: ScalingDecision, text: str) -> None:
    assert text in validate(decision, MIDDLE)
    with pytest.raises(InvalidDecision):
        check(decision, MIDDLE)


def test_an_actor_is_not_told_to_wait_for_samples_that_are_all_there() -> None:
    waits = ScalingDecision(actor_waits=True)
    assert not waits.is_empty
    assert validate(waits, MIDDLE) == []
    assert validate(waits, with_load(cluster(), 0)) == [
        "nothing is left to generate, but the actor is to wait for more samples"
    ]


def test_the_actor_changes_only_between_two_mini_batches() -> None:
    busy = msgspec.structs.replace(MIDDLE, actor=msgspec.structs.replace(MIDDLE.actor, ready=False))
    decision = ScalingDecision(stop=(0, 1), actor=Strategy(dp=4))
    assert validate(decision, MIDDLE) == []
    [fault] = validate(decision, busy)
    assert fault.startswith("the actor is not at a boundary")


def test_an_instance_that_does_not_answer_is_left_alone() -> None:
    instances = tuple(
        msgspec.structs.replace(one, answers=one.number != 1) for one in MIDDLE.instances
    )
    state = msgspec.structs.replace(MIDDLE, instances=instances)
    assert validate(ScalingDecision(stop=(1,)), state) == [
        "stop names instance 1, which does not answer"
    ]


def test_one_that_is_stopped_and_does_not_answer_is_told_to_come_home_all_the_same() -> None:
    state = with_instances(MIDDLE, 1, devices=(), answers=False)
    assert validate(ScalingDecision(resume=(Resume(instance=1, devices=(3,)),)), state) == []


def test_an_instance_that_cannot_become_wider_serves_at_home_alone() -> None:
    state = with_instances(MIDDLE, 1, sizes=(), devices=())
    assert validate(ScalingDecision(resume=(Resume(instance=1, devices=(3,)),)), state) == []
    [fault] = validate(
        ScalingDecision(stop=(0,), resume=(Resume(instance=1, devices=(2,)),)), state
    )
    assert fault == (
        "instance 1 cannot serve on devices [2] (it can on those of its home alone: [3])"
    )


def test_devices_that_an_instance_may_still_hold_are_given_to_nobody() -> None:
    state = with_instances(MIDDLE, 1, stopping=True, answers=False)
    decision = ScalingDecision(resume=(Resume(instance=0, devices=(2, 3)),))
    assert validate(decision, state) == ["device 3 is given to both rollout[0] and rollout[1]"]


def test_an_actor_that_has_lent_its_devices_needs_those_of_the_strategy_that_it_had() -> None:
    lent = msgspec.structs.replace(MIDDLE.actor, strategy=Strategy(dp=4), holds=False)
    state = msgspec.structs.replace(MIDDLE, actor=lent)
    taken = ScalingDecision(actor=Strategy(dp=2), actor_holds=True)
    assert "device 2 is given to both actor and rollout[0]" in validate(taken, state)
    assert validate(msgspec.structs.replace(taken, stop=(0, 1)), state) == []


def test_nobody_may_serve_where_nobody_can_or_somebody_will_but_not_where_somebody_could() -> None:
    nothing, fault = ScalingDecision(), "no instance would serve, but 20 samples are unfinished"
    stopped = MIDDLE
    for number in range(8):
        stopped = with_instances(stopped, number, devices=())
    assert validate(nothing, stopped) == [fault]
    assert validate(nothing, msgspec.structs.replace(stopped, lost=tuple(range(2, 8)))) == []
    assert validate(nothing, with_instances(stopped, 0, due=(2,))) == []


def with_instances(state: ClusterState, number: int, **changes: Any) -> ClusterState:
    """The state with another value of an instance."""
    return msgspec.structs.replace(
        state,
        instances=tuple(
            msgspec.structs.replace(one, **changes) if one.number == number else one
            for one in state.instances
        ),
    )


def test_a_lost_device_is_given_to_nobody() -> None:
    state = msgspec.structs.replace(MIDDLE, lost=(0,))
    decision = ScalingDecision(actor_holds=False, resume=(Resume(instance=6, devices=(0,)),))
    # The actor still held it when it was lost, and releases it.
    assert validate(decision, state) == []
    gone = msgspec.structs.replace(state, actor=msgspec.structs.replace(state.actor, holds=False))
    assert validate(ScalingDecision(resume=decision.resume), gone) == [
        "rollout[6] is given device 0, which is lost"
    ]


def test_devices_follow_a_decision() -> None:
    decision = ScalingDecision(stop=(0, 1), actor=Strategy(dp=4))
    held = holdings_after(decision, MIDDLE)
    assert held["actor"] == (0, 1, 2, 3)
    assert held["rollout[0]"] == held["rollout[1]"] == ()
    assert held["rollout[2]"] == (4,)


def test_states_and_decisions_travel() -> None:
    decision = ScalingDecision(
        iteration=3,
        actor=Strategy(dp=4),
        resume=(Resume(instance=6, devices=(0,)),),
        migrations=(Migration(source=0, target=1, names=("1/2",)),),
    )
    for value in (decision, MIDDLE):
        data = msgspec.msgpack.encode(value)
        assert msgspec.msgpack.decode(data, type=type(value)) == value


def test_nothing_is_wrong_with_nothing() -> None:
    empty = ScalingDecision()
    assert empty.is_empty
    assert validate(empty, MIDDLE) == []
    assert isinstance(MIDDLE, ClusterState)
