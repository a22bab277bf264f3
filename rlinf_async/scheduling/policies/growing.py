"""What the policies that move devices share: lending, taking back, growing the actor."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from rlinf_async.parallel import Strategy
from rlinf_async.scheduling.decision import (
    Migration,
    Resume,
    ScalingDecision,
    holdings_after,
)
from rlinf_async.scheduling.policies.home import servable
from rlinf_async.scheduling.state import ClusterState, InstanceState, instance_name

UNEVEN = 0.2
"""share above the mean load from which requests of an instance go to others"""


def lend(state: ClusterState) -> ScalingDecision | None:
    """The actor lends its devices to the instances that were launched there; None: it cannot."""
    guests = [
        one
        for one in state.instances
        if state.is_guest(one) and not one.serves and servable(state, one)
    ]
    if not guests or not state.unfinished or not state.actor.holds or not state.actor.ready:
        return None
    return ScalingDecision(
        iteration=state.iteration,
        actor_holds=False,
        resume=tuple(Resume(instance=one.number, devices=one.home) for one in guests),
        reason="rollout borrows the actor's devices",
    )


def take_back(state: ClusterState, strategy: Strategy | None = None) -> ScalingDecision | None:
    """The actor takes its devices again, as many as the strategy needs (None: that of home, or the
    one that it had where it cannot apply that); None: it has them, or cannot have them now."""
    actor = state.actor
    if actor.holds or not actor.ready:
        return None
    if strategy is None:
        strategy = actor.home if actor.home in actor.strategies else actor.strategy
    there = on_devices(state, actor.needs(strategy))
    if there is None:
        return None
    return ScalingDecision(
        iteration=state.iteration,
        stop=tuple(one.number for one in there),
        actor=strategy if actor.strategy != strategy else None,
        actor_holds=True,
        migrations=migrations(there),
        reason="the actor takes its devices again",
    )


def on_devices(state: ClusterState, devices: Collection[int]) -> list[InstanceState] | None:
    """Return the instances that have to stop so that the actor can have these devices; None: it
    cannot, for want of an answer, of a device, or of another instance for what is unfinished."""
    wanted = set(devices)
    there = [one for one in state.instances if not wanted.isdisjoint(one.devices)]
    if not all(one.answers and one.serves for one in there) or not wanted.isdisjoint(state.lost):
        return None
    stays = any(one.answers for one in state.serving if one not in there)
    return None if state.unfinished and not stays else there


def at_least_home(state: ClusterState) -> list[Strategy]:
    """Return the strategies of the actor with no fewer ranks than at home."""
    actor = state.actor
    sizes = range(actor.home.world_size, len(actor.devices) + 1)
    return [one for one in actor.strategies if one.world_size in sizes]


def take_most(state: ClusterState) -> ScalingDecision | None:
    """The actor takes its devices again, and as many others as it can have; None: it cannot."""
    for one in sorted(at_least_home(state), key=lambda one: -one.world_size):
        if (found := take_back(state, one)) is not None:
            return found
    return take_back(state)


def migrations(leaving: Sequence[InstanceState]) -> tuple[Migration, ...]:
    """The requests of instances that stop go to whichever instance has room."""
    return tuple(Migration(source=one.number, count=one.load) for one in leaving if one.load)


def spread(decision: ScalingDecision, state: ClusterState) -> ScalingDecision:
    """Return the decision of an iteration's beginning, with which instances share the requests.

    Some have taken all of them before others came back, or got devices of the actor. None is begun,
    or nearly so: they move for nothing.
    """
    holdings = holdings_after(decision, state)
    serving = [
        one for one in state.instances if one.answers and holdings[instance_name(one.number)]
    ]
    if state.queued or not serving:
        return decision
    fair = math.ceil(sum(one.load for one in serving) / len(serving))
    moves = tuple(
        Migration(source=one.number, count=one.load - fair)
        for one in serving
        if one.load > (1.0 + UNEVEN) * fair
    )
    return msgspec.structs.replace(decision, migrations=(*decision.migrations, *moves))


def keep_order(state: ClusterState) -> list[InstanceState]:
    """Serving instances, those first whose devices the actor would take last."""
    position = {device: at for at, device in enumerate(state.actor.devices)}
    beyond = len(position)

    def first_needed(one: InstanceState) -> int:
        return min(position.get(device, beyond) for device in one.devices)

    return sorted(state.serving, key=lambda one: (-first_needed(one), one.number))


def instances_needed(state: ClusterState, share: float = 1.0) -> int:
    """Return how many instances can decode what is unfinished, with ``share`` of their slots."""
    slots = max(1, round(share * min((one.slots for one in state.serving), default=1)))
    waiting = sum(one.load for one in state.serving) + state.queued
    return max(1, math.ceil(waiting / slots)) if waiting else 0


def strategy_beside(state: ClusterState, kept: Collection[int]) -> Strategy:
    """Return the largest strategy, not below the present one, that fits beside these instances."""
    taken = {
        device
        for one in state.instances
        if one.number in kept or not one.answers
        for device in one.devices
    } | set(state.lost)
    actor = state.actor
    fitting = [
        one
        for one in larger_strategies(state)
        if taken.isdisjoint(actor.devices[actor.strategy.world_size : one.world_size])
    ]
    return max(fitting, key=lambda one: one.world_size, default=actor.strategy)


def larger_strategies(state: ClusterState) -> list[Strategy]:
    """Return the strategies of more ranks than the present one, smallest first."""
    actor = state.actor
    return sorted(
        (
            one
            for one in actor.strategies
            if actor.strategy.world_size < one.world_size <= len(actor.devices)
        ),
        key=lambda one: one.world_size,
    )


def grow(state: ClusterState, kept: Collection[int], reason: str) -> ScalingDecision | None:
    """The actor grows as far as it can beside the instances that are kept; others stop where their
    devices are needed for it. None: it cannot grow."""
    return grow_to(state, strategy_beside(state, kept), reason)


def grow_to(state: ClusterState, strategy: Strategy, reason: str) -> ScalingDecision | None:
    """The actor grows to this strategy; instances on the devices that it needs stop. None: it
    cannot, for want of devices or of an instance for what is unfinished, or has it already."""
    actor = state.actor
    needed = set(actor.devices[actor.strategy.world_size : strategy.world_size])
    leaving = on_devices(state, needed) if needed else None
    if leaving is None:
        return None
    return ScalingDecision(
        iteration=state.iteration,
        stop=tuple(one.number for one in leaving),
        actor=strategy,
        migrations=migrations(leaving),
        reason=reason,
    )


def wanted_by_actor(state: ClusterState) -> set[int]:
    """Return the devices that the actor may still grow into before its last mini-batch, which
    waits for the tail in any case."""
    actor = state.actor
    if actor.left <= 1:
        return set()
    return set(actor.devices[: max(one.world_size for one in actor.strategies)])


def release(state: ClusterState) -> ScalingDecision | None:
    """Everything is generated: instances stop on devices that the actor may grow into, so that it
    finds them free at its next boundary. None: there are none, or somebody still asks for them."""
    if state.unfinished or state.queued:
        return None
    wanted = wanted_by_actor(state)
    idle = [one for one in state.serving if not wanted.isdisjoint(one.devices)]
    if not idle or any(one.load or not one.answers for one in idle):
        return None
    return ScalingDecision(
        iteration=state.iteration,
        stop=tuple(one.number for one in idle),
        reason="everything is generated",
    )


def has_work(state: ClusterState) -> bool:
    """Whether the samples of the next mini-batch have arrived, as far as is known."""
    actor = state.actor
    size = state.samples * actor.epochs // max(actor.mini_batches, 1)
    return actor.left > 0 and (actor.arrived is None or actor.arrived >= size)
