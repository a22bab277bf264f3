"""`create_placement_group`: bundles of Ray, ordered by host and device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

from rlinf_async.runtime.ray.bundles import there
from rlinf_async.runtime.ray.hosts import live_hosts, natural
from rlinf_async.runtime.ray.library import of_ray
from rlinf_async.runtime.ray.reservation import own_accelerator
from rlinf_async.workers.errors import BuildError

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0


class OrderedPlacementGroup(NamedTuple):
    """A placement group, and its bundles by host and device. Any such triple will do."""

    group: Any
    bundle_indices: list[int]
    """the k-th rank is in bundle ``bundle_indices[k]``"""
    gpu_ids: list[str]
    """number of the accelerator of the k-th rank on its host; empty for one without"""


class Placed(NamedTuple):
    """Where the ranks of a training group go."""

    group: Any
    bundles: list[int]
    """of each rank; there may be more"""
    own: bool
    """whether the training group made it, and removes it"""


def placed(pg: Any, ranks: int) -> Placed:
    """Return where so many ranks go.

    Args:
        pg: a placement group, its bundle indices by rank, and perhaps more, such as the number of
            the accelerator in each; None: one of their own is reserved.

    Raises:
        ValueError: ``pg`` is none of these, or its bundles are too few.
        BuildError: bundles were not free in time.
    """
    if pg is None:
        made = create_placement_group(ranks)
        return Placed(made.group, made.bundle_indices, own=True)
    given: tuple[Any, ...] = tuple(pg) if isinstance(pg, Sequence) else (pg,)
    if (
        len(given) not in (2, 3)
        or not hasattr(given[0], "bundle_specs")
        or not hasattr(given[1], "__iter__")
    ):
        kinds = ", ".join(type(one).__name__ for one in given)
        raise ValueError(
            f"pg is ({kinds}); it has to be (placement group of Ray, bundle indices), with or "
            "without the numbers of the accelerators, as create_placement_group() makes it, or None"
        )
    group, bundles = given[0], list(given[1])
    there = len(group.bundle_specs)
    for rank, bundle in enumerate(bundles[:ranks]):
        # -1 is any of them for Ray: it has no device of its own.
        if not isinstance(bundle, Integral) or not 0 <= int(bundle) < there:
            raise ValueError(
                f"bundle {bundle} of rank {rank} is none of the placement group, which has 0 to "
                f"{there - 1}"
            )
    if ranks > len(bundles):
        raise ValueError(f"{ranks} ranks need {ranks} bundles, but pg names {len(bundles)}")
    return Placed(group, [int(one) for one in bundles], own=False)


def create_placement_group(
    num_gpus: int, *, wait: float = 10.0, kind: str | None = None
) -> OrderedPlacementGroup:
    """Reserve bundles of one device each; ``ray.init`` was called already.

    Ray gives no order to bundles: host and device of each are looked up, and sorted.

    Args:
        num_gpus: number of bundles.
        wait: seconds to wait for them.
        kind: ``"GPU"`` or ``"CPU"``; accelerators where the cluster has any.

    Raises:
        BuildError: they were not free in time: what was asked, and what there is; ``num_gpus`` or
            ``wait`` is no such number.
    """
    if type(num_gpus) is not int or num_gpus < 1:
        raise BuildError(f"num_gpus must be a whole number from 1, got {num_gpus!r}")
    if not wait >= 0.0:
        raise BuildError(f"wait must be seconds from 0, got {wait!r}")
    ray, groups = of_ray(), of_ray("util.placement_group")
    if kind is None:
        kind = "GPU" if ray.cluster_resources().get("GPU", 0) > 0 else "CPU"
    bundle = {"CPU": 1.0} if kind == "CPU" else {"GPU": 1.0, "CPU": 1.0}
    group = groups.placement_group([bundle] * num_gpus, strategy="PACK")
    try:
        _wait_until_free(group, num_gpus, kind, wait)
        return _ordered(group, num_gpus, kind)
    except BaseException:  # an interrupt, too: nobody else knows of it
        groups.remove_placement_group(group)
        raise


def _wait_until_free(group: Any, num_gpus: int, kind: str, wait: float) -> None:
    waited = 0.0
    while not group.wait(LOOK_SECONDS):
        waited += LOOK_SECONDS
        if waited >= wait:
            hosts = live_hosts(of_ray().nodes())
            raise BuildError(
                f"a placement group of {num_gpus} bundles of 1 {kind} was not free within "
                f"{wait:g} s: {there(hosts)}; 'ray status' shows what is in use. Ask for fewer, "
                "end what holds the rest, or wait longer (wait=...)"
            )
        log.warning("waiting up to %g s for %d bundles of 1 %s", wait, num_gpus, kind)


def _ordered(group: Any, num_gpus: int, kind: str) -> OrderedPlacementGroup:
    """Sort the bundles by host and accelerator."""
    numbers = _numbers(group, num_gpus) if kind == "GPU" else [""] * num_gpus
    place = {host.id: at for at, host in enumerate(live_hosts(of_ray().nodes()))}
    nodes = of_ray("util.placement_group").placement_group_table(group)["bundles_to_node_id"]
    order = sorted(range(num_gpus), key=lambda at: (place[nodes[at]], natural(numbers[at]), at))
    return OrderedPlacementGroup(group, order, [numbers[at] for at in order])


def _numbers(group: Any, bundles: int) -> list[str]:
    """Ask in each bundle which accelerator it has."""
    ray = of_ray()
    strategy = of_ray("util.scheduling_strategies").PlacementGroupSchedulingStrategy
    probe = ray.remote(own_accelerator)
    asked = [
        probe.options(num_cpus=0, num_gpus=1, scheduling_strategy=strategy(group, at)).remote()
        for at in range(bundles)
    ]
    found: list[str] = ray.get(asked)
    return found
