"""A launch: its arguments, the devices of each rank, and what a rank is started with.

::

    check_launch        arguments, before anything is started
    host_devices        this host's accelerators, or its CPU cores where there are none
    stated_devices      "2x8xH100": a machine that is not this one
    Packed, Spread      placements: which of these devices each rank gets; groups may share them
    device_environment  variables by which a process sees its own accelerators alone
    pinned_cores        cores that a process keeps to: its own, or those near its accelerators

Nothing here imports torch.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from rlinf_async.config.registry import names_for_workers
from rlinf_async.runtime.supervise import Backend, Never, Restart, WorkerSpec
from rlinf_async.workers.base import BuildError, Device, Worker, WorkerInfo
from rlinf_async.workers.methods import holds_ends


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of ``launch``, without those of the worker's ``__init__``."""

    worker: Any
    """a `Worker` class, once checked by `check_launch`"""
    name: str | None
    count: int
    placement: object
    restart: Never | Restart | None
    collective: str | None
    env_vars: dict[str, str] | None
    resources: dict[str, float] | None
    runtime_env: dict[str, Any] | None

    @property
    def group(self) -> str:
        """The group's name."""
        return self.name or str(getattr(self.worker, "__name__", self.worker))


DEFAULTS: Mapping[str, object] = {
    "name": None,
    "count": 1,
    "placement": None,
    "restart": None,
    "collective": None,
    "env_vars": None,
    "resources": None,
    "runtime_env": None,
}
"""Keywords that ``launch`` keeps to itself, and their defaults."""


