"""Large arrays between two processes of one host: written once, then only referred to.

The bytes lie in a slab (see `slab`) of the process that first sent them; the socket carries
references to parts of slabs. A process that only forwards an array forwards the reference, and
reads none of the bytes. The states of a part, while producer P sends an array to consumer C through
the owner O of the channel:

====================================  ==============  ====================================
event                                 may be written  holder of the part
====================================  ==============  ====================================
free                                  by P            none
P copies an array, `Pool.lend`        no              P, for its views in the message
P's message is written                no              P, until O releases the part
O reads it, with the slab open        no              P, for O's views in the queue
O's message to C is written           no              P for O; O, until C releases the part
C reads it, and makes an array        no              P for O; O for C's array
C's array is deleted, C releases      no              P for O, if O has views
O's views are deleted, O releases     by P            none
------------------------------------  --------------  ------------------------------------
C dies                                no              O, for the item's next consumer; then O
                                                      releases the part to P as poisoned
P dies                                never           O's open file and C's mapping
O dies                                never           C's mapping; P's part is poisoned
a connection is cut, both live        never           poisoning of its loans
====================================  ==============  ====================================

So an array may outlive its connection and its maker, and no clean-up is needed.

A message refers to a slab only after the peer has confirmed that the slab is open: the first
message with arrays of a slab, and all data behind it, waits for the confirmation. This wait occurs
once for each slab, and is much shorter than the transfer of its bytes through the socket. Arrays go
through the socket where they are small, the peer has refused a slab, the pool has no free memory,
or the connection is closing. A received array is writable and private: its pages are copied when
they are written, and no other process sees the writes.

Slabs hold only elements of arrays, never data that is parsed: a process that writes into memory
that it lent can change numbers, not their meaning. Offsets are checked against the size of the
slab, which is sealed. `Lending` is the side that sends, `Borrowing` the one that receives::

    ANNOUNCE slab, file, token ---------->
    <---------- OPENED slab, or REFUSED slab
    a message that refers to parts ------>
    <---------- RELEASED parts
    RETIRED slab ------------------------>
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, Final

import msgspec

from rlinf_async.channels.encoded import PIECE_BYTES, Buffer, Encoded
from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.wire.arrays import is_reserved
from rlinf_async.channels.wire.frames import (
    CHUNK_BYTES,
    LATER,
    MAX_BUFFERS,
    MAX_MESSAGE_BYTES,
    SHARE_BYTES,
    Flag,
    FrameType,
    Later,
    Message,
    Share,
    pack_small,
)
from rlinf_async.channels.wire.pool import Copying, Pool
from rlinf_async.channels.wire.protocol import (
    Announce,
    Notice,
    NotOpened,
    Opened,
    Place,
    Released,
    Retired,
    decode_notice,
    decode_places,
    encode,
)
from rlinf_async.channels.wire.session.outbox import Outbox
from rlinf_async.channels.wire.session.streams import peer_pid
from rlinf_async.channels.wire.slab import (
    AVAILABLE,
    PAGE,
    Loan,
    Slab,
    SlabRefused,
    View,
    open_slab,
    view_of,
)

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

    def refuse(self, notice: NotOpened, peer: str) -> None:
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


MAX_SLABS: Final = 256
"""largest number of slabs of one peer that are open in this process"""
MAX_REPEATED_BYTES: Final = 2 * 1024**3
"""limit of the shared bytes of a message, where it exceeds the size of their slabs: a reference to
the same memory again and again costs its sender nothing, and a copy of each costs this process"""


class Borrowing:
    """The shared memory of the peer that this process may read.

    Args:
        send: sends a notice to the peer, at once.
        release: notes, in any thread, that a loan is released and whether it is poisoned; the
            notice follows later.
    """

    def __init__(
        self, send: Callable[[Notice], None], release: Callable[[int, bool], None]
    ) -> None:
        self._send = send
        self._release = release
        self._slabs: dict[int, Slab] = {}

    def announced(self, notice: Announce, pid: int) -> None:
        """Open a slab of the process ``pid``, and send the peer the result."""
        try:
            if not pid:
                raise SlabRefused("it is not known which process of this host is the peer")
            if len(self._slabs) >= MAX_SLABS:
                raise SlabRefused(f"{MAX_SLABS} pieces of its memory are open here")
            self._slabs[notice.slab] = open_slab(pid, notice.file, notice.token)
        except SlabRefused as refused:
            self._send(NotOpened(notice.slab, str(refused)))
        else:
            self._send(Opened(notice.slab))

    def retired(self, notice: Retired) -> None:
        """Remove a slab. Its memory stays mapped while arrays over it are used."""
        self._slabs.pop(notice.slab, None)

    def restore(self, received: Encoded) -> Encoded:
        """The body that was passed to `Lending.share` by the peer.

        Raises:
            MalformedFrame: the table of places is missing, or names memory that was not lent.
        """
        if not received.buffers:
            raise MalformedFrame("a message with shared arrays does not say where they are")
        places = decode_places(received.buffers[0])
        self._check(places, len(received.buffers) - 1)
        beside = iter(received.buffers[1:])
        shared = self._borrow([place for place in places if place is not None])
        return Encoded(received.data, [next(beside if one is None else shared) for one in places])

    def close(self) -> None:
        """The connection is closed: no message will refer to a slab any more."""
        self._slabs.clear()

    # ---- internals

    def _check(self, places: list[Place | None], beside: int) -> None:
        if places.count(None) != beside or len(places) > MAX_BUFFERS:
            raise MalformedFrame(f"{len(places)} arrays, {beside} of them not shared")
        total = 0
        slab_of: dict[int, int] = {}
        for place in places:
            if place is None:
                continue
            slab = self._slabs.get(place.slab)
            if slab is None:
                raise MalformedFrame(f"slab {place.slab} of shared memory was not announced")
            if place.size < 1 or not PAGE <= place.offset <= slab.size - place.size:
                raise MalformedFrame(
                    f"{place.size} bytes at {place.offset} of shared memory that has {slab.size}"
                )
            if slab_of.setdefault(place.loan, place.slab) != place.slab:
                raise MalformedFrame(f"part {place.loan} of shared memory lies in two slabs")
            total += place.size
        mapped = sum(self._slabs[number].size for number in {*slab_of.values()})
        allowed = min(MAX_MESSAGE_BYTES, max(MAX_REPEATED_BYTES, mapped))
        if total > allowed:
            raise MalformedFrame(f"{total} bytes shared, {allowed} are allowed")

    def _borrow(self, places: list[Place]) -> Iterator[memoryview | bytearray]:
        """The arrays at these places, in order."""
        parts: dict[int, list[Place]] = {}
        for place in places:
            parts.setdefault(place.loan, []).append(place)
        loans = {number: self._loan(number, part) for number, part in parts.items()}
        arrays: list[memoryview | bytearray] = []
        for place in places:
            loan = loans[place.loan]
            if loan is None:
                arrays.append(self._slabs[place.slab].read(place.offset, place.size))
            else:
                arrays.append(loan.view(place.offset, place.size))
        for number, loan in loans.items():
            if loan is None:
                self._release(number, False)
        return iter(arrays)

    def _loan(self, number: int, places: list[Place]) -> Loan | None:
        """The loan of these places; None where their pages are in use here, and may be written."""
        slab = self._slabs[places[0].slab]
        start = min(place.offset for place in places) // PAGE * PAGE
        stop = -(-max(place.offset + place.size for place in places) // PAGE) * PAGE
        if slab.in_use(start, stop):
            return None
        slab.use(start, stop)
        return Loan(slab, partial(self._loan_ended, number, slab, start, stop))

    def _loan_ended(self, number: int, slab: Slab, start: int, stop: int, poisoned: bool) -> None:
        slab.unuse(start, stop)
        self._release(number, poisoned)


MAX_RELEASED = 4096
"""largest number of loans that one frame releases"""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Messages with large arrays of a connection, by the way of the arrays."""

    sent_shared: int
    """messages through shared memory"""
    sent_copied: int
    """messages through the socket"""
    received_shared: int
    received_copied: int
    lent: int
    """loans that the peer has not released"""
    refused: str
    """reason why the peer uses no shared memory; empty if it does, or if no slab was announced"""


