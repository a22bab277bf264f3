"""`create_placement_group`: bundles of Ray, ordered by host and device."""

from __future__ import annotations

import logging
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
