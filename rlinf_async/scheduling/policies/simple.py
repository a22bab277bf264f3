"""`Static`, `Tail` and `Turns`, and what all policies that move devices share: going home, lending,
taking back, growing the actor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import msgspec

from rlinf_async.parallel import Strategy
from rlinf_async.scheduling.state import (
    ClusterState,
    InstanceState,
    Migration,
    Resume,
    ScalingDecision,
    holdings_after,
    instance_name,
)


def go_home(state: ClusterState, reason: str = "home") -> ScalingDecision:
    """Return the decision after which everybody holds what it was launched with.

    Instances on the actor's devices stop. Where an instance does not answer or a device is lost,
    the others go home as far as that leaves them room; one that is stopped goes home whether it
    answers or not: it serves there once it does. The actor has to be at a boundary; one that has
    lent its devices takes them again unless nobody would serve then.
    """
    actor = state.actor
    stuck = {device for one in state.instances if not one.answers for device in one.devices}
    strategy = home_strategy(state, stuck | set(state.lost))
    own = set(actor.needs(strategy)) if actor.holds or strategy else set()
    if not actor.holds and not _serves_beside(own, state):
        strategy, own = None, set()
    stop = tuple(
        one.number
        for one in state.serving
        if one.answers
        and not own.isdisjoint(one.devices)
        and (state.is_guest(one) or not own.isdisjoint(one.home))
    )
    resume = tuple(
        Resume(instance=one.number, devices=one.home)
        for one in state.instances
        if (one.answers or not one.serves)
        and one.number not in stop
        and (one.devices != one.home or not one.serves)
        and own.isdisjoint(one.home)
        and not (state.is_guest(one) and not one.serves)
        and stuck.isdisjoint(set(one.home) - set(one.devices))
        and set(one.home).isdisjoint(state.lost)
    )
    return ScalingDecision(
        iteration=state.iteration,
        stop=stop,
        actor=strategy if strategy is not None and strategy != actor.strategy else None,
        actor_holds=True if strategy is not None and not actor.holds else None,
        resume=resume,
        reason=reason,
    )


def _serves_beside(devices: set[int], state: ClusterState) -> bool:
    """Whether somebody serves on other devices, or need not."""
    others = (one for one in state.serving if devices.isdisjoint(one.devices))
    return not state.unfinished or any(one.answers for one in others)


def all_serve(decision: ScalingDecision, state: ClusterState) -> ScalingDecision:
    """Return the decision of an iteration's beginning, with which those also serve that could not
    go home at the end of the last one."""
    taken = {one for devices in holdings_after(decision, state).values() for one in devices}
    named = {one.instance for one in decision.resume}
    back = tuple(
        Resume(instance=one.number, devices=one.home)
        for one in state.instances
        if not (one.serves or one.due or state.is_guest(one) or one.number in named)
        and taken.difference(one.devices).union(state.lost).isdisjoint(one.home)
    )
    if not back:
        return decision
    return msgspec.structs.replace(decision, resume=(*decision.resume, *back))


def home_strategy(state: ClusterState, blocked: set[int]) -> Strategy | None:
    """Return the home strategy, or the largest smaller one, or, where the actor has lent its
    devices, the one that it had: the first of them that needs no blocked device; None if there is
    none."""
    actor = state.actor
    fitting = [one for one in actor.strategies if one.world_size <= actor.home.world_size]
    fitting.sort(key=lambda one: (one == actor.home, one.world_size), reverse=True)
    if not actor.holds:
        fitting.append(actor.strategy)
    return next((one for one in fitting if blocked.isdisjoint(actor.needs(one))), None)


def servable(state: ClusterState, instance: InstanceState) -> bool:
    """Whether a stopped instance could serve at home, as far as the instance itself goes."""
    return instance.answers and set(instance.home).isdisjoint(state.lost)


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


class IterationPolicy(ABC):
    """A policy by which everybody goes home at the end of an iteration."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        """Return what changes now."""
        if state.phase == "end":
            return go_home(state)
        nothing = ScalingDecision(iteration=state.iteration)
        if state.phase == "begin":
            return spread(all_serve(self.begin(state) or nothing, state), state)
        decision = self.step(state) or nothing
        comes = decision.resume or any(
            one.serves or (one.due and set(one.due).isdisjoint(state.lost))
            for one in state.instances
        )
        if state.unfinished and not comes:  # the last one is lost, or does not answer any more
            return all_serve(decision, state)
        return decision

    def begin(self, state: ClusterState) -> ScalingDecision | None:
        """Return what changes as an iteration begins: rollout borrows the actor's devices."""
        return lend(state)

    @abstractmethod
    def step(self, state: ClusterState) -> ScalingDecision | None:
        """Return what changes within an iteration; None: nothing."""


LENT_UNTIL = 0.5
"""share of an iteration's samples that is generated on the actor's devices, too"""


class Tail(IterationPolicy):
    """The built-in policy of an on-policy step whose lengths have a long tail.

    ::

        an iteration begins          rollout borrows the actor's devices
        half of its samples done     the actor takes them again, and trains what is there
        after each mini-batch        instances that are not needed for what is unfinished stop;
                                     their requests go to the others; the actor grows into their
                                     devices
        an iteration ends            everybody goes home
    """

    def step(self, state: ClusterState) -> ScalingDecision | None:
        """Return what changes within an iteration; None: nothing."""
        if not state.actor.holds:
            due = state.finished >= LENT_UNTIL * state.samples or not state.unfinished
            return take_back(state) if due else None
        if not state.actor.ready or not has_work(state):
            return None
        kept = [one.number for one in keep_order(state)[: instances_needed(state)]]
        return grow(state, kept, f"{state.unfinished} samples are left to generate")


class Turns(IterationPolicy):
    """Generation and training take turns on all devices, as where both are collocated.

    ::

        an iteration begins        rollout borrows the actor's devices
        everything is generated    the actor takes all devices that it can have, and trains
        an iteration ends          everybody goes home

    No device waits for the other role, but all of them wait for the longest response: what `Tail`
    and the others have to beat.
    """

    def step(self, state: ClusterState) -> ScalingDecision | None:
        """Return what changes within an iteration; None: nothing."""
        if state.unfinished:
            return None
        if not state.actor.holds:
            return take_most(state)
        if not state.actor.ready or not state.actor.left:
            return None
        return grow(state, (), "everything is generated")


class Static:
    """Everybody keeps the devices that it was launched with. Where another policy, which failed,
    has given them to others, all go home, once the actor is at a boundary."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        """Return that nothing changes, or who goes home."""
        if not state.actor.ready:
            return ScalingDecision(iteration=state.iteration)
        decision = go_home(state)
        return all_serve(decision, state) if state.phase == "begin" else decision
