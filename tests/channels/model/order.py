"""The order of the items of one key.

What is promised (docs/channels.md, "In order"): first in, first out for each key. Of what can be
seen from outside:

* An item was certainly let in before another if its put had returned before the other one's began,
  and both came over the same connection, or from the owner's process.
* One receiver was certainly handed an item before another if the operation that took it had
  finished before the operation that took the other one began. Within a batch, the places count.
* Then the first of both orders implies the second, unless the earlier item was away when the later
  one was handed out, and came back: a lease failed, or an operation was cancelled, closed or killed
  that may have had it. Such an operation had begun before the later item was handed out and, where
  it used the same end, did not finish before the operation began that took the later item. Where a
  payload was lost with its producer, any operation may have had the items beside it, gave them
  back, and was handed others, or none.

Receivers of one process without a wire between them share one order; over wires it is promised for
each receiver. Operations that go on at the same time have no order that can be seen from outside.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable

import msgspec

from rlinf_async.channels import Key
from tests.channels.model.history import Event, History
from tests.channels.model.program import SENDING


class Put(msgspec.Struct, frozen=True, gc=False):
    """When an item was let in: not before ``begun``, and before ``ended``."""

    begun: int
    ended: int


def out_of_order(history: History) -> list[str]:
    """Items that were handed out in the wrong order."""
    puts: dict[int, Put] = {}
    sources: dict[int, int] = {}
    for event in history.events:
        if event.do in SENDING and event.finished:
            puts[event.items[0]] = Put(event.begun, event.finished)
            sources[event.items[0]] = event.end[1]
    found: list[str] = []
    for group, events in _groups(history).items():
        for source in {
            sources[item] for event in events for item in event.items if item in sources
        }:
            mine = {item: put for item, put in puts.items() if sources[item] == source}
            found += _Sweep(history, group[1], events, mine).run()
    return found


def _groups(history: History) -> dict[tuple[Hashable, Key | None], list[Event]]:
    """The operations that must agree on an order."""
    groups: defaultdict[tuple[Hashable, Key | None], list[Event]] = defaultdict(list)
    ends = _ends(history)
    for event in history.events:
        if event.do not in SENDING and event.items:
            groups[None if history.local else ends[id(event)], event.key].append(event)
    return groups


def _ends(history: History) -> dict[int, Hashable]:
    """The end that each operation used: a task that has cloned goes on with an end of its own."""
    found: dict[int, Hashable] = {}
    clones: defaultdict[int, int] = defaultdict(int)
    for event in sorted(history.events, key=lambda one: one.begun):
        cloned = clones[event.task]
        found[id(event)] = (event.end, event.task, cloned) if cloned else event.end
        if event.do == "clone" and event.outcome == "ok":
            clones[event.task] += 1
    return found


class _Sweep:
    """Goes through operations in the order in which they began, beside those that had finished."""

    def __init__(
        self, history: History, key: Key | None, events: list[Event], puts: dict[int, Put]
    ) -> None:
        self._events = events
        self._puts = puts
        self._ends = _ends(history)
        self._local = history.local
        self._lost = has_lost(history)
        self._returning = [
            event for event in history.events if event.key == key and gave_back(event, history)
        ]

    def run(self) -> list[str]:
        found = [text for event in self._events for text in self._within(event)]
        finished = sorted(
            (event for event in self._events if event.finished), key=lambda event: event.finished
        )
        ends = [event.finished for event in finished]
        latest = self._latest(finished)
        for event in sorted(self._events, key=lambda event: event.begun):
            before = bisect_left(ends, event.begun)
            if not before:
                continue
            newest, by = latest[before - 1]
            for item in event.items:
                put = self._puts.get(item)
                if put is None or by is None or put.ended >= newest:
                    continue
                # somebody had a later one: unless it may have been away then, for all of them
                if wrong := self._overtaken(item, put, finished[:before]):
                    found.append(
                        f"{_name(item)} was taken by {_by(event)} after "
                        f"{_name(wrong[1])} by {_by(wrong[0])}, which was put later"
                    )
                    break
        return found

    def _latest(self, finished: list[Event]) -> list[tuple[int, Event | None]]:
        """The latest begin of a put that each operation, or one before it, was handed."""
        newest, by = -1, None
        found: list[tuple[int, Event | None]] = []
        for event in finished:
            for item in event.items:
                put = self._puts.get(item)
                if put is not None and put.begun > newest:
                    newest, by = put.begun, event
            found.append((newest, by))
        return found

    def _overtaken(self, item: int, put: Put, before: list[Event]) -> tuple[Event, int] | None:
        for event in before:
            for other in event.items:
                later = self._puts.get(other)
                if later is not None and put.ended < later.begun and not self._away(item, event):
                    return event, other
        return None

    def _away(self, item: int, when: Event) -> bool:
        """Whether somebody may have had this item at that time, and given it back."""
        return any(
            one.begun <= when.finished
            and (
                item in one.items or ((self._lost or not one.items) and self._not_before(one, when))
            )
            for one in self._returning
        )

    def _not_before(self, one: Event, when: Event) -> bool:
        """Whether it may have given back what it had after the other one was handed its items.
        Over a wire that is when it began only where both used one end: what another end gave back
        may be on its way for any time, and items may be sent ahead of the gets that take them."""
        if one.died or (not self._local and self._ends[id(one)] != self._ends[id(when)]):
            return True
        return not one.finished or one.finished >= when.begun

    def _within(self, event: Event) -> list[str]:
        newest = -1
        for item in event.items:
            put = self._puts.get(item)
            if put is None:
                continue
            if put.ended < newest:
                return [f"{_by(event)} was given {_name(item)} behind an item that was put later"]
            newest = max(newest, put.begun)
        return []


def has_lost(history: History) -> bool:
    """Whether payloads were lost with their producer."""
    return history.statistics is not None and history.statistics.lost > 0


def gave_back(event: Event, history: History) -> bool:
    """Whether an operation may have been handed items that it did not consume."""
    if event.do in SENDING:
        return False
    return bool(
        event.died
        or has_lost(history)
        or event.end[1] in history.killed
        or event.fate != "consumed"
        or event.returned
        or event.outcome not in ("ok", "EndOfChannel", "ChannelEmpty")
    )


def _name(item: int) -> str:
    return f"{item >> 20}:{item & 0xFFFFF}"


def _by(event: Event) -> str:
    return f"task {event.task} {event.do} {event.begun}..{event.finished}"
