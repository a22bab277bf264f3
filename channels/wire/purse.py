"""Room to put into that channels in another process have lent to this one, key by key.

What is not used goes back to its owner: when that asks for it, and by itself after a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from rlinf_async.channels.ends import Key
from rlinf_async.channels.wire.protocol import Room

if TYPE_CHECKING:
    from rlinf_async.channels.wire.connection import Connection
    from rlinf_async.channels.wire.router import Request

MAX_KEY: Final = 128
"""Characters of a key to which room is lent."""
MAX_PURSES: Final = 256
IDLE_SECONDS: Final = 1.0
"""Room that was not used for so long goes back."""
SWEEP_SECONDS: Final = 0.05
"""Where there are too many keys, it goes back after so long."""


class Purse:
    """What one key of a channel has lent to this process."""

    __slots__ = ("items", "kept", "key", "lendable", "puts", "queue", "used", "waiting", "weight")

    def __init__(self, queue: int, key: Key | None) -> None:
        self.queue = queue
        self.key = key
        self.kept = False
        """whether it is this key's purse; one that is not never has anything"""
        self.lendable = queue > 0 and (key is None or len(str(key)) <= MAX_KEY)
        self.items = 0
        self.weight: float = 0
        self.waiting = 0
        """puts that asked and wait for their answer"""
        self.puts = 0
        """that asked"""
        self.used = True

    @property
    def wants(self) -> bool:
        """Whether it is worth lending to."""
        return self.kept and self.puts > 0 and self.lendable

    def empty(self) -> Room:
        """Take out what is left."""
        weight = None if self.weight == float("inf") else int(self.weight)
        room = Room(self.queue, self.key, self.items, weight)
        self.items, self.weight = 0, 0
        return room


class Purses:
    """Those of one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.kept: dict[tuple[int, Key | None], Purse] = {}
        """by channel and key; no more than `MAX_PURSES`"""
        self._sweeper: asyncio.TimerHandle | None = None
        self._swept_at = self._loop.time()
        connection.answers.add_sync("channel.recall", Room, self._recalled)

    def find(self, queue: int, key: Key | None) -> Purse:
        """What this key has lent. It may be forgotten when it has nothing; see `Purse.kept`."""
        purse = self.kept.get((queue, key))
        if purse is None:
            purse = Purse(queue, key)
            full = len(self.kept) >= MAX_PURSES
            if full and self._loop.time() - self._swept_at >= SWEEP_SECONDS:
                self.sweep()
                full = len(self.kept) >= MAX_PURSES
            if not full:
                self.kept[queue, key] = purse
                purse.kept = True
        return purse

    def fill(self, rooms: Iterable[Room]) -> None:
        """So much more was lent."""
        for room in rooms:
            purse = self.find(room.queue, room.key)
            purse.items += room.items
            purse.weight = float("inf") if room.weight is None else purse.weight + room.weight
            purse.used = True
            if not purse.kept:  # there are too many keys
                self._give_back(purse)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(IDLE_SECONDS, self._swept)

    def sweep(self) -> None:
        """Give back what was not used since the last time, and forget its keys."""
        self._swept_at = self._loop.time()
        for at, purse in list(self.kept.items()):
            if purse.used or purse.waiting:
                purse.used = False
                continue
            if purse.items:
                self._give_back(purse)
            purse.puts = 0
            purse.kept = False
            del self.kept[at]

    def close(self) -> None:
        """The connection is lost: nothing is lent any more."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for purse in self.kept.values():
            purse.items = 0

    def _recalled(self, request: Request[Room]) -> None:
        room = request.meta
        purse = self.kept.get((room.queue, room.key)) or Purse(room.queue, room.key)
        self._give_back(purse)  # the owner waits for it, be it nothing
        purse.puts = 0

    def _give_back(self, purse: Purse) -> None:
        self._connection.notify("channel.return", purse.empty(), control=True)

    def _swept(self) -> None:
        self._sweeper = None
        if not self._connection.closed:
            self.sweep()
            if any(purse.items for purse in self.kept.values()):
                self._sweeper = self._loop.call_later(IDLE_SECONDS, self._swept)
