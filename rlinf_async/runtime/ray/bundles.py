"""What a launch asks of Ray, and how it is said where it cannot be had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rlinf_async.runtime.backend import WorkerSpec
from rlinf_async.runtime.ray.hosts import Host
from rlinf_async.workers.context import Device
from rlinf_async.workers.errors import BuildError

RESOURCES = {"cuda": "GPU", "cpu": "CPU"}


class Bundle(msgspec.Struct, frozen=True):
    """What is asked of Ray as one."""

    resources: dict[str, float]
    host: str
    """name of the host; empty for any"""
    device: Device | None = None
    rank: str = ""
    """name of the rank for which it holds resources besides devices"""


def bundles(ranks: Sequence[WorkerSpec], reserved: Mapping[Device | str, object]) -> list[Bundle]:
    """What is to be reserved for the ranks of a launch: for each new device a bundle, and one for
    each rank that needs more than devices.

    Raises:
        BuildError: a rank has a device twice.
    """
    found: dict[Device | str, Bundle] = {}
    for rank in ranks:
        devices = rank.info.devices
        if len(set(devices)) < len(devices):
            raise BuildError(f"{rank.info.name} is given a device twice: {_labels(devices)}")
        for device in devices:
            if device not in reserved:
                resources = {RESOURCES[device.kind]: 1.0}
                found.setdefault(device, Bundle(resources, device.host, device=device))
        if rank.resources and rank.info.name not in reserved:
            host = devices[0].host if devices else ""
            found[rank.info.name] = Bundle(dict(rank.resources), host, rank=rank.info.name)
    return list(found.values())


def impossible(wanted: Iterable[Bundle], hosts: Sequence[Host]) -> list[Bundle]:
    """Those of the bundles that no host has, also where nobody uses it."""
    return [one for one in wanted if not any(_fits(one, host) for host in hosts)]


def _fits(bundle: Bundle, host: Host) -> bool:
    return bundle.host in ("", host.name) and all(
        host.resources.get(name, 0) >= number for name, number in bundle.resources.items()
    )


def holders(groups: Iterable[Mapping[str, Any]], hosts: Sequence[Host]) -> list[str]:
    """What each placement group holds, and where: ``"run/1 Env: 4 CPU on beta"``.

    Args:
        groups: as Ray's table of placement groups has them.
    """
    names = {host.id: host.name for host in hosts}
    found = []
    for group in groups:
        if group["state"] != "CREATED":
            continue
        nodes = group["bundles_to_node_id"]
        held = [
            Bundle(resources, names.get(nodes.get(at, ""), ""))
            for at, resources in group["bundles"].items()
        ]
        found.append(f"{group['name'] or group['placement_group_id'][:8]}: {asked(held)}")
    return found


def asked(wanted: Iterable[Bundle]) -> str:
    """Bundles in words."""
    by_host: dict[str, list[dict[str, float]]] = {}
    for one in wanted:
        by_host.setdefault(one.host, []).append(one.resources)
    return ", ".join(
        f"{amount(resources)}{f' on {host}' if host else ''}" for host, resources in by_host.items()
    )


def there(hosts: Sequence[Host]) -> str:
    """What the hosts have, in words."""
    each = []
    for host in hosts:
        named = {
            name: number
            for name, number in host.resources.items()
            if name not in ("memory", "object_store_memory") and ":" not in name
        }
        each.append(f"{host.name} has {amount([named])}")
    return f"of {len(hosts)} hosts {', '.join(each)}" if each else "there is no host"


def amount(resources: Iterable[Mapping[str, float]]) -> str:
    """The sum of resources, in words."""
    total: Any = Counter()  # of numbers that may be fractions
    for one in resources:
        total.update(one)
    return " and ".join(f"{number:g} {name}" for name, number in sorted(total.items())) or "nothing"


def _labels(devices: Iterable[Device]) -> str:
    return ", ".join(f"{one.host}:{one}" if one.host else str(one) for one in devices)
