"""Slabs: memory without a name, that another process of this host can map.

A slab is a memfd: it stands in no folder, so nothing can be left behind, and the kernel frees it
with the last process that has it open or mapped, however that process ends. Another process opens
it as ``/proc/<pid>/fd/<fd>`` while its maker, or one whom it was lent to, lives.

Its first page holds a random token, which tells whether a process found the slab that was meant: it
does not where /proc is another one, as between containers.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import weakref
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any, Final, NamedTuple

from rlinf_async.channels.wire.memory.written import was_written

PAGE: Final = mmap.PAGESIZE
TOKEN_BYTES: Final = 32
AVAILABLE: Final = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
"""Whether this system has what slabs need."""

_numbers = count(1)


class SlabRefused(Exception):
    """Why another process's slab cannot be used here."""


class Slab:
    """Mapped memory that others can map too. Made by `make_slab` and `open_slab`.

    Args:
        private: whether what is written here stays here (copy on write).
    """

    def __init__(self, fd: int, size: int, token: bytes, *, private: bool) -> None:
        weakref.finalize(self, os.close, fd).atexit = False
        self.number = next(_numbers)
        """in this process"""
        self.fd = fd
        self.size = size
        self.token = token
        self.private = private
        self.backed = PAGE
        """bytes from the start for which the system has promised memory; maybe more have it"""
        self.memory = mmap.mmap(
            fd, size, flags=mmap.MAP_PRIVATE if private else mmap.MAP_SHARED,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )  # fmt: skip
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.memory))
        self._used: set[tuple[int, int]] = set()  # only by the thread that uses this slab
        self._unused: deque[tuple[int, int]] = deque()  # by any thread

    def back(self, start: int, stop: int) -> None:
        """Have memory behind this part: without it, a write could kill.

        Raises:
            OSError: there is none.
        """
        backed = self.backed
        if start > backed:  # what lies between is somebody else's, who has not written all of it
            os.posix_fallocate(self.fd, start, stop - start)
        elif stop > backed:
            os.posix_fallocate(self.fd, backed, stop - backed)
            self.backed = stop

    def in_use(self, start: int, stop: int) -> bool:
        """Whether views of the maker's memory exist here that this part would share pages with.

        Always called in the same thread, as `use` is.
        """
        while self._unused:
            self._used.remove(self._unused.popleft())
        return any(start < other_stop and other < stop for other, other_stop in self._used)

    def use(self, start: int, stop: int) -> None:
        """Views of this part exist from now on. None does yet, see `in_use`."""
        self._used.add((start, stop))

    def unuse(self, start: int, stop: int) -> None:
        """They do not any more: forget what was written here.

        May be called in any thread, and within anything that this thread is doing, `in_use` too. So
        no lock is taken, and nothing changes that somebody may be looking at.
        """
        if was_written(self._address + start, stop - start):
            self.memory.madvise(mmap.MADV_DONTNEED, start, stop - start)
        self._unused.append((start, stop))

    def read(self, offset: int, size: int) -> bytearray:
        """A copy of what the maker wrote, whatever was written here.

        Raises:
            OSError: there is less.
        """
        copied = bytearray(size)
        rest = memoryview(copied)
        while rest:  # the system reads at most 2 GiB at a time, less a page
            count = os.preadv(self.fd, [rest], offset + size - len(rest))
            if not count:
                raise OSError(f"{len(rest)} of {size} bytes at {offset} of shared memory are gone")
            rest = rest[count:]
        return copied


class View(NamedTuple):
    """What a buffer over shared memory is a part of. The buffer keeps it alive."""

    loan: Loan
    offset: int
    size: int


class Loan:
    """A part of a slab in use. Given back once, when there is no view of it any more.

    Args:
        give_back: called then, in whichever thread, with whether the part is poisoned.
    """

    __slots__ = ("__weakref__", "_give_back", "poisoned", "slab")

    def __init__(self, slab: Slab, give_back: Callable[[bool], None]) -> None:
        self.slab = slab
        self.poisoned = False
        """a process that is out of reach may still read it: never write there again"""
        self._give_back = give_back

    def view(self, offset: int, size: int) -> memoryview:
        """A writable buffer over ``size`` bytes of the slab.

        Everything that is made of it (a slice, an array, a tensor) keeps this loan alive.
        """
        # A ctypes array exports a buffer and can carry an attribute; a memoryview alone cannot.
        elements: Any = (ctypes.c_ubyte * size).from_buffer(self.slab.memory, offset)
        elements.view = View(self, offset, size)
        return memoryview(elements).cast("B")

    def __del__(self) -> None:
        self._give_back(self.poisoned)


def view_of(buffer: object) -> View | None:
    """The part of shared memory that a buffer is, if it is one as `Loan.view` gave it."""
    if not isinstance(buffer, memoryview):
        return None
    view = getattr(buffer.obj, "view", None)
    return view if isinstance(view, View) and view.size == buffer.nbytes else None


def is_private(buffer: object) -> bool:
    """Whether a buffer lies in another process's memory, with what is written staying here."""
    view = view_of(buffer)
    return view is not None and view.loan.slab.private


def make_slab(size: int) -> Slab:
    """A slab of ``size`` bytes, a multiple of the page, the first page of which is taken.

    Raises:
        OSError: the system gives no memory, or no file.
    """
    fd = os.memfd_create("rlinf-async", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    token = os.urandom(TOKEN_BYTES)
    try:
        os.ftruncate(fd, size)
        # Nobody can shrink it any more: memory that went away under a reader would kill it.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        os.pwrite(fd, token, 0)
    except BaseException:
        os.close(fd)
        raise
    return Slab(fd, size, token, private=False)


def open_slab(pid: int, number: int, token: bytes) -> Slab:
    """Another process's slab, by its file's number there.

    Raises:
        SlabRefused: it cannot be opened, is not the one that was meant, or is not safe to map.
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
        return Slab(fd, size, token, private=True)  # which closes the file, also if it fails
    except (OSError, ValueError, OverflowError) as error:
        raise SlabRefused(f"cannot map the {size} bytes of {path}: {error}") from error


def _check(fd: int, path: str, token: bytes) -> int:
    """Its size, which will not change."""
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
