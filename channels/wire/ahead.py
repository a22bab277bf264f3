"""How the owner answers the gets of one process: with one item, and some ahead of the next gets.

What was sent to each receiver, and what becomes of it, is kept in `sent`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rlinf_async.channels.ends import Key
from rlinf_async.channels.lanes import Entry, GetWait
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.waitfor import WaitFuture
from rlinf_async.channels.wire.connection import Connection
from rlinf_async.channels.wire.delivery import forget
from rlinf_async.channels.wire.protocol import Back, Get, More
from rlinf_async.channels.wire.router import Request
from rlinf_async.channels.wire.sent import Sent


class Asked(WaitFuture):
    """A get that waits here. Whoever serves it answers the request at once, not a turn later."""

    def __init__(self, aheads: Aheads, request: Request[Get], sent: Sent) -> None:
        super().__init__(loop=aheads.loop)
        self._aheads = aheads
        self._request = request
        self._sent = sent
        self.wait: GetWait | None = None
        """its place in the queue; None while that is looked for"""

    def set_result(self, entries: list[Entry]) -> None:
        super().set_result(entries)
        request, sent, wait = self._request, self._sent, self._over()
        try:
            self._aheads.deliver(request, sent, entries)
        except Exception as error:
            request.fail(error)
            sent.forget()
        finally:  # only now may others be told that all was taken: it may go back
            if wait is not None:
                sent.queue.finish_get(wait)

    def set_exception(self, exception: type | BaseException, /) -> None:
        super().set_exception(exception)
        if self.wait is not None:  # whoever ends the channel is not done with it
            self._aheads.loop.call_soon(self._refused)

    def abandon(self) -> None:
        """The answer is wanted no more."""
        if (wait := self._over()) is not None:
            queue = self._sent.queue
            queue.abandon_get(wait)
            queue.finish_get(wait)
            forget(wait)
            self._sent.forget()

    def _refused(self) -> None:
        error = self.exception()
        if error is not None and (wait := self._over()) is not None:  # else it was abandoned
            self._request.fail(error)
            self._sent.forget()
            self._sent.queue.finish_get(wait)

    def _over(self) -> GetWait | None:
        """It waits no more. They must not keep each other."""
        wait, self.wait = self.wait, None
        if wait is not None:
            self._sent.waiting -= 1
        return wait


class Aheads:
    """What was sent to the receivers of one process."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.loop = asyncio.get_running_loop()
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
        sent = self._sent.get((get.end, get.key)) or self._find(get.end, get.key, queue, end)
        if get.ranges:
            sent.took(get.ranges)
        entry = queue.take_one(get.key)
        if entry is not None:
            self.deliver(request, sent, [entry])
            return
        asked = Asked(self, request, sent)
        try:
            wait = queue.start_get(get.key, 1, None, get.party, end, None, asked)
        except BaseException:
            sent.forget()
            raise
        if isinstance(wait, GetWait):  # else it was answered by now
            asked.wait = wait
            sent.waiting += 1
            request.abandon = asked.abandon

    def deliver(self, request: Request[Get], sent: Sent, entries: list[Entry]) -> None:
        """Answer with these, and some ahead."""
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
