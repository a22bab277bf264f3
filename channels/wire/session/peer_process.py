"""Whether a process of this host still lives: what tells a cut from a death."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable


def peer_pid(transport: asyncio.BaseTransport) -> int:
    """Which process is at the other side of a Unix socket; 0 where that cannot be known.

    Its word is not needed: the kernel knows.
    """
    found: socket.socket | None = transport.get_extra_info("socket")
    if found is None or not is_local(transport) or not hasattr(socket, "SO_PEERCRED"):
        return 0
    pid: int = struct.unpack("3i", found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


def is_local(transport: asyncio.BaseTransport) -> bool:
    """Whether this is a Unix socket: no network can cut it, only one of its two processes."""
    found: socket.socket | None = transport.get_extra_info("socket")
    return found is not None and found.family == socket.AF_UNIX


def is_stopped(pid: int) -> bool:
    """Whether this process was stopped, as by Ctrl-Z; False where that cannot be known."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def can_watch(pid: int) -> bool:
    """Whether the end of this process would be seen."""
    return pid > 0 and hasattr(os, "pidfd_open")


class DeathWatch:
    """Calls back when a process has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._file = -1

    def start(self, pid: int, died: Callable[[], None]) -> None:
        """Watch it from now on; of one that is gone already this is said at the loop's next turn.

        Does nothing for a ``pid`` of 0, or where the system cannot tell.
        """
        self.stop()
        if not can_watch(pid):
            return
        try:
            self._file = os.pidfd_open(pid)
        except ProcessLookupError:
            self._loop.call_soon(died)
        except OSError:
            return
        else:
            self._loop.add_reader(self._file, died)

    def stop(self) -> None:
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1
