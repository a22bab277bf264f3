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
slab, which is sealed.

::

    ANNOUNCE slab, file, token ---------->
    <---------- OPENED slab, or REFUSED slab
    a message that refers to parts ------>
    <---------- RELEASED parts
    RETIRED slab ------------------------>
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial

import msgspec

from rlinf_async.channels.encoded import PIECE_BYTES, Encoded
from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.wire.frames.framing import Flag, FrameType, pack_small
from rlinf_async.channels.wire.frames.messages import LATER, SHARE_BYTES, Later, Message, Share
from rlinf_async.channels.wire.memory.borrowing import Borrowing
from rlinf_async.channels.wire.memory.lending import Lending, Progress
from rlinf_async.channels.wire.memory.memory_protocol import (
    Announce,
    Notice,
    Opened,
    Refused,
    Released,
    Retired,
    decode_notice,
    encode,
)
from rlinf_async.channels.wire.memory.pool import Pool
from rlinf_async.channels.wire.memory.slab import AVAILABLE, view_of
from rlinf_async.channels.wire.session.outbox import Outbox
from rlinf_async.channels.wire.session.peer_process import peer_pid

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
        elif isinstance(notice, Refused):
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
            self._outbox.add_control(pack_small(FrameType.MEMORY, head=encode(notice)))


def _private_bytes(body: Encoded) -> int:
    """Bytes of the arrays of a body that do not lie in shared memory."""
    return sum(len(buffer) for buffer in body.buffers if view_of(buffer) is None)
