"""Child processes: messages with them, how they have ended, and that they end with their parent.

A message is a frame, its size in 4 bytes and then MessagePack, over a pipe or a socket. It is
decoded by its type, and is no pickle.

::

    parent   write(message) ----frame---> read(decoder)      child
    parent   read(decoder)  <---frame---- write(message)     child
    parent   how_it_ended(exit code)      end_with_parent    child
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from contextlib import suppress
from types import FrameType
from typing import BinaryIO, Final, Generic, TypeVar

import msgspec

HEADER: Final = struct.Struct("!I")
"""the size of a message in bytes, which stands before it"""
MAX_MESSAGE: Final = 256 * 1024 * 1024
"""largest message, in bytes"""
PR_SET_PDEATHSIG: Final = 1

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message: header and body."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(body)} bytes; the limit is {MAX_MESSAGE}")
    return HEADER.pack(len(body)) + body


def read_message(file: BinaryIO, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
    """Read the next message; None where the other process has closed its end."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    body = file.read(size)
    return decoder.decode(body) if len(body) == size else None


class Frames(Generic[M]):
    """Messages out of bytes as they come."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._held = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes."""
        self._held += data

    def take(self) -> M | None:
        """The next message; None where it is not there as a whole."""
        if len(self._held) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._held)
        end = HEADER.size + size
        if len(self._held) < end:
            return None
        body = bytes(self._held[HEADER.size : end])
        del self._held[:end]
        return self._decoder.decode(body)


def how_it_ended(code: int) -> str:
    """Say it in words, of an exit code; one below 0 is that of a signal.

    Real-time signals have numbers, but most of them no name.
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def kill_group(pid: int) -> None:
    """Kill a process, and the processes of the group that it leads, if it leads one already."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def signal_at_end_of_parent(number: int) -> None:
    """Let the kernel send this process a signal when its parent ends, on Linux. Not if it has ended
    already.

    The signal also comes when only the thread ends that started this process: one that kills is for
    children of a process with one thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; end now where that is not it."""
    signal_at_end_of_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this was set
        os._exit(0)


def leave_signals_to_driver() -> None:
    """Do nothing at signals for the driver: the parent closes its end of the connection."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _nothing)


def _nothing(number: int, where: FrameType | None) -> None:
    """A handler rather than SIG_IGN, which programs that this process starts would inherit."""
