"""At a moment when nothing goes on: who waits, whether they could be served, and what is said."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from rlinf_async.channels import Channel, Key
from rlinf_async.channels.queue import statistics_of
from tests.channels.model.history import Event, History
from tests.channels.model.items import number_in
from tests.channels.model.program import SENDING, TAKING, Program, name_of, party_of


def waiting_wrongly(channel: Channel[Any], history: History) -> list[str]:
    """What is wrong with who waits now."""
    waiting = [event for event in history.events if event.waits and event.do in (*SENDING, *TAKING)]
    gone = {*history.killed}
    waiting = [event for event in waiting if event.end[1] not in gone]
    found = _reported_wrongly(channel, waiting)
    if not (history.program.kills or history.program.cuts):  # else some may only now connect
        found += _helped_by_others(channel, waiting)
    if waiting and not history.killed:
        dead = {number_in(letter.item) for letter in channel.dead_letters}
        found += _could_be_served(history, waiting, dead)
        found += _ended(channel, history, waiting)
    return found


def _reported_wrongly(channel: Channel[Any], waiting: list[Event]) -> list[str]:
    """The report names those who wait, and no others."""
    truly: Counter[tuple[str, str, str | None]] = Counter(
        (party_of(event.task), "put" if event.do in SENDING else "get", _text(event.key))
        for event in waiting
    )
    reported: Counter[tuple[str, str, str | None]] = Counter(
        (wait.party, wait.operation, wait.key) for wait in channel.waits()
    )
    found = [f"the report leaves out {one}" for one in (truly - reported).elements()]
    found += [f"the report says that {one} waits" for one in (reported - truly).elements()]
    return found


def _helped_by_others(channel: Channel[Any], waiting: list[Event]) -> list[str]:
    """Whoever could end a wait, as the report says, has an open end: where all tasks wait or have
    ended, those are the ends of the tasks that wait."""
    found: list[str] = []
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


def _ended(channel: Channel[Any], history: History, waiting: list[Event]) -> list[str]:
    """Nobody waits for items when every sender has closed and nobody holds a lease."""
    seen = statistics_of(channel.queue)
    sent = any(task.side == "send" for task in history.program.tasks)
    takes = sum(event.do in TAKING for event in waiting)
    if seen.senders or seen.leases_out or not sent or not takes:
        return []
    return [f"{takes} takes wait although every sender has closed; {seen.depth} items are queued"]


def _text(key: Key | None) -> str | None:
    return None if key is None else str(key)


def _could_be_served(history: History, waiting: list[Event], dead: set[int]) -> list[str]:
    weights = weights_put(history)
    surely = queued_now(history, dead)
    perhaps = queued_now(history, dead, but_for_cancelled=False)
    found: list[str] = []
    for key in {event.key for event in waiting}:
        here = [event for event in waiting if event.key == key]
        weight = sum(weights[item] for item in surely[key])
        takes = [event for event in here if event.do in TAKING]
        if takes and weight >= max(event.least for event in takes):
            found.append(
                f"{len(takes)} takes wait for key {key!r}, where {len(surely[key])} items that "
                f"weigh {weight} are queued"
            )
        puts = [event for event in here if event.do in SENDING]
        weight = sum(weights[item] for item in perhaps[key])
        if puts and _has_room(history.program, perhaps[key], weight, puts):
            found.append(
                f"{len(puts)} puts wait for room under key {key!r}, where {len(perhaps[key])} "
                f"items that weigh {weight} are queued"
            )
    return found


def _has_room(program: Program, items: list[int], weight: int, puts: list[Event]) -> bool:
    heaviest = max(event.least for event in puts)
    light = program.max_weight is None or weight + heaviest <= program.max_weight
    return not items or (len(items) < program.capacity and light)


def weights_put(history: History) -> dict[int, int]:
    """The weight of each item that somebody wanted to put."""
    return {event.items[0]: event.least for event in history.events if event.do in SENDING}


def queued_now(
    history: History, dead: set[int], *, but_for_cancelled: bool = True
) -> dict[Key | None, list[int]]:
    """The items of each key that were put and that nobody has. The item of a put that was
    cancelled may be there too, if somebody had taken it before and has given it back."""
    outcomes = ("ok",) if but_for_cancelled else ("ok", "cancelled")
    put: dict[int, Key | None] = {}
    taken: set[int] = set()
    for event in history.events:
        if event.do in SENDING:
            if event.outcome in outcomes:
                put[event.items[0]] = event.key
        elif not event.finished:
            taken.update(event.items)
        elif event.fate != "returned":
            taken.update(event.kept)
    queued: defaultdict[Key | None, list[int]] = defaultdict(list)
    for item, key in put.items():
        if item not in taken and item not in dead:
            queued[key].append(item)
    return queued
