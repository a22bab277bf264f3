"""What a channel has seen so far, and who waits for whom on it.

An edge leads from a producer in another process into the channel, or from it to such a consumer.
Edges are counted where items arrive or leave, in structs that are there already: nothing is
allocated for an item. What is handed over inside the owner's process has no edge: it is what is
left of ``puts`` and ``gets``.

Every wait on a channel is recorded with its *party*: the worker and the method that wait. A channel
also knows which parties hold its open ends. Together they answer the question that every hang
raises: who waits, on what, for how long, and who could end the wait. `find_cycle` looks for parties
that can only be woken by one another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

import msgspec

from rlinf_async.channels.encoded import Encoded

MAX_EDGES: Final = 1024
"""Edges of one channel that are told apart, in each direction; the others share the last."""
OTHER_PARTIES: Final = "others"


class Edge(msgspec.Struct, kw_only=True):
    """What went between a channel and the calls of one name in other processes."""

    end: Literal["sender", "receiver"]
    party: str
    """who put or took it, as in ``Actor[0].train``"""
    items: int = 0
    nbytes: int = 0
    """encoded, arrays included"""
    shared: int = 0
    """items put whose large arrays came by shared memory, without a copy"""
    copied: int = 0
    """items put whose large arrays came through the socket"""
    direct: int = 0
    """items whose large arrays did not come to the channel's owner, or did not leave from there"""
    credit_waits: int = 0
    """puts that had to ask, because the credit was spent"""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """One channel's counts since its first end was opened.

    Timeouts are in seconds of the event loop's clock.
    """

    name: str
    capacity: int
    """items that each key may hold before ``put`` waits"""
    depth: int
    """items queued now, over all keys, without those that were `collected`"""
    weight: int
    """weight of the queued items"""
    collected: int = 0
    """items that a batch which still waits for more has collected so far: they take up no room"""
    keys: int
    """keys under which something is queued or waited for; ``capacity`` holds for each"""
    puts: int
    gets: int
    put_waits: int
    """puts that found the channel full"""
    put_wait_seconds: float
    get_waits: int
    """gets that found nothing"""
    get_wait_seconds: float
    waiting_putters: int
    waiting_getters: int
    leases_out: int
    """items taken by lease and neither acknowledged nor returned"""
    redelivered: int
    """items that a failed or cancelled lease has put back"""
    unconfirmed: int = 0
    """items that went back because the process they were sent to was lost before it confirmed them:
    it may have seen them, so that they are seen twice"""
    dead_letters: int
    """items given up after ``max_deliveries``"""
    stale: int
    """items that came back as `TooStale`"""
    shared: int = 0
    """items of other processes whose large arrays came by shared memory, without a copy"""
    copied: int = 0
    """items of other processes whose large arrays came through a socket"""
    prefetched: int = 0
    """queued items that were sent to a receiver ahead of its next gets"""
    credit: int = 0
    """items that other processes may put without asking"""
    credit_waits: int = 0
    """puts of other processes that had to ask, because their credit was spent"""
    refused: int = 0
    """items that were under way when the channel closed, failed, or lost its last receiver"""
    direct: int = 0
    """items of other processes whose large arrays stayed there, until a consumer fetches them"""
    loaded: int = 0
    """items past the owner that came through this process after all: for a receiver here, or one
    that cannot reach the producer, or because the producer ended"""
    lost: int = 0
    """items past the owner that are lost: the producer died before they were fetched"""
    edges: tuple[Edge, ...] = ()
    """what went to and from other processes, by who put or took it"""
    senders: int
    receivers: int
    seconds: float
    """seconds since the first end was opened"""

    @property
    def rate(self) -> float:
        """Items taken per second, over the channel's whole life."""
        return self.gets / self.seconds if self.seconds > 0 else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the items that came from other processes."""
        return sum(edge.nbytes for edge in self.edges if edge.end == "sender")


class KeyState(msgspec.Struct, frozen=True, kw_only=True):
    """How full one key of a channel is now."""

    depth: int
    """items queued, without those that were `collected`"""
    weight: int
    """weight of the queued items"""
    collected: int
    """items that a batch which still waits for more has collected so far: they take up no room"""
    unsettled: int = 0
    """deliveries that are not settled: of items that are leased, or on their way to a process"""
    room: int
    """items that could be put now; credit that other processes hold is not counted as room"""
    room_weight: int | None
    """weight for which there is room; None where the channel does not bound it"""

    @property
    def empty(self) -> bool:
        """Whether nothing is queued."""
        return self.depth == 0

    @property
    def full(self) -> bool:
        """Whether the next put would have to wait."""
        return self.room == 0 or self.room_weight == 0


class DeadLetter(msgspec.Struct, frozen=True):
    """An item that failed in every lease that took it."""

    item: Any
    deliveries: int
    error: str
    """what the last holder raised"""


class Edges:
    """The edges of one channel."""

    def __init__(self) -> None:
        self._sent: dict[str, Edge] = {}
        self._taken: dict[str, Edge] = {}

    def put(self, party: str, item: Encoded) -> Edge:
        """An item came from another process."""
        edge = self._sent.get(party) or _add(self._sent, "sender", party)
        edge.items += 1
        edge.nbytes += len(item.data)
        for buffer in item.buffers:
            edge.nbytes += len(buffer)
        return edge

    def put_many(self, party: str, items: int, nbytes: int) -> None:
        """Count ``items`` small items that came together."""
        edge = self._sent.get(party) or _add(self._sent, "sender", party)
        edge.items += items
        edge.nbytes += nbytes

    def put_direct(self, party: str, sizes: list[int]) -> None:
        """Count items, by the sizes of their large arrays, which did not come with them."""
        edge = self._sent.get(party) or _add(self._sent, "sender", party)
        edge.direct += len(sizes)
        edge.nbytes += sum(sizes)

    def asked(self, party: str) -> None:
        """A put had to ask, because the credit was spent."""
        edge = self._sent.get(party) or _add(self._sent, "sender", party)
        edge.credit_waits += 1

    def take(self, party: str, items: int, nbytes: int, direct: int = 0) -> None:
        """Count items that leave for another process, ``direct`` of them without their large
        arrays."""
        edge = self._taken.get(party) or _add(self._taken, "receiver", party)
        edge.items += items
        edge.nbytes += nbytes
        edge.direct += direct

    def seen(self) -> tuple[Edge, ...]:
        """Return the edges as they are now."""
        every = (*self._sent.values(), *self._taken.values())
        return tuple(msgspec.structs.replace(edge) for edge in every)


def _add(edges: dict[str, Edge], end: Literal["sender", "receiver"], party: str) -> Edge:
    if len(edges) >= MAX_EDGES:
        party = OTHER_PARTIES
    found = edges.get(party)
    if found is None:
        found = edges[party] = Edge(end=end, party=party)
    return found


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
    """parties whose connection is cut now, and may be found again"""
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


class Waited(msgspec.Struct, frozen=True, omit_defaults=True):
    """Waits of one party on one channel, all together, open ones up to now."""

    party: str
    operation: Literal["put", "get"]
    channel: str
    count: int
    """waits that are over"""
    seconds: float
    """a sum: two tasks of a party that wait at the same time count twice"""
    unblockers: tuple[str, ...] = ()
    """parties that hold the other end"""


class Waits:
    """Seconds that each party has waited on one channel. Counted when a wait is over."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], list[float]] = {}
        """number and seconds of the waits of each operation and party"""

    def add(self, operation: str, party: str, seconds: float) -> None:
        """Count a wait that is over."""
        found = self._of.get((operation, party))
        if found is None:
            if len(self._of) >= MAX_EDGES:
                party = OTHER_PARTIES
            found = self._of.setdefault((operation, party), [0.0, 0.0])
        found[0] += 1.0
        found[1] += seconds

    def seen(
        self,
        channel: str,
        waiting: Iterable[tuple[Literal["put", "get"], str, float]],
        holders: Mapping[str, tuple[str, ...]],
    ) -> list[Waited]:
        """Return all waits so far, those included that are not over.

        Args:
            channel: its name.
            waiting: operation, party and seconds of each wait that is not over.
            holders: parties that can end a wait of each operation.
        """
        found = {key: (int(count), seconds) for key, (count, seconds) in self._of.items()}
        for operation, party, seconds in waiting:
            count, before = found.get((operation, party), (0, 0.0))
            found[operation, party] = count, before + seconds
        return [
            Waited(
                party=party,
                operation="put" if operation == "put" else "get",
                channel=channel,
                count=count,
                seconds=seconds,
                unblockers=holders.get(operation, ()),
            )
            for (operation, party), (count, seconds) in found.items()
        ]


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
