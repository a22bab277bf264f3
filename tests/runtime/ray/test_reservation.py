"""What is asked of Ray for a launch, and which accelerator each device is."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_async.runtime.backend import WorkerSpec
from rlinf_async.runtime.ray.hosts import Host
from rlinf_async.runtime.ray.reservation import Bundle, Slot, bundles, numbered
from rlinf_async.workers.base import Worker
from rlinf_async.workers.context import Device, WorkerInfo
from rlinf_async.workers.errors import BuildError

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


def test_a_device_given_twice_to_a_rank_is_refused() -> None:
    with pytest.raises(BuildError, match=r"G\[1\] is given a device twice: a:cuda:0, a:cuda:0"):
        bundles(ranks((A0,), (A0, A0)), {})


def test_devices_have_accelerators_in_the_order_of_their_numbers_on_every_host() -> None:
    hosts = {name: Host(id=name, name=name, address="", port=0, resources={}) for name in "abc"}
    wanted = bundles(ranks((A1,), (B0,), (CORE,), (A0,)), {})
    group: Any = object()
    slots = [Slot(group, at, hosts[one.host]) for at, one in enumerate(wanted)]
    found = numbered(wanted, slots, {0: "2", 1: "0", 3: "10"})
    shown = {key: (slot.index, slot.number) for key, slot in found.items()}
    assert shown == {A0: (0, "2"), A1: (3, "10"), B0: (1, "0"), CORE: (2, "")}
