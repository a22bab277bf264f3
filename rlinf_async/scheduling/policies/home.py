"""The layout between two iterations, from which each iteration begins and in which it ends."""

from __future__ import annotations

import msgspec

from rlinf_async.parallel import Strategy
from rlinf_async.scheduling.decision import Resume, ScalingDecision, holdings_after
from rlinf_async.scheduling.state import ClusterState, InstanceState


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
