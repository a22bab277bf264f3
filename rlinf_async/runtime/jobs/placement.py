"""Devices of each role of a run: the settings of ``[cluster.placement]``, and a `PlacementPlan`.

::

    roles of the job  --+
    settings            +--> make_plan --> Plan --> devices of each launch, number of workers,
    devices, by host  --+                           memory shares, turns; the table of `check`

A setting names devices: ``"0-3"``, ``"alpha"``, ``"trainers:0-3"``. Roles whose devices are not set
get theirs from a preset, which says which roles share devices. Nothing is started here: a plan can
be made for a machine that is not this one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

import msgspec

from rlinf_async.config import ConfigError, MissingDevice
from rlinf_async.config.counts import MOST_WORKERS
from rlinf_async.config.registry import nearest
from rlinf_async.runtime.launching import Ranks, check_resources
from rlinf_async.workers.base import Device

Preset: TypeAlias = Literal["auto", "collocated", "disaggregated", "hybrid"]
"""How roles without devices of their own settings share the rest.

``disaggregated``: each role has its own; ``collocated``: all share all; ``hybrid``: some share, as
the job says; ``auto``: disaggregated where there are enough devices, else collocated.
"""
SETTING = ("cluster", "placement")


class RolePlacement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices of a role, and what the processes of its workers are started with."""

    devices: str = ""
    """``"0-3,6"``: numbers over all hosts; ``"alpha"`` or ``"alpha:0-3"``: of a host or a node
    group; ``"all"``; ``"cpu"``: none; ``"shared with actor"``; left out: the preset decides"""
    devices_per_worker: float = 1.0
    """whole devices of each worker; 0.5: two workers share each"""
    resources: dict[str, float] = {}
    """what the host of each worker must have besides devices, ``{ robot = 1 }``; Ray alone"""
    env_vars: dict[str, str] = {}
    """environment variables of each worker's process"""
    python: str = ""
    """Python of the role's workers, with packages of its own: path of an interpreter; left out:
    that of the command"""
    runtime_env: dict[str, Any] = {}
    """Ray's runtime environment of the role: ``pip``, ...; Ray alone"""

    def __post_init__(self) -> None:
        if self.python and "py_executable" in self.runtime_env:
            raise ValueError(
                f"python is {self.python!r}, and runtime_env has a py_executable: give one of them"
            )
        each = self.devices_per_worker
        if not (0.0 < each <= 1.0 or (1.0 < each < math.inf and each == int(each))):
            raise ValueError(
                f"devices_per_worker is {each}; it must be a whole number, or a fraction up to 1"
            )
        check_resources(self.resources)

    @property
    def environment(self) -> dict[str, Any]:
        """What its workers are launched with as ``runtime_env``."""
        own = {"py_executable": self.python} if self.python else {}
        return {**self.runtime_env, **own}


class LaunchOptions(TypedDict):
    """Keywords of `Cluster.launch` that follow from the placement of a role."""

    placement: Ranks | None
    env_vars: dict[str, str]
    resources: dict[str, float] | None
    runtime_env: dict[str, Any] | None


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements of a role, for the planner."""

    name: str
    """name of the role in the settings: ``"actor"``"""
    count: int | None
    """number of workers; None: as many as its devices allow"""
    asked: str | RolePlacement = ""
    """the user's setting"""
    accelerated: bool = True
    """whether it gets accelerators where the user says nothing"""
    takes_turns: bool = False
    """whether it frees the memory of shared devices while another such role works"""
    one_device: bool = False
    """whether a worker uses exactly one device"""
    fits: Callable[[int], bool] = lambda count: True
    """whether the batch sizes can be divided among so many workers"""


class PlacedRank(msgspec.Struct, frozen=True):
    """A row of the plan: one worker."""

    role: str
    rank: int
    devices: tuple[Device, ...]
    memory_share: float | None
    """share of each device's memory; None without accelerators"""
    in_turns: bool
    """whether other roles use the same devices while this one has freed their memory"""


