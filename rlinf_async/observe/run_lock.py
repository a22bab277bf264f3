"""Who holds a run folder: one process at a time, as the kernel knows it.

A run locks the file ``.lock`` of its folder and writes there who it is. The kernel releases the
lock however the process ends; the text is cleared only at an orderly end. So

======  =======  =====================================
lock    text     the run
======  =======  =====================================
held    who      goes on
free    none     has ended, or has never begun
free    who      was killed
======  =======  =====================================

Invariant: only a process that holds the lock is ever signalled, whoever has its number later.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import msgspec

from rlinf_async.observe.files import RunFolderError, explaining

LOCK: Final = ".lock"
_LAYOUT: Final = "hhqqi4x"
"""``struct flock`` of 64-bit Linux: type, whence, start, length, pid"""
_LOOK_EVERY: Final = 0.1
"""seconds between two looks at a lock that is waited for"""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class LockHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that took the lock, as it says itself."""

    host: str
    pid: int
    boot: str
    """names the running kernel: that of another host, or of this one before it was started anew,
    has another"""

    @property
    def is_here(self) -> bool:
        """Whether its kernel is the one of this process."""
        return self.boot == _boot_id()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class LockState(NamedTuple):
    """A look at the lock of a folder."""

    holder: LockHolder | None
    """the process that took it last; None where that has ended in order"""
    held: bool
    pid: int
    """the process that holds it, as this host's kernel says; 0 or less where it runs elsewhere, or
    where nobody holds it"""


def take_lock(folder: Path) -> int:
    """Lock the folder for this process, which must not open the file a second time: closing it
    would release the lock.

    Returns:
        A descriptor for `release_lock`.

    Raises:
        RunFolderError: another process holds it; or the file cannot be written.
    """
    path = folder / LOCK
    with explaining("write", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with explaining("lock", path):
            _lock_exclusively(descriptor, folder)
        with explaining("write", path):
            holder = LockHolder(host=socket.gethostname(), pid=os.getpid(), boot=_boot_id())
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, msgspec.json.encode(holder) + b"\n", 0)
    except RunFolderError:
        os.close(descriptor)
        raise
    return descriptor


def release_lock(descriptor: int) -> None:
    """Note the orderly end, and release the lock."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


def look_at_lock(folder: Path) -> LockState:
    """The lock of a folder, which another process may hold, at one moment.

    Raises:
        RunFolderError: the file cannot be read.
    """
    path = folder / LOCK
    with explaining("read", path):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return LockState(None, held=False, pid=0)
        try:
            while True:  # until text and lock are of the same moment
                before = _lock_of(descriptor)
                text = os.pread(descriptor, 4096, 0)
                if _lock_of(descriptor) == before:
                    return LockState(_holder(text), *before)
        finally:
            os.close(descriptor)


class Driver:
    """The process of this host that holds a folder, known to the kernel by more than its number.

    Raises:
        RunFolderError: there is none that can be signalled from here; says where there is one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pid = _pid_here(folder, look_at_lock(folder))
        try:
            self._descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            raise _has_ended(folder) from None
        except OSError as error:
            raise RunFolderError(
                f"the kernel of this host cannot signal a process safely (pidfd_open: "
                f"{error.strerror}); process {self.pid} runs in {folder}: kill -TERM {self.pid}"
            ) from error

    def terminate(self) -> None:
        """Send SIGTERM, if the process still holds the folder."""
        if not self._holds():
            raise _has_ended(self._folder)
        try:
            signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)
        except ProcessLookupError:
            raise _has_ended(self._folder) from None
        except PermissionError as error:
            raise RunFolderError(
                f"process {self.pid}, which runs in {self._folder}, is of another user: only that "
                "one can stop it"
            ) from error

    def wait(self, seconds: float) -> bool:
        """Wait until it does not hold the folder any more; False where it then still does."""
        deadline = time.monotonic() + seconds
        while self._holds():
            left = deadline - time.monotonic()
            if left <= 0.0:
                return False
            select.select([self._descriptor], [], [], min(left, _LOOK_EVERY))
        return True

    def _holds(self) -> bool:
        return look_at_lock(self._folder).pid == self.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)


def _pid_here(folder: Path, state: LockState) -> int:
    """The process that holds the folder, which has to be one of this host."""
    if not state.held:
        raise _has_ended(folder)
    if state.holder is None:
        raise RunFolderError(f"{folder} is being taken by a process just now: try again")
    if not state.holder.is_here:
        raise RunFolderError(
            f"{state.holder} runs in {folder}, and this is {socket.gethostname()}: stop it there, "
            f"by rlinf-async stop, or by kill -TERM {state.holder.pid}"
        )
    if state.pid <= 0:
        raise RunFolderError(
            f"{state.holder} runs in {folder}, in a container that is not seen from here: stop it "
            f"there, by rlinf-async stop, or by kill -TERM {state.holder.pid}"
        )
    return state.pid


def _has_ended(folder: Path) -> RunFolderError:
    return RunFolderError(f"no run goes on in {folder}: there is nothing to stop")


def _lock_exclusively(descriptor: int, folder: Path) -> None:
    try:
        # lockf, not flock: a forked worker that outlives us for a moment does not inherit it, and
        # the kernel says who holds it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise RunFolderError(
            f"another process is running in {folder}; wait for it or stop it "
            f"(rlinf-async stop {folder}), or choose another folder (--out DIR)"
        ) from error


def _lock_of(descriptor: int) -> tuple[bool, int]:
    """Whether another process has a lock on the file, and which."""
    wanted = struct.pack(_LAYOUT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_LAYOUT, fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
    held = kind != fcntl.F_UNLCK
    return held, pid if held else 0


def _holder(text: bytes) -> LockHolder | None:
    try:
        return msgspec.json.decode(text, type=LockHolder)
    except msgspec.DecodeError:  # empty; or it is written just now
        return None


def _boot_id() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:  # no such file in some sandboxes
        return socket.gethostname()
