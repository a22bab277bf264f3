"""Checkers of invariants of a dataflow, fed by a test.

A test reports to a checker the items that were sent and received; ``check()`` raises
`InvariantBroken`, naming the items, if the invariant does not hold.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from rlinf_async.channels.local import Channel
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.statistics import render
from rlinf_async.testing.virtual_loop import InvariantBroken, describe_tasks, unfinished

T = TypeVar("T")

_SHOWN = 10


def _itself(item: Any) -> Hashable:
    identity: Hashable = item
    return identity


class ExactlyOnce(Generic[T]):
    """Every item sent is received once: none lost, none twice, none out of nowhere.

    ``identity`` returns a hashable key of an item, for items that cannot be hashed.
    """

    def __init__(self, identity: Callable[[T], Hashable] = _itself) -> None:
        self._identity = identity
        self._sent: Counter[Hashable] = Counter()
        self._received: Counter[Hashable] = Counter()

    def sent(self, item: T) -> None:
        """Record that an item was sent."""
        self._sent[self._identity(item)] += 1

    def received(self, item: T) -> None:
        """Record that an item arrived."""
        self._received[self._identity(item)] += 1

    def check(self) -> None:
        """Raise `InvariantBroken` naming lost, doubled and unknown items."""
        lost = self._sent - self._received
        extra = self._received - self._sent
        doubled = [item for item in extra.elements() if item in self._sent]
        unknown = [item for item in extra.elements() if item not in self._sent]
        findings = [
            _listed("lost", lost.elements()),
            _listed("received more often than sent", doubled),
            _listed("received but never sent", unknown),
        ]
        _raise_if_any(f"{self._sent.total()} items were sent, exactly once each", findings)


class OrderPerKey(Generic[T]):
    """Items of one key are received in the order in which they were sent.

    Record an item right before it is sent and right after it is received. Items may be missing
    (`ExactlyOnce` looks at that); keys may be interleaved in any way.
    """

    def __init__(self, key: Callable[[T], Hashable]) -> None:
        self._key = key
        self._expected: dict[Hashable, deque[T]] = {}
        self._findings: list[str] = []

    def sent(self, item: T) -> None:
        """Record that an item is about to be sent."""
        self._expected.setdefault(self._key(item), deque()).append(item)

    def received(self, item: T) -> None:
        """Record that an item arrived."""
        key = self._key(item)
        expected = self._expected.get(key, deque())
        if item not in expected:
            self._findings.append(
                f"key {key!r}: {item!r} came after a later item, came twice, or was never sent"
            )
            return
        while expected.popleft() != item:
            pass  # skipped: if one of these comes later, it is out of order

    def check(self) -> None:
        """Raise `InvariantBroken` naming the items that came out of order, with their keys."""
        _raise_if_any("items of one key arrive in the order sent", self._findings)


class Bounds:
    """A channel never holds more than its capacity.

    From outside, an item counts as sent when ``put`` returned and as received when ``get``
    returned; in between, each receiver may hold one item and each sender may have handed one over,
    which widens the bounds by ``receivers`` above and by ``senders`` below. `saw` is exact.
    """

    def __init__(self, capacity: int, *, senders: int = 1, receivers: int = 1) -> None:
        self.capacity = capacity
        self.most = 0
        self._level = 0
        self._high = capacity + receivers
        self._low = -senders
        self._findings: list[str] = []

    def sent(self, item: object) -> None:
        """Record that ``put`` returned."""
        self._level += 1
        self.most = max(self.most, self._level)
        if self._level > self._high:
            self._findings.append(
                f"{item!r} was let in as number {self._level}, where at most {self._high} fit"
            )

    def received(self, item: object) -> None:
        """Record that ``get`` returned."""
        self._level -= 1
        if self._level < self._low:
            self._findings.append(f"{item!r} was received before it can have been sent")

    def saw(self, depth: int) -> None:
        """Record a depth that the channel itself reported."""
        self.most = max(self.most, depth)
        if not 0 <= depth <= self.capacity:
            self._findings.append(f"a depth of {depth} was seen")

    def check(self) -> None:
        """Raise `InvariantBroken` naming the items and depths that passed the bounds."""
        _raise_if_any(f"the channel holds at most {self.capacity} items", self._findings)


def nothing_left_waiting(*channels: Channel[Any]) -> None:
    """Raise `InvariantBroken` if a channel still has items, leases or waiting parties."""
    findings: list[str] = []
    for channel in channels:
        counts = statistics_of(channel.queue)
        if counts.depth:
            findings.append(f"channel {counts.name!r} still holds {counts.depth} items")
        if counts.leases_out:
            findings.append(f"channel {counts.name!r} has {counts.leases_out} items out on lease")
    waits = [wait for channel in channels for wait in channel.waits()]
    if waits:
        findings.append(render(waits))
    _raise_if_any("nothing is left in the channels and nobody waits on them", findings)


def no_tasks_left() -> None:
    """Raise `InvariantBroken` if any task but the current one has not finished."""
    current = asyncio.current_task()
    left = [task for task in unfinished(asyncio.get_running_loop()) if task is not current]
    findings = [f"{len(left)} tasks have not finished:\n{describe_tasks(left)}"] if left else []
    _raise_if_any("no task is left", findings)


def _listed(finding: str, items: Iterable[Hashable]) -> str:
    """``lost: 'a', 'b' and 3 more``, or nothing."""
    shown = [repr(item) for item in items]
    rest = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return f"{finding}: {', '.join(shown[:_SHOWN])}{rest}" if shown else ""


def _raise_if_any(promise: str, findings: Iterable[str]) -> None:
    found = [finding for finding in findings if finding]
    if found:
        raise InvariantBroken(f"broken: {promise}\n" + "\n".join(found))