class PlacementPlan(msgspec.Struct, frozen=True):
    """The devices of every worker."""

    machine: tuple[Device, ...]
    ranks: dict[str, list[tuple[int, ...]]]
    """positions in ``machine``, by role and rank; empty for a worker without devices"""
    together: dict[str, str]
    """role -> role whose devices it shares by its setting or the preset, else itself"""
    turns: frozenset[str]
    """roles that free the memory of shared devices while another of these works"""
    settings: dict[str, RolePlacement] = {}
    """settings of each role"""

    def count(self, role: str) -> int:
        """Number of workers of the role."""
        return len(self.ranks[role])

    def placement(self, role: str) -> Ranks | None:
        """The role's placement, to launch it with; None for no devices."""
        ranks = self.ranks[role]
        return Ranks(ranks) if any(ranks) else None

    def options(self, role: str, environment: Mapping[str, str]) -> LaunchOptions:
        """Return what the role is launched with; its own environment variables go before the
        others."""
        settings = self.settings.get(role, RolePlacement())
        return LaunchOptions(
            placement=self.placement(role),
            env_vars={**environment, **settings.env_vars},
            resources=settings.resources or None,
            runtime_env=settings.environment or None,
        )

    def accelerated(self, role: str) -> bool:
        """Whether the role's workers have accelerators."""
        return any(self.machine[at].kind != "cpu" for rank in self.ranks[role] for at in rank)

    def device(self, role: str, *, own_process: bool) -> str:
        """The device of each of the role's workers, as torch names it in the worker's process."""
        if not self.accelerated(role):
            return "cpu"
        return "cuda:0" if own_process else str(self.machine[self.ranks[role][0][0]])

    def devices_per_worker(self, role: str) -> int:
        """Accelerators of each of the role's workers, at least 1."""
        return max(1, len(self.ranks[role][0])) if self.accelerated(role) else 1

    def shared(self, one: str, other: str) -> bool:
        """Whether the two roles share devices."""
        if one not in self.ranks or other not in self.ranks:
            return False
        return self.together[one] == self.together[other] or bool(
            self._devices_of(one) & self._devices_of(other)
        )

    def memory_share(self, role: str) -> float:
        """The smallest share of a device's memory that a worker of the role may take."""
        return min(self._shares(role), default=1.0)

    def collective(self, role: str) -> str | None:
        """torch.distributed's backend between the role's workers; None for one alone."""
        if self.count(role) == 1:
            return None
        return "nccl" if self.accelerated(role) else "gloo"

    @property
    def unused(self) -> list[Device]:
        """Accelerators that no worker has."""
        used = {at for role in self.ranks for at in self._devices_of(role)}
        return [one for at, one in enumerate(self.machine) if one.kind != "cpu" and at not in used]

    def rows(self) -> Iterator[PlacedRank]:
        """All workers, role by role."""
        for role, ranks in self.ranks.items():
            shares, in_turns = self._shares(role), self._in_turns(role)
            accelerated = self.accelerated(role)
            for rank, places in enumerate(ranks):
                devices = tuple(self.machine[at] for at in places)
                share = shares[rank] if accelerated else None
                yield PlacedRank(role, rank, devices, share, in_turns)

    def _in_turns(self, role: str) -> bool:
        others = (other for other in self.turns if other != role and role in self.turns)
        return any(self.shared(role, other) for other in others)

    def _devices_of(self, role: str) -> set[int]:
        return {at for rank in self.ranks[role] for at in rank}

    def _shares(self, role: str) -> list[float]:
        """Return for each rank one over the number of workers that hold memory on one of its
        devices at a time."""
        held = Counter[int]()
        for other, ranks in self.ranks.items():
            if other == role or not {other, role} <= self.turns:
                held.update(at for places in ranks for at in places)
        ranks = self.ranks[role]
        return [1.0 / max((held[at] for at in places), default=1) for places in ranks]


