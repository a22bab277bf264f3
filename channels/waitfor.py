"""Who waits for whom.

Every wait on a channel is recorded with its *party*: the worker and the method that wait. A channel
also knows which parties hold its open ends. Together they answer the question that every hang
raises: who waits, on what, for how long, and who could end the wait. `find_cycle` looks for parties
that can only be woken by one another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Literal
from weakref import WeakKeyDictionary

import msgspec

current_party: ContextVar[str] = ContextVar("current_party", default="main")
"""Who is running: ``"Doubler[1].run"`` inside a worker's call, ``"main"`` elsewhere."""


class WaitFuture(asyncio.Future[Any]):
    """What a task awaits while it waits on a channel: nothing but the channel can end it.

    The runtime tells by this type whether a worker could still go on by itself.
    """


async def until_done(future: asyncio.Future[Any]) -> None:
    """Wait for a task, or for what only others can complete. To cancel this wait does not cancel
    the future; and it is seen that only others can end it, as of a wait on a channel."""
    if future.done():
        return
    mine = WaitFuture()

    def wake(_: asyncio.Future[Any]) -> None:
        if not mine.done():
            mine.set_result(None)

    future.add_done_callback(wake)
    try:
        await mine
    finally:
        future.remove_done_callback(wake)


class ComputeThread:
    """The thread that computes for a worker: whether it works, or waits for the event loop.

    Changed and read on that loop alone: from the moment on which what it waits for is there, it
    counts as at work, however long the machine takes to wake it.
    """

    def __init__(self) -> None:
        self.waits = 0
        """number of tasks of the loop that it waits for now: 0 or 1"""


current_thread: ContextVar[ComputeThread | None] = ContextVar("current_thread", default=None)
"""the thread that the running function computes in; the tasks that it starts inherit it"""
computations: WeakKeyDictionary[asyncio.Future[Any], ComputeThread] = WeakKeyDictionary()
"""what tasks await while a thread computes for them"""


class Wait(msgspec.Struct, frozen=True):
    """One party that waits on one channel."""

    party: str
    operation: Literal["put", "get"]
    channel: str
    key: str | None
    seconds: float
    unblockers: tuple[str, ...]
    """The parties that hold the other end: only they can end this wait."""
    reconnecting: tuple[str, ...] = ()
    """those of all these whose connection is cut now, and may be found again"""
    held_by: tuple[str, ...] = ()
    """the parties that hold credit, or prefetched items, which this wait could use: they were asked
    to return it, and their processes do so by themselves"""

    def __str__(self) -> str:
        key = "" if self.key is None else f" (key {self.key})"
        on = (
            "no open sender: its producer is gone or was never started"
            if self.operation == "get"
            else "no open receiver: its consumer is gone or was never started"
        )
        if self.unblockers:
            on = "only " + ", ".join(self.unblockers) + " can end this wait"
        if self.held_by:
            what = "credit is held" if self.operation == "put" else "items were prefetched"
            on += f"; {what} by {', '.join(self.held_by)}, and recalled"
        if self.reconnecting:
            on += f"; {', '.join(self.reconnecting)}: cut off, reconnecting"
        return (
            f"{self.party} has waited {self.seconds:.1f} s to {self.operation} on channel "
            f"{self.channel!r}{key}; {on}"
        )


def mark_cut_off(wait: Wait, prefixes: tuple[str, ...]) -> Wait:
    """The wait, with those of its parties named that begin so: their connection is cut."""
    if not prefixes:
        return wait
    parties = dict.fromkeys((wait.party, *wait.unblockers, *wait.held_by))
    cut = tuple(party for party in parties if party.startswith(prefixes))
    return msgspec.structs.replace(wait, reconnecting=cut)


def find_cycle(waits: Iterable[Wait]) -> tuple[Wait, ...]:
    """The first ring of waits in which each party can be woken only by parties that wait
    themselves.

    A wait that nobody can end (a producer that died or was never started) is a ring of one.
    """
    by_party: dict[str, list[Wait]] = {}
    for wait in waits:
        by_party.setdefault(wait.party, []).append(wait)
    stuck = {party: list(of) for party, of in by_party.items()}
    changed = True
    while changed:  # a party is free if one of its waits can be ended by a party that is free
        changed = False
        for party, of in list(stuck.items()):
            if any(wait.held_by or not stuck.keys() >= {*wait.unblockers} for wait in of):
                del stuck[party]
                changed = True
    if not stuck:
        return ()
    path: list[Wait] = []
    seen: dict[str, int] = {}
    party = next(iter(stuck))
    while party not in seen:
        seen[party] = len(path)
        wait = stuck[party][0]
        path.append(wait)
        if not wait.unblockers:
            return (wait,)
        party = wait.unblockers[0]
    return tuple(path[seen[party] :])


def render(waits: Iterable[Wait]) -> str:
    """The report that a person reads: the ring first, then every other wait, oldest first."""
    every = sorted(waits, key=lambda wait: -wait.seconds)
    cycle = find_cycle(every)
    lines: list[str] = []
    if cycle:
        lines.append("nobody can go on:")
        lines += [f"  {wait}" for wait in cycle]
    rest = [wait for wait in every if wait not in cycle]
    if rest:
        lines.append("also waiting:" if cycle else "waiting:")
        lines += [f"  {wait}" for wait in rest]
    return "\n".join(lines) if lines else "nobody waits on a channel"
