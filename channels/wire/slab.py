"""Slabs: anonymous memory that another process of this host can map.

A slab is a memfd: it has no path, so no file can be left over, and the kernel frees the memory with
the last process that has the slab open or mapped, however that process ends. Another process opens
the slab as ``/proc/<pid>/fd/<fd>`` while its maker, or a borrower of the slab, lives.

The first page holds a random token, by which a borrower checks that it has opened the right slab: a
borrower with another /proc, as between containers, would open another file.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import struct
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any, Final, NamedTuple

_ARGUMENTS: Final = struct.Struct("<12Q")
_SCAN: Final = 3 << 30 | _ARGUMENTS.size << 16 | ord("f") << 8 | 16
"""PAGEMAP_SCAN of linux/fs.h"""
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4


def was_written(address: int, size: int) -> bool:
    """Whether this process has a copy of a page; True also where the system cannot answer, which
    Linux does from 6.7 on.

    The check saves time: to discard a part whose pages were not written would only cost the page
    faults of its next use.
    """
    pagemap = _pagemap(os.getpid())
    if pagemap < 0:
        return True
    region = (ctypes.c_uint64 * 3)()
    request = _ARGUMENTS.pack(
        _ARGUMENTS.size, 0, address, address + size, 0, ctypes.addressof(region), 1, 1,
        _FILE, _FILE, _PRESENT | _SWAPPED, _FILE | _PRESENT,
    )  # fmt: skip
    try:
        regions: int = fcntl.ioctl(pagemap, _SCAN, bytearray(request))
    except OSError:
        return True
    return regions > 0


@cache
def _pagemap(pid: int) -> int:
    """File descriptor of this process's page map; -1 where the system has none."""
    try:
        return os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


PAGE: Final = mmap.PAGESIZE
TOKEN_BYTES: Final = 32
AVAILABLE: Final = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
"""whether this system has memfd and /proc"""

_numbers = count(1)


class SlabRefused(Exception):
    """Another process's slab cannot be used; the message says why."""


class Slab:
    """Memory that several processes map. Made by `make_slab` and `open_slab`.

    Args:
        private: whether writes of this process stay in this process (copy on write).
    """

    def __init__(self, fd: int, size: int, token: bytes, *, private: bool) -> None:
        weakref.finalize(self, os.close, fd).atexit = False
        self.number = next(_numbers)
        """number of the slab in this process"""
        self.fd = fd
        self.size = size
        self.token = token
        self.private = private
        self.backed = PAGE
        """bytes from the start whose memory is allocated; further parts may be allocated too"""
        self.memory = mmap.mmap(
            fd, size, flags=mmap.MAP_PRIVATE if private else mmap.MAP_SHARED,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )  # fmt: skip
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.memory))
        self._used: set[tuple[int, int]] = set()
        """start and stop of the parts with views; only for the thread that uses this slab"""
        self._unused: deque[tuple[int, int]] = deque()
        """parts of ``_used`` whose views are deleted; for any thread"""

    def back(self, start: int, stop: int) -> None:
        """Allocate the memory of this part: a write to memory that is not there kills the process.

        Raises:
            OSError: the system has no memory for the part.
        """
        backed = self.backed
        if start > backed:  # the part between belongs to another loan, which is not written yet
            os.posix_fallocate(self.fd, start, stop - start)
        elif stop > backed:
            os.posix_fallocate(self.fd, backed, stop - backed)
            self.backed = stop

    def in_use(self, start: int, stop: int) -> bool:
        """Whether views of this process share pages with this part.

        Always called in the same thread, as `use` is.
        """
        while self._unused:
            self._used.remove(self._unused.popleft())
        return any(start < other_stop and other < stop for other, other_stop in self._used)

    def use(self, start: int, stop: int) -> None:
        """Note that this part has views. It must have none yet, see `in_use`."""
        self._used.add((start, stop))

    def unuse(self, start: int, stop: int) -> None:
        """Note that this part has no views any more, and discard what this process wrote to it.

        May be called in any thread, at any point of what the thread is doing, also inside `in_use`.
        So it takes no lock, and changes nothing that `in_use` iterates over.
        """
        if was_written(self._address + start, stop - start):
            self.memory.madvise(mmap.MADV_DONTNEED, start, stop - start)
        self._unused.append((start, stop))

    def read(self, offset: int, size: int) -> bytearray:
        """A copy of what the maker wrote, without what this process wrote.

        Raises:
            OSError: the file ends before.
        """
        copied = bytearray(size)
        rest = memoryview(copied)
        while rest:  # the system reads at most 2 GiB at a time, less a page
            count = os.preadv(self.fd, [rest], offset + size - len(rest))
            if not count:
                raise OSError(
                    f"{len(rest)} of {size} bytes at {offset} of shared memory are missing"
                )
            rest = rest[count:]
        return copied


