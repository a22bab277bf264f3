"""Devices of a Ray cluster that a run has reserved.

::

    device (host, kind, index)  --ledger-->  bundle of a placement group, on that host
                                              |
                                              +--> the accelerator's own number there

Each device is a bundle of its own, pinned to its host; so roles that share a device share its
bundle, and what one launch reserved serves the next. Which accelerator Ray gave to a bundle only a
task in it can say: it is asked, and the numbers of a host are given out in order. What cannot be
had is refused with what was asked, what there is, and who holds the rest.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from rlinf_async.runtime.ray.session import (
    Host,
    RaySession,
    answering,
    least_loaded,
    natural,
    of_ray,
)
from rlinf_async.runtime.supervise import WorkerSpec
from rlinf_async.workers.base import BuildError, Device

RESOURCES = {"cuda": "GPU", "cpu": "CPU"}


class Bundle(msgspec.Struct, frozen=True):
    """Resources that are asked of Ray as one."""

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
    """Return the bundles that no host has, even while nobody uses it."""
    return [one for one in wanted if not any(_fits(one, host) for host in hosts)]


def _fits(bundle: Bundle, host: Host) -> bool:
    return bundle.host in ("", host.name) and all(
        host.resources.get(name, 0) >= number for name, number in bundle.resources.items()
    )


def holders(groups: Iterable[Mapping[str, Any]], hosts: Sequence[Host]) -> list[str]:
    """Return what each placement group holds, and where: ``"run/1 Env: 4 CPU on beta"``.

    Args:
        groups: placement groups, as Ray's table has them.
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
    """Return what the hosts have, in words."""
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


log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
"""time after which it is looked again whether the devices are there"""
PROBE_SECONDS = 300.0
"""time in which Ray runs a first task in a bundle; it may start processes for it"""
NODE_LABEL = "ray.io/node-id"
WAIT = "wait=, in a job cluster.ray.wait"
_group_numbers = itertools.count()
"""numbers of this process's placement groups: Ray wants another name for each"""


class ReservedBundle(msgspec.Struct, frozen=True):
    """A bundle that is reserved."""

    group: Any
    """placement group of the bundle"""
    index: int
    host: Host
    number: str = ""
    """number of the bundle's accelerator, as CUDA_VISIBLE_DEVICES names it"""


class RankPlace(msgspec.Struct, frozen=True):
    """Place of a rank in the cluster."""

    host: Host
    slot: ReservedBundle | None
    """the bundle that it runs in; None: none, it has no devices"""
    numbers: tuple[str, ...] = ()
    """numbers of the rank's accelerators on its host"""


