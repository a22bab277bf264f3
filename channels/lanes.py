"""What waits under one key of a channel: items, those who want one, those who have one to give."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

import msgspec

from rlinf_async.channels.ends import Key
from rlinf_async.channels.waitfor import WaitFuture


class Entry(msgspec.Struct, eq=False, gc=False):
    """An item in its place. Not tracked by the garbage collector, which would visit every one."""

    item: Any
    weight: int
    seq: int
    deliveries: int = 0
    ready: Any = None
    """as it travels, where that was made before it was asked for"""


class Borrower(Protocol):
    """Whoever was lent room, to put into without asking."""

    items: int
    """room that it has and did not use"""
    holder: str
    """the party that asked for it"""

    def recall(self) -> None:
        """Somebody waits for this room: give back what is not used yet."""

    def feed(self) -> None:
        """There is room again."""


class Reader(Protocol):
    """Whoever was sent items ahead of asking for them."""

    end: int

    @property
    def holder(self) -> str:
        """The party that has its end."""
        ...

    def recall(self, end: int) -> None:
        """Somebody waits for an item, on the end with this number: give back what is not taken."""

    def close(self) -> None:
        """Its end is closed."""


class Lane:
    """What waits under one key: items, those who want one, those who have one to give."""

    __slots__ = (
        "borrowers", "contested", "entries", "further", "getters", "handed", "held", "held_weight",
        "hunger", "key", "putters", "readers", "weight",
    )  # fmt: skip

    def __init__(self, key: Key | None) -> None:
        self.key = key
        self.entries: deque[Entry] = deque()
        self.getters: deque[GetWait] = deque()  # where several receivers wait, the first of each
        self.further: dict[int, deque[GetWait] | None] = {}  # then the others of each, by receiver
        self.putters: deque[PutWait] = deque()
        self.handed: set[GetWait] = set()  # served, but cancelled before they ran they give back
        self.weight = 0
        self.held = 0  # items that count although they are not here: lent room, sent ahead
        self.held_weight = 0
        self.borrowers: list[Borrower] = []
        self.readers: list[Reader] = []
        self.contested = float("-inf")  # when somebody else last waited for what was sent ahead
        self.hunger = 0  # so much free room is worth telling a borrower; 0 where none asks

    @property
    def idle(self) -> bool:
        return not (self.entries or self.getters or self.putters or self.borrowers or self.readers)

    def push(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.weight += entry.weight

    # ---- whose turn it is to get: `getters[0]`

    @property
    def gets(self) -> Iterator[GetWait]:
        """Every get that waits."""
        return chain(self.getters, *filter(None, self.further.values()))

    @property
    def waiting_gets(self) -> int:
        """How many these are."""
        return len(self.getters) + sum(map(len, filter(None, self.further.values())))

    def wait_in_turn(self, wait: GetWait) -> None:
        """Where others wait already: receivers are served in turn, one get of each, and the gets of
        each in the order in which they came."""
        further, end = self.further, wait.end
        if end in further:
            if (own := further[end]) is None:
                own = further[end] = deque()
            own.append(wait)
        elif further:
            further[end] = None
            self.getters.append(wait)
        elif (first := self.getters[0]).end == end:
            self.getters.append(wait)
        else:  # a second receiver
            own = self.getters
            own.popleft()
            further[first.end], further[end] = own or None, None
            self.getters = deque((first, wait))

    def served(self, wait: GetWait) -> None:
        """Where several receivers wait: this was the first get, and has left `getters`."""
        if own := self.further[wait.end]:
            self.getters.append(own.popleft())
        else:
            self._leave_the_turns(wait.end)

    def drop(self, wait: GetWait) -> bool:
        """Take a get out, whose receiver keeps its turn; False if it does not wait here."""
        getters, own = self.getters, self.further.get(wait.end)
        if wait in getters:
            if own:
                getters[getters.index(wait)] = own.popleft()
            else:
                getters.remove(wait)
                if self.further:
                    self._leave_the_turns(wait.end)
        elif own and wait in own:
            own.remove(wait)
        else:
            return False
        return True

    def drop_all(self, end: int | None) -> list[GetWait]:
        """Take out all gets, or those of one receiver, in their order."""
        dropped = [wait for wait in self.gets if end is None or wait.end == end]
        if end is None or not self.further:
            if dropped:
                self.getters = deque()
                self.further.clear()
        elif dropped:
            self.getters.remove(dropped[0])
            self._leave_the_turns(end)
        return dropped

    def _leave_the_turns(self, end: int) -> None:
        """This receiver waits no more."""
        further = self.further
        del further[end]
        if len(further) == 1:
            _, own = further.popitem()
            if own:
                own.appendleft(self.getters[0])
                self.getters = own

    def pop_many(self, count: int) -> list[Entry]:
        pop = self.entries.popleft
        popped = [pop() for _ in range(count)]
        self.weight -= sum([entry.weight for entry in popped])
        return popped

    def push_back(self, entries: Iterable[Entry]) -> None:
        """Return entries to where they were: the head, in order of their first arrival."""
        returned = sorted(entries, key=lambda entry: entry.seq)
        self.weight += sum(entry.weight for entry in returned)
        if self.entries and returned and returned[-1].seq > self.entries[0].seq:
            self.entries = deque(sorted((*returned, *self.entries), key=lambda entry: entry.seq))
        else:
            self.entries.extendleft(reversed(returned))


class PutWait:
    """A put that waits for room."""

    __slots__ = ("end", "entry", "future", "lane", "party", "since")

    def __init__(self, lane: Lane, entry: Entry, party: str, end: int) -> None:
        loop = asyncio.get_running_loop()
        self.lane = lane
        self.end = end
        self.entry = entry
        self.party = party
        self.since = loop.time()
        self.future: asyncio.Future[None] = WaitFuture(loop=loop)


class GetWait:
    """A get that waits for items, and those it has collected so far."""

    __slots__ = (
        "at_least", "end", "future", "lane", "owner", "party", "since", "taken", "target", "weight"
    )  # fmt: skip

    def __init__(
        self, lane: Lane, target: int, at_least: int, party: str, end: int, owner: object,
        future: WaitFuture | None = None,
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        self.lane = lane
        self.owner = owner or party
        self.end = end
        self.target = target
        self.at_least = at_least
        self.party = party
        self.since = loop.time()
        self.taken: list[Entry] = []
        self.weight = 0
        self.future: asyncio.Future[list[Entry]] = future or WaitFuture(loop=loop)

    @property
    def enough(self) -> bool:
        """Whether the batch may be delivered as it is."""
        return self.weight >= self.at_least

    def collect(self) -> bool:
        """Take what fits from the lane; whether nothing more would fit."""
        lane, taken, target = self.lane, self.taken, self.target
        entries = lane.entries
        while entries:
            weight = entries[0].weight
            if taken and self.weight + weight > target:
                return True  # whole items only
            taken.append(entries.popleft())
            lane.weight -= weight
            self.weight += weight
            if self.weight >= target:
                return True
        return False

    def give_back(self) -> list[Entry]:
        """Let go of what was collected."""
        taken, self.taken, self.weight = self.taken, [], 0
        return taken


class LeaseRecord(msgspec.Struct):
    """Entries that somebody holds."""

    key: Key | None
    entries: list[Entry]
    holder: str
    owner: Any
    """who must not wait for these items: the holder's task, or the party where that is unknown"""


def now() -> float:
    """The loop's clock where one runs; channels may be made before."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