_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class NamedDevices:
    """Finds the devices of a machine by number, host and node group."""

    def __init__(self, machine: Sequence[Device], node_groups: Mapping[str, Sequence[str]]) -> None:
        self._machine = machine
        self._by_host: dict[str, list[int]] = {}
        for at, device in enumerate(machine):
            self._by_host.setdefault(device.host, []).append(at)
        self._groups = node_groups
        accelerators = [at for at, one in enumerate(machine) if one.kind != "cpu"]
        self._numbered = accelerators or list(range(len(machine)))

    def select(self, part: str, path: tuple[str, ...]) -> list[int]:
        """The devices that one part of a setting names, between its commas."""
        host, colon, numbers = part.rpartition(":")
        if not colon and not _RANGE.fullmatch(part):
            host, numbers = part, ""
        if not host:
            return self._range(numbers, self._numbered, "the machine", path)
        found: list[int] = []
        for name in self._names(host, path):
            there = self._by_host[name]
            found += self._range(numbers, there, name, path) if numbers else there
        return found

    def _names(self, host: str, path: tuple[str, ...]) -> Sequence[str]:
        names = self._groups.get(host, (host,))
        for name in names:
            if name not in self._by_host or not name:
                known = [*filter(None, self._by_host), *self._groups]
                there = f"there are {', '.join(known)}" if known else "there is this one alone"
                raise ConfigError(
                    f"{name!r} is neither device numbers ('0-3'), 'all', 'cpu', 'shared with ROLE' "
                    f"nor a host{nearest(name, known)}: {there}",
                    path=path,
                )
        return names

    def _range(
        self, text: str, there: Sequence[int], where: str, path: tuple[str, ...]
    ) -> list[int]:
        found = _RANGE.fullmatch(text)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ConfigError(f"{text!r} is no range of devices: write '3' or '0-3'", path=path)
        first, last = int(found[1]), int(found[2] or found[1])
        if last >= len(there):
            kinds = {self._machine[at].kind for at in there}
            raise ConfigError(
                f"device {last} is not there: {where} has {len(there)} "
                f"({' and '.join(sorted(kinds)) or 'none'}), numbered from 0",
                path=path,
            )
        return list(there[first : last + 1])


def label(device: Device) -> str:
    """Return the name of a device in a setting."""
    return f"{device.host}:{device.index}" if device.host else str(device.index)


_SHARED = re.compile(r"shared with (\S+)")


def make_plan(
    roles: Sequence[Role],
    machine: Sequence[Device],
    *,
    preset: Preset = "auto",
    hybrid: Sequence[Sequence[str]] = (),
    node_groups: Mapping[str, Sequence[str]] | None = None,
) -> PlacementPlan:
    """Give every worker of every role its devices.

    Args:
        roles: in the order in which they take devices; those without workers get none.
        machine: the devices there are, by host.
        preset: for roles without devices of their own settings.
        hybrid: names of roles that share devices under the preset ``hybrid``.
        node_groups: names for several hosts.

    Raises:
        ConfigError: a setting of the placement is wrong; with its path.
        MissingDevice: there are too few devices.
    """
    for role in roles:
        if role.count == 0 and _role_placement(role.asked) != RolePlacement():
            raise ConfigError(
                f"this run has no {role.name} workers: say in [cluster] how many there are, or "
                "leave their devices out",
                path=(*SETTING, role.name),
            )
    there = [role for role in roles if role.count != 0]
    return _Planner(there, tuple(machine), preset, hybrid, node_groups or {}).plan()


