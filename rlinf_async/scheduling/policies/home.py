"""The layout between two iterations, from which each iteration begins and in which it ends."""

from __future__ import annotations

from rlinf_async.parallel import Strategy
from rlinf_async.scheduling.decision import Resume, ScalingDecision
from rlinf_async.scheduling.state import ClusterState, InstanceState


def go_home(state: ClusterState, reason: str = "home") -> ScalingDecision:
    """Return the decision after which everybody holds what it was launched with.

    Instances on the actor's devices stop. Where an instance does not answer or a device is lost,
    the others go home as far as that leaves them room. The actor has to be at a boundary.
    """
    actor = state.actor
    stuck = {device for one in state.serving if not one.answers for device in one.devices}
    home = home_strategy(state, stuck | set(state.lost))
    own = set(actor.devices[: home.world_size]) if home else set()
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
        if one.answers
        and one.number not in stop
        and one.devices != one.home
        and own.isdisjoint(one.home)
        and not (state.is_guest(one) and not one.serves)
        and stuck.isdisjoint(set(one.home) - set(one.devices))
        and set(one.home).isdisjoint(state.lost)
    )
    return ScalingDecision(
        iteration=state.iteration,
        stop=stop,
        actor=home if home is not None and home != actor.strategy else None,
        actor_holds=True if home is not None and not actor.holds else None,
        resume=resume,
        reason=reason,
    )


def home_strategy(state: ClusterState, blocked: set[int]) -> Strategy | None:
    """Return the home strategy, or the largest smaller one that needs no blocked device; None if
    there is none."""
    actor = state.actor
    for one in sorted(
        actor.strategies, key=lambda one: (one == actor.home, one.world_size), reverse=True
    ):
        if one.world_size <= actor.home.world_size and blocked.isdisjoint(
            actor.devices[: one.world_size]
        ):
            return one
    return None


def servable(state: ClusterState, instance: InstanceState) -> bool:
    """Whether a stopped instance could serve at home, as far as the instance itself goes."""
    return instance.answers and set(instance.home).isdisjoint(state.lost)