class DeviceReservations:
    """The placement groups of one cluster.

    Args:
        wait: seconds to wait for devices that are in use, or that autoscaling is to bring.
        label: name of the run in Ray's list of placement groups.
    """

    def __init__(self, session: RaySession, *, wait: float, label: str) -> None:
        self._session = session
        self._wait = wait
        self._label = label
        self._slots: dict[Device | str, ReservedBundle] = {}
        """reserved bundles by device; by name of a rank for what it has besides devices"""
        self._users: dict[str, set[str]] = {}
        """names of the groups that use a placement group, by its identifier"""
        self._groups: dict[str, Any] = {}
        """placement groups by identifier"""
        self._hosts: dict[str, str] = {}
        """identifier of the host of each rank without devices"""
        self._replaced: dict[Device, Device] = {}
        """devices of lost hosts, each with the one that took its place: ranks that shared it still
        share that"""
        self._moving = asyncio.Lock()
        self._reserving = asyncio.Lock()
        """lock of one launch after the other: the next may share what the last has reserved"""

    async def reserve(self, ranks: Sequence[WorkerSpec]) -> None:
        """Reserve what the ranks of a launch need and no launch before has reserved.

        Raises:
            BuildError: it cannot be had: what was asked, what there is, and who holds the rest.
        """
        name = ranks[0].info.group
        if bundles(ranks, self._slots):
            async with self._reserving:
                if missing := bundles(ranks, self._slots):
                    await self._reserve(name, missing)
        for group in {slot.group.id.hex() for rank in ranks for slot in self._held(rank)}:
            self._users[group].add(name)

    async def release(self, name: str) -> None:
        """Give back what only this group of workers has."""
        for group, users in list(self._users.items()):
            users.discard(name)
            if not users:
                await self._remove(group)

    async def place(self, spec: WorkerSpec) -> tuple[WorkerSpec, RankPlace]:
        """Return where the rank runs: elsewhere, with other devices, where its host is lost.

        Raises:
            BuildError: no other host has devices for it.
        """
        alive = await self._session.hosts()
        if spec.info.incarnation:  # the host of its last life may be lost, unknown to Ray so far
            alive = await answering(alive) or alive
        hosts = {host.id: host for host in alive}
        if not _keys(spec):
            name = spec.info.name
            self._hosts.pop(name, None)
            host = least_loaded(list(hosts.values()), Counter(self._hosts.values()))
            self._hosts[name] = host.id
            return spec, RankPlace(host, None)
        async with self._moving:  # one rank after the other: the next may share the new device
            spec = _with_devices(spec, [self._present(one) for one in spec.info.devices])
            held = self._held(spec)
            if len(held) < len(_keys(spec)) or any(slot.host.id not in hosts for slot in held):
                spec = await self._move(spec, list(hosts.values()))
                held = self._held(spec)
        numbers = tuple(slot.number for slot in held if slot.number)
        return spec, RankPlace(held[0].host, held[0], numbers)

    async def close(self) -> None:
        """Give everything back."""
        for group in list(self._groups):
            await self._remove(group)

    def _held(self, spec: WorkerSpec) -> list[ReservedBundle]:
        return [self._slots[key] for key in _keys(spec) if key in self._slots]

    def _present(self, device: Device) -> Device:
        """The device itself, or what took its place."""
        while device in self._replaced:
            device = self._replaced[device]
        return device

    async def _move(self, spec: WorkerSpec, hosts: Sequence[Host]) -> WorkerSpec:
        """Reserve as many devices of the same kind on another host, for this rank.

        Raises:
            BuildError: no host has them; or none gives them, and why the last one that was asked
                does not.
        """
        present = {host.id for host in hosts}
        self._slots = {key: slot for key, slot in self._slots.items() if slot.host.id in present}
        wanted, refused = spec.info.devices, None
        for host in hosts:
            free = [one for one in host.devices if one not in self._slots]
            same = [one for one in free if wanted and one.kind == wanted[0].kind]
            if len(same) >= len(wanted):
                moved = _with_devices(spec, same[: len(wanted)])
                try:
                    await self.reserve([moved])
                except BuildError as error:  # somebody else holds them: another host may have more
                    refused = error
                    continue
                for old, new in zip(wanted, moved.info.devices, strict=True):
                    self._replaced[old] = new
                    self._replaced.pop(new, None)
                return moved
        if refused is not None:
            raise refused
        lost = ", ".join(f"{one.host}:{one.kind}:{one.index}" for one in wanted)
        raise BuildError(
            f"{spec.info.name} cannot be started again: its host is lost (it had {lost or 'none'}) "
            f"and no other host has {len(wanted)} free devices"
        )

    async def _reserve(self, name: str, wanted: Sequence[Bundle]) -> None:
        groups = of_ray("util.placement_group")
        hosts = {host.name: host for host in await self._session.hosts()}
        lost = sorted({one.host for one in wanted if one.host and one.host not in hosts})
        if lost:
            raise BuildError(
                f"{name} asks for devices of {', '.join(lost)}, which Ray has no more: "
                f"{there(list(hosts.values()))}"
            )
        if self._wait <= 0 and (none := impossible(wanted, list(hosts.values()))):
            raise BuildError(_no_host(name, none, list(hosts.values())))
        labels = [{NODE_LABEL: hosts[one.host].id} if one.host in hosts else {} for one in wanted]
        group = await self._session.make(
            partial(
                groups.placement_group,
                [one.resources for one in wanted],
                strategy="PACK",
                name=f"{self._label}/{next(_group_numbers)} {name}",
                bundle_label_selector=labels,
            ),
            undo=groups.remove_placement_group,
        )
        key = group.id.hex()
        self._groups[key], self._users[key] = group, {name}
        try:
            await self._until_ready(group, name, wanted)
            table = await self._session.do(groups.placement_group_table, group)
            by_id = {host.id: host for host in await self._session.hosts()}
            nodes = table["bundles_to_node_id"]
            if any(nodes[at] not in by_id for at in range(len(wanted))):
                raise BuildError(f"{name}: a host was lost while {asked(wanted)} were reserved")
            slots = [ReservedBundle(group, at, by_id[nodes[at]]) for at in range(len(wanted))]
            self._slots |= numbered(wanted, slots, await self._numbers(wanted, slots))
        except BaseException:
            await self._remove(key)
            raise

    async def _until_ready(self, group: Any, name: str, wanted: Sequence[Bundle]) -> None:
        loop = asyncio.get_running_loop()
        end, told = loop.time() + max(self._wait, LOOK_SECONDS), False
        while not await asyncio.to_thread(group.wait, LOOK_SECONDS):
            if loop.time() >= end:
                raise BuildError(await self._explain(name, wanted))
            if not told:
                log.warning("%s: waiting up to %g s for %s", name, self._wait, asked(wanted))
                told = True

    async def _numbers(
        self, wanted: Sequence[Bundle], slots: Sequence[ReservedBundle]
    ) -> dict[int, str]:
        """The accelerator of each bundle that has one, by position."""
        at = [index for index, one in enumerate(wanted) if one.device and one.device.kind == "cuda"]
        if not at:
            return {}
        asked = await self._session.do(ask_accelerators, slots[0].group, at)
        names = ", ".join(sorted({slots[index].host.name for index in at}))
        unknown = f"which accelerators were reserved on {names} is not known"
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                answers = await asyncio.gather(*asked)
        except TimeoutError:
            raise BuildError(
                f"{unknown}: Ray ran no task there within {PROBE_SECONDS:g} s; look at 'ray list "
                "tasks'"
            ) from None
        except of_ray("exceptions").RayError as error:  # of the runtime environment, for example
            text = " ".join(str(error).split())
            raise BuildError(f"{unknown}: Ray cannot run a task there: {text}") from error
        return dict(zip(at, answers, strict=True))

    async def _explain(self, name: str, wanted: Sequence[Bundle]) -> str:
        """What was asked, what there is, and who holds the rest."""
        hosts = await self._session.hosts()
        if none := impossible(wanted, hosts):
            return _no_host(name, none, hosts)
        get_table = of_ray("util.placement_group").placement_group_table
        table: Mapping[str, Any] = await self._session.do(get_table)
        held = "; ".join(holders(table.values(), hosts)) or "nothing"
        return (
            f"{name} asks for {asked(wanted)}, which was not free within {self._wait:g} s: "
            f"{there(hosts)}. Placement groups hold: {held}; the rest is used by tasks and actors "
            f"of others ('ray status' shows how much). Ask for less, or wait longer ({WAIT})"
        )

    async def _remove(self, group: str) -> None:
        removed = self._groups.pop(group, None)
        self._users.pop(group, None)
        if removed is not None:
            self._slots = {
                key: slot for key, slot in self._slots.items() if slot.group is not removed
            }
            remove = of_ray("util.placement_group").remove_placement_group
            await self._session.do(remove, removed)


