"""Whether the bundles of a placement group have room for the ranks of a training group.

Ray itself lets an actor for which its bundle has no room wait, for ever and without a word.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import uuid4

import msgspec

from rlinf_async.runtime.ray.bundles import amount, there
from rlinf_async.runtime.ray.hosts import live_hosts
from rlinf_async.runtime.ray.library import of_ray
from rlinf_async.workers.errors import BuildError

log = logging.getLogger(__name__)
ROOM_SECONDS: Final = 8.0
"""time that what has just ended has to give its bundles back"""
LOOK_SECONDS: Final = 0.25
TELL_SECONDS: Final = 30.0
"""interval between reports of a wait that has no limit"""
LEAST: Final = 1e-4
"""the smallest share of a resource that Ray knows"""


class Asked(msgspec.Struct, frozen=True):
    """What a rank asks of its bundle."""

    rank: str
    bundle: int
    resources: Mapping[str, float]


def actor_name(rank: str, group: Any, bundle: int) -> str:
    """Return a name for the actor of Ray, by which others see who holds the bundle."""
    return f"{rank} {_holds(group, bundle)} {uuid4().hex[:8]}"


def wait_until_placed(group: Any) -> None:
    """Wait until the placement group is reserved: it may be asked of autoscaling."""
    since = told = time.monotonic()
    while not group.wait(LOOK_SECONDS):
        now = time.monotonic()
        if now >= told + TELL_SECONDS:
            told = now
            wanted, hosts = amount(group.bundle_specs), live_hosts(of_ray().nodes())
            log.warning(
                "waiting for %.0f s for a placement group of %s: %s",
                now - since, wanted, there(hosts),
            )  # fmt: skip


def check_room(whose: str, group: Any, asked: Sequence[Asked]) -> None:
    """Raise `BuildError` where a bundle has no room: what was asked, what there is, and who holds
    the rest.

    Args:
        whose: name of the training group.
    """
    for one in asked:
        has = group.bundle_specs[one.bundle]
        inside = [other for other in asked if other.bundle == one.bundle]
        if any(
            sum(other.resources[name] for other in inside) > has.get(name, 0.0) + LEAST
            for name in one.resources
        ):
            ranks, each = " and ".join(other.rank for other in inside), amount([one.resources])
            asks = f"asks for {each}" if len(inside) == 1 else f"ask for {each} each"
            raise BuildError(
                f"{whose}: {ranks} {asks}, but bundle {one.bundle} of the placement group is of "
                f"{amount([has])}: make it of larger bundles (create_placement_group), or ask for "
                "less (num_gpus_per_actor)"
            )
    end = time.monotonic() + ROOM_SECONDS
    while full := [one for one in asked if not _has_room(group, one)]:
        if time.monotonic() >= end:
            raise BuildError(f"{whose}: {_explain(group, full)}")
        time.sleep(LOOK_SECONDS)


def wait_for_ranks(refs: Sequence[Any], asked: Sequence[Asked], group: Any) -> None:
    """Wait until these ranks answer. Raises Ray's error where one cannot be started."""
    ray, waiting = of_ray(), list(refs)
    since = time.monotonic()
    while True:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=TELL_SECONDS)
        ray.get(done)
        if not waiting:
            return
        if not done:
            late = [one for one, ref in zip(asked, refs, strict=True) if ref in waiting]
            log.warning(
                "waiting for %.0f s for Ray to start %s: %s",
                time.monotonic() - since,
                ", ".join(one.rank for one in late),
                _explain(group, [one for one in late if not _has_room(group, one)])
                or "their bundles have room ('ray list actors' shows what they wait for)",
            )


def _has_room(group: Any, asked: Asked) -> bool:
    free = _free(group, asked)
    return all(free[name] + LEAST >= number for name, number in asked.resources.items())


def _free(group: Any, asked: Asked) -> dict[str, float]:
    """What the bundle has left of what is asked."""
    here, found = f"_group_{asked.bundle}_{group.id.hex()}", of_ray().available_resources()
    return {name: found.get(name + here, 0.0) for name in asked.resources}


def _explain(group: Any, full: Sequence[Asked]) -> str:
    if not full:
        return ""
    names = [str(one["name"]) for one in of_ray("util").list_named_actors(all_namespaces=True)]
    each = []
    for one in full:
        has = {name: group.bundle_specs[one.bundle][name] for name in one.resources}
        held = Counter(has)
        held.subtract(_free(group, one))
        here = [name.partition(" ")[0] for name in names if _holds(group, one.bundle) in name]
        each.append(
            f"{one.rank} asks for {amount([one.resources])} of bundle {one.bundle} of the "
            f"placement group, which has {amount([has])}, of which "
            f"{', '.join(sorted(here)) or 'another actor or task'} holds {amount([held])}"
        )
    return (
        f"{'; '.join(each)}. To share a bundle, give each group a part of it "
        "(num_gpus_per_actor=0.4, of both); else make a placement group with more bundles and give "
        "each group its own (pg[0], pg[1][n:], pg[2][n:]), or end what holds them (shutdown())"
    )


def _holds(group: Any, bundle: int) -> str:
    return f"in bundle {bundle} of {group.id.hex()}"
