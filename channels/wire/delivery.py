"""How the owner answers a put and a get of another process, now or when the queue lets it.

An answer that was not taken leaves no trace: a put that was cancelled after it went through is
taken out again, items that were handed to a cancelled or lost get go back to the head.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import ChannelError, ItemTooLarge, WrongItemType
from rlinf_async.channels.lanes import Entry, GetWait, PutWait
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.wire.codec import Decoder, Encoder, join
from rlinf_async.channels.wire.protocol import Get, Nothing, Put, Taken
from rlinf_async.channels.wire.router import Request, Undo

NOTHING = Nothing()
_encode = Encoder().encode


class Leases:
    """What one process holds."""

    def __init__(self) -> None:
        self.queues: dict[int, Queue] = {}

    def settle(self, number: int, error: str | None) -> None:
        """Consume the lease's items, or put them back.

        Raises:
            LeaseLost: they went back before.
        """
        queue = self.queues.pop(number, None)
        if queue is None:
            return
        if error is None:
            queue.acknowledge(number)
        else:
            queue.put_back(number, error)

    def put_back(self, error: str) -> None:
        """Its holder is gone: everything goes back, oldest first."""
        queues, self.queues = self.queues, {}
        for number, queue in queues.items():
            queue.put_back(number, error)


def prepare(queue: Queue) -> None:
    """Let this queue carry items of other processes.

    Raises:
        TypeError: its type cannot travel.
    """
    if queue.decode is None:
        queue.decode = Decoder(queue.item_type).decode


# ---- put


def answer_put(request: Request[Put], queue: Queue, end: int) -> None:
    """Put the request's body; answer when there was room for it."""
    put = request.meta
    item = request.body or Encoded(b"")
    wait = queue.start_put(item, put.key, put.weight, put.party, end)
    if wait is None:
        request.reply(NOTHING, undo=partial(_retract, queue, put, item))
        return
    request.abandon = partial(queue.abandon_put, wait)
    wait.future.add_done_callback(partial(_admitted, request, queue, wait))


def _admitted(
    request: Request[Put], queue: Queue, wait: PutWait, future: asyncio.Future[None]
) -> None:
    if not request.open:
        return  # abandoned meanwhile
    error = future.exception()
    if error is not None:
        queue.abandon_put(wait)
        request.fail(error)
    else:
        queue.finish_put(wait)
        request.reply(NOTHING, undo=partial(_retract, queue, request.meta, wait.entry.item))


def _retract(queue: Queue, put: Put, item: Any, lost: str | None) -> None:
    # A connection that was lost says nothing about what the sender wanted: the item stays.
    if lost is None:
        queue.retract(put.key, item)


# ---- get


def answer_get(request: Request[Get], queue: Queue, leases: Leases, end: int) -> None:
    """Take items; answer with them when there are enough."""
    get = request.meta
    if get.weight == 1 and (entry := queue.take_one(get.key)) is not None:
        _deliver(request, queue, leases, [entry])
        return
    taken = queue.start_get(get.key, get.weight, get.at_least, get.party, end)
    if not isinstance(taken, GetWait):
        _deliver(request, queue, leases, taken)
        return
    request.abandon = partial(_abandon_get, queue, taken)
    taken.future.add_done_callback(partial(_collected, request, queue, leases, taken))


def _abandon_get(queue: Queue, wait: GetWait) -> None:
    queue.abandon_get(wait)
    queue.finish_get(wait)


def _collected(
    request: Request[Get],
    queue: Queue,
    leases: Leases,
    wait: GetWait,
    future: asyncio.Future[list[Entry]],
) -> None:
    if not request.open:
        return  # abandoned meanwhile
    queue.finish_get(wait)
    error = future.exception()
    if error is not None:
        request.fail(error)
        return
    try:
        _deliver(request, queue, leases, future.result())
    except ChannelError as refused:
        request.fail(refused)


def _deliver(request: Request[Get], queue: Queue, leases: Leases, entries: list[Entry]) -> None:
    """Answer with these items.

    Raises:
        WrongItemType, ItemTooLarge: they cannot travel; none is lost.
    """
    get = request.meta
    sizes, body = join(_encoded(queue, get, entries))
    taken = Taken(sizes)
    undo: Undo = partial(_return, queue, get, entries)
    if get.lease:
        number = queue.grant(get.key, entries, get.party)
        leases.queues[number] = queue
        taken = Taken(sizes, number, [entry.deliveries for entry in entries])
        undo = partial(_ungrant, queue, leases, number)
    try:
        request.reply(taken, body, undo=undo)
    except ItemTooLarge as error:
        undo(None)
        raise ItemTooLarge(f"channel {queue.name!r}: {error}: ask for a smaller batch") from error


def _encoded(queue: Queue, get: Get, entries: list[Entry]) -> list[Encoded]:
    """The items as they travel; one that cannot is buried, the others go back."""
    found: list[Encoded] = []
    for index, entry in enumerate(entries):
        item = entry.item
        if item.__class__ is not Encoded:
            try:
                item = _encode(item)
            except WrongItemType as error:
                queue.bury(entry, error)
                queue.return_entries(get.key, entries[:index] + entries[index + 1 :])
                raise WrongItemType(f"channel {queue.name!r}: {error}") from error
        found.append(item)
    return found


def _return(queue: Queue, get: Get, entries: list[Entry], lost: str | None) -> None:
    queue.return_entries(get.key, entries)


def _ungrant(queue: Queue, leases: Leases, number: int, lost: str | None) -> None:
    # A holder that died may have died of the item: `Leases.put_back` counts that delivery.
    if lost is None:
        leases.queues.pop(number, None)
        queue.ungrant(number)