def check_launch(launch: Launch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the arguments of a launch.

    Raises:
        BuildError: not a worker class, or an abstract one; a wrong count; a restart policy that
            cannot be kept; wrong arguments.
    """
    check_class(launch.worker, "launch()")
    group, count = launch.group, launch.count
    if type(count) is not int or count < 1:
        raise BuildError(f"{group}: count must be a whole number from 1, got {count!r}")
    _check_env_vars(group, launch.env_vars)
    if launch.resources is not None:
        try:
            check_resources(launch.resources)
        except BuildError as error:
            raise BuildError(f"{group}: {error}") from None
    if launch.collective is not None and count > 1 and isinstance(launch.restart, Restart):
        raise BuildError(
            f"{group}: ranks of one torch.distributed group cannot be restarted one by one: "
            "leave restart out, and resume from a checkpoint"
        )
    _check_shared(launch, check_arguments(launch.worker, args, kwargs, DEFAULTS))


def check_class(worker: object, taker: str) -> None:
    """Raise `BuildError` for what is no worker class that can be started. ``taker``: the function
    that was given it."""
    if not isinstance(worker, type) or not issubclass(worker, Worker):
        raise BuildError(f"{taker} takes a subclass of Worker, not {worker!r}")
    if missing := sorted(getattr(worker, "__abstractmethods__", ())):
        raise BuildError(
            f"{worker.__name__} is abstract: launch a subclass that has {' and '.join(missing)}"
        )


def _check_env_vars(group: str, env_vars: object) -> None:
    if env_vars is None:
        return
    if not isinstance(env_vars, dict):
        raise BuildError(f"{group}: env_vars must be a dict of names and values, got {env_vars!r}")
    for name, value in env_vars.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise BuildError(
                f"{group}: env_vars: {name!r} is {value!r}; names and values must be text"
            )


def check_arguments(
    worker: type[Worker],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shared: Iterable[str] = (),
) -> dict[str, Any]:
    """The arguments of a worker's ``__init__``, by name. ``shared``: keywords that do not reach it.

    Raises:
        BuildError: they do not fit, or one has an end of a channel.
    """
    label = f"{worker.__name__}.__init__"
    signature = inspect.signature(worker)
    kept = [name for name in shared if name in signature.parameters]
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise BuildError(f"{label}: {error}{_shadowed(kept)}") from None
    for name, value in bound.arguments.items():
        if holds_ends(value):
            raise BuildError(
                f"{label}: {name!r} has an end of a channel; ends are given to calls, which close "
                f"them when they return: pass it to a method of {worker.__name__}"
            )
    return bound.arguments


def _check_shared(launch: Launch, given: Mapping[str, Any]) -> None:
    parameters = inspect.signature(launch.worker).parameters
    taken = [
        name
        for name in DEFAULTS
        if name in parameters and name not in given and getattr(launch, name) != DEFAULTS[name]
    ]
    if taken:
        label = f"{launch.worker.__name__}.__init__"
        raise BuildError(f"{label}: {taken[0]!r} is not passed to it{_shadowed(taken)}")


def _shadowed(names: list[str]) -> str:
    if not names:
        return ""
    return (
        f"; launch() keeps the keyword {' and '.join(map(repr, names))} to itself: pass it to the "
        "worker by position, or give the parameter another name"
    )


def check_resources(resources: object) -> None:
    """Check what a host must have besides devices.

    Raises:
        BuildError: it is no mapping of names to amounts above 0.
    """
    if not isinstance(resources, dict):
        raise BuildError(f"resources must be a dict such as {{'robot': 1}}, got {resources!r}")
    for name, amount in resources.items():
        said = f"resources: {name!r} is {amount!r}"
        number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not isinstance(name, str) or not number or not 0 < amount < math.inf:
            raise BuildError(f"{said}; an amount is a number above 0: leave out what is not needed")
        if amount > 1 and amount != int(amount):
            raise BuildError(f"{said}; an amount above 1 is a whole number: Ray divides no other")


def specs(
    launch: Launch,
    places: Sequence[tuple[Device, ...]],
    backend: Backend,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[WorkerSpec]:
    """Return what each rank is started with; ``places`` are the devices of each."""
    return [
        WorkerSpec(
            cls=launch.worker,
            args=args,
            kwargs=kwargs,
            info=WorkerInfo(
                group=launch.group,
                rank=rank,
                world_size=launch.count,
                devices=places[rank],
                sees_own_devices=backend.isolates_devices,
                collective=launch.collective,
            ),
            env_vars={**names_for_workers(), **(launch.env_vars or {})},
            resources=launch.resources or {},
            runtime_env=launch.runtime_env or {},
            restartable=isinstance(launch.restart, Restart),
        )
        for rank in range(launch.count)
    ]


def check_limits(*, deadlock_after: float | None, grace: float) -> None:
    """Check the time limits of a cluster, in seconds.

    Raises:
        BuildError: invalid time limit.
    """
    if deadlock_after is not None:
        check_seconds("deadlock_after", deadlock_after, "None to only report who waits")
    if not grace >= 0:
        raise BuildError(
            f"grace must be seconds from 0, got {grace!r}: 0 kills workers without asking"
        )


def check_seconds(name: str, seconds: float, otherwise: str) -> None:
    """Raise `BuildError` unless the time limit is above 0; NaN is not."""
    if not seconds > 0:
        raise BuildError(f"{name} must be more than 0 seconds, got {seconds!r}: pass {otherwise}")


VISIBLE = "CUDA_VISIBLE_DEVICES"
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_PCI = Path("/sys/bus/pci/devices")
_FILES = Path("/dev")
_FILE = re.compile(r"nvidia\d+")
_MINOR = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)
_NAME = re.compile(r"\d+|(GPU|MIG)-.+")
_STATED = re.compile(r"(?:(?P<hosts>\d+)x)?(?P<count>\d+)x(?P<model>[A-Za-z][\w.-]*)")


MOST_STATED: Final = 65_536
"""devices that a stated machine may have: more than any cluster, and few enough to go through"""


def host_devices() -> tuple[Device, ...]:
    """Return the accelerators of this host, or its CPU cores. Found without importing torch."""
    present = len(_pci_addresses() or _device_files())
    visible = os.environ.get(VISIBLE)
    if present and visible is not None:
        names = _visible(visible)
        beyond = (at for at, one in enumerate(names) if one.isdigit() and int(one) >= present)
        present = next(beyond, len(names))  # CUDA uses those before the first that is not there
    if present:
        return tuple(Device("cuda", index) for index in range(present))
    return tuple(Device("cpu", core) for core in sorted(os.sched_getaffinity(0)))


def stated_devices(text: str) -> tuple[Device, ...]:
    """The devices of a machine by its description.

    ``"8xH100"`` is one host with eight accelerators, ``"2x8xH100"`` two such hosts, ``"16xcpu"``
    a host without accelerators.

    Raises:
        ValueError: the text is no such description.
    """
    found = _STATED.fullmatch(text.replace(" ", ""))
    if found is None or not float(found["count"]) or found["hosts"] == "0":
        raise ValueError(
            f"{text!r} describes no machine: write hosts x devices x model, such as '8xH100', "
            "'2x8xH100' or '16xcpu'"
        )
    # As floats: Python reads no integer of thousands of digits.
    if float(found["hosts"] or 1) * float(found["count"]) > MOST_STATED:
        raise ValueError(
            f"{text[:40]!r} has more than {MOST_STATED:,} devices, the most that can be gone "
            "through: state a smaller machine"
        )
    hosts, kind = int(found["hosts"] or 1), "cpu" if found["model"].lower() == "cpu" else "cuda"
    names = [""] if hosts == 1 else [f"host{number}" for number in range(hosts)]
    count = range(int(found["count"]))
    return tuple(Device(kind, index, host) for host in names for index in count)


def device_environment(devices: Sequence[Device]) -> dict[str, str]:
    """Variables by which a process of this host sees these accelerators alone, as ``cuda:0`` and
    on; empty where there are none among them.

    They have to be set before torch is imported.

    Raises:
        BuildError: this process itself does not see one of them.
    """
    numbers = [device.index for device in devices if device.kind == "cuda"]
    if not numbers:
        return {}
    given = os.environ.get(VISIBLE)
    names = [str(number) for number in range(max(numbers) + 1)]
    order = {"CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    if given is not None:  # the driver's own numbers count from those that it sees, in its order
        names, order = _visible(given), {}
    if max(numbers) >= len(names):
        raise BuildError(
            f"a worker is to have cuda:{max(numbers)}, but {VISIBLE} is {given!r}: that shows "
            f"{len(names)} devices"
        )
    shown = ",".join(names[number] for number in numbers)
    return {VISIBLE: shown} | order


def pinned_cores(devices: Sequence[Device]) -> set[int]:
    """The CPU cores that a process with these devices keeps to; empty: all.

    They are its own where its devices are cores, and those of the accelerators' NUMA nodes where
    the host has several. Called in the process, whose environment says which accelerators it sees.

    Cores that the process may not use are left out: Ray counts a host's cores from 0, which those
    of a container need not be, and as many as ``ray start --num-cpus`` says.
    """
    own = {device.index for device in devices if device.kind == "cpu"}
    if own or not devices:
        return own & os.sched_getaffinity(0)
    addresses, near = _pci_addresses(), set[int]()
    for name in _visible(os.environ.get(VISIBLE, "")):
        if not name.isdigit() or int(name) >= len(addresses):
            return set()  # named by its UUID: which address that is, only the driver library knows
        near |= _local_cores(addresses[int(name)])
    return near & os.sched_getaffinity(0)


def _pci_addresses() -> list[str]:
    """Return the addresses of the accelerators here, in the order of
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.

    A container may see the driver's list of the whole host, but it has the device files of its own
    alone. Where there is no such file yet, the first program that uses CUDA makes them.
    """
    found = sorted(_NVIDIA.iterdir()) if _NVIDIA.is_dir() else []
    files = _device_files()
    return [one.name for one in found if not files or _file_of(one) in (None, *files)]


def _device_files() -> set[str]:
    """Names of the files of accelerators, ``nvidia0``."""
    return {one.name for one in _FILES.glob("nvidia*") if _FILE.fullmatch(one.name)}


def _file_of(accelerator: Path) -> str | None:
    """Name of the device file of an accelerator in the driver's list; None where it does not
    say."""
    try:
        found = _MINOR.search((accelerator / "information").read_text(encoding="utf-8"))
    except OSError:
        return None
    return f"nvidia{found[1]}" if found else None


def _local_cores(address: str) -> set[int]:
    """The cores of the NUMA node that an accelerator is attached to, ``0-31,64-95``."""
    try:
        text = (_PCI / address.lower() / "local_cpulist").read_text(encoding="ascii")
    except OSError:
        return set()
    cores = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _visible(names: str) -> list[str]:
    """The devices that a value of CUDA_VISIBLE_DEVICES shows.

    CUDA uses the entries before the first that names no device: of ``"0,-1,1"`` the first, of
    ``"-1"`` none.
    """
    words = (word.strip() for word in names.split(","))
    return list(takewhile(_NAME.fullmatch, words))


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
