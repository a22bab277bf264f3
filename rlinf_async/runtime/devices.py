"""The devices of a host, of a machine that is only stated, and what a worker's process sees of
them. Nothing here imports torch.

::

    host_devices        this host's accelerators, or its CPU cores
    stated_devices      "2x8xH100": a machine that is not this one
    device_environment  variables by which a process sees its own accelerators alone
    pinned_cores        cores that a process keeps to: its own, or those near its accelerators
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

from rlinf_async.workers.context import Device
from rlinf_async.workers.errors import BuildError

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
    """This host's accelerators, or its CPU cores. Found without importing torch."""
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
    """Of the accelerators here, in the order of ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.

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
    return [word.strip() for word in takewhile(_names_a_device, names.split(","))]


def _names_a_device(word: str) -> bool:
    return _NAME.fullmatch(word.strip()) is not None
