"""Short words between the ranks of one host, through pipes: microseconds, and a death is heard.

::

    word    int64 kind, int64 number        one write, so never half there

Every rank has a pipe for what each peer says to it. A peer opens the writing end by way of
``/proc``, and the owner closes its own: when the peer dies, the pipe ends at once. A rank that
gives up says whom it lost before it goes, so that all name the same one.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from rlinf_async.backends.reshard.errors import PeerLost

PLACE, DONE, LOST = 1, 2, 3
"""a bucket lies there; it has been read; this rank is gone"""
_WORD = struct.Struct("=qq")


class Inboxes:
    """The pipes of one rank before its peers have opened them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._pipes = {peer: os.pipe() for peer in range(ranks) if peer != rank}
        self._rank, self._ranks = rank, ranks

    def numbers(self) -> list[int]:
        """Return for every rank the descriptor that it has to open in this process; -1 for none."""
        return [self._pipes[r][1] if r in self._pipes else -1 for r in range(self._ranks)]

    def open(self, found: Mapping[int, tuple[int, Sequence[int]]]) -> dict[int, int]:
        """Open what this rank writes to: ``found`` has each peer's process and `numbers`.

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
        """Keep only the ends that are read: once every peer has opened its own."""
        _close(writer for _, writer in self._pipes.values())
        return {peer: reader for peer, (reader, _) in self._pipes.items()}

    def close(self) -> None:
        """Close both ends of all."""
        _close(end for pipe in self._pipes.values() for end in pipe)


class Signals:
    """What this rank says and hears."""

    def __init__(
        self, readers: Mapping[int, int], writers: Mapping[int, int], timeout: timedelta
    ) -> None:
        self._readers, self._writers = dict(readers), dict(writers)
        self._seconds = timeout.total_seconds()
        self._heard: dict[tuple[int, int], deque[int]] = {}

    def say(self, peer: int, kind: int, number: int) -> None:
        """Say a word to a rank. Raises `PeerLost` when it is gone."""
        try:
            os.write(self._writers[peer], _WORD.pack(kind, number))
        except OSError as error:
            while self._hear(peer, 0.0):  # its last words may say who was lost before it
                continue
            raise self._gone(peer, peer) from error

    def wait(self, peer: int, kind: int) -> int:
        """Return the number of a rank's next word of a kind.

        Raises `PeerLost` when that rank is gone or says nothing in time."""
        heard = self._heard.setdefault((peer, kind), deque())
        limit = time.monotonic() + self._seconds
        while not heard:
            if not self._hear(peer, max(0.0, limit - time.monotonic())):
                raise self._gone(peer, peer)
        return heard.popleft()

    def _hear(self, peer: int, seconds: float) -> bool:
        """Take in what a rank has said; False when it said nothing or its pipe has ended."""
        poll = select.poll()
        poll.register(self._readers[peer], select.POLLIN)
        words = b""
        if poll.poll(seconds * 1000):
            words = os.read(self._readers[peer], 64 * _WORD.size)
        for said, number in _WORD.iter_unpack(words):
            if said == LOST:
                raise self._gone(peer, number)
            self._heard.setdefault((peer, said), deque()).append(number)
        return bool(words)

    def close(self) -> None:
        """Let all pipes go."""
        _close([*self._readers.values(), *self._writers.values()])
        self._readers, self._writers = {}, {}

    def _gone(self, peer: int, lost: int) -> PeerLost:
        """Tell the others whom this rank lost."""
        for other, writer in self._writers.items():
            if other not in (peer, lost):
                try:
                    os.write(writer, _WORD.pack(LOST, lost))
                except OSError:  # it is gone too
                    continue
        return PeerLost(
            f"rank {lost} was lost, or nothing came from it in {self._seconds:.0f} s; the old "
            "buffers are as they were"
        )


def _close(descriptors: Iterable[int]) -> None:
    for one in descriptors:
        os.close(one)
