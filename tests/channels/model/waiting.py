"""At a moment when nothing goes on: who waits, whether they could be served, and what is said."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from rlinf_async.channels import Channel, Key
from tests.channels.model.history import Event, History
from tests.channels.model.items import number_in
from tests.channels.model.program import SENDING, TAKING, name_of, party_of


def waiting_wrongly(channel: Channel[Any], history: History) -> list[str]:
    """What is wrong with who waits now."""
    waiting = [event for event in history.events if event.waits and event.do in (*SENDING, *TAKING)]
    gone = {*history.killed}
    waiting = [event for event in waiting if event.end[1] not in gone]
    found = _reported_wrongly(channel, waiting)
    if waiting and not history.killed:
        dead = {number_in(letter.item) for letter in channel.dead_letters}
        found += _could_be_served(history, waiting, dead)
    return found


def _reported_wrongly(channel: Channel[Any], waiting: list[Event]) -> list[str]:
    """The report names those who wait, and no others; whoever could help has an open end."""
    truly: Counter[tuple[str, str, str | None]] = Counter(
        (party_of(event.task), "put" if event.do in SENDING else "get", _text(event.key))
        for event in waiting
    )
    reported: Counter[tuple[str, str, str | None]] = Counter(
        (wait.party, wait.operation, wait.key) for wait in channel.waits()
    )
    found = [f"the report leaves out {one}" for one in (truly - reported).elements()]
    found += [f"the report says that {one} waits" for one in (reported - truly).elements()]
    senders = {name_of(event.end) for event in waiting if event.do in SENDING}
    takers = {name_of(event.end) for event in waiting if event.do in TAKING}
    for wait in channel.waits():
        named = {one for one in wait.unblockers if "@" in one}  # the tasks', not the owner's
        others = takers if wait.operation == "put" else senders
        if others != named:
            found.append(
                f"the report says that {sorted(named)} can end a {wait.operation} of {wait.party}, "
                f"and {sorted(others)} can"
            )
    return found


def _text(key: Key | None) -> str | None:
    return None if key is None else str(key)


def _could_be_served(history: History, waiting: list[Event], dead: set[int]) -> list[str]:
    queued = queued_now(history, dead)
    weights = weights_put(history)
    program = history.program
    found: list[str] = []
    for key in {event.key for event in waiting}:
        items = queued[key]
        weight = sum(weights[item] for item in items)
        takes = [event for event in waiting if event.key == key and event.do in TAKING]
        if takes and weight >= max(event.least for event in takes):
            found.append(
                f"{len(takes)} takes wait for key {key!r}, where {len(items)} items that weigh "
                f"{weight} are queued"
            )
        puts = [event for event in waiting if event.key == key and event.do in SENDING]
        heaviest = max((event.least for event in puts), default=0)
        light = program.max_weight is None or weight + heaviest <= program.max_weight
        if puts and (not items or (len(items) < program.capacity and light)):
            found.append(
                f"{len(puts)} puts wait for room under key {key!r}, where {len(items)} items that "
                f"weigh {weight} are queued"
            )
    return found


def weights_put(history: History) -> dict[int, int]:
    """The weight of each item that somebody wanted to put."""
    return {event.items[0]: event.least for event in history.events if event.do in SENDING}


def queued_now(history: History, dead: set[int]) -> dict[Key | None, list[int]]:
    """The items of each key that were put for certain, and that nobody has."""
    put: dict[int, Key | None] = {}
    taken: set[int] = set()
    for event in history.events:
        if event.do in SENDING:
            if event.outcome == "ok":
                put[event.items[0]] = event.key
        elif event.fate != "returned" or not event.finished:
            taken.update(event.items)
    queued: defaultdict[Key | None, list[int]] = defaultdict(list)
    for item, key in put.items():
        if item not in taken and item not in dead:
            queued[key].append(item)
    return queued
