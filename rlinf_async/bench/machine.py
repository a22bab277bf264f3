"""This machine: what a measurement depends on."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform

import msgspec

_PACKAGES = ("rlinf-async", "anyio", "torch", "numpy", "msgspec", "uvloop", "gymnasium", "mujoco")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the versions with which a bench ran."""

    system: str
    cpu: str
    cores: int
    """cores that this process may use"""
    python: str
    versions: dict[str, str]
    load_average: tuple[float, float, float]
    """runnable processes over the last 1, 5 and 15 minutes, when the bench started"""


def this_machine() -> Machine:
    """This machine, now."""
    return Machine(
        system=platform.platform(),
        cpu=_cpu(),
        cores=usable_cores(),
        python=platform.python_version(),
        versions=_versions(),
        load_average=os.getloadavg(),
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
