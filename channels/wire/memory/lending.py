"""Arrays in shared memory that this process lends to the peer of a connection."""

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
"""limit of the MessagePack bytes beside shared arrays: such a message is always one frame"""

log = logging.getLogger(__name__)


class PendingCopy:
    """The arrays of a body that are being copied into shared memory."""

    __slots__ = ("__weakref__", "body", "copying")

    def __init__(self, body: Encoded, copying: Copying) -> None:
        self.body = body
        self.copying = copying


class Progress:
    """The state of one message between the calls of `Lending.share` for it."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: PendingCopy | None = None


_pending_copies: weakref.WeakValueDictionary[int, PendingCopy] = weakref.WeakValueDictionary()
"""copies by the identity of their body, while a connection sends it: all connections share one"""


class Lending:
    """The shared memory of this process that the peer may read.

    Args:
        pool: shared memory of this process.
        send: sends a notice to the peer, at once.
        slab_freed: notes, in any thread, that a slab that the peer has open is gone.
    """

    def __init__(
        self, pool: Pool, send: Callable[[Notice], None], slab_freed: Callable[[int], None]
    ) -> None:
        self._pool = pool
        self._send = send
        self._slab_freed = slab_freed
        self._numbers = count(1)
        self._open: dict[int, bool] = {}
        """announced slabs, by number: whether the peer has opened the slab"""
        self._finalizers: dict[int, weakref.finalize[Any, Slab]] = {}
        """finalizers of the announced slabs, by number"""
        self.lent: dict[int, Loan] = {}
        """loans that the peer has not released, by number"""
        self.may_wait = True
        """whether a message may wait for the peer and for its copies"""
        self.refused = ""
        """reason of the peer's refusal; empty without one"""

    def share(
        self, body: Encoded, progress: Progress | None = None
    ) -> tuple[Encoded | Later | None, int]:
        """Lend the arrays of a body to the peer.

        The arrays of ``body`` itself are replaced by their copies in shared memory: the next
        connection needs no copy.

        Args:
            body: of a message.
            progress: of the message. One call then copies no more than `PIECE_BYTES`.

        Returns:
            The body to send, in which places stand for the lent arrays; None if ``body`` is to be
            sent as it is; `LATER` while bytes are left to copy, or the peer has not opened a slab.
            And the number of copied bytes.
        """
        if self.refused or len(body.data) > MAX_DATA:
            if progress is not None:
                progress.pending = None
            return None, 0
        copied = self._copy_to_shared(body, progress)
        if progress is not None and progress.pending is not None:
            return LATER, copied or 0
        views = [view_of(buffer) for buffer in body.buffers]
        slabs = {view.loan.slab for view in views if view is not None}
        missing = [slab for slab in slabs if not self._is_open(slab)]
        if copied is None:
            return None, 0
        if missing:
            return LATER if self.may_wait else None, copied
        beside = [buffer for buffer in body.buffers if view_of(buffer) is None]
        table, loans = self._table(views)
        size = len(body.data) + len(table) + sum(map(len, beside))
        if size > CHUNK_BYTES:
            return None, copied
        self.lent.update(loans)
        return Encoded(body.data, [memoryview(table), *beside]), copied

    def prepare(self, body: Encoded) -> bool:
        """Copy the large arrays of a body into shared memory, so that `share` copies nothing.

        Returns whether that was possible.
        """
        return not self.refused and self._copy_to_shared(body) is not None

    def opened(self, notice: Opened) -> None:
        """The peer has opened a slab."""
        if notice.slab in self._open:  # a slab may be freed before the answer
            self._open[notice.slab] = True

    def refuse(self, notice: Refused, peer: str) -> None:
        """The peer cannot open a slab: it gets copies from now on."""
        if not self.refused:
            self.refused = notice.reason
            log.warning(
                "large arrays go to %s through the socket, not shared memory: %s",
                peer, notice.reason,
            )  # fmt: skip

    def take_back(self, notice: Released) -> None:
        """The peer has released loans.

        Raises:
            MalformedFrame: a loan was not lent to this peer.
        """
        for number in notice.poisoned:
            self._find(number).poisoned = True
        for number in (*notice.loans, *notice.poisoned):
            self._find(number)
            del self.lent[number]

    def close(self) -> None:
        """The connection is closed: what the peer has not released is poisoned."""
        for loan in self.lent.values():
            loan.poisoned = True
        self.lent.clear()
        while self._finalizers:  # finalizers may run meanwhile, in any thread
            _, finalizer = self._finalizers.popitem()
            finalizer.detach()

    # ---- internals

    def _copy_to_shared(self, body: Encoded, progress: Progress | None = None) -> int | None:
        """Copy large arrays into shared memory; the number of bytes, or None where they stay."""
        private = [buffer for buffer in body.buffers if view_of(buffer) is None]
        size = sum(map(len, private))
        if any(map(is_reserved, private)):
            return None  # large arrays from a socket: forwarding them takes no further copy
        if size > PIECE_BYTES and progress is not None:
            return self._copy_piece(body, private, progress)
        if progress is not None:
            progress.pending = None  # another connection has copied the rest
        if size < SHARE_BYTES:
            return 0
        views = self._pool.lend(private)
        if views is None:
            return None
        _replace(body, views)
        return size

    def _copy_piece(self, body: Encoded, private: list[Buffer], progress: Progress) -> int | None:
        """Copy one piece, or all that is left where the message may not wait."""
        pending = progress.pending or _pending_copies.get(id(body))
        if pending is None:
            copying = self._pool.begin(private)
            if copying is None:
                return None
            pending = _pending_copies[id(body)] = PendingCopy(body, copying)
            self._announce_slab_of(copying.views[0])
        progress.pending, copying = pending, pending.copying
        copied = copying.copy_some(PIECE_BYTES if self.may_wait else sum(map(len, private)))
        if not copying.done:
            return copied
        progress.pending = None
        if copying.failed:
            return None
        _replace(body, copying.views)
        return copied

    def _announce_slab_of(self, buffer: memoryview) -> None:
        """Let the peer open the slab of this buffer while the rest is copied."""
        if (view := view_of(buffer)) is not None:
            self._is_open(view.loan.slab)

    def _is_open(self, slab: Slab) -> bool:
        """Whether the peer has opened this slab; announces a slab that is new to the peer."""
        found = self._open.get(slab.number)
        if found is None:
            found = self._open[slab.number] = False
            finalizer = weakref.finalize(slab, self._forget, slab.number)
            finalizer.atexit = False
            self._finalizers[slab.number] = finalizer
            self._send(Announce(slab.number, slab.fd, slab.token))
        return found

    def _forget(self, number: int) -> None:
        # Runs in any thread, at any point of what the thread is doing.
        self._open.pop(number, None)
        self._finalizers.pop(number, None)
        self._slab_freed(number)

    def _table(self, views: list[View | None]) -> tuple[bytes, dict[int, Loan]]:
        """The places of the arrays, encoded, and the loans that the peer gets by them."""
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
    """Replace the private arrays of a body by their copies in shared memory."""
    moved = iter(views)
    body.buffers = [buffer if view_of(buffer) else next(moved) for buffer in body.buffers]
