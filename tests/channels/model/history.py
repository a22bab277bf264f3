"""What the tasks of a program did: one event for each operation, from its begin to its end.

Events of one process have the numbers of a counter for times; those of several processes have the
nanoseconds of the system's clock, which is the same for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Literal, Protocol

import msgspec

from rlinf_async.channels import DeadLetter, Key, Statistics
from tests.channels.model.program import SENDING, Do, EndName, Program

OWNER: EndName = "take", 0, -1
"""The end by which the owner takes what is left."""
REST = -1
"""The task that does it."""

Clock = Callable[[], int]
Fate = Literal["consumed", "returned", "unknown"]


class Event(msgspec.Struct):
    """One operation of one task."""

    task: int
    end: EndName
    do: Do
    key: Key | None
    least: int
    """of the weights that it waits for; the weight of the item that it puts"""
    begun: int
    finished: int = 0
    """0: it never was"""
    outcome: str = ""
    """``ok``, ``cancelled``, or the name of the error that it raised"""
    items: list[int] = []
    """those that it put, or was handed"""
    fate: Fate = "consumed"
    """of the items that it was handed"""
    replaced: list[int] = []
    """how often each of them was replaced"""
    returned: list[int] = []
    """those of them that it replaced, when it left its block"""
    settling: bool = False
    """a lease that has left its block, and waits until the channel knows"""
    most: int = 1
    """items that it may take"""
    died: bool = False
    """its process was killed while it went on"""

    @property
    def kept(self) -> list[int]:
        """The items that it was handed and did not replace."""
        return [item for item in self.items if item not in self.returned]

    @property
    def waits(self) -> bool:
        """Whether it has begun, holds nothing, and has not finished."""
        return not self.finished and (not self.items or self.do in SENDING)


class Recorder(Protocol):
    """Where events go."""

    def begin(self, event: Event) -> None:
        """An operation begins; its time is set here."""
        ...

    def hand(self, event: Event) -> None:
        """A lease has its items, and is held; or is left, and being settled."""
        ...

    def finish(self, event: Event) -> None:
        """An operation has finished; its time is set here."""
        ...

    def after(self, finished: int) -> asyncio.Future[None]:
        """Done when so many more operations have finished."""
        ...


class Journal:
    """The events of one process, in memory."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.events: list[Event] = []
        self.finished = 0
        self._now = clock or count(1).__next__
        self._watched: list[tuple[int, asyncio.Future[None]]] = []

    def begin(self, event: Event) -> None:
        event.begun = self._now()
        self.events.append(event)

    def hand(self, event: Event) -> None:
        """It is seen in the event itself."""

    def finish(self, event: Event) -> None:
        event.finished = self._now()
        self.finished += 1
        if self._watched:
            due = [future for at, future in self._watched if at <= self.finished]
            self._watched = [one for one in self._watched if one[0] > self.finished]
            for future in due:
                if not future.done():
                    future.set_result(None)

    def after(self, finished: int) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watched.append((self.finished + finished, future))
        return future


class History(msgspec.Struct):
    """Everything there is to judge of one run."""

    program: Program
    events: list[Event] = []
    statistics: Statistics | None = None
    """when all had ended and every end was closed"""
    dead: list[DeadLetter] = []
    hung: str = ""
    """who waited for ever, and what the channel said of it"""
    violations: list[str] = []
    """found while it ran"""
    depths: list[tuple[int, int]] = []
    """depth and weight of the whole channel, whenever somebody asked"""
    killed: list[int] = []
    """processes that were"""
    local: bool = False
    """whether nothing went over a wire"""
