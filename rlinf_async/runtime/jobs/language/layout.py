"""Which devices the actors and the rollout workers of a scheduled run are launched on.

::

    device     0  1 | 2      3      4
    actor      0  1 |        3      2      idle members at first, from the last rollout worker on
    rollout         | 0      1      2      rollout worker 0 always serves
    guests     3    |                      start when the actors lend devices for the first time

Actors and rollout workers have devices of their own; beyond theirs actors are launched on those of
rollout workers, too, and hold nothing there until a worker has given its device back. So are the
``scheduler.guests`` among the rollout workers on devices of the actors: their engines start once
the actors have given these back.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.placement import LaunchOptions, Plan
from rlinf_async.runtime.placement import Ranks


class Layout(msgspec.Struct, frozen=True):
    """Devices by number: their positions in the plan's machine, or, without accelerators, one for
    each worker."""

    actor: tuple[int, ...]
    """of each launched rank; the first ones train between two iterations"""
    instances: tuple[tuple[int, ...], ...]
    """of each rollout worker, guests last"""
    hosts: dict[int, int]
    """host of each device"""
    accelerated: bool


def layout_of(config: LanguageConfig, plan: Plan) -> Layout:
    """Return the devices of a run, whose numbers of workers are known."""
    own, instances, accelerated = _homes(config, plan)
    beyond = [device for one in reversed(instances[1:]) for device in one]
    most = len(own) + len(beyond)
    launched = max(
        (one for one in range(len(own), most + 1) if config.fits_actors(one)), default=len(own)
    )
    names = sorted({one.host for one in plan.machine})
    every = [*own, *(device for one in instances for device in one)]
    hosts = {one: names.index(plan.machine[one].host) if accelerated else 0 for one in every}
    each = plan.devices_per_worker("rollout")
    guests = tuple(own[one * each : (one + 1) * each] for one in range(config.scheduler.guests))
    return Layout((*own, *beyond)[:launched], (*instances, *guests), hosts, accelerated)


def _homes(
    config: LanguageConfig, plan: Plan
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], bool]:
    if plan.accelerated("actor") and plan.accelerated("rollout"):
        own = tuple(device for rank in plan.ranks["actor"] for device in rank)
        return own, tuple(plan.ranks["rollout"]), True
    actors = config.actors
    homes = tuple((actors + number,) for number in range(config.rollout_workers))
    return tuple(range(actors)), homes, False


def options(
    role: Literal["actor", "rollout"],
    layout: Layout | None,
    plan: Plan,
    environment: dict[str, str],
) -> LaunchOptions:
    """Return what the workers of a role are launched with; ``layout``: of a scheduled run."""
    found = plan.options(role, environment)
    if layout is not None and layout.accelerated:
        alone = [(device,) for device in layout.actor]
        found["placement"] = Ranks(alone if role == "actor" else list(layout.instances))
    return found
