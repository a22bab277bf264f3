"""The owner's side of putting: credit that one process was granted, and what it puts.

Credit is room that a process can put into without asking. At most half of the free room of a key is
granted at once, and to each process that wants some at most an equal share of the capacity. It is
recalled as soon as another put waits for it. What is put on credit is confirmed with the next
grant, or a few milliseconds later. A put without credit is a request, answered when it is admitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.ends import Key
from rlinf_async.channels.errors import ChannelError, MalformedFrame
from rlinf_async.channels.key_queue import Entry, KeyQueue, WaitingPut
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.remote_payload import remote_payload_of
from rlinf_async.channels.wire.direct import Producer, take_retained
from rlinf_async.channels.wire.frames import SHARE_BYTES
from rlinf_async.channels.wire.owner_deliveries import NOTHING, OpenEnd
from rlinf_async.channels.wire.protocol import Credit, Grant, Put, Refused, Run, Transfer
from rlinf_async.channels.wire.session.connection import Connection, Request
from rlinf_async.channels.wire.session.requests import Report, report
from rlinf_async.channels.wire.slab import is_private

FAR_ARRAYS_BYTES: Final = 8 * 1024**2
"""most bytes of the arrays of an item that is put without asking, where they are not in shared
memory"""


def cut(transfer: Transfer, body: Encoded) -> list[tuple[Run, list[Encoded], int]]:
    """Each run with its items, and the bytes of MessagePack that these take.

    Raises:
        MalformedFrame: they do not fit the body, or are not as such items may be.
    """
    data, arrays, sizes = body.data, body.buffers, transfer.sizes
    if sizes == [len(data)] and len(transfer.runs) == 1 and not arrays:
        run = transfer.runs[0]
        if run.count == 1 and run.weight >= 1:
            return [(run, [body], len(data))]  # one item, which most messages have
    count = 0
    for run in transfer.runs:
        if run.count < 0 or run.weight < 1:
            raise MalformedFrame("items came in negative numbers or weights")
        count += run.count
    if sum(sizes) != len(data) or count != len(sizes):
        raise MalformedFrame(f"{len(sizes)} items of {sum(sizes)} bytes came in {len(data)}")
    if sizes and min(sizes) < 0:
        raise MalformedFrame("items came in negative sizes")
    if arrays:
        _check_arrays(count, arrays)
    found: list[tuple[Run, list[Encoded], int]] = []
    index = start = 0
    for run in transfer.runs:
        items: list[Encoded] = []
        first = start
        for size in sizes[index : index + run.count]:
            stop = start + size
            items.append(Encoded(data[start:stop], arrays))
            start = stop
        index += run.count
        found.append((run, items, start - first))
    return found


def _check_arrays(items: int, arrays: Sequence[memoryview | bytearray]) -> None:
    """Credit is room in a channel, and not any amount of this process's memory."""
    beside = sum(len(one) for one in arrays if not is_private(one))
    if items != 1 or beside > FAR_ARRAYS_BYTES:
        raise MalformedFrame(
            f"{items} items with arrays came unasked, {beside} bytes of them not in shared memory"
        )


MIN_CAPACITY: Final = 4
"""Smaller channels grant nothing."""
MAX_CREDIT: Final = 65_536
"""Most items of credit that one process has under a key."""
CONFIRM_SECONDS: Final = 0.005
CONFIRM_BYTES: Final = 256 * 1024
"""Items are confirmed after this time, or after so many bytes: whichever comes first."""
REFUSAL_BYTES: Final = 500
"""most bytes of each text of an error, where items are refused"""
GRANT_REFUSALS: Final = 48
GRANT_CREDITS: Final = 64
"""most credits in one message, whose head is bounded"""


