"""Arrays that this process lends to the peer of a connection."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any, Final

from rlinf_async.channels.encoded import PIECE_BYTES, Buffer, Encoded
from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.wire.frames.framing import CHUNK_BYTES
from rlinf_async.channels.wire.frames.messages import LATER, SHARE_BYTES, Later
from rlinf_async.channels.wire.frames.reserved import is_reserved
from rlinf_async.channels.wire.memory.memory_protocol import (
    Announce,
    Notice,
    Opened,
    Place,
    Refused,
    Released,
    encode,
)
from rlinf_async.channels.wire.memory.pool import Copying, Pool
from rlinf_async.channels.wire.memory.slab import Loan, Slab, View, view_of

MAX_DATA: Final = CHUNK_BYTES // 2
"""Of MessagePack, beside shared arrays: such a message is always one frame, not begun and left."""

log = logging.getLogger(__name__)


class PendingCopy:
    """The arrays of a body that are being brought into shared memory."""

    __slots__ = ("__weakref__", "body", "copying")

    def __init__(self, body: Encoded, copying: Copying) -> None:
        self.body = body
        self.copying = copying


class Progress:
    """How far one message is that `Lending.share` is asked for again and again."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: PendingCopy | None = None


_pending_copies: weakref.WeakValueDictionary[int, PendingCopy] = weakref.WeakValueDictionary()
"""By the body's identity, while somebody sends it: one copy does for all connections."""


class Lending:
    """The memory of this process that the peer may read."""

    def __init__(
        self, pool: Pool, tell: Callable[[Notice], None], gone: Callable[[int], None]
    ) -> None:
        self._pool = pool
        self._tell = tell
        self._gone = gone
        self._numbers = count(1)
        self._open: dict[int, bool] = {}
        self._ends: dict[int, weakref.finalize[Any, Slab]] = {}
        self.lent: dict[int, Loan] = {}
        self.patient = True
        """whether there is time to wait for what the peer says"""
        self.refused = ""
        """why the peer does not want any"""

    def share(
        self, body: Encoded, progress: Progress | None = None
    ) -> tuple[Encoded | Later | None, int]:
        """The body as it travels, with its arrays lent; None if it is to travel as it is, `LATER`
        until the peer has said whether it can look at them. And how many bytes were copied for it.

        With a ``progress``, one call copies no more than `PIECE_BYTES`, and it is `LATER` while any
        are left.

        The body's own arrays are replaced by those in shared memory: who gets it next needs no
        copy.
        """
        if self.refused or len(body.data) > MAX_DATA:
            if progress is not None:
                progress.pending = None
            return None, 0
        copied = self._move(body, progress)
        if progress is not None and progress.pending is not None:
            return LATER, copied or 0
        views = [view_of(buffer) for buffer in body.buffers]
        slabs = {view.loan.slab for view in views if view is not None}
        missing = [slab for slab in slabs if not self._is_open(slab)]
        if copied is None:
            return None, 0
        if missing:
            return LATER if self.patient else None, copied
        beside = [buffer for buffer in body.buffers if view_of(buffer) is None]
        table, loans = self._table(views)
        size = len(body.data) + len(table) + sum(map(len, beside))
        if size > CHUNK_BYTES:
            return None, copied
        self.lent.update(loans)
        return Encoded(body.data, [memoryview(table), *beside]), copied

    def prepare(self, body: Encoded) -> bool:
        """Bring its large arrays into shared memory: `share` then copies nothing. Whether that was
        possible."""
        return not self.refused and self._move(body) is not None

    def opened(self, notice: Opened) -> None:
        """The peer has this slab."""
        if notice.slab in self._open:  # it may be gone by now
            self._open[notice.slab] = True

    def refuse(self, notice: Refused, peer: str) -> None:
        """The peer cannot have it: it gets copies from now on."""
        if not self.refused:
            self.refused = notice.reason
            log.warning(
                "large arrays go to %s through the socket, not shared memory: %s",
                peer, notice.reason,
            )  # fmt: skip

    def take_back(self, notice: Released) -> None:
        """The peer is done with these.

        Raises:
            MalformedFrame: they were not lent.
        """
        for number in notice.poisoned:
            self._find(number).poisoned = True
        for number in (*notice.loans, *notice.poisoned):
            self._find(number)
            del self.lent[number]

    def close(self) -> None:
        """The peer will not say any more what it is done with."""
        for loan in self.lent.values():
            loan.poisoned = True
        self.lent.clear()
        while self._ends:  # others may go meanwhile, in any thread
            _, end = self._ends.popitem()
            end.detach()

    # ---- inside

    def _move(self, body: Encoded, progress: Progress | None = None) -> int | None:
        """Bring large arrays into shared memory; how many bytes, or None where they do not go."""
        private = [buffer for buffer in body.buffers if view_of(buffer) is None]
        size = sum(map(len, private))
        if any(map(is_reserved, private)):
            return None  # so large, and from a socket: going on through one takes no other copy
        if size > PIECE_BYTES and progress is not None:
            return self._move_on(body, private, progress)
        if progress is not None:
            progress.pending = None  # another connection has done the rest
        if size < SHARE_BYTES:
            return 0
        views = self._pool.lend(private)
        if views is None:
            return None
        _replace(body, views)
        return size

    def _move_on(self, body: Encoded, private: list[Buffer], progress: Progress) -> int | None:
        """Copy a piece; if there is no time for more of them, all that is left."""
        pending = progress.pending or _pending_copies.get(id(body))
        if pending is None:
            copying = self._pool.begin(private)
            if copying is None:
                return None
            pending = _pending_copies[id(body)] = PendingCopy(body, copying)
            self._announce(copying.views[0])
        progress.pending, copying = pending, pending.copying
        copied = copying.go_on(PIECE_BYTES if self.patient else sum(map(len, private)))
        if not copying.done:
            return copied
        progress.pending = None
        if copying.failed:
            return None
        _replace(body, copying.views)
        return copied

    def _announce(self, buffer: memoryview) -> None:
        """Let the peer open the slab of this one, while the rest is copied."""
        if (view := view_of(buffer)) is not None:
            self._is_open(view.loan.slab)

    def _is_open(self, slab: Slab) -> bool:
        """Whether the peer has it; if it was never asked, it is now."""
        found = self._open.get(slab.number)
        if found is None:
            found = self._open[slab.number] = False
            end = weakref.finalize(slab, self._forget, slab.number)
            end.atexit = False
            self._ends[slab.number] = end
            self._tell(Announce(slab.number, slab.fd, slab.token))
        return found

    def _forget(self, number: int) -> None:
        # In any thread, and within anything that this thread is doing.
        self._open.pop(number, None)
        self._ends.pop(number, None)
        self._gone(number)

    def _table(self, views: list[View | None]) -> tuple[bytes, dict[int, Loan]]:
        """Where each array is, encoded, and the loans that are made by saying so."""
        loans = dict.fromkeys(view.loan for view in views if view is not None)
        numbers = {loan: next(self._numbers) for loan in loans}
        places = [
            view and Place(numbers[view.loan], view.loan.slab.number, view.offset, view.size)
            for view in views
        ]
        return encode(places), {number: loan for loan, number in numbers.items()}

    def _find(self, number: int) -> Loan:
        loan = self.lent.get(number)
        if loan is None:
            raise MalformedFrame(f"part {number} of shared memory was released, but is not lent")
        return loan


def _replace(body: Encoded, views: list[memoryview]) -> None:
    """Its arrays that do not lie in shared memory lie there now."""
    moved = iter(views)
    body.buffers = [buffer if view_of(buffer) else next(moved) for buffer in body.buffers]
