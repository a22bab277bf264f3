"""Hosts of a Ray cluster by name, and where a rank without devices goes."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from rlinf_async.runtime.ray.backend import how_it_ended
from rlinf_async.runtime.ray.session import (
    answering,
    devices_of,
    least_loaded,
    live_hosts,
    present_hosts,
)


def node(number: int, name: str = "", hostname: str = "box", **resources: float) -> dict[str, Any]:
    address = f"10.0.0.{number}"
    return {
        "NodeID": f"id{number}",
        "Alive": True,
        "NodeName": name or address,
        "NodeManagerHostname": hostname,
        "NodeManagerAddress": address,
        "NodeManagerPort": 7000 + number,
        "Resources": resources,
    }


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ([node(1, "node10"), node(2, "node9"), node(3, "node1")], ["node1", "node9", "node10"]),
        ([node(1, hostname="b"), node(2, hostname="a")], ["a", "b"]),
        ([node(1), node(2), node(3, "other")], ["box-0", "box-1", "other"]),
        ([node(1, "alive"), node(2, "dead") | {"Alive": False}], ["alive"]),
    ],
)
def test_a_host_is_known_by_its_given_name_else_by_its_hostname(
    nodes: list[dict[str, Any]], names: list[str]
) -> None:
    assert [host.name for host in live_hosts(nodes)] == names


def test_a_host_has_its_accelerators_or_else_its_cores() -> None:
    hosts = live_hosts([node(1, "a", CPU=8, GPU=2), node(2, "b", CPU=2)])
    found = [(one.host, one.kind, one.index) for one in devices_of(hosts)]
    assert found == [("a", "cuda", 0), ("a", "cuda", 1), ("b", "cpu", 0), ("b", "cpu", 1)]


def test_ranks_without_devices_are_spread_by_the_number_of_cores() -> None:
    hosts = live_hosts([node(1, "small", CPU=1), node(2, "large", CPU=3), node(3, "none")])
    ranks = Counter[str]()
    for _ in range(8):
        ranks[least_loaded(hosts, ranks).id] += 1
    assert ranks == {"id1": 1, "id2": 6, "id3": 1}


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """One at which somebody listens, and one at which nobody does."""
    with socket.create_server(("127.0.0.1", 0)) as there:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            found: tuple[int, int] = there.getsockname()[1], gone.getsockname()[1]
        yield found


def at_port(number: int, name: str, port: int) -> dict[str, Any]:
    return node(number, name) | {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}


def test_the_end_of_ray_on_the_driver_s_host_is_said_in_words() -> None:
    said = how_it_ended(RuntimeError("The actor is dead because: Owner's node has crashed."))
    assert "Ray has ended on the driver's host" in said


async def test_a_host_whose_node_is_gone_does_not_answer(ports: tuple[int, int]) -> None:
    hosts = live_hosts([at_port(1, "there", ports[0]), at_port(2, "gone", ports[1])])
    assert [host.name for host in await answering(hosts)] == ["there"]


async def test_a_host_that_was_started_again_keeps_its_name(ports: tuple[int, int]) -> None:
    there, gone = ports
    nodes = [at_port(1, "one", gone), at_port(2, "one", there), at_port(3, "other", gone)]
    found = await present_hosts(nodes)
    assert [(host.name, host.id) for host in found] == [("one", "id2"), ("other", "id3")]
