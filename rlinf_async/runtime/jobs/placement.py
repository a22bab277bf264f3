"""Which devices each role of a run has: the settings of ``[cluster.placement]``, and a `Plan`.

::

    roles of the job  --+
    settings            +--> make_plan --> Plan --> devices of each launch, number of workers,
    devices, by host  --+    (planning.py)          memory shares, turns; the table of `check`
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias, TypedDict

import msgspec

from rlinf_async.runtime.launching import check_resources
from rlinf_async.runtime.placement import Ranks
from rlinf_async.workers.context import Device

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
    runtime_env: dict[str, Any] = {}
    """Ray's runtime environment of the role: ``py_executable``, ``pip``, ...; Ray alone"""

    def __post_init__(self) -> None:
        each = self.devices_per_worker
        if not (0.0 < each <= 1.0 or (1.0 < each < math.inf and each == int(each))):
            raise ValueError(
                f"devices_per_worker is {each}; it must be a whole number, or a fraction up to 1"
            )
        check_resources(self.resources)


class LaunchOptions(TypedDict):
    """Keywords of `Cluster.launch` that follow from the placement of a role."""

    placement: Ranks | None
    env_vars: dict[str, str]
    resources: dict[str, float] | None
    runtime_env: dict[str, Any] | None


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner has to know of a role."""

    name: str
    """as in the settings: ``"actor"``"""
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


class Plan(msgspec.Struct, frozen=True):
    """The devices of every worker."""

    machine: tuple[Device, ...]
    ranks: dict[str, list[tuple[int, ...]]]
    """positions in ``machine``, by role and rank; empty for a worker without devices"""
    together: dict[str, str]
    """role -> role whose devices it shares by its setting or the preset, else itself"""
    turns: frozenset[str]
    """roles that free the memory of shared devices while another of these works"""
    settings: dict[str, RolePlacement] = {}
    """of each role"""

    def count(self, role: str) -> int:
        """Number of workers of the role."""
        return len(self.ranks[role])

    def placement(self, role: str) -> Ranks | None:
        """The role's placement, to launch it with; None for no devices."""
        ranks = self.ranks[role]
        return Ranks(ranks) if any(ranks) else None

    def options(self, role: str, environment: Mapping[str, str]) -> LaunchOptions:
        """What the role is launched with; its own environment variables go before the others."""
        settings = self.settings.get(role, RolePlacement())
        return LaunchOptions(
            placement=self.placement(role),
            env_vars={**environment, **settings.env_vars},
            resources=settings.resources or None,
            runtime_env=settings.runtime_env or None,
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
        return self.together[one] == self.together[other] or bool(self._of(one) & self._of(other))

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
        used = {at for role in self.ranks for at in self._of(role)}
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

    def _of(self, role: str) -> set[int]:
        return {at for rank in self.ranks[role] for at in rank}

    def _shares(self, role: str) -> list[float]:
        """For each rank one over the number of workers that hold memory on one of its devices at a
        time."""
        held = Counter[int]()
        for other, ranks in self.ranks.items():
            if other == role or not {other, role} <= self.turns:
                held.update(at for places in ranks for at in places)
        ranks = self.ranks[role]
        return [1.0 / max((held[at] for at in places), default=1) for places in ranks]