class _Planner:
    """Makes one plan."""

    def __init__(
        self,
        roles: Sequence[Role],
        machine: tuple[Device, ...],
        preset: Preset,
        hybrid: Sequence[Sequence[str]],
        node_groups: Mapping[str, Sequence[str]],
    ) -> None:
        self._roles = {role.name: role for role in roles}
        self._asked = {role.name: _role_placement(role.asked) for role in roles}
        self._machine = machine
        self._accelerators = [at for at, one in enumerate(machine) if one.kind != "cpu"]
        self._hosts = NamedDevices(machine, node_groups)
        self._preset: Preset = preset
        self._hybrid = hybrid
        self._pools: dict[str, list[int]] = {}
        """positions of the devices of each role that owns some"""
        self._together: dict[str, str] = {}

    def plan(self) -> PlacementPlan:
        undecided = []
        for name in self._roles:
            self._check_role(name)
            self._together[name] = self._owner(name)
        for name, owner in self._together.items():
            if owner != name:
                continue
            text = self._asked[name].devices
            if text:
                self._pools[name] = [] if text == "cpu" else self._selected(name, text)
            elif self._roles[name].accelerated:
                undecided.append(name)
            else:
                self._pools[name] = []
        self._allocate(undecided)
        ranks = {name: self._ranks(name) for name in self._roles}
        turns = frozenset(role.name for role in self._roles.values() if role.takes_turns)
        return PlacementPlan(self._machine, ranks, self._together, turns, self._asked)

    # ---- what the settings say

    def _check_role(self, name: str) -> None:
        role, each = self._roles[name], self._asked[name].devices_per_worker
        if role.one_device and each != 1.0:
            raise ConfigError(
                f"each {name} worker uses one device, and shares it with no other of its kind: "
                f"leave devices_per_worker = {each:g} out",
                path=(*SETTING, name),
            )

    def _owner(self, name: str) -> str:
        """The role whose devices this role has: itself, or the one it shares with in the end."""
        seen = [name]
        while shared := _SHARED.fullmatch(self._asked[seen[-1]].devices):
            other = shared[1]
            if other not in self._roles:
                raise ConfigError(
                    f"there is no role {other!r} to share with{nearest(other, self._roles)}; this "
                    f"run has {', '.join(self._roles)}",
                    path=(*SETTING, seen[-1]),
                )
            if other in seen:
                raise ConfigError(
                    f"{', which shares with '.join([*seen, other])}: give one of them devices",
                    path=(*SETTING, name),
                )
            seen.append(other)
        return seen[-1]

    def _selected(self, name: str, text: str) -> list[int]:
        path = (*SETTING, name)
        if text == "all":
            return self._accelerators or list(range(len(self._machine)))
        found: list[int] = []
        for part in text.split(","):
            found += self._hosts.select(part.strip(), path)
        twice = [at for at, times in Counter(found).items() if times > 1]
        if twice:
            raise ConfigError(
                f"{text!r} names device {label(self._machine[twice[0]])} twice", path=path
            )
        return found

    # ---- what the preset gives to the others

    def _allocate(self, undecided: Sequence[str]) -> None:
        """Divide the accelerators that no setting names among groups of roles."""
        taken = {at for pool in self._pools.values() for at in pool}
        free = [at for at in self._accelerators if at not in taken]
        groups = self._groups(undecided, len(free))
        for group in groups:
            for name in group:
                self._join(name, group[0])
        if not self._accelerators:
            self._pools |= {name: [] for name in undecided}
            return
        least = [self._least(group) for group in groups]
        if sum(least) > len(free):
            raise self._too_few(groups, least, len(free))
        growing = [group for group in groups if not self._is_fixed(group)]
        left = len(free) - sum(least) + sum(map(self._least, growing))
        for group, size in zip(groups, least, strict=True):
            if growing and group is growing[0]:
                growing.pop(0)
                rest = left - sum(map(self._least, growing))
                size = max(size, min(left // (len(growing) + 1), rest))
                size = max(self._used(name, size) for name in group)
                left -= size
            self._pools |= dict.fromkeys(group, free[:size])
            free = free[size:]

    def _join(self, name: str, owner: str) -> None:
        """Note that the role, and those that share with it, share the owner's devices."""
        for other, with_whom in self._together.items():
            if with_whom == name:
                self._together[other] = owner

    def _groups(self, undecided: Sequence[str], free: int) -> list[list[str]]:
        """The roles without devices of their own settings, those together that share."""
        alone = [[name] for name in undecided]
        if not undecided or self._preset == "disaggregated":
            return alone
        if self._preset == "hybrid":
            groups = [[name for name in group if name in undecided] for group in self._hybrid]
            return [group for group in groups if group]
        enough = not self._accelerators or sum(map(self._least, alone)) <= free
        if self._preset == "auto" and enough:
            return alone
        return [list(undecided)]

    def _is_fixed(self, group: Sequence[str]) -> bool:
        return all(self._roles[name].count is not None for name in group)

    def _least(self, group: Sequence[str]) -> int:
        """The fewest devices that the group can do with."""
        return max(self._needed(name, self._roles[name].count or 1) for name in group)

    def _needed(self, name: str, count: int) -> int:
        each = self._asked[name].devices_per_worker
        return math.ceil(count / _sharing(each)) if each < 1.0 else count * int(each)

    def _used(self, name: str, size: int) -> int:
        """Return how many of ``size`` devices the role can use."""
        count = self._roles[name].count
        return self._needed(name, self._most_workers(name, size) if count is None else count)

    def _most_workers(self, name: str, size: int) -> int:
        """Return the largest number of workers for ``size`` devices, at least 1."""
        each = self._asked[name].devices_per_worker
        most = int(size * _sharing(each)) if each < 1.0 else size // int(each)
        most = min(most, MOST_WORKERS)
        return next((n for n in range(most, 1, -1) if self._roles[name].fits(n)), 1)

    def _too_few(
        self, groups: Sequence[Sequence[str]], least: Sequence[int], free: int
    ) -> MissingDevice:
        wants = ", ".join(
            f"{' and '.join(group)} {size}" for group, size in zip(groups, least, strict=True)
        )
        held = ", ".join(f"{name} {len(pool)}" for name, pool in self._pools.items() if pool)
        rest = f" (by their settings: {held})" if held else ""
        return MissingDevice(
            f"{'.'.join(SETTING)}: {sum(least)} devices are needed ({wants}), but {free} of "
            f"{len(self._accelerators)} are free{rest}: lower the numbers of workers, let roles "
            "share ('shared with actor', preset 'collocated') or several workers of one role "
            "(devices_per_worker = 0.5), or put one on the 'cpu'"
        )

    # ---- the devices of each worker

    def _ranks(self, name: str) -> list[tuple[int, ...]]:
        role, asked = self._roles[name], self._asked[name]
        owner = self._together[name]
        pool = self._pools[owner] if owner in self._pools else self._pools[name]
        if not pool:
            return [()] * (role.count or 1)
        count = self._most_workers(name, len(pool)) if role.count is None else role.count
        if self._needed(name, count) > len(pool):
            raise ConfigError(
                f"{count} workers with {asked.devices_per_worker:g} devices each need "
                f"{self._needed(name, count)}, but {name} has {len(pool)} "
                f"({', '.join(label(self._machine[at]) for at in pool)}): lower the number of "
                "workers or devices_per_worker, or give it more devices",
                path=(*SETTING, name),
            )
        whole, sharing = max(1, int(asked.devices_per_worker)), _sharing(asked.devices_per_worker)
        firsts = [rank // sharing * whole for rank in range(count)]
        ranks = [tuple(pool[first : first + whole]) for first in firsts]
        for rank, places in enumerate(ranks):
            if len({self._machine[at].host for at in places}) > 1:
                raise ConfigError(
                    f"worker {rank} would have devices of several hosts "
                    f"({', '.join(label(self._machine[at]) for at in places)}): use a number of "
                    "devices_per_worker that divides those of each host",
                    path=(*SETTING, name),
                )
        return ranks


def _role_placement(asked: str | RolePlacement) -> RolePlacement:
    return RolePlacement(devices=asked) if isinstance(asked, str) else asked


def _sharing(devices_per_worker: float) -> int:
    """How many workers fit one device."""
    return 1 if devices_per_worker >= 1.0 else int(1.0 / devices_per_worker + 1e-9)
