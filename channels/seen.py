"""What can be seen of a queue from outside: who waits on it, and its counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from rlinf_async.channels.lanes import GetWait, PutWait, now
from rlinf_async.channels.statistics import Statistics
from rlinf_async.channels.waitfor import Wait

if TYPE_CHECKING:
    from rlinf_async.channels.queue import Queue


def waits_of(queue: Queue) -> list[Wait]:
    """Everybody who waits on this channel, the longest first."""
    found: list[Wait] = []
    at = now()  # once: those who began in the same moment stay in the order in which they came
    for lane in queue.every_lane():
        found += _describe(queue, lane.putters, "put", at)
        found += _describe(queue, lane.gets, "get", at)
    return sorted(found, key=lambda wait: -wait.seconds)


def _describe(
    queue: Queue,
    waits: Iterable[PutWait | GetWait],
    operation: Literal["put", "get"],
    at: float,
) -> list[Wait]:
    return [
        Wait(
            party=wait.party,
            operation=operation,
            channel=queue.name,
            key=None if wait.lane.key is None else str(wait.lane.key),
            seconds=at - wait.since,
            unblockers=_unblockers(queue, wait, operation),
            held_by=_held_by(wait),
        )
        for wait in waits
    ]


def _unblockers(
    queue: Queue, wait: PutWait | GetWait, operation: Literal["put", "get"]
) -> tuple[str, ...]:
    """The parties that hold the other end; when no sender is left, those that hold a lease."""
    others = list((queue.receivers if operation == "put" else queue.senders).values())
    if not others and operation == "get":
        others = [one.holder for one in queue.leases.values() if one.key == wait.lane.key]
    return tuple(dict.fromkeys(others))


def _held_by(wait: PutWait | GetWait) -> tuple[str, ...]:
    """The parties that have room, or items, which were not asked for."""
    if isinstance(wait, PutWait):
        found = [one.holder for one in wait.lane.borrowers if one.items]
    else:
        found = [one.holder for one in wait.lane.readers if one.end != wait.end]
    return tuple(dict.fromkeys(found))


def statistics_of(queue: Queue) -> Statistics:
    """The channel's counts up to now."""
    lanes = list(queue.every_lane())
    return Statistics(
        name=queue.name,
        capacity=queue.capacity,
        depth=sum(len(lane.entries) for lane in lanes) + queue.ahead,
        weight=sum(lane.weight for lane in lanes) + queue.ahead_weight,
        keys=len(lanes) - 1,
        puts=queue.puts,
        gets=queue.gets,
        put_waits=queue.put_waits,
        put_wait_seconds=queue.put_wait_seconds,
        get_waits=queue.get_waits,
        get_wait_seconds=queue.get_wait_seconds,
        waiting_putters=sum(len(lane.putters) for lane in lanes),
        waiting_getters=sum(lane.waiting_gets for lane in lanes),
        leases_out=sum(len(lease.entries) for lease in queue.leases.values()),
        redelivered=queue.redelivered,
        unconfirmed=queue.unconfirmed,
        dead_letters=len(queue.dead_letters),
        stale=queue.stale,
        shared=queue.shared,
        copied=queue.copied,
        ahead=queue.ahead,
        lent=queue.lent,
        credit_waits=queue.credit_waits,
        refused=queue.refused,
        direct=queue.direct,
        brought=queue.brought,
        lost=queue.lost,
        edges=queue.edges.seen(),
        senders=len(queue.senders),
        receivers=len(queue.receivers),
        seconds=0.0 if queue.born is None else now() - queue.born,
    )
