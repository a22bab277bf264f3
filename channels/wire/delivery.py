"""How the owner answers a put and a get of another process, now or when the queue lets it.

An answer that was not taken leaves no trace: a put that was cancelled after it went through is
taken out again, items that were handed to a cancelled or lost get go back to the head.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from rlinf_async.channels.away import away_of, is_lost
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import ItemTooLarge, MalformedFrame
from rlinf_async.channels.lanes import Entry, GetWait, PutWait
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.saying import say
from rlinf_async.channels.wire.codec import join
from rlinf_async.channels.wire.items import ItemCodec
from rlinf_async.channels.wire.protocol import Get, Left, Nothing, Put, Taken
from rlinf_async.channels.wire.ready import CANNOT_TRAVEL, as_travels, make_next_ready
from rlinf_async.channels.wire.router import Refused, Request, Undo
from rlinf_async.channels.wire.slab import is_private
from rlinf_async.channels.wire.sources import Source, leave_out
from rlinf_async.channels.wire.transfer import SHARE_BYTES

NOTHING = Nothing()
NO_LEFT: list[Left] = []


class Leases:
    """What one process holds."""

    def __init__(self) -> None:
        self.queues: dict[int, Queue] = {}

    def settle(self, number: int, error: str | None) -> bool:
        """Consume the lease's items, or put them back; whether this process held it. (Whoever left
        its block while it was cancelled says so twice.)

        Raises:
            LeaseLost: the channel took them back before.
        """
        queue = self.queues.pop(number, None)
        if queue is None:
            return False
        if error is None:
            queue.acknowledge(number)
        else:
            queue.put_back(number, error)
        return True

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
    if queue.decode is None:  # `Queue.lend_values` copies what it may have to hand out again
        codec = ItemCodec(queue.item_type)
        queue.encode, queue.decode, queue.form = codec.encode, codec.decode, codec.form


# ---- put


def answer_put(request: Request[Put], queue: Queue, end: int) -> None:
    """Put the request's body; answer when there was room for it."""
    put = request.meta
    item = request.body or Encoded(b"")
    if put.kept is not None:
        if item.buffers:
            raise MalformedFrame("an item has arrays here and arrays that stay with its producer")
        item = Source.of(request.connection).take(item.data, put.kept, queue)
    count_put(queue, queue.senders.get(end, put.party), item)
    wait = queue.start_put(item, put.key, put.weight, put.party, end)
    if wait is None:
        request.reply(NOTHING, undo=partial(_retract, queue, put, item))
        return
    request.abandon = partial(_abandon_put, queue, wait)
    wait.future.add_done_callback(partial(_admitted, request, queue, wait))


def _abandon_put(queue: Queue, wait: PutWait) -> None:
    queue.abandon_put(wait)
    wait.future.cancel()  # or it and its callback would keep the item, and each other


def count_put(queue: Queue, party: str, item: Encoded) -> None:
    """An item came from this party, in another process."""
    edge = queue.edges.put(party, item)
    if not item.buffers:
        return
    if away_of(item) is not None:
        edge.direct += 1
    elif any(map(is_private, item.buffers)):
        queue.shared += 1
        edge.shared += 1
    elif sum(map(len, item.buffers)) >= SHARE_BYTES:
        queue.copied += 1
        edge.copied += 1


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


def _retract(queue: Queue, put: Put, item: Any, why: str | Refused | None) -> None:
    # A connection that was lost says nothing about what the sender wanted: the item stays.
    if why is None:
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
    forget(wait)


def forget(wait: GetWait) -> None:
    """A get was abandoned: it, its future and that one's callback must not keep what it had."""
    wait.taken.clear()
    wait.future.cancel()


def _collected(
    request: Request[Get],
    queue: Queue,
    leases: Leases,
    wait: GetWait,
    future: asyncio.Future[list[Entry]],
) -> None:
    if not request.open:
        return  # abandoned meanwhile
    try:
        _deliver(request, queue, leases, future.result())
    except Exception as error:
        request.fail(error)
    finally:  # only now may others be told that all was taken: a lease may give it back
        queue.finish_get(wait)


def _deliver(request: Request[Get], queue: Queue, leases: Leases, entries: list[Entry]) -> None:
    """Answer with these items.

    Raises:
        WrongItemType, ItemTooLarge: they cannot travel; none is lost.
    """
    get = request.meta
    items, left = _encoded(queue, get, entries), NO_LEFT
    nbytes = sum(item.nbytes for item in items)
    if queue.direct:
        items, left = leave_out(items)
    sizes, body = join(items)
    taken = Taken(sizes, left=left)
    undo: Undo = partial(_return, queue, get, entries)
    if get.lease:
        number = queue.grant(get.key, entries, get.party)
        leases.queues[number] = queue
        taken = Taken(sizes, number, [entry.deliveries for entry in entries], left=left)
        undo = partial(_ungrant, queue, leases, number)
    try:
        request.reply(taken, body, undo=undo)
    except Exception as error:
        undo(None)
        if not isinstance(error, ItemTooLarge):
            raise
        raise ItemTooLarge(f"channel {queue.name!r}: {error}: ask for a smaller batch") from error
    queue.edges.take(get.party, len(entries), nbytes, len(left))
    make_next_ready(request.connection, queue, get.key, body)


def _encoded(queue: Queue, get: Get, entries: list[Entry]) -> list[Encoded]:
    """The items as they travel; one that cannot is buried, the others go back."""
    found: list[Encoded] = []
    for index, entry in enumerate(entries):
        try:
            found.append(as_travels(entry, queue))
        except CANNOT_TRAVEL as error:
            _return(queue, get, entries, Refused(index, say(error)))
            raise type(error)(f"channel {queue.name!r}: {error}") from error
    return found


def _return(queue: Queue, get: Get, entries: list[Entry], why: str | Refused | None) -> None:
    """They go back; the one that was refused is buried."""
    if isinstance(why, str):
        queue.unconfirmed += len(entries)
    queue.return_entries(get.key, _without_refused(queue, entries, why))


def _ungrant(queue: Queue, leases: Leases, number: int, why: str | Refused | None) -> None:
    # A holder that died may have died of the item: `Leases.put_back` counts that delivery.
    if isinstance(why, str) or leases.queues.pop(number, None) is None:
        return
    if (lease := queue.leases.get(number)) is not None:
        lease.entries = _without_refused(queue, lease.entries, why)
        queue.ungrant(number)


def _without_refused(queue: Queue, entries: list[Entry], why: str | Refused | None) -> list[Entry]:
    if not isinstance(why, Refused) or not 0 <= why.part < len(entries):
        return entries
    if why.lost and not is_lost(entries[why.part].item):
        return entries
    if why.lost:
        queue.lose([entries[why.part]])
    else:
        queue.bury(entries[why.part], why.error)
    return entries[: why.part] + entries[why.part + 1 :]
