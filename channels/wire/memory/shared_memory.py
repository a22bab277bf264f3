"""Large arrays between two processes of one host: written once, then only referred to.

The bytes lie in a slab (see `slab`) of the process that first sent them; what goes through the
socket is which part of which slab. A process that only forwards passes this on, and touches none of
them. Whose part it is, while producer P sends to consumer C through the owner O of the channel:

====================================  ==============  ====================================
what happened                         may be written  keeps the part from being used again
====================================  ==============  ====================================
free                                  by P            nobody
P copies an array, `Pool.lend`        no              P's views, in the message
P's message is written                no              P: until O releases it
O reads it: it has the slab open      no              P, for O's views, in the queue
O's message to C is written           no              P for O; O: until C releases it
C reads it, and makes an array        no              P for O, O for C's array
the array is gone, C releases         no              P for O, if O has views
O has none any more, O releases       by P            nobody
------------------------------------  --------------  ------------------------------------
C dies                                no              O, that the item may go to another; then
                                                      O releases it to P as poisoned
P dies                                by nobody       O's open file and C's mapping
O dies                                by nobody       C's mapping; P's part is poisoned
a connection is cut, both live        by nobody       what was lent over it is poisoned
====================================  ==============  ====================================

So an array may outlive its connection and its maker, and nothing needs to be cleaned up.

Before a part of a slab is mentioned, the other side has said that it has the slab open: the first
message that lies there waits for this, and all data behind it, which is once for each slab and much
less than its bytes would take through the socket. What is small, refused, finds no room, or is sent
when the connection closes, goes through the socket. A received array is
writable and private: its pages are copied when they are written, and no one else sees it.

Only elements of arrays lie here, never anything that is parsed: what a process writes into memory
that it lent can change numbers, not what they mean. Offsets are checked against the size of the
slab, which is sealed.

::

    ANNOUNCE slab, file, token ---------->
    <---------- OPENED slab, or REFUSED slab
    a message that mentions parts ------->
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

AT_ONCE = 4096
"""Parts that one frame releases."""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """How the large arrays of a connection travelled. Counted in messages."""

    sent_shared: int
    sent_copied: int
    """through the socket"""
    received_shared: int
    received_copied: int
    lent: int
    """parts that the peer has not released"""
    refused: str
    """why the peer uses no shared memory; empty if it does, or was not asked"""


class Sharing:
    """The shared memory of one connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop, outbox: Outbox, pool: Pool) -> None:
        self._loop = loop
        self._outbox = outbox
        self._lending = Lending(pool, self._tell, self._slab_gone)
        self._borrowing = Borrowing(self._tell, self._release)
        self._pid = 0
        self._found: deque[tuple[str, int]] = deque()
        self._scheduled = self._closed = self._resting = False
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
        """Learn which process is at the other side: over TCP, none of this host."""
        self._pid = peer_pid(transport) if AVAILABLE else 0

    def new_share(self) -> Share:
        """What makes the body of one message travel: it is asked until it has."""
        return partial(self._send, Progress())

    def send_now(self, body: Encoded) -> Encoded | None:
        """The body as it travels with the next frame; None where that cannot be, or would take so
        long that others in this loop should have a turn."""
        if not self._pid or _private_bytes(body) > PIECE_BYTES:
            return None
        shared = self._lending.share(body)[0]
        if not isinstance(shared, Encoded):
            return None
        self._sent_shared += 1
        return shared

    def prepare(self, body: Encoded) -> bool:
        """Bring its large arrays into shared memory before it is sent; whether they lie there."""
        return self._pid > 0 and self._lending.prepare(body)

    def hurry(self) -> None:
        """Do not wait any more for what the peer says: the connection is about to close."""
        self._lending.patient = False

    def receive(self, message: Message) -> Message:
        """The message with its arrays, wherever they lie.

        Raises:
            MalformedFrame: they lie where there is nothing for this process.
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
        """The body as it travels, with its large arrays lent; None: as it is; or not yet."""
        if not self._pid:
            self._sent_copied += 1
            return None
        if self._resting and self._lending.patient:
            return LATER
        shared, copied = self._lending.share(body, progress)
        self._outbox.worked(copied)
        if shared is None:
            self._sent_copied += 1
        elif shared is not LATER:
            self._sent_shared += 1
        elif progress.pending is not None:  # others in this loop first
            self._resting = True
            self._loop.call_soon(self._go_on)
        return shared

    def _go_on(self) -> None:
        self._resting = False
        self._outbox.flush()

    def handle(self, head: bytes, peer: str) -> None:
        """Handle a notice of the peer about its memory, or about this process's.

        Raises:
            MalformedFrame: it is invalid.
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
        """The connection is gone. Arrays that arrived stay."""
        self._closed = True
        self._lending.close()
        self._borrowing.close()
        self._found.clear()

    # ---- what is found out in any thread, within anything that it is doing

    def _release(self, number: int, poisoned: bool) -> None:
        self._say_later("poisoned" if poisoned else "released", number)

    def _slab_gone(self, number: int) -> None:
        self._say_later("retired", number)

    def _say_later(self, what: str, number: int) -> None:
        if self._closed:
            return
        self._found.append((what, number))
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._say)
            except RuntimeError:  # the loop is closed, and the connection with it
                self._closed = True

    def _say(self) -> None:
        self._scheduled = False  # first: what is found from here on is said by the next call
        found: dict[str, list[int]] = {"released": [], "poisoned": [], "retired": []}
        for _ in range(min(len(self._found), AT_ONCE)):
            what, number = self._found.popleft()
            found[what].append(number)
        if found["released"] or found["poisoned"]:
            self._tell(Released(found["released"], found["poisoned"]))
        for number in found["retired"]:
            self._tell(Retired(number))
        if self._found:
            self._loop.call_soon(self._say)

    def _tell(self, notice: Notice) -> None:
        if not self._closed:
            self._outbox.add_control(pack_small(FrameType.MEMORY, head=encode(notice)))


def _private_bytes(body: Encoded) -> int:
    """Bytes of its arrays that do not lie in shared memory."""
    return sum(len(buffer) for buffer in body.buffers if view_of(buffer) is None)