class Sharing:
    """The shared memory of one connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop, outbox: Outbox, pool: Pool) -> None:
        self._loop = loop
        self._outbox = outbox
        self._lending = Lending(pool, self._send_notice, self._slab_freed)
        self._borrowing = Borrowing(self._send_notice, self._release)
        self._pid = 0
        """process of the peer; 0 where it is unknown, or on another host"""
        self._unsent: deque[tuple[str, int]] = deque()
        """kinds and numbers of releases and retirements without a notice"""
        self._scheduled = self._closed = self._yielding = False
        self._sent_shared = self._sent_copied = 0
        self._received_shared = self._received_copied = 0

    @property
    def use(self) -> MemoryUse:
        return MemoryUse(
            sent_shared=self._sent_shared,
            sent_copied=self._sent_copied,
            received_shared=self._received_shared,
            received_copied=self._received_copied,
            lent=len(self._lending.lent),
            refused=self._lending.refused,
        )

    def attach(self, transport: asyncio.BaseTransport) -> None:
        """Find the process of the peer. Over TCP it is on another host."""
        self._pid = peer_pid(transport) if AVAILABLE else 0

    def new_share(self) -> Share:
        """A function that shares the body of one message; called until it returns no `LATER`."""
        return partial(self._send, Progress())

    def send_now(self, body: Encoded) -> Encoded | None:
        """The body to send with the next frame; None where its arrays cannot be shared, or where
        their copy would block this loop for long."""
        if not self._pid or _private_bytes(body) > PIECE_BYTES:
            return None
        shared = self._lending.share(body)[0]
        if not isinstance(shared, Encoded):
            return None
        self._sent_shared += 1
        return shared

    def prepare(self, body: Encoded) -> bool:
        """Copy the large arrays of a body into shared memory before it is sent; whether that was
        possible."""
        return self._pid > 0 and self._lending.prepare(body)

    def hurry(self) -> None:
        """Stop waiting for the peer and for copies: the connection is about to close."""
        self._lending.may_wait = False

    def receive(self, message: Message) -> Message:
        """The message with its arrays, from shared memory or the socket.

        Raises:
            MalformedFrame: the message refers to memory that was not lent to this process.
        """
        body = message.body
        if body is None:
            raise MalformedFrame("a message without a body cannot have shared arrays")
        if message.flags & Flag.SHARED:
            self._received_shared += 1
            return msgspec.structs.replace(message, body=self._borrowing.restore(body))
        if sum(map(len, body.buffers)) >= SHARE_BYTES:
            self._received_copied += 1
        return message

    def _send(self, progress: Progress, body: Encoded) -> Encoded | Later | None:
        """The body to send, with its large arrays lent; None to send it as it is; or `LATER`."""
        if not self._pid:
            self._sent_copied += 1
            return None
        if self._yielding and self._lending.may_wait:
            return LATER
        shared, copied = self._lending.share(body, progress)
        self._outbox.worked(copied)
        if shared is None:
            self._sent_copied += 1
        elif shared is not LATER:
            self._sent_shared += 1
        elif progress.pending is not None:  # other tasks of this loop run first
            self._yielding = True
            self._loop.call_soon(self._continue)
        return shared

    def _continue(self) -> None:
        self._yielding = False
        self._outbox.flush()

    def handle(self, head: bytes, peer: str) -> None:
        """Handle a notice of the peer about its memory, or about the memory of this process.

        Raises:
            MalformedFrame: the notice is invalid.
        """
        notice = decode_notice(head)
        if isinstance(notice, Announce):
            self._borrowing.announced(notice, self._pid)
        elif isinstance(notice, Opened):
            self._lending.opened(notice)
        elif isinstance(notice, NotOpened):
            self._lending.refuse(notice, peer)
        elif isinstance(notice, Released):
            self._lending.take_back(notice)
        else:
            self._borrowing.retired(notice)

    def close(self) -> None:
        """The connection is closed. Received arrays stay valid."""
        self._closed = True
        self._lending.close()
        self._borrowing.close()
        self._unsent.clear()

    # ---- called in any thread, at any point of what the thread is doing

    def _release(self, number: int, poisoned: bool) -> None:
        self._queue_notice("poisoned" if poisoned else "released", number)

    def _slab_freed(self, number: int) -> None:
        self._queue_notice("retired", number)

    def _queue_notice(self, kind: str, number: int) -> None:
        if self._closed:
            return
        self._unsent.append((kind, number))
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._send_notices)
            except RuntimeError:  # the loop is closed, and the connection with it
                self._closed = True

    def _send_notices(self) -> None:
        self._scheduled = False  # first: later events are sent by the next call
        numbers: dict[str, list[int]] = {"released": [], "poisoned": [], "retired": []}
        for _ in range(min(len(self._unsent), MAX_RELEASED)):
            kind, number = self._unsent.popleft()
            numbers[kind].append(number)
        if numbers["released"] or numbers["poisoned"]:
            self._send_notice(Released(numbers["released"], numbers["poisoned"]))
        for number in numbers["retired"]:
            self._send_notice(Retired(number))
        if self._unsent:
            self._loop.call_soon(self._send_notices)

    def _send_notice(self, notice: Notice) -> None:
        if not self._closed:
            self._outbox.add(pack_small(FrameType.MEMORY, head=encode(notice)))


def _private_bytes(body: Encoded) -> int:
    """Bytes of the arrays of a body that do not lie in shared memory."""
    return sum(len(buffer) for buffer in body.buffers if view_of(buffer) is None)