class View(NamedTuple):
    """The loan and the place of a buffer over shared memory. The buffer keeps the loan alive."""

    loan: Loan
    offset: int
    size: int


class Loan:
    """A part of a slab in use. It is returned once, when its last view is deleted.

    Args:
        on_end: called then, in any thread, with whether the part is poisoned.
    """

    __slots__ = ("__weakref__", "_on_end", "poisoned", "slab")

    def __init__(self, slab: Slab, on_end: Callable[[bool], None]) -> None:
        self.slab = slab
        self.poisoned = False
        """whether a process out of reach may still read the part: it is never written again"""
        self._on_end = on_end

    def view(self, offset: int, size: int) -> memoryview:
        """A writable buffer over ``size`` bytes of the slab.

        Every object over the buffer (a slice, an array, a tensor) keeps this loan alive.
        """
        # A ctypes array exports a buffer and can carry an attribute; a memoryview alone cannot.
        elements: Any = (ctypes.c_ubyte * size).from_buffer(self.slab.memory, offset)
        elements.view = View(self, offset, size)
        return memoryview(elements).cast("B")

    def __del__(self) -> None:
        self._on_end(self.poisoned)


def view_of(buffer: object) -> View | None:
    """The view of a buffer that `Loan.view` returned; None for any other buffer."""
    if not isinstance(buffer, memoryview):
        return None
    view = getattr(buffer.obj, "view", None)
    return view if isinstance(view, View) and view.size == buffer.nbytes else None


def is_private(buffer: object) -> bool:
    """Whether a buffer lies in another process's slab, mapped copy on write."""
    view = view_of(buffer)
    return view is not None and view.loan.slab.private


def make_slab(size: int) -> Slab:
    """A slab of ``size`` bytes, a multiple of the page, the first page of which is taken.

    Raises:
        OSError: the system has no memory, or no file descriptor.
    """
    fd = os.memfd_create("rlinf-async", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    token = os.urandom(TOKEN_BYTES)
    try:
        os.ftruncate(fd, size)
        # Sealed: a reader of memory that was cut off would be killed.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        os.pwrite(fd, token, 0)
    except BaseException:
        os.close(fd)
        raise
    return Slab(fd, size, token, private=False)


def open_slab(pid: int, number: int, token: bytes) -> Slab:
    """Open another process's slab by its file descriptor there.

    Raises:
        SlabRefused: the slab cannot be opened, has another token, or is not safe to map.
    """
    path = f"/proc/{pid}/fd/{number}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise SlabRefused(f"cannot open {path}: {error.strerror}") from error
    try:
        size = _check(fd, path, token)
    except SlabRefused:
        os.close(fd)
        raise
    try:
        return Slab(fd, size, token, private=True)  # the slab closes the file, also after an error
    except (OSError, ValueError, OverflowError) as error:
        raise SlabRefused(f"cannot map the {size} bytes of {path}: {error}") from error


def _check(fd: int, path: str, token: bytes) -> int:
    """The size of the slab, which is sealed. Raises `SlabRefused`."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise SlabRefused(f"{path} is not memory")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # not a memfd
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise SlabRefused(f"{path} could shrink while it is read")
    if len(token) != TOKEN_BYTES or os.pread(fd, TOKEN_BYTES, 0) != token:
        raise SlabRefused(f"{path} is not the memory that was meant: do both sides share /proc?")
    return found.st_size
