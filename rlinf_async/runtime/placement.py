"""Which devices each rank of a group gets.

Devices are the host's accelerators, or its CPU cores where there are none. Groups may share
devices: that is how roles are collocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from rlinf_async.workers.context import Device
from rlinf_async.workers.errors import BuildError


class Placement(Protocol):
    """Chooses devices for the ranks of a group."""

    def assign(self, count: int, devices: Sequence[Device]) -> list[tuple[Device, ...]]:
        """The devices of each rank.

        Raises:
            BuildError: there are not enough.
        """
        ...


class Packed(msgspec.Struct, frozen=True):
    """Ranks side by side, from device ``start``: the fewest devices.

    ``devices`` is the number for each rank: 2 for two whole ones, 0.5 for two ranks on each.
    """

    devices: float = 1
    start: int = 0

    def assign(self, count: int, devices: Sequence[Device]) -> list[tuple[Device, ...]]:
        per_rank = self.devices
        if per_rank <= 0 or (per_rank > 1 and per_rank != int(per_rank)):
            raise BuildError(
                f"{self}: devices must be a whole number, or a fraction up to 1, got {per_rank}"
            )
        whole = max(1, int(per_rank))
        sharing = 1 if per_rank >= 1 else int(1 / per_rank + 1e-9)  # ranks that fit one device
        firsts = [self.start + rank // sharing * whole for rank in range(count)]
        return [_pick(devices, range(first, first + whole), self, count) for first in firsts]


class Spread(msgspec.Struct, frozen=True):
    """One device for each rank, spread evenly over all devices."""

    def assign(self, count: int, devices: Sequence[Device]) -> list[tuple[Device, ...]]:
        if not devices or count > len(devices):
            raise _missing(self, count, count, devices)
        step = len(devices) / count
        return [(devices[int(rank * step)],) for rank in range(count)]


class Ranks(msgspec.Struct, frozen=True):
    """Devices by list: ``Ranks([0, 0, 1])`` puts ranks 0 and 1 on device 0; ``[[0, 1], [2, 3]]``
    gives each two."""

    devices: Sequence[int | Sequence[int]]

    def assign(self, count: int, devices: Sequence[Device]) -> list[tuple[Device, ...]]:
        if len(self.devices) != count:
            raise BuildError(
                f"Ranks lists devices for {len(self.devices)} ranks, but count={count} are launched"
            )
        wanted = [(one,) if isinstance(one, int) else tuple(one) for one in self.devices]
        return [_pick(devices, of, self, count) for of in wanted]


def _pick(
    devices: Sequence[Device], wanted: Sequence[int], by: object, count: int
) -> tuple[Device, ...]:
    if not wanted:
        raise BuildError(f"{by} gives a worker no device: leave the placement out, or list one")
    if min(wanted) < 0:
        raise BuildError(f"{by} asks for device {min(wanted)}: devices are numbered from 0")
    if max(wanted) >= len(devices):
        raise _missing(by, count, max(wanted) + 1, devices)
    return tuple(devices[index] for index in wanted)


def _missing(by: object, count: int, needed: int, devices: Sequence[Device]) -> BuildError:
    kind = devices[0].kind if devices else "no"
    return BuildError(
        f"{by} for {count} workers needs {needed} devices, but this host has "
        f"{len(devices)} ({kind}): launch fewer workers, share devices "
        "(Packed(devices=0.5), Ranks([0, 0])), or leave the placement out"
    )
