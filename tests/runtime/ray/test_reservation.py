"""What is asked of Ray for a launch, and which accelerator each device is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from rlinf_async.runtime.ray import backend
from rlinf_async.runtime.ray.reservation import (
    Bundle,
    DeviceReservations,
    ReservedBundle,
    asked,
    bundles,
    holders,
    impossible,
    numbered,
)
from rlinf_async.runtime.ray.session import Host
from rlinf_async.runtime.supervise import WorkerSpec
from rlinf_async.workers.base import BuildError, Device, Worker, WorkerInfo

A0, A1, B0 = Device("cuda", 0, "a"), Device("cuda", 1, "a"), Device("cuda", 0, "b")
CORE = Device("cpu", 3, "c")


def ranks(*devices: tuple[Device, ...], **resources: float) -> list[WorkerSpec]:
    infos = [
        WorkerInfo(group="G", rank=rank, world_size=len(devices), devices=own)
        for rank, own in enumerate(devices)
    ]
    return [
        WorkerSpec(cls=Worker, args=(), kwargs={}, info=info, env_vars={}, resources=resources)
        for info in infos
    ]


def test_each_new_device_is_a_bundle_on_its_host() -> None:
    asked = bundles(ranks((A0, A1), (A1,), (CORE,)), {A0: object()})
    assert asked == [
        Bundle({"GPU": 1.0}, "a", device=A1),
        Bundle({"CPU": 1.0}, "c", device=CORE),
    ]


def test_a_resource_is_asked_for_each_rank_on_the_host_of_its_devices() -> None:
    assert bundles(ranks((), robot=1), {}) == [Bundle({"robot": 1}, "", rank="G[0]")]
    asked = bundles(ranks((B0,), robot=2), {})
    assert asked[1] == Bundle({"robot": 2}, "b", rank="G[0]")
    assert bundles(ranks((B0,), robot=2), {B0: 0, "G[0]": 0}) == []


def test_what_no_host_has_is_told_from_what_is_in_use() -> None:
    hosts = [
        Host(id=name, name=name, address="", port=0, resources=resources)
        for name, resources in (("a", {"CPU": 4.0}), ("b", {"CPU": 2.0, "robot": 1.0}))
    ]
    wanted = [
        Bundle({"CPU": 3.0}, ""),
        Bundle({"CPU": 3.0}, "b"),
        Bundle({"robot": 2.0}, ""),
        Bundle({"robot": 1.0}, "b"),
    ]
    assert impossible(wanted, hosts) == wanted[1:3]
    assert asked(wanted[1:3]) == "3 CPU on b, 2 robot"


def test_holders_are_named_with_the_hosts_of_what_they_hold() -> None:
    hosts = [Host(id="ida", name="a", address="", port=0, resources={})]
    bundles_of = {0: {"CPU": 1.0}, 1: {"CPU": 1.0}, 2: {"GPU": 0.5}}
    nodes = {0: "ida", 1: "ida", 2: "of a host that is gone"}
    one = {"placement_group_id": "0123456789", "bundles": bundles_of, "bundles_to_node_id": nodes}
    table = [
        one | {"name": "mine/1 Env", "state": "CREATED"},
        one | {"name": "", "state": "CREATED"},
        one | {"name": "mine/2 Actor", "state": "PENDING"},
    ]
    assert holders(table, hosts) == [
        "mine/1 Env: 2 CPU on a, 0.5 GPU",
        "01234567: 2 CPU on a, 0.5 GPU",
    ]


def test_a_device_given_twice_to_a_rank_is_refused() -> None:
    with pytest.raises(BuildError, match=r"G\[1\] is given a device twice: a:cuda:0, a:cuda:0"):
        bundles(ranks((A0,), (A0, A0)), {})


def test_devices_have_accelerators_in_the_order_of_their_numbers_on_every_host() -> None:
    hosts = {name: Host(id=name, name=name, address="", port=0, resources={}) for name in "abc"}
    wanted = bundles(ranks((A1,), (B0,), (CORE,), (A0,)), {})
    group: Any = object()
    slots = [ReservedBundle(group, at, hosts[one.host]) for at, one in enumerate(wanted)]
    found = numbered(wanted, slots, {0: "2", 1: "0", 3: "10"})
    shown = {key: (slot.index, slot.number) for key, slot in found.items()}
    assert shown == {A0: (0, "2"), A1: (3, "10"), B0: (1, "0"), CORE: (2, "")}


class Refusing(DeviceReservations):
    """Reservations of which some hosts' devices are held by another cluster."""

    def __init__(self, *held: str) -> None:
        super().__init__(cast(Any, None), wait=0.0, label="")
        self._refused = set(held)

    async def reserve(self, ranks: Sequence[WorkerSpec]) -> None:
        [device] = ranks[0].info.devices
        if device.host in self._refused:
            raise BuildError(f"GPU on {device.host}, which was not free")


def host(name: str) -> Host:
    return Host(id=name, name=name, address="", port=0, resources={"GPU": 1.0})


async def test_a_rank_moves_to_the_next_host_where_one_that_looked_free_is_not() -> None:
    hosts = [host("b"), host("c")]
    [rank] = ranks((A0,))
    moved = await Refusing("b")._move(rank, hosts)
    assert moved.info.devices == (Device("cuda", 0, "c"),)
    with pytest.raises(BuildError, match="GPU on c, which was not free"):
        await Refusing("b", "c")._move(rank, hosts)
    with pytest.raises(BuildError, match="no other host has 1 free devices"):
        await Refusing()._move(rank, [])


async def test_a_rank_whose_hosts_are_lost_one_after_the_other_is_given_up_by_name() -> None:
    async def start(rank: WorkerSpec) -> str:
        tried.append(rank.info.name)
        if len(tried) < lost:
            raise backend.HostLost("host beta was lost")
        return "started"

    [_, rank] = ranks((A0,), (A1,))
    tried: list[str] = []
    lost = backend.HOSTS_TRIED
    assert await backend.on_a_living_host(rank, start) == "started"
    tried, lost = [], backend.HOSTS_TRIED + 1
    with pytest.raises(BuildError, match=r"G\[1\]: 5 hosts were lost while it was started"):
        await backend.on_a_living_host(rank, start)