class GrantedCredit:
    """The credit of one process for one key. (A `CreditHolder`.)"""

    __slots__ = (
        "_credits", "channel", "gone", "holder", "items", "low", "number", "queue", "recalled",
        "wanting", "weight",
    )  # fmt: skip

    def __init__(self, credits: Credits, number: int, channel: Queue, key: Key | None) -> None:
        self._credits = credits
        self.number = number
        """number of the channel, to the process"""
        self.channel = channel
        self.queue = channel.of_key(key)
        self.holder = ""
        self.items = 0
        self.weight = 0
        self.low = 0
        """number of items left with which, or with fewer, the process wants more credit"""
        self.recalled = self.wanting = self.gone = False
        self.queue.credit_holders.append(self)
        if key is not None:
            channel.touch(0, self.queue)

    def recall(self) -> None:
        if self.items and not self.recalled:
            self.recalled = True
            self._credits.recall(self)

    def room_freed(self) -> None:
        self._credits.reconsider(self)

    def forgotten(self) -> None:
        self.gone = True
        self._credits.forget(self)

    def grant(self) -> Credit | None:
        """Grant more, up to its share, if there is enough to be worth it. Else `room_freed` is
        called when there is."""
        if self.recalled or self.gone:
            return None
        share = min(MAX_CREDIT, self.channel.capacity // (1 + len(self.queue.credit_holders)))
        least = max(1, share // 4)  # less is not worth a message
        self.low = share - least
        wanted = share - self.items
        if wanted < least:
            return None
        room, weight = self.queue.room_to_grant()
        items = min(room // 2, wanted)
        weight = None if weight is None else weight // 2
        if items < least or weight == 0:
            self.queue.room_wanted = 2 * least
            return None
        self.items += items
        self.weight += weight or 0
        self.queue.reserve(items, weight or 0)
        return Credit(self.number, self.queue.key, items, weight)

    def spend(self, items: int, each: int) -> None:
        """Spend credit for ``items`` that came, of weight ``each``.

        Raises:
            MalformedFrame: that is more than was granted.
        """
        weight = items * each if self.channel.max_weight is not None else 0
        if items > self.items or weight > self.weight:
            raise MalformedFrame(
                f"{items} items of weight {weight} came for channel {self.channel.name!r}, "
                f"which has granted credit for {self.items} of weight {self.weight}"
            )
        if items == self.items:  # the process forgets what is left of the weight, too
            weight = self.weight
        self.items -= items
        self.weight -= weight
        self.queue.reserve(-items, -weight)

    def take_back(self, items: int, weight: int) -> None:
        """Take back credit that was not spent. What was granted since that was said stays
        granted."""
        self.items -= items
        self.weight -= weight
        self.queue.reserve(-items, -weight)
        self.recalled = False
        self.queue.serve()
        if self.queue.putters:  # that was not enough
            self.recall()
        self.channel.forget(self.queue.key)

    def give_up(self) -> None:
        """Take all credit back, for good."""
        self.gone = True
        if self in self.queue.credit_holders:
            self.queue.credit_holders.remove(self)
        if not self.queue.credit_holders:
            self.queue.room_wanted = 0
        self.take_back(self.items, self.weight)


class Credits:
    """All credit of one process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._granted: dict[tuple[int, Key | None], GrantedCredit] = {}
        self._wanting: dict[GrantedCredit, None] = {}
        self._handled = self._handled_bytes = 0
        self._refused: dict[tuple[int, Report], int] = {}
        self._collected = False
        self._timer: asyncio.TimerHandle | None = None
        connection.outbox.last.append(self.send_grants)

    # ---- granting

    def request(self, number: int, channel: Queue, key: Key | None, holder: str) -> None:
        """A sender puts again and again: grant it credit. If it had some, that was not enough."""
        found = self._granted.get((number, key))
        if found is not None:
            channel.credit_waits += 1
            channel.edges.asked(holder)
        elif channel.capacity >= MIN_CAPACITY and channel.open:
            found = self._granted[number, key] = GrantedCredit(self, number, channel, key)
        if found is not None:
            found.holder = holder
            self.reconsider(found)

    def reconsider(self, credit: GrantedCredit) -> None:
        """Grant it more at the end of this turn, if there is room."""
        credit.wanting = True
        self._wanting[credit] = None
        self._collect()

    def recall(self, credit: GrantedCredit) -> None:
        """Ask for what was not spent."""
        if not self._connection.closed:
            asked = Credit(credit.number, credit.queue.key)
            self._connection.notify("credit.recall", asked, control=True)

    def returned(self, credit: Credit) -> None:
        """Take back credit that was not spent, and will not be. More may be on its way to the
        process by now.

        Raises:
            MalformedFrame: it was not granted.
        """
        found = self._granted.get((credit.queue, credit.key))
        if found is None:
            return  # its channel was withdrawn, or all of it came back already
        items, weight = credit.items, credit.weight or 0
        if not (0 <= items <= found.items and 0 <= weight <= found.weight):
            raise MalformedFrame(
                f"credit for {items} items of weight {weight} of channel "
                f"{found.channel.name!r} came back, which has granted {found.items} of "
                f"weight {found.weight}"
            )
        if items == found.items:
            self.forget(found)
            found.give_up()
        else:
            found.take_back(items, weight)

    def forget(self, credit: GrantedCredit) -> None:
        """Forget a key that has no credit, and wants none."""
        at = credit.number, credit.queue.key
        if self._granted.get(at) is credit:
            del self._granted[at]
        self._wanting.pop(credit, None)

    def withdraw(self, number: int) -> None:
        """Take back the credit of a channel that is not there any more."""
        for at in [at for at in self._granted if at[0] == number]:
            self._granted.pop(at).give_up()

    # ---- what comes

    def take(
        self,
        transfer: Transfer,
        body: Encoded,
        find: Callable[[int], OpenEnd],
    ) -> None:
        """Put these items; those of ends that cannot be found are refused, the others counted for
        the holders of their ends.

        Raises:
            MalformedFrame: they do not fit what was granted, or the body.
        """
        index = 0
        for run, items, nbytes in cut(transfer, body):
            elsewhere: list[int] = []
            if transfer.retained:
                into = self._granted.get((run.queue, run.key))
                channel = into.channel if into else None
                elsewhere = take_retained(self._connection, transfer, items, index, channel)
            index += run.count
            holder, refused = "", None
            try:
                end = find(run.end)
            except ChannelError as error:
                refused = error
            else:
                holder = end.holder
                known = self._granted.get((run.queue, run.key))
                if known is not None and known.channel is not end.queue:
                    raise MalformedFrame("items came for a channel that is not their sender's")
            channel = self._put(run, items, refused, holder)
            if channel is None:
                continue
            if body.buffers:
                count_put(channel, holder, body)
            else:
                channel.edges.put_many(holder, run.count, nbytes)
            if elsewhere:
                channel.edges.put_direct(holder, elsewhere)
        self._handled += len(transfer.sizes)
        self._handled_bytes += body.nbytes if body.buffers else len(body.data)
        if self._wanting or self._handled_bytes >= CONFIRM_BYTES:
            self._collect()
        elif self._timer is None and not self._collected:
            self._timer = self._loop.call_later(CONFIRM_SECONDS, self._collect)

    def _put(
        self, run: Run, items: list[Encoded], refused: ChannelError | None, holder: str
    ) -> Queue | None:
        """Put them where credit was granted; there."""
        credit = self._granted.get((run.queue, run.key))
        if credit is None:  # its channel was withdrawn
            if refused is None:
                raise MalformedFrame(f"{run.count} items came for a key that has granted no credit")
            self._refuse(run, refused)
            return None
        credit.spend(run.count, run.weight)
        queue, channel = credit.queue, credit.channel
        try:
            if refused is not None:
                raise refused
            queue.put_on_credit(items, run.weight, holder)
        except ChannelError as error:
            channel.refused += run.count
            self._refuse(run, error)
            queue.serve()
            channel.forget(queue.key)
        if credit.items <= credit.low and not credit.gone:
            credit.wanting = True
            self._wanting[credit] = None
        return channel

    def _refuse(self, run: Run, error: ChannelError) -> None:
        refused = run.end, report(error, REFUSAL_BYTES)
        self._refused[refused] = self._refused.get(refused, 0) + run.count
        self._collect()

    # ---- what goes out

    def send_grants(self) -> None:
        """Grant, refuse and then confirm, in one message if that can hold it: a process that reads
        that its items were handled has read which were refused."""
        self._collected = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connection.closed:
            return
        wanting, self._wanting = self._wanting, {}
        credits: list[Credit] = []
        for one in wanting:
            if (credit := one.grant()) is not None:
                credits.append(credit)
            one.wanting = False
            if not one.items:
                one.channel.forget(one.queue.key)
        handled, self._handled = self._handled, 0
        refused: list[Refused] = []
        for (end, why), count in self._refused.items():
            refused.append(Refused(end, count, why))
        self._refused.clear()
        self._handled_bytes = 0
        while handled or refused or credits:
            more = len(credits) > GRANT_CREDITS or len(refused) > GRANT_REFUSALS
            grant = Grant(0 if more else handled, credits[:GRANT_CREDITS], refused[:GRANT_REFUSALS])
            self._connection.notify("credit.grant", grant, control=True)
            if not more:
                break
            del credits[:GRANT_CREDITS], refused[:GRANT_REFUSALS]

    def _collect(self) -> None:
        if not self._collected and not self._connection.closed:
            self._collected = True
            self._connection.outbox.collect(self.send_grants)

    def close(self) -> None:
        """The process is gone: its room is free again."""
        if self._timer is not None:
            self._timer.cancel()
        granted = list(self._granted.values())
        self._granted.clear()
        self._wanting.clear()
        for credit in granted:
            credit.give_up()


# ---- puts that ask


class RemotePut(WaitingPut):
    """A put of another process that waits for room; its request is answered when it has some."""

    __slots__ = ("queue", "request")

    request: Request[Put]

    def __init__(self, queue: KeyQueue, entry: Entry, sender: int, holder: str) -> None:
        super().__init__(entry, sender, holder)
        self.queue = queue

    @property
    def cancelled(self) -> bool:
        return self.request.connection.closed  # else it leaves its queue when it is cancelled

    def admitted(self) -> None:
        self.queue.put_waited(self)
        put_answered(self.request, self.queue, self.entry.item)

    def refused(self, error: ChannelError) -> None:
        self.queue.put_waited(self)
        self.request.fail(error)

    def abandon(self) -> None:
        """Cancel the put: its request was given up."""
        self.queue.cancel_put(self)


class AnsweredPut:
    """An item that was put, until its sender knows. (An `Unsettled`.)"""

    __slots__ = ("_item", "_queue")

    def __init__(self, queue: KeyQueue, item: Encoded) -> None:
        self._queue = queue
        self._item = item

    def returned(self) -> None:
        queue = self._queue
        for entry in (*queue.entries, *queue.collected):
            if entry.item is self._item:
                queue.retract(entry)
                return

    def losing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def lost(self, reason: str) -> None:
        """Do nothing: a lost connection says nothing about what the sender wanted, so the item
        stays."""


def answer_put(request: Request[Put], end: OpenEnd) -> None:
    """Put the request's body; answer when it was admitted."""
    put, channel = request.meta, end.queue
    item = request.body or Encoded(b"")
    if put.retained is not None:
        if item.buffers:
            raise MalformedFrame("an item came with arrays, and with a payload that stays behind")
        item = Producer.of(request.connection).take(item.data, put.retained, channel)
    channel.check_put(put.key, put.weight)
    count_put(channel, channel.senders.get(end.number, put.party), item)
    queue = channel.of_key(put.key)
    wait = queue.put(item, put.weight, end.number, RemotePut, put.party)
    if wait is None:
        put_answered(request, queue, item)
    else:
        wait.request = request
        request.abandon = wait.abandon


def put_answered(request: Request[Put], queue: KeyQueue, item: Encoded) -> None:
    """Say that the item is in its queue."""
    request.reply(NOTHING, unsettled=AnsweredPut(queue, item), receipt=True)


def count_put(channel: Queue, party: str, item: Encoded) -> None:
    """An item came from this party, in another process."""
    edge = channel.edges.put(party, item)
    if not item.buffers:
        return
    if remote_payload_of(item) is not None:
        edge.direct += 1
    elif any(map(is_private, item.buffers)):
        channel.shared += 1
        edge.shared += 1
    elif sum(map(len, item.buffers)) >= SHARE_BYTES:
        channel.copied += 1
        edge.copied += 1
