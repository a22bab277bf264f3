"""Signals between the ranks of one host, through pipes: in microseconds, and a death is noticed.

::

    signal    int64 kind, int64 number        one write, so never a part of it

Every rank has a pipe for the signals of each peer. A peer opens the writing end by way of
``/proc``, and the owner closes its own: when the peer dies, the pipe ends at once. A rank that
gives up signals which one it lost before, so that all name the same one.

Errors; after each of them the old buffers are unchanged::

    ReshardError
     +-- BuffersDiffer    this rank's buffers are not those of the layout
     +-- PeerLost         a rank died, was cut off, or did not answer in time
     +-- BucketDamaged    bytes that arrived are not those that were sent
     +-- NotAgreed        this rank is done, but another failed: the new buffers must not be used
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta


class ReshardError(RuntimeError):
    """Base of the errors of an exchange; the new buffers are invalid, the old ones unchanged."""


class BuffersDiffer(ReshardError):
    """A buffer is missing, of another size or dtype, or not contiguous. Raised before any
    exchange."""


class PeerLost(ReshardError):
    """The connection to a rank broke, or nothing came from it in time."""


class BucketDamaged(ReshardError):
    """A checksum differs."""


class NotAgreed(ReshardError):
    """Another rank failed; the message names it."""


PLACE, DONE, LOST = 1, 2, 3
"""kinds: place of a bucket; its bucket was read; number of a lost rank"""
_SIGNAL = struct.Struct("=qq")


class Inboxes:
    """The pipes of one rank before its peers have opened them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._pipes = {peer: os.pipe() for peer in range(ranks) if peer != rank}
        self._rank, self._ranks = rank, ranks

    def numbers(self) -> list[int]:
        """Return the descriptor in this process that each rank has to open; -1 for its own."""
        return [self._pipes[r][1] if r in self._pipes else -1 for r in range(self._ranks)]

    def open(self, found: Mapping[int, tuple[int, Sequence[int]]]) -> dict[int, int]:
        """Open the writing ends for this rank: ``found`` has each peer's process and `numbers`.

        Raises `OSError` where that is not allowed; nothing is left open then.
        """
        made: dict[int, int] = {}
        try:
            for peer, (process, numbers) in found.items():
                path = f"/proc/{process}/fd/{numbers[self._rank]}"
                made[peer] = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            _close(made.values())
            raise
        return made

    def readers(self) -> dict[int, int]:
        """Close the writing ends, once every peer has opened its own; return the others."""
        _close(writer for _, writer in self._pipes.values())
        return {peer: reader for peer, (reader, _) in self._pipes.items()}

    def close(self) -> None:
        """Close both ends of all pipes."""
        _close(end for pipe in self._pipes.values() for end in pipe)


class Signals:
    """The signals that this rank sends and receives."""

    def __init__(
        self, readers: Mapping[int, int], writers: Mapping[int, int], timeout: timedelta
    ) -> None:
        self._readers, self._writers = dict(readers), dict(writers)
        self._seconds = timeout.total_seconds()
        self._received: dict[tuple[int, int], deque[int]] = {}

    def send(self, peer: int, kind: int, number: int) -> None:
        """Send a signal to a rank. Raises `PeerLost` when it is gone."""
        try:
            os.write(self._writers[peer], _SIGNAL.pack(kind, number))
        except OSError as error:
            while self._receive(peer, 0.0):  # its last signal may name a rank that was lost before
                continue
            raise self._gone(peer, peer) from error

    def wait(self, peer: int, kind: int) -> int:
        """Return the number of a rank's next signal of a kind.

        Raises `PeerLost` when that rank is gone or silent until the timeout.
        """
        received = self._received.setdefault((peer, kind), deque())
        limit = time.monotonic() + self._seconds
        while not received:
            if not self._receive(peer, max(0.0, limit - time.monotonic())):
                raise self._gone(peer, peer)
        return received.popleft()

    def _receive(self, peer: int, seconds: float) -> bool:
        """Read a rank's signals; False when there were none or its pipe has ended."""
        poll = select.poll()
        poll.register(self._readers[peer], select.POLLIN)
        signals = b""
        if poll.poll(seconds * 1000):
            signals = os.read(self._readers[peer], 64 * _SIGNAL.size)
        for kind, number in _SIGNAL.iter_unpack(signals):
            if kind == LOST:
                raise self._gone(peer, number)
            self._received.setdefault((peer, kind), deque()).append(number)
        return bool(signals)

    def close(self) -> None:
        """Close all pipes."""
        _close([*self._readers.values(), *self._writers.values()])
        self._readers, self._writers = {}, {}

    def _gone(self, peer: int, lost: int) -> PeerLost:
        """Signal the other ranks which one was lost."""
        for other, writer in self._writers.items():
            if other not in (peer, lost):
                try:
                    os.write(writer, _SIGNAL.pack(LOST, lost))
                except OSError:  # it is gone too
                    continue
        return PeerLost(
            f"rank {lost} was lost, or nothing came from it in {self._seconds:.0f} s; the old "
            "buffers are as they were"
        )


def _close(descriptors: Iterable[int]) -> None:
    for one in descriptors:
        os.close(one)
