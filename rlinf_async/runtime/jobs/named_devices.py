"""The devices that a setting names: ``"0-3"``, ``"alpha"``, ``"trainers:0-3"``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rlinf_async.config import ConfigError
from rlinf_async.config.errors import nearest
from rlinf_async.workers.context import Device

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
    """How a device is named in a setting."""
    return f"{device.host}:{device.index}" if device.host else str(device.index)
