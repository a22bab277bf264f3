"""What can be seen of a queue from outside: who waits on it, and its counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from rlinf_async.channels.delivery import Delivery, WaitingPut
from rlinf_async.channels.statistics import KeyState, Statistics
from rlinf_async.channels.waitfor import Wait

if TYPE_CHECKING:
    from rlinf_async.channels.ends import Key
    from rlinf_async.channels.key_queue import KeyQueue
    from rlinf_async.channels.queue import Queue


def waits_of(queue: Queue) -> list[Wait]:
    """Everybody who waits on this channel, the longest first."""
    found: list[Wait] = []
    at = (
        queue.now()
    )  # once: those who began in the same moment stay in the order in which they came
    for key in queue.every_key():
        found += _describe(queue, key, key.putters, "put", at)
        found += _describe(queue, key, key.getters, "get", at)
    return sorted(found, key=lambda wait: -wait.seconds)


def _describe(
    queue: Queue,
    of_key: KeyQueue,
    waits: Iterable[WaitingPut | Delivery],
    operation: Literal["put", "get"],
    at: float,
) -> list[Wait]:
    return [
        Wait(
            party=wait.holder,
            operation=operation,
            channel=queue.name,
            key=None if of_key.key is None else str(of_key.key),
            seconds=at - wait.since,
            unblockers=_unblockers(queue, of_key, wait),
            held_by=_held_by(of_key, wait),
        )
        for wait in waits
    ]


def _unblockers(queue: Queue, of_key: KeyQueue, wait: WaitingPut | Delivery) -> tuple[str, ...]:
    """The parties that hold the other end; when no sender is left, those whose deliveries are not
    settled: their items may come back."""
    others = list((queue.receivers if isinstance(wait, WaitingPut) else queue.senders).values())
    if not others and isinstance(wait, Delivery):
        others = [one.holder for one in of_key.deliveries if one.owner != wait.owner]
    return tuple(dict.fromkeys(others))


def _held_by(of_key: KeyQueue, wait: WaitingPut | Delivery) -> tuple[str, ...]:
    """The parties that have credit, or prefetched items, which this wait could use."""
    if isinstance(wait, WaitingPut):
        found = [one.holder for one in of_key.credit_holders if one.items]
    else:
        found = [one.holder for one in of_key.prefetching]
    return tuple(dict.fromkeys(found))


def state_of(queue: Queue, key: Key | None) -> KeyState:
    """How full this key is now."""
    limit = queue.max_weight
    found = queue.known(key)
    if found is None:
        return KeyState(depth=0, weight=0, collected=0, room=queue.capacity, room_weight=limit)
    prefetched = [
        entry for one in found.prefetching for entry in one.entries[one.requested :] if entry
    ]
    return KeyState(
        depth=len(found.entries) + len(prefetched),
        weight=found.weight + sum(entry.weight for entry in prefetched),
        collected=len(found.collected),
        unsettled=len(found.deliveries),
        room=max(0, queue.capacity - len(found.entries) - found.reserved),
        room_weight=None if limit is None else max(0, limit - found.weight - found.reserved_weight),
    )


def statistics_of(queue: Queue) -> Statistics:
    """The channel's counts up to now."""
    keys = list(queue.every_key())
    waiting_putters = sum(len(key.putters) for key in keys)
    return Statistics(
        name=queue.name,
        capacity=queue.capacity,
        depth=sum(len(key.entries) for key in keys) + queue.prefetched,
        weight=sum(key.weight for key in keys) + queue.prefetched_weight,
        collected=sum(len(key.collected) for key in keys),
        keys=sum(1 for key in keys[1:] if key.entries or key.getters.order or key.putters),
        puts=queue.sequence - queue.withdrawn + waiting_putters,
        gets=queue.gets,
        put_waits=queue.put_waits,
        put_wait_seconds=queue.put_wait_seconds,
        get_waits=queue.get_waits,
        get_wait_seconds=queue.get_wait_seconds,
        waiting_putters=waiting_putters,
        waiting_getters=sum(len(key.getters) for key in keys),
        leases_out=sum(one.unsettled for one in queue.unsettled() if one.lease),
        redelivered=queue.redelivered,
        unconfirmed=queue.unconfirmed,
        dead_letters=len(queue.dead_letters),
        stale=queue.stale,
        shared=queue.shared,
        copied=queue.copied,
        prefetched=queue.prefetched,
        credit=queue.credit,
        credit_waits=queue.credit_waits,
        refused=queue.refused,
        direct=queue.direct,
        loaded=queue.loaded,
        lost=queue.lost,
        edges=queue.edges.seen(),
        senders=len(queue.senders),
        receivers=len(queue.receivers),
        seconds=0.0 if queue.opened_at is None else queue.now() - queue.opened_at,
    )
