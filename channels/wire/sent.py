"""Items that were sent to a receiver in another process, until it has taken them.

Those that a get has asked for count as taken from the channel. Those that were sent ahead of the
next gets do not: they count to its depth and its capacity. Only one receiver of a key has such
items, and as soon as another one gets they are asked back (`Reader.recall`), before it is served:
so each receiver sees a key in order. What is given back, or was sent to a process that is gone,
goes to the head, in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from rlinf_async.channels.away import is_lost
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.ends import Key
from rlinf_async.channels.errors import ItemTooLarge
from rlinf_async.channels.lanes import Entry, Lane, now
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.wire.codec import join
from rlinf_async.channels.wire.framing import CHUNK_BYTES
from rlinf_async.channels.wire.protocol import Get, Left, More, Taken, Wanted
from rlinf_async.channels.wire.ready import CANNOT_TRAVEL, as_travels, make_next_ready
from rlinf_async.channels.wire.router import Refused, Request
from rlinf_async.channels.wire.sources import leave_out

if TYPE_CHECKING:
    from rlinf_async.channels.wire.ahead import Aheads

MAX_BYTES: Final = CHUNK_BYTES // 2
"""Sent ahead with one answer."""
MAX_ITEM_BYTES: Final = 32 * 1024
"""Larger items are not sent ahead."""
ALONE_SECONDS: Final = 1.0
"""Nothing is sent ahead for so long after somebody else wanted it."""


class Sent:
    """What was sent to one receiver under one key, and is not known to have been taken. It is there
    while that is anything, or a get waits."""

    __slots__ = ("_aheads", "_connection", "_number", "_reads", "_recalled", "ahead", "asked",
                 "end", "key", "queue", "waiting")  # fmt: skip

    def __init__(
        self, aheads: Aheads, number: int, key: Key | None, queue: Queue, end: int
    ) -> None:
        self._aheads = aheads
        self._connection = aheads.connection
        self._number = number
        self._recalled = False
        self._reads = False  # the lane knows of it
        self.waiting = 0
        """gets that wait"""
        self.key = key
        self.queue = queue
        self.end = end
        self.asked: dict[int, Entry] = {}
        self.ahead: dict[int, Entry] = {}

    @property
    def holder(self) -> str:
        return self.queue.receivers.get(self.end, self._connection.peer)

    # ---- sending

    def send(self, request: Request[Get] | Request[More], asked: list[Entry], limit: int) -> None:
        """Answer with what was asked for, one item or none, and with at most ``limit`` ahead.

        Raises:
            WrongItemType, ItemTooLarge: it cannot travel; none is lost.
        """
        bodies = [self._encoded(asked[0])] if asked else []
        queue, key = self.queue, self.key
        lane = queue.lane if key is None else queue.lanes.get(key)
        ahead = self._more(lane, limit, bodies) if limit and lane and lane.entries else ()
        count = len(bodies)
        number = self._aheads.number(count)
        if ahead:
            self.asked.update(enumerate(asked, number))
            self._hold(ahead, number + len(asked))
        elif asked:
            self.asked[number] = asked[0]
        nbytes = 0
        left: list[Left] = []
        if queue.direct:
            nbytes = sum(one.nbytes for one in bodies)
            bodies, left = leave_out(bodies)
        taken: Taken | int = number
        if count == 1 and not left:
            body = bodies[0]
        else:
            sizes, body = join(bodies)
            taken = Taken(sizes, first=number, left=left)
        undo = partial(self.undo, number, count)
        try:
            request.reply(taken, body, undo=undo)
        except Exception as error:
            undo(None)
            if not isinstance(error, ItemTooLarge):
                raise
            raise ItemTooLarge(f"channel {queue.name!r}: {error}") from error
        if bodies:
            queue.edges.take(request.meta.party, count, nbytes or body.nbytes, len(left))
            if body.buffers:
                make_next_ready(self._connection, queue, key, body)

    def _encoded(self, entry: Entry) -> Encoded:
        """One item as it travels; one that cannot is buried."""
        try:
            return as_travels(entry, self.queue)
        except CANNOT_TRAVEL as error:
            self.queue.bury(entry, error)
            self.queue.return_entries(self.key, [])
            self.queue.gets -= 1
            raise type(error)(f"channel {self.queue.name!r}: {error}") from error

    def _more(self, lane: Lane, limit: int, bodies: list[Encoded]) -> list[Entry]:
        """Items to send ahead, small ones. Their bodies are added."""
        if lane.getters or self._recalled or not self.queue.can_send_ahead:
            return []
        others = any(reader is not self for reader in lane.readers)
        if others or now() - lane.contested < ALONE_SECONDS:
            return []
        size, before = 0, len(bodies)
        for entry in islice(lane.entries, max(0, limit)):
            item = entry.item
            if item.__class__ is not Encoded:
                try:
                    item = as_travels(entry, self.queue)
                except CANNOT_TRAVEL:  # whoever asks for it is told
                    break
            more = len(item.data)
            if item.buffers or more > MAX_ITEM_BYTES:
                break
            bodies.append(item)
            size += more
            if size >= MAX_BYTES:
                break
        return lane.pop_many(len(bodies) - before)

    def _hold(self, entries: list[Entry], number: int) -> None:
        if not self._reads:
            self._reads = True
            self.queue.add_reader(self.key, self)
        self.ahead.update(enumerate(entries, number))
        self.queue.send_ahead(self.key, entries)

    # ---- what becomes of it

    def took(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Somebody has these. Whoever says so calls `forget`, or uses it again."""
        ahead, asked = self.ahead, self.asked
        taken: list[Entry] = []
        for first, length in ranges:
            for index in range(first, first + length):
                if (entry := ahead.pop(index, None)) is not None:
                    taken.append(entry)
                else:
                    asked.pop(index, None)
        if taken:
            self.queue.took_ahead(self.key, taken)
            if self._reads and not self.ahead:
                self._read_all()

    def lose(self, ranges: Iterable[tuple[int, int]]) -> None:
        """The arrays of these went with their producer."""
        found = [entry for _, entry, _ in self._pop(ranges)]
        self.queue.lose([entry for entry in found if is_lost(entry.item)])
        self.queue.return_entries(self.key, [entry for entry in found if not is_lost(entry.item)])
        self.forget()

    def back(self, ranges: Iterable[tuple[int, int]], error: str | None) -> None:
        """These were not taken: they go back; with an error they are buried."""
        if error is None:
            self._recalled = False
        self._return(list(self._pop(ranges)), error)

    def undo(self, first: int, length: int, why: str | Refused | None) -> None:
        """An answer was not taken: all of it goes back."""
        found = list(self._pop([(first, length)]))
        if isinstance(why, str):
            self.queue.unconfirmed += len(found)
        self._return(found, None)

    def close(self) -> None:
        """The receiver is closed: what was sent ahead will not be taken."""
        ahead, self.ahead = self.ahead, {}
        self._restore(list(ahead.values()))
        self.forget()

    def lost(self) -> None:
        """The process is gone."""
        self.queue.unconfirmed += len(self.asked) + len(self.ahead)
        asked, self.asked = self.asked, {}
        self.queue.return_entries(self.key, list(asked.values()))
        self.close()

    def recall(self, end: int) -> None:
        """Somebody, of this end, waits for an item."""
        if end == self.end or self._recalled or self._connection.closed:
            return  # this very receiver: it has some
        self._recalled = True
        if (lane := self.queue.lane_of(self.key)) is not None:
            lane.contested = now()
        self._connection.notify("channel.wanted", Wanted(self._number, self.key))

    # ---- inside

    def _pop(self, ranges: Iterable[tuple[int, int]]) -> Iterable[tuple[int, Entry, bool]]:
        for first, length in ranges:
            for index in range(first, first + length):
                if (entry := self.ahead.pop(index, None)) is not None:
                    yield index, entry, True
                elif (entry := self.asked.pop(index, None)) is not None:
                    yield index, entry, False

    def _return(self, found: list[tuple[int, Entry, bool]], error: str | None) -> None:
        asked = [entry for _, entry, ahead in found if not ahead]
        ahead = [entry for _, entry, ahead in found if ahead]
        if error is not None:
            for entry in (*asked, *ahead):
                self.queue.bury(entry, error)
            if ahead:
                self.queue.took_ahead(self.key, ahead)
        else:
            if asked:
                self.queue.return_entries(self.key, asked)
            self._restore(ahead)
        self.forget()

    def _restore(self, entries: list[Entry]) -> None:
        if entries:
            self.queue.restore_ahead(self.key, entries)

    def _read_all(self) -> None:
        """Nothing is under way that was not asked for."""
        self._reads = False
        self.queue.remove_reader(self.key, self)

    def forget(self) -> None:
        """It may have nothing any more."""
        if not self.ahead:
            self._recalled = False
            if self._reads:
                self._read_all()
            if not (self.asked or self.waiting):
                self._aheads.forget(self._number, self.key)
