"""What the owner of channels lends to one process: room that it can put into without asking.

At most half of the free room of a key is lent at once, and to each of its borrowers at most an
equal share of the capacity. It is asked back as soon as somebody else waits for it. What the
process puts into it is confirmed with the next room that it is lent, or a few milliseconds later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.ends import Key
from rlinf_async.channels.errors import ChannelError, MalformedFrame
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.wire.connection import Connection
from rlinf_async.channels.wire.delivery import count_put
from rlinf_async.channels.wire.failures import Report, report
from rlinf_async.channels.wire.protocol import Credit, Puts, Room, Run, Untaken
from rlinf_async.channels.wire.sources import take_kept
from rlinf_async.channels.wire.unasked import cut

if TYPE_CHECKING:
    from rlinf_async.channels.wire.opened import OpenEnd

MIN_CAPACITY: Final = 4
"""Smaller channels lend nothing."""
MAX_LENT: Final = 4096
"""Items, to one borrower."""
CONFIRM_SECONDS: Final = 0.005
CONFIRM_BYTES: Final = 256 * 1024
REFUSAL_BYTES: Final = 500
"""Of each text of an error, where items are refused."""
CREDIT_REFUSALS: Final = 48
CREDIT_ROOMS: Final = 64
"""No more of them are said in one message: its head is bounded."""


class Lent:
    """Room under one key that one process has."""

    __slots__ = (
        "_creditor", "holder", "items", "key", "lane", "number", "queue", "recalled", "weight"
    )  # fmt: skip

    def __init__(self, creditor: Creditor, number: int, queue: Queue, key: Key | None) -> None:
        self._creditor = creditor
        self.number = number
        self.queue = queue
        self.key = key
        self.holder = ""
        self.items = 0
        self.weight = 0
        self.recalled = False
        self.lane = queue.borrow(key, self)

    def recall(self) -> None:
        """Somebody waits for it."""
        if self.items and not self.recalled:
            self.recalled = True
            self._creditor.recall(self)

    def feed(self) -> None:
        """There is room again."""
        self._creditor.look_at(self)

    @property
    def _share(self) -> int:
        share = self.queue.capacity // (1 + len(self.lane.borrowers))
        return share if share < MAX_LENT else MAX_LENT

    @property
    def wanted(self) -> int:
        """Items, up to its share; 0 where that is too few to be worth it."""
        share = self._share
        wanted = share - self.items
        return wanted if wanted > 0 and wanted >= share // 4 else 0

    def grant(self) -> Room | None:
        """Lend more, if there is enough to be worth it. Else `feed` is called when there is."""
        if self.recalled:
            return None
        wanted = self.wanted
        if not wanted:
            return None
        least = max(1, self._share // 4)  # less is not worth a message
        room, weight = self.queue.spare(self.lane)
        items = min(room // 2, wanted)
        weight = None if weight is None else weight // 2
        if items < least or weight == 0:
            self.lane.hunger = 2 * least
            return None
        self.items += items
        self.weight += weight or 0
        self.queue.reserve(self.lane, items, weight)
        return Room(self.number, self.key, items, weight)

    def spend(self, items: int, each: int) -> None:
        """So many came, weighing so much each.

        Raises:
            MalformedFrame: that is more than was lent.
        """
        weight = items * each if self.queue.max_weight is not None else 0
        if items > self.items or weight > self.weight:
            raise MalformedFrame(
                f"{items} items of weight {weight} came for channel {self.queue.name!r}, which has "
                f"lent room for {self.items} of weight {self.weight}"
            )
        self.items -= items
        self.weight -= weight

    def take_back(self, items: int, weight: int) -> None:
        """So much was not used. What was lent since that was said stays lent."""
        self.items -= items
        self.weight -= weight
        self.queue.unreserve(self.lane, items, weight)

    def give_up(self) -> None:
        """Nothing is lent any more, and nothing will be."""
        self.recalled = True
        self.queue.forget_borrower(self.lane, self)  # first: the room must not be lent to it again
        self.take_back(self.items, self.weight)


class Creditor:
    """What one process was lent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._lent: dict[tuple[int, Key | None], Lent] = {}
        self._hungry: dict[Lent, None] = {}
        self._handled = self._handled_bytes = 0
        self._refused: dict[tuple[int, Report], int] = {}
        self._collected = False
        self._timer: asyncio.TimerHandle | None = None
        connection.outbox.last.append(self.say)

    # ---- lending

    def want(self, number: int, queue: Queue, key: Key | None, holder: str) -> None:
        """A sender puts again and again: lend it room. If it was lent some, that was not enough."""
        found = self._lent.get((number, key))
        if found is not None:
            queue.credit_waits += 1
            queue.edges.asked(holder)
        elif queue.capacity >= MIN_CAPACITY and queue.open:
            found = self._lent[number, key] = Lent(self, number, queue, key)
        if found is not None:
            found.holder = holder
            self.look_at(found)

    def look_at(self, lent: Lent) -> None:
        """Lend it more at the end of this turn, if there is room."""
        self._hungry[lent] = None
        self._collect()

    def recall(self, lent: Lent) -> None:
        """Ask for what was not used."""
        if not self._connection.closed:
            asked = Room(lent.number, lent.key)
            self._connection.notify("channel.recall", asked, control=True)

    def returned(self, room: Room) -> None:
        """This was not used, and will not be. More may be on its way to the process by now.

        Raises:
            MalformedFrame: it was not lent.
        """
        lent = self._lent.get((room.queue, room.key))
        if lent is None:
            return  # its channel was withdrawn, or all of it came back already
        items, weight = room.items, room.weight or 0
        if not (0 <= items <= lent.items and 0 <= weight <= lent.weight):
            raise MalformedFrame(
                f"room for {items} items of weight {weight} of channel {lent.queue.name!r} came "
                f"back, which has lent room for {lent.items} of weight {lent.weight}"
            )
        if items == lent.items:
            del self._lent[room.queue, room.key]
            self._hungry.pop(lent, None)
            lent.give_up()
        else:
            lent.take_back(items, weight)

    def withdraw(self, number: int) -> None:
        """This channel is not there any more."""
        for at in [at for at in self._lent if at[0] == number]:
            self._lent.pop(at).give_up()

    # ---- what comes

    def take(
        self,
        puts: Puts,
        body: Encoded,
        find: Callable[[int], OpenEnd],
    ) -> None:
        """Put these items; those of ends that cannot be found are refused, the others counted for
        the holders of their ends.

        Raises:
            MalformedFrame: they do not fit what was lent, or the body.
        """
        index = 0
        for run, items, nbytes in cut(puts, body):
            elsewhere: list[int] = []
            if puts.kept:
                into = self._lent.get((run.queue, run.key))
                queue = into.queue if into else None
                elsewhere = take_kept(self._connection, puts, items, index, queue)
            index += run.count
            holder, refused = "", None
            try:
                holder = find(run.end).holder
            except ChannelError as error:
                refused = error
            lent = self._put(run, items, refused)
            if lent is None:
                continue
            if body.buffers:
                count_put(lent.queue, holder, body)
            else:
                lent.queue.edges.put_many(holder, run.count, nbytes)
            if elsewhere:
                lent.queue.edges.put_direct(holder, elsewhere)
        self._handled += len(puts.sizes)
        self._handled_bytes += len(body.data)
        self._confirm_later()

    def _put(self, run: Run, items: list[Encoded], refused: ChannelError | None) -> Lent | None:
        """Put them where room was lent; there."""
        lent = self._lent.get((run.queue, run.key))
        if lent is None:  # its channel was withdrawn
            if refused is None:
                raise MalformedFrame(f"{run.count} items came for a key that has lent no room")
            self._refuse(run, refused)
            return None
        lent.spend(run.count, run.weight)
        try:
            lent.queue.put_reserved(lent.lane, items, run.weight, refused)
        except ChannelError as error:
            lent.queue.refused += run.count
            self._refuse(run, error)
        if lent.wanted:
            self._hungry[lent] = None
        return lent

    def _refuse(self, run: Run, error: ChannelError) -> None:
        refused = run.end, report(error, REFUSAL_BYTES)
        self._refused[refused] = self._refused.get(refused, 0) + run.count
        self._collect()

    # ---- what goes out

    def say(self) -> None:
        """Lend, refuse and then confirm, in one message if that can hold it: whoever hears that its
        items were handled has heard of those that were refused."""
        self._collected = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connection.closed:
            return
        hungry, self._hungry = self._hungry, {}
        rooms = [room for lent in hungry if (room := lent.grant()) is not None]
        handled, self._handled = self._handled, 0
        refused = [Untaken(end, count, why) for (end, why), count in self._refused.items()]
        self._refused.clear()
        self._handled_bytes = 0
        while len(rooms) > CREDIT_ROOMS or len(refused) > CREDIT_REFUSALS:
            self._credit(Credit(0, rooms[:CREDIT_ROOMS], refused[:CREDIT_REFUSALS]))
            del rooms[:CREDIT_ROOMS], refused[:CREDIT_REFUSALS]
        if handled or refused or rooms:
            self._credit(Credit(handled, rooms, refused))

    def _credit(self, credit: Credit) -> None:
        self._connection.notify("channel.credit", credit, control=True)

    def _collect(self) -> None:
        if not self._collected and not self._connection.closed:
            self._collected = True
            self._connection.outbox.collect(self.say)

    def _confirm_later(self) -> None:
        if self._hungry or self._handled_bytes >= CONFIRM_BYTES:
            self._collect()
        elif self._timer is None and not self._collected:
            self._timer = self._loop.call_later(CONFIRM_SECONDS, self._collect)

    def close(self) -> None:
        """The process is gone: its room is free again."""
        if self._timer is not None:
            self._timer.cancel()
        for lent in self._lent.values():
            lent.give_up()
        self._lent.clear()
        self._hungry.clear()
