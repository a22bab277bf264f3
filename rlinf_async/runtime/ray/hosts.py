"""The hosts of a Ray cluster by name, and their devices."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from rlinf_async.workers.context import Device

ANSWER_SECONDS: Final = 5.0
"""time that a host has to answer before it is taken for lost"""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A host (a node, as Ray says) of a cluster."""

    id: str
    """Ray's identifier of the node"""
    name: str
    address: str
    port: int
    """at which Ray's node listens there"""
    resources: Mapping[str, float]
    """all that it has, by name, also what is in use"""

    @property
    def devices(self) -> list[Device]:
        """Its accelerators, or its CPU cores where it has none."""
        accelerators = int(self.resources.get("GPU", 0))
        kind, count = ("cuda", accelerators) if accelerators else ("cpu", self.cores)
        return [Device(kind, index, self.name) for index in range(count)]

    @property
    def cores(self) -> int:
        """Number of its CPU cores, as Ray counts them."""
        return int(self.resources.get("CPU", 0))

    async def answers(self) -> bool:
        """Whether Ray's node listens there: until Ray itself says that a host is lost, half a
        minute goes by."""
        return await _answers(self.address, self.port)


def live_hosts(nodes: Iterable[Mapping[str, Any]]) -> list[Host]:
    """The hosts of Ray's nodes that are alive, in the order of their names.

    A host is known by the name that its node was given (``ray start --node-name``), else by its
    hostname; where several nodes of one host have no names, by hostname and number.
    """
    alive = [node for node in nodes if node["Alive"]]
    alive.sort(key=lambda node: (natural(_name(node)), node["NodeID"]))
    times, seen = Counter(map(_name, alive)), Counter[str]()
    found = []
    for node in alive:
        name = _name(node)
        if times[name] > 1:
            seen[name] += 1
            name = f"{name}-{seen[name] - 1}"
        found.append(
            Host(
                id=node["NodeID"],
                name=name,
                address=node["NodeManagerAddress"],
                port=node["NodeManagerPort"],
                resources=dict(node["Resources"]),
            )
        )
    return found


async def present_hosts(nodes: Iterable[Mapping[str, Any]]) -> list[Host]:
    """As `live_hosts`; of several nodes with one name only those that answer.

    Where a host was started again, Ray takes its former node for alive for another while.
    """
    alive = [node for node in nodes if node["Alive"]]
    times = Counter(map(_name, alive))
    twice = [node for node in alive if times[_name(node)] > 1]
    there = await asyncio.gather(
        *(_answers(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in twice)
    )
    gone = {node["NodeID"] for node, answers in zip(twice, there, strict=True) if not answers}
    return live_hosts(node for node in alive if node["NodeID"] not in gone)


async def answering(hosts: Sequence[Host]) -> list[Host]:
    """Those that answer."""
    answers = await asyncio.gather(*(host.answers() for host in hosts))
    return [host for host, there in zip(hosts, answers, strict=True) if there]


def devices_of(hosts: Sequence[Host]) -> tuple[Device, ...]:
    """All devices, host by host."""
    return tuple(device for host in hosts for device in host.devices)


def least_loaded(hosts: Sequence[Host], ranks: Mapping[str, int]) -> Host:
    """Where a rank without devices goes: the host with the fewest ranks for its cores.

    Args:
        hosts: at least one.
        ranks: number of ranks on each host, by the host's identifier.
    """
    return min(hosts, key=lambda host: (ranks.get(host.id, 0) + 1) / max(host.cores, 1))


def natural(text: str) -> list[tuple[int, str]]:
    """The order in which ``node2`` comes before ``node10``."""
    parts = re.split(r"(\d+)", text)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


async def _answers(address: str, port: int) -> bool:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            _, writer = await asyncio.open_connection(address, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _name(node: Mapping[str, Any]) -> str:
    given = node.get("NodeName") or ""
    hostname: str = node.get("NodeManagerHostname") or node["NodeManagerAddress"]
    return hostname if given in ("", node["NodeManagerAddress"]) else given
