"""How the owner answers the gets of one process: with one item, and some ahead of the next gets.

What was sent to each receiver, and what becomes of it, is kept in `sent`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

from rlinf_async.channels.ends import Key
from rlinf_async.channels.lanes import Entry, GetWait
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.wire.connection import Connection
from rlinf_async.channels.wire.delivery import forget
from rlinf_async.channels.wire.protocol import Back, Get, More
from rlinf_async.channels.wire.router import Request
from rlinf_async.channels.wire.sent import Sent


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
            if back.lost:
                sent.lose(back.ranges)
            else:
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
    forget(wait)
    sent.forget()
