"""Items that were sent to a receiver in another process, until it has taken them.

Those that a get has asked for count as taken from the channel. Those that were sent ahead of the
next gets do not: they count to its depth and its capacity. Only one receiver of a key has such
items, and as soon as another one gets they are asked back (`Reader.recall`), before it is served:
so each receiver sees a key in order. What is given back, or was sent to a process that is gone,
goes to the head, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Final

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.ends import Key
from rlinf_async.channels.errors import ItemTooLarge, WrongItemType
from rlinf_async.channels.lanes import Entry, GetWait, now
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.wire.codec import Encoder, join
from rlinf_async.channels.wire.connection import Connection
from rlinf_async.channels.wire.framing import CHUNK_BYTES
from rlinf_async.channels.wire.protocol import Back, Get, More, Taken, Wanted
from rlinf_async.channels.wire.router import Refused, Request

MAX_BYTES: Final = CHUNK_BYTES // 2
"""Sent ahead with one answer."""
MAX_ITEM_BYTES: Final = 32 * 1024
"""Larger items are not sent ahead."""
ALONE_SECONDS: Final = 1.0
"""Nothing is sent ahead for so long after somebody else wanted it."""
_encode = Encoder().encode


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
        bodies = [self._encoded(entry) for entry in asked]
        ahead = self._more(limit, bodies) if limit else ()
        count = len(bodies)
        number = self._aheads.number(count)
        if ahead:
            self.asked.update(enumerate(asked, number))
            self._hold(ahead, number + len(asked))
        elif asked:
            self.asked[number] = asked[0]
        sizes, body = join(bodies)
        undo = partial(self.undo, number, count)
        try:
            request.reply(Taken(sizes, first=number), body, undo=undo)
        except Exception as error:
            undo(None)
            if not isinstance(error, ItemTooLarge):
                raise
            raise ItemTooLarge(f"channel {self.queue.name!r}: {error}") from error
        if bodies:
            self.queue.edges.take(request.meta.party, len(bodies), body.nbytes)

    def _encoded(self, entry: Entry) -> Encoded:
        """One item as it travels; one that cannot is buried."""
        item = entry.item
        if item.__class__ is Encoded:
            return item
        try:
            return _encode(item)
        except WrongItemType as error:
            self.queue.bury(entry, error)
            self.queue.return_entries(self.key, [])
            self.queue.gets -= 1
            raise WrongItemType(f"channel {self.queue.name!r}: {error}") from error

    def _more(self, limit: int, bodies: list[Encoded]) -> list[Entry]:
        """Items to send ahead, small ones. Their bodies are added."""
        queue = self.queue
        lane = queue.lane_of(self.key)
        if lane is None or not lane.entries or lane.getters:
            return []
        if self._recalled or not queue.can_send_ahead:
            return []
        others = any(reader is not self for reader in lane.readers)
        if others or now() - lane.contested < ALONE_SECONDS:
            return []
        limit = min(limit, len(lane.entries))
        found: list[Entry] = []
        size = 0
        while len(found) < limit and size < MAX_BYTES:
            entry = lane.entries[0]
            item = entry.item
            if item.__class__ is not Encoded:
                try:
                    item = _encode(item)
                except WrongItemType:  # whoever asks for it is told
                    break
            if item.buffers or len(item.data) > MAX_ITEM_BYTES:
                break
            found.append(lane.pop())
            bodies.append(item)
            size += len(item.data)
        return found

    def _hold(self, entries: list[Entry], number: int) -> None:
        if not self._reads:
            self._reads = True
            self.queue.add_reader(self.key, self)
        self.ahead.update(enumerate(entries, number))
        self.queue.send_ahead(self.key, entries)

    # ---- what becomes of it

    def took(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Somebody has these. Whoever says so calls `forget`, or uses it again."""
        if self.ahead:
            taken = [entry for _, entry, ahead in self._pop(ranges) if ahead]
            if taken:
                self.queue.took_ahead(self.key, taken)
        else:
            for first, length in ranges:
                for index in range(first, first + length):
                    self.asked.pop(index, None)
            return
        if self._reads and not self.ahead:
            self._read_all()

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


class Aheads:
    """What was sent to the receivers of one process."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._numbers = 1
        self._sent: dict[tuple[int, Key | None], Sent] = {}

    def number(self, length: int) -> int:
        """The first of so many new numbers."""
        first = self._numbers
        self._numbers += length
        return first

    def forget(self, number: int, key: Key | None) -> None:
        """Nothing is under way there."""
        self._sent.pop((number, key), None)

    def _find(self, number: int, key: Key | None, queue: Queue, end: int) -> Sent:
        sent = self._sent.get((number, key))
        if sent is None:
            sent = self._sent[number, key] = Sent(self, number, key, queue, end)
        return sent

    # ---- requests

    def get(self, request: Request[Get], queue: Queue, end: int) -> None:
        """Answer with one item, now or when there is one."""
        get = request.meta
        sent = self._find(get.end, get.key, queue, end)
        if get.ranges:
            sent.took(get.ranges)
        entry = queue.take_one(get.key)
        if entry is not None:
            self._deliver(request, sent, [entry])
            return
        try:
            taken = queue.start_get(get.key, 1, None, get.party, end)
        except BaseException:
            sent.forget()
            raise
        if not isinstance(taken, GetWait):
            self._deliver(request, sent, taken)
            return
        sent.waiting += 1
        request.abandon = partial(_abandon, sent, taken)
        taken.future.add_done_callback(partial(self._collected, request, sent, taken))

    def _collected(
        self,
        request: Request[Get],
        sent: Sent,
        wait: GetWait,
        future: asyncio.Future[list[Entry]],
    ) -> None:
        if not request.open:
            return  # abandoned meanwhile
        sent.waiting -= 1
        try:
            self._deliver(request, sent, future.result())
        except Exception as error:
            request.fail(error)
            sent.forget()
        finally:  # only now may others be told that all was taken: it may go back
            sent.queue.finish_get(wait)

    def _deliver(self, request: Request[Get], sent: Sent, entries: list[Entry]) -> None:
        try:
            sent.send(request, entries, request.meta.ahead or 0)
        finally:
            if not sent.asked:  # it failed
                sent.forget()

    def more(self, request: Request[More], queue: Queue, end: int) -> None:
        """Answer with what is there now."""
        more = request.meta
        self._find(more.end, more.key, queue, end).send(request, [], more.ahead)

    def took(self, number: int, key: Key | None, ranges: Iterable[tuple[int, int]]) -> None:
        """Items were taken."""
        if (sent := self._sent.get((number, key))) is not None:
            sent.took(ranges)
            sent.forget()

    def back(self, back: Back) -> None:
        """Items were not taken."""
        if (sent := self._sent.get((back.end, back.key))) is not None:
            sent.back(back.ranges, back.error)

    def close(self) -> None:
        """The process is gone: all of it goes back."""
        for sent in list(self._sent.values()):
            sent.lost()
        self._sent.clear()


def _abandon(sent: Sent, wait: GetWait) -> None:
    sent.waiting -= 1
    sent.queue.abandon_get(wait)
    sent.queue.finish_get(wait)
    sent.forget()
