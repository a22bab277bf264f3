"""Which ready callback runs next.

A *lane* keeps what asyncio promises: a task's own steps and the callbacks that it scheduled run in
the order in which they were scheduled. Between lanes nothing is promised, so `SeededQueue` takes
any of them; that is where races show.

    a step of a task                  lane of that task
    a callback, by call_soon          lane of whoever scheduled it
    a timer, an executor's function   a lane of its own

One promise holds across lanes: a task that awaits a future goes on after the callbacks that were
added to that future.
"""

from __future__ import annotations

import random
from asyncio import Future, Handle
from collections import deque
from collections.abc import Hashable
from typing import Any, Protocol


class Entry:
    """One scheduled callback, its lane, and the entries that must wait for it."""

    __slots__ = ("done", "followers", "future", "handle", "is_step", "label", "lane", "waits_for")

    def __init__(
        self,
        handle: Handle,
        *,
        label: str = "",
        lane: Hashable = "main",
        is_step: bool = False,
        future: Future[Any] | None = None,
    ) -> None:
        self.handle = handle
        self.label = label
        self.lane = lane
        self.is_step = is_step
        """it runs a task, and is not a plain callback"""
        self.future = future
        """the future that it was called for, if any"""
        self.followers: list[Entry] = []
        self.waits_for = 0
        self.done = False


class ReadyQueue(Protocol):
    """Takes entries that are ready and hands out one at a time, in a legal order."""

    def push(self, entry: Entry) -> None:
        """Add an entry behind all others of its lane."""

    def pop(self) -> Entry | None:
        """Take an entry that may run now; None if there is none."""

    def finished(self, entry: Entry) -> None:
        """Say that an entry has run: those that waited for it may run now."""


class FifoQueue:
    """The order of a stock asyncio loop."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()

    def push(self, entry: Entry) -> None:
        """Add an entry behind all others."""
        self._entries.append(entry)

    def pop(self) -> Entry | None:
        """Take the oldest entry."""
        return self._entries.popleft() if self._entries else None

    def finished(self, entry: Entry) -> None:
        """Nothing to release: the order is total."""


class SeededQueue:
    """Any legal order; the same seed and the same pushes give the same one."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random
        self._runnable: list[Entry] = []
        self._last_in_lane: dict[Hashable, Entry] = {}
        self._last_callback_of: dict[Future[Any], Entry] = {}

    def push(self, entry: Entry) -> None:
        """Add an entry behind the others of its lane and behind the callbacks of its future."""
        self._follow(entry, self._last_in_lane.get(entry.lane))
        self._last_in_lane[entry.lane] = entry
        if entry.future is not None:
            self._follow(entry, self._last_callback_of.get(entry.future))
            if not entry.is_step:
                self._last_callback_of[entry.future] = entry
        if not entry.waits_for:
            self._runnable.append(entry)

    def pop(self) -> Entry | None:
        """Take any entry whose predecessors have run."""
        runnable = self._runnable
        if not runnable:
            return None
        index = int(self._random() * len(runnable))
        runnable[index], runnable[-1] = runnable[-1], runnable[index]
        return runnable.pop()

    def finished(self, entry: Entry) -> None:
        """Release the entries that waited for this one."""
        entry.done = True
        if self._last_in_lane.get(entry.lane) is entry:
            del self._last_in_lane[entry.lane]
        future = entry.future
        if future is not None and self._last_callback_of.get(future) is entry:
            del self._last_callback_of[future]
        for follower in entry.followers:
            follower.waits_for -= 1
            if not follower.waits_for:
                self._runnable.append(follower)

    @staticmethod
    def _follow(entry: Entry, before: Entry | None) -> None:
        if before is not None and not before.done:
            before.followers.append(entry)
            entry.waits_for += 1
