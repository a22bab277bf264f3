"""Files that hold arrays in shared memory: through them, another process can map the same memory.

Weights that came through shared memory lie in a file without a name (a ``memfd``) that this process
has mapped and open. Whoever knows its number and the place in it can map it too; no byte is copied.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAPPED: Final = re.compile(
    r"^(\w+)-(\w+) \S+ (\w+) (\w+):(\w+) (\d+) +/memfd:", re.MULTILINE
)  # fmt: skip
"""fields of a line of ``/proc/self/maps``: start, end, offset, device (major, minor), inode"""


class FilePlace(NamedTuple):
    """The place of an array's bytes in a file."""

    path: str
    """path by which other processes of this user open the file while this one has it open"""
    offset: int
    """bytes from the start of the file"""


def places_of(arrays: Sequence[NDArray[Any]]) -> list[FilePlace | None]:
    """Return where contiguous arrays lie; None for one that lies in no file that is open here."""
    try:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
            mapped = [
                [int(one, 16) for one in found[:5]] + [int(found[5])]
                for found in MAPPED.findall(maps.read())
            ]
    except OSError:  # a system without it
        return [None] * len(arrays)
    numbers = _open_files() if mapped else {}
    return [_place(array, mapped, numbers) for array in arrays]


def map_place(place: FilePlace, size: int) -> NDArray[np.uint8]:
    """Map ``size`` bytes of another process of `this_host`; what is written here, it sees.

    Raises:
        OSError: the place cannot be opened or mapped, or is gone.
        ValueError: its file ends before.
    """
    start = place.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    before = place.offset - start
    file = os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_size < place.offset + size:
            raise ValueError(f"{place.path} has no {size} bytes at {place.offset}")
        memory = mmap.mmap(file, before + size, mmap.MAP_SHARED, offset=start)
    finally:
        os.close(file)
    return np.frombuffer(memory, np.uint8, size, before)


def this_host() -> int:
    """Return a number that processes share which see each other's memory by process id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # a system without them
        return os.getpid()
    return (int(boot.replace("-", ""), 16) ^ namespace) & ((1 << 62) - 1)


def _place(
    array: NDArray[Any], mapped: list[list[int]], numbers: dict[tuple[int, int], int]
) -> FilePlace | None:
    address = array.ctypes.data
    for start, end, offset, major, minor, inode in mapped:
        if start <= address and address + array.nbytes <= end and array.flags.c_contiguous:
            number = numbers.get((os.makedev(major, minor), inode))
            if number is None:
                return None
            return FilePlace(f"/proc/{os.getpid()}/fd/{number}", offset + address - start)
    return None


def _open_files() -> dict[tuple[int, int], int]:
    """Return the numbers of this process's open files, by device and inode."""
    found: dict[tuple[int, int], int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:  # closed meanwhile, as that of this folder is
            continue
        found[status.st_dev, status.st_ino] = int(name)
    return found
