"""What each policy decides in a given state, and what holds for all of them in any run."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_async.config import ConfigError
from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import (
    POLICIES,
    ClusterState,
    RequestState,
    ScalingDecision,
    holdings_after,
    load_policy,
    safe,
)
from tests.scheduling.kit import carried_out, cluster, with_load


def lent(state: ClusterState) -> ClusterState:
    return carried_out(load_policy("tail").decide(state), state)


@pytest.mark.parametrize("name", ["turns", "tail", "greedy", "longest_first"])
def test_rollout_borrows_the_actors_devices_when_an_iteration_begins(name: str) -> None:
    decision = load_policy(name).decide(cluster(tokens=8000.0))
    assert decision.actor_holds is False
    assert {one.instance: one.devices for one in decision.resume} == {6: (0,), 7: (1,)}


@pytest.mark.parametrize(
    ("finished", "takes_back"), [(0, False), (63, False), (64, True), (100, True)]
)
def test_tail_takes_the_devices_back_once_half_is_done(finished: int, takes_back: bool) -> None:
    state = with_load(lent(cluster()), 128 - finished)
    decision = load_policy("tail").decide(state)
    assert decision.actor_holds is (True if takes_back else None)
    assert decision.stop == ((6, 7) if takes_back else ())


@pytest.mark.parametrize(
    ("unfinished", "dp", "stopped"),
    # 16 slots for each instance, one device for each; instance n is on device n + 2
    [(96, 2, ()), (64, 4, (0, 1)), (40, 4, (0, 1)), (0, 8, (0, 1, 2, 3, 4, 5))],
)
def test_tail_grows_the_actor_into_what_the_tail_does_not_need(
    unfinished: int, dp: int, stopped: tuple[int, ...]
) -> None:
    state = with_load(cluster(), unfinished)
    decision = load_policy("tail").decide(state)
    assert (decision.actor or state.actor.strategy).dp == dp
    assert decision.stop == stopped
    assert sum(one.count for one in decision.migrations) == sum(
        one.load for one in state.instances if one.number in stopped
    )


@pytest.mark.parametrize("lends", [True, False])
def test_turns_gives_the_actor_everything_once_everything_is_generated(lends: bool) -> None:
    begun = lent(cluster()) if lends else cluster()
    assert load_policy("turns").decide(with_load(begun, 1)).is_empty
    decision = load_policy("turns").decide(with_load(begun, 0))
    assert decision.actor == Strategy(dp=8)
    assert decision.actor_holds is (True if lends else None)


def test_longest_first_merges_instances_when_few_responses_are_left() -> None:
    early, late = (
        msgspec.structs.replace(with_load(cluster(), count), tokens=500.0, longest=4000.0)
        for count in (96, 12)
    )
    policy = load_policy("longest_first")
    assert policy.decide(early).is_empty
    merged = policy.decide(late)
    assert {len(one.devices) for one in merged.resume} == {2}
    assert len(merged.stop) == len(merged.resume) == 3


def test_greedy_waits_for_the_best_moment_to_take_devices_back() -> None:
    state = lent(cluster())
    ready = msgspec.structs.replace(state.actor, arrived=32)
    many, few = (
        msgspec.structs.replace(
            with_load(state, left),
            actor=ready,
            tokens=500.0,
            rates=msgspec.structs.replace(state.rates, train_seconds=5e-4),
        )
        for left in (90, 4)
    )
    assert load_policy("greedy").decide(many).is_empty
    assert load_policy("greedy").decide(few).actor_holds is True


def test_greedy_does_nothing_without_rates() -> None:
    unknown = msgspec.structs.replace(cluster(), rates=type(cluster().rates)())
    assert load_policy("greedy").decide(unknown).is_empty


def test_greedy_grows_only_where_it_gains() -> None:
    state = with_load(cluster(), 20)
    heavy = msgspec.structs.replace(
        state, rates=msgspec.structs.replace(state.rates, train_seconds=1e-3)
    )
    light = msgspec.structs.replace(
        state, rates=msgspec.structs.replace(state.rates, train_seconds=1e-9, rescale_seconds=60.0)
    )
    assert load_policy("greedy").decide(heavy).actor == Strategy(dp=4)
    assert load_policy("greedy").decide(light).is_empty


@pytest.mark.parametrize(("token_seconds", "waits"), [(0.001, True), (0.1, False)])
def test_greedy_lets_the_actor_wait_for_the_last_samples_where_it_can_grow_then(
    token_seconds: float, waits: bool
) -> None:
    # Two samples are left, on one instance that the actor cannot do without.
    state = with_load(cluster(rollout=1, actor=1), 2)
    rates = msgspec.structs.replace(
        state.rates, decode_seconds=token_seconds, train_seconds=1e-3, rescale_seconds=1.0
    )
    decision = load_policy("greedy").decide(msgspec.structs.replace(state, rates=rates))
    assert decision.actor_waits is waits
    assert not decision.changes_devices


@pytest.mark.parametrize(
    ("queued", "trained", "rescale_seconds", "stopped"),
    [
        (0, 1, 2.0, (0, 1, 2, 3, 4, 5)),
        (1, 1, 2.0, ()),  # somebody asks for the next iteration
        (0, 3, 2.0, ()),  # the actor trains its last mini-batch
        (0, 1, 1000.0, ()),  # it will not grow
    ],
)
def test_greedy_stops_instances_before_the_actor_comes_to_the_boundary_at_which_it_grows(
    queued: int, trained: int, rescale_seconds: float, stopped: tuple[int, ...]
) -> None:
    state = with_load(cluster(), 0, queued=queued)
    rates = msgspec.structs.replace(
        state.rates, train_seconds=1e-3, rescale_seconds=rescale_seconds
    )
    training = msgspec.structs.replace(state.actor, ready=False, mini_batches_done=trained)
    decision = load_policy("greedy").decide(
        msgspec.structs.replace(state, actor=training, rates=rates)
    )
    assert decision.stop == stopped
    assert decision.actor is None


def test_longest_first_orders_what_waits() -> None:
    waiting = tuple(RequestState(name=f"q{n}", expected=float(n)) for n in (3, 9, 5))
    state = msgspec.structs.replace(with_load(cluster(), 20), queued=3, queued_requests=waiting)
    assert load_policy("longest_first").decide(state).order == ("q9", "q5", "q3")


def test_longest_first_gives_free_devices_to_the_tail() -> None:
    state = with_load(cluster(), 20)
    stopped = carried_out(ScalingDecision(stop=(0, 1, 2, 3)), state)
    few = with_load(stopped, 4)
    last = msgspec.structs.replace(
        few,
        actor=msgspec.structs.replace(few.actor, mini_batches_done=3, ready=False),
    )
    decision = load_policy("longest_first").decide(last)
    # Instances 4 and 5 are on devices 6 and 7 of host 1; devices 4 and 5 of that host are free.
    assert sorted(one.devices for one in decision.resume) == [(6, 5), (7, 4)]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    rollout=st.integers(1, 9),
    actor=st.integers(1, 4).filter(lambda n: 64 % n == 0),
    guests=st.booleans(),
    finishing=st.lists(st.integers(0, 40), min_size=4, max_size=20),
    silent=st.sets(st.integers(0, 12), max_size=2),
    train=st.floats(1e-7, 1e-3),
)
def test_every_run_of_every_policy_is_valid_calm_and_ends_where_it_began(
    name: str,
    rollout: int,
    actor: int,
    guests: bool,
    finishing: list[int],
    silent: set[int],
    train: float,
) -> None:
    policy = load_policy(name)
    home = cluster(rollout, actor, guests=guests)
    home = msgspec.structs.replace(
        home, rates=msgspec.structs.replace(home.rates, train_seconds=train)
    )
    state, layouts = home, []
    for iteration in range(2):
        state = carried_out(policy.decide(state), state)  # raises for what is invalid
        state = with_load(state, state.samples)
        sizes, starts = [], 0
        quiet = silent if iteration == 0 else set()
        state = msgspec.structs.replace(
            state,
            instances=tuple(
                msgspec.structs.replace(one, answers=one.number not in quiet)
                for one in state.instances
            ),
        )
        for count in [*finishing, math.inf]:
            left = state.unfinished - int(min(count, state.unfinished))
            done = min((state.samples - left) // 32, state.actor.mini_batches)
            state = with_load(state, left)
            trained = done if state.actor.holds else state.actor.mini_batches_done
            state = msgspec.structs.replace(
                state, actor=msgspec.structs.replace(state.actor, mini_batches_done=trained)
            )
            decision = policy.decide(state)
            held = [device for held in holdings_after(decision, state).values() for device in held]
            assert len(held) == len(set(held)) <= len(state.hosts)
            after = carried_out(decision, state)
            if after.actor.holds:
                sizes.append(after.actor.strategy.world_size)
            starts += sum(not one.serves for one in state.instances) > sum(
                not one.serves for one in after.instances
            )
            state = after
        assert sizes == sorted(sizes)  # within an iteration the actor only grows
        assert starts == 0  # and no instance that has stopped comes back
        state = msgspec.structs.replace(
            state,
            phase="end",
            instances=tuple(msgspec.structs.replace(one, answers=True) for one in state.instances),
        )
        state = carried_out(policy.decide(state), state)
        layouts.append(holdings_after(ScalingDecision(), state))
        state = msgspec.structs.replace(
            state,
            phase="begin",
            iteration=iteration + 1,
            finished=0,
            actor=msgspec.structs.replace(state.actor, mini_batches_done=0),
        )
    assert layouts == [holdings_after(ScalingDecision(), home)] * 2


class Broken:
    """Fails in the way it is told."""

    def __init__(self, returns: object) -> None:
        self.returns = returns

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        if isinstance(self.returns, Exception):
            raise self.returns
        return self.returns  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("returns", "text"),
    [
        (ValueError("no idea"), "ValueError: no idea"),
        (None, "it returned None, not a ScalingDecision"),
        (ScalingDecision(stop=(99,)), "stop names instance 99"),
    ],
)
def test_a_policy_that_fails_is_static_from_then_on_and_that_is_said_once(
    returns: object, text: str
) -> None:
    said: list[str] = []
    policy = safe(Broken(returns), "broken", said.append)
    for _ in range(3):
        assert policy.decide(cluster()).is_empty
    [message] = said
    assert "policy 'broken' failed in iteration 0" in message
    assert text in message


def test_when_a_policy_fails_the_actor_gets_its_devices_back() -> None:
    state = with_load(lent(cluster()), 100)
    decision = safe(Broken(ValueError()), report=lambda _: None).decide(state)
    after = carried_out(decision, state)
    assert after.actor.holds
    assert {one.number for one in after.serving} == set(range(6))


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    message = r"no scaling policy is called 'tial'; did you mean 'tail'\?"
    with pytest.raises(ConfigError, match=message):
        load_policy("tial")


def test_a_users_policy_is_named_by_its_path() -> None:
    assert isinstance(load_policy("tests.scheduling.test_policies:Quiet"), Quiet)
    with pytest.raises(ConfigError, match="has no method decide"):
        load_policy("builtins:object")


class Quiet:
    """A user's policy."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        return ScalingDecision()


def test_longest_first_hands_the_longest_of_the_last_instance_to_the_first() -> None:
    state = with_load(cluster(2, 2, guests=False), 6)
    long = tuple(RequestState(name=f"long{n}", expected=1000.0 + n) for n in range(4))
    short = (RequestState(name="short", expected=10.0),)
    busy, idle = state.instances
    rates = msgspec.structs.replace(state.rates, sequence_seconds=0.01, move_seconds=0.1)
    state = msgspec.structs.replace(
        state,
        rates=rates,
        actor=msgspec.structs.replace(state.actor, ready=False),
        instances=(
            msgspec.structs.replace(busy, running=4, waiting=0, requests=long),
            msgspec.structs.replace(idle, running=1, waiting=0, requests=short),
        ),
    )
    (move,) = load_policy("longest_first").decide(state).migrations
    assert (move.source, move.target) == (busy.number, idle.number)
    assert move.names == ("long3", "long2")
    slow = msgspec.structs.replace(rates, move_seconds=1000.0)
    assert (
        not load_policy("longest_first")
        .decide(msgspec.structs.replace(state, rates=slow))
        .migrations
    )