def _keys(spec: WorkerSpec) -> list[Device | str]:
    """What a rank has reserved: its devices, and a bundle under its name where it has more."""
    return [*spec.info.devices, *([spec.info.name] if spec.resources else [])]


def _with_devices(spec: WorkerSpec, devices: Iterable[Device]) -> WorkerSpec:
    info = msgspec.structs.replace(spec.info, devices=tuple(devices))
    return msgspec.structs.replace(spec, info=info)


def numbered(
    wanted: Sequence[Bundle], slots: Sequence[ReservedBundle], numbers: Mapping[int, str]
) -> dict[Device | str, ReservedBundle]:
    """Each device with its slot: on every host the devices in the order of their indices have the
    accelerators in the order of their numbers."""
    found: dict[Device | str, ReservedBundle] = {}
    for host in {slot.host.id for slot in slots}:
        here = [at for at, slot in enumerate(slots) if slot.host.id == host]
        by_number = sorted(numbers.keys() & here, key=lambda at: natural(numbers[at]))
        devices = sorted(
            (one for at in here if (one := wanted[at].device) and one.kind == "cuda"),
            key=lambda one: one.index,
        )
        for device, at in zip(devices, by_number, strict=True):
            found[device] = msgspec.structs.replace(slots[at], number=numbers[at])
        for at in here:
            device_or_rank = wanted[at].device or wanted[at].rank
            found.setdefault(device_or_rank, slots[at])
    return found


def _no_host(name: str, wanted: Sequence[Bundle], hosts: Sequence[Host]) -> str:
    return (
        f"{name} asks for {asked(wanted)}, which no host has: {there(hosts)}. Ask for less, start "
        f"a host that has it, or, where Ray adds hosts by itself, wait longer ({WAIT})"
    )


def ask_accelerators(group: Any, indices: Iterable[int]) -> list[Any]:
    """References to the numbers of the accelerators of these bundles of a placement group."""
    ask = of_ray().remote(own_accelerator).options
    in_bundle = of_ray("util.scheduling_strategies").PlacementGroupSchedulingStrategy
    return [
        ask(num_cpus=0, num_gpus=1, scheduling_strategy=in_bundle(group, at)).remote()
        for at in indices
    ]


def own_accelerator() -> str:
    """The number of the accelerator of the bundle in which this runs, as a task of Ray."""
    return str(of_ray().get_runtime_context().get_accelerator_ids()["GPU"][0])
