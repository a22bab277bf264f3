"""What waits to be sent: two lanes, coalesced into one write for each turn of the loop.

The first small message of a turn is written at once, with all that was collected before it; what
follows in the same turn waits for its end, or until it is worth a write of its own, and what
answers what was read waits until all of that was read. So a lone question or answer does not wait
for a turn, a crowd of them is few writes, and the peer works while a long turn still goes on.

Control frames always go first; large messages are cut into chunks, so what is ahead of a control
frame is never more than one batch and what the transport holds already.

What was written is kept until the peer has acknowledged it: after a cut, the next transport sends
the rest of it first. Too much of it holds data back, but never control frames, which carry the
acknowledgements.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.wire.frames import (
    CHUNK_BYTES,
    CONTROL,
    DATA,
    MAX_HEAD_BYTES,
    Bytes,
    FrameType,
    Outgoing,
    Share,
    is_request,
    movement,
    outgoing,
    pack_message,
)

MAX_UNACKNOWLEDGED_BYTES: Final = 16 * 1024**2
"""Bytes that may be written and not acknowledged; beyond it data waits, control goes on."""


class Unacknowledged:
    """The end of a stream that may not have arrived. Pure: no socket, no clock.

    A connection is one stream of bytes in each direction, whichever sockets carry it. Both sides
    count what arrived; what is not acknowledged is kept, and goes out again on the next socket,
    from the very byte at which the last one was cut. So nothing is lost or doubled, wherever the
    cut was, and no frame needs a number.

    ::

        0 ------------- arrived ----------------- written ----> bytes of the stream
                           |<------ unacknowledged ---------->|
    """

    def __init__(self) -> None:
        self._limit = MAX_UNACKNOWLEDGED_BYTES
        self._batches: deque[list[Bytes] | Bytes] = deque()
        self._ends: deque[int] = deque()  # where each of them ends
        self.written = 0
        """bytes, since the connection began"""
        self.arrived = 0
        """written bytes that have arrived, as far as is known"""
        self.full = False
        """whether no more data should be written"""

    @property
    def pending(self) -> bool:
        """Whether anything may have to be written again."""
        return self.written > self.arrived

    def add(self, batch: list[Bytes] | Bytes, size: int) -> None:
        """Keep what was written: one frame, of which the garbage collector sees nothing, or several
        parts. They must not change until they are acknowledged."""
        self.written += size
        self._batches.append(batch)
        self._ends.append(self.written)
        self.full = self.written - self.arrived >= self._limit

    def forget(self, arrived: int) -> None:
        """The other side has so many bytes of the stream.

        Raises:
            MalformedFrame: it cannot have them.
        """
        if arrived > self.written:
            raise MalformedFrame(f"{arrived} bytes arrived, though {self.written} were sent")
        self.arrived = max(self.arrived, arrived)
        self.full = self.written - self.arrived >= self._limit
        ends, batches = self._ends, self._batches
        while ends and ends[0] <= arrived:
            ends.popleft()
            batches.popleft()

    def after(self, arrived: int) -> list[Bytes]:
        """What is to be written again, if so much arrived.

        Raises:
            MalformedFrame: it cannot be so.
        """
        if arrived < self.arrived:
            raise MalformedFrame(f"{arrived} bytes arrived, though it was said to be more before")
        self.forget(arrived)
        rest: list[Bytes] = []
        for batch in self._batches:
            rest += batch if isinstance(batch, list) else [batch]
        skipped = arrived - (self.written - sum(map(len, rest)))
        for index, part in enumerate(rest):
            if skipped < len(part):
                return [memoryview(part)[skipped:], *rest[index + 1 :]]
            skipped -= len(part)
        return []

    def clear(self) -> None:
        """Forget everything: nothing will be written again."""
        self._batches.clear()
        self._ends.clear()


BATCH_BYTES = CHUNK_BYTES
HIGH_WATER = 256 * 1024
LOW_WATER = 64 * 1024
JOIN_BYTES = 64 * 1024
"""Copying so few is quicker than writing them as they lie."""
WRITE_BYTES = 8 * 1024
"""bytes that are written at once, though the turn goes on"""
TURN_BYTES = 8 * 1024**2
"""How much is copied to shared memory before others in this loop have a turn."""

log = logging.getLogger(__name__)


class Outbox:
    """The outgoing side of a connection.

    Args:
        keep: whether what was written may have to be written again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, keep: bool = True) -> None:
        self._loop = loop
        self._transport: asyncio.WriteTransport | None = None
        self._control: deque[Bytes] = deque()  # whole frames, which go ahead of the data
        self._data: deque[Outgoing | bytes] = deque()  # messages: small ones as their frame
        self._fresh = True  # nothing was written at once since the last turn
        self.held = False
        """what is sent until `release` goes in one write"""
        self.paused = False
        """the transport holds enough, which the peer does not take"""
        self._scheduled = False
        self._worked = 0
        self._queued = 0  # bytes of small messages, since the last write
        self.unacknowledged = Unacknowledged() if keep else None
        self._due: list[Callable[[], None]] = []
        self.last: list[Callable[[], None]] = []
        """what may have something to say before the connection is closed"""
        self.new_share: Callable[[], Share] | None = None
        """makes what may bring the arrays of one message into shared memory"""
        self.sent_bytes = 0

    def attach(self, transport: asyncio.WriteTransport, arrived: int = 0) -> None:
        """Send through this transport from now on, first of all what did not arrive.

        Raises:
            MalformedFrame: that cannot be so much.
        """
        again = [] if self.unacknowledged is None else self.unacknowledged.after(arrived)
        transport.set_write_buffer_limits(high=HIGH_WATER, low=LOW_WATER)
        self._transport = transport
        self.paused = False
        if again:
            transport.writelines(again)
        self._schedule()

    def cut(self) -> None:
        """The transport is gone: hold everything until there is another."""
        self._transport = None

    def detach(self) -> None:
        """Send no more, and hold nothing."""
        self._transport = None
        self.drop()
        if self.unacknowledged is not None:
            self.unacknowledged.clear()

    def drop(self) -> None:
        """Forget what was not sent."""
        self._control.clear()
        self._data.clear()
        self._due.clear()

    @property
    def all_arrived(self) -> bool:
        """Whether the peer is known to have all that was said here."""
        pending = self.unacknowledged is not None and self.unacknowledged.pending
        return not (pending or self._control or self._data or self._due)

    @property
    def waiting(self) -> int:
        """Messages that have not been given to the transport."""
        return len(self._control) + len(self._data)

    def send(
        self,
        kind: FrameType,
        number: int,
        head: bytes,
        body: Encoded | None,
        lane: int,
        *,
        flags: int = 0,
        what: str,
    ) -> None:
        """Send a message in its lane; one that takes several frames goes with the data.

        Raises:
            ItemTooLarge: it is over a limit; nothing of it is sent.
        """
        if self._due:
            self._say_together()
        data = None if body is None else body.data
        if len(head) <= MAX_HEAD_BYTES and (
            body is None or (not body.buffers and len(body.data) <= CHUNK_BYTES)
        ):
            self.add(pack_message(kind, number, head, data, lane, flags), lane)
            return
        share = None if self.new_share is None else self.new_share()
        message, small = outgoing(
            kind, number, head, body, lane, flags=flags, what=what, share=share
        )
        if lane == DATA or not small:
            self._data.append(message)
            self._schedule()
        else:
            self.add(b"".join(message.next_frame() or ()))

    def add(self, frame: bytes, lane: int = CONTROL) -> None:
        """Send a whole message, at once if it is the first of this turn; one in the control lane
        goes ahead of all data."""
        at_once = self._fresh and not self.held
        transport, unacknowledged, control = self._transport, self.unacknowledged, self._control
        if (
            at_once
            and transport is not None
            and not (self.paused or self._data)
            and (unacknowledged is None or lane == CONTROL or not unacknowledged.full)
        ):
            self._fresh = False
            if control:  # it is small: what was collected to go with it
                frame = b"".join((*control, frame))
                control.clear()
            self.sent_bytes += len(frame)
            if unacknowledged is not None:
                unacknowledged.add(frame, len(frame))
            transport.write(frame)
            return
        if lane == DATA:
            self._data.append(frame)
        else:
            control.append(frame)
        if at_once:
            self._fresh = False
            self.flush()
        elif not self.held:
            self._schedule()
            self._queued += len(frame)
            if self._queued >= WRITE_BYTES:
                self.flush()

    def collect(self, say: Callable[[], None]) -> None:
        """Let this send what it collects: with the next write, and before anything else."""
        self._due.append(say)
        if not self._scheduled:
            self._schedule()

    def say_due(self) -> None:
        """What was collected goes first. One that fails holds neither the others back nor what is
        is sent next: it is logged."""
        while self._due:
            due, self._due = self._due, []
            for say in due:
                try:
                    say()
                except Exception:
                    log.exception("what was collected cannot be said")

    def _say_together(self) -> None:
        held, self.held = self.held, True
        try:
            self.say_due()
        finally:
            self.held = held

    def withdraw(self, number: int) -> bool:
        """Forget what was not sent of this request; whether none of it was."""
        for message in self._data:
            if isinstance(message, bytes):
                if is_request(message, number):
                    self._data.remove(message)
                    return True
            elif message.number == number and message.request:
                self._data.remove(message)
                return not message.begun
        return False

    def pause(self) -> None:
        """The transport holds enough."""
        self.paused = True

    def resume(self) -> None:
        """The transport can take more."""
        self.paused = False
        self.flush()

    def end_turn(self) -> None:
        """Say what was collected, and give the transport what it can take now."""
        self.held = True
        try:
            self.say_due()
        finally:
            self._scheduled = False
            self.release()

    def release(self) -> None:
        """Write what was `held`. What was collected meanwhile has its turn yet."""
        self.held = False
        self._fresh = True
        if self._data or self._control:
            self.flush()

    def flush(self) -> None:
        """Give the transport what it can take now."""
        fresh, self._fresh = self._fresh, False  # what is said of memory meanwhile is scheduled
        self._worked = self._queued = 0
        transport = self._transport
        while (
            (self._data or self._control)
            and transport is not None
            and not self.paused
            and (batch := self._batch())
        ):
            if len(batch) == 1:
                transport.write(batch[0])
            else:
                transport.writelines(batch)
            if self._worked >= TURN_BYTES:
                self._schedule()
                break
        self._fresh = fresh

    def flush_all(self) -> None:
        """Give the transport everything, though it may hold much: it is about to close."""
        self._fresh = False
        self._due += self.last
        self.say_due()
        self.unacknowledged = None
        while self._transport is not None and (batch := self._batch()):
            self._transport.writelines(batch)

    def worked(self, copied: int) -> None:
        """Count bytes that were copied to shared memory, which takes its time, too."""
        self._worked += copied
        movement.count += copied

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.end_turn)

    def _batch(self) -> list[Bytes]:
        """The frames to write now: all of control, and data of about `BATCH_BYTES`, with what was
        copied to shared memory for it; small frames as one."""
        unacknowledged, data = self.unacknowledged, self._data
        batch: list[Bytes] = list(self._control)
        self._control.clear()
        size = sum(map(len, batch))
        limit = size + self._worked + BATCH_BYTES  # however much control is, data goes on too
        only_control = unacknowledged is not None and unacknowledged.full
        while data and not only_control and (full := limit - self._worked) > size:
            while size < full and data and isinstance(first := data[0], bytes):
                batch.append(first)
                size += len(first)
                data.popleft()
            if size >= full or not data or isinstance(first := data[0], bytes):
                break
            frame = first.next_frame()
            if frame is None:
                data.popleft()
                continue
            if not frame:  # it waits for a word of the peer; its turn comes when that is read
                break
            batch += frame
            size += sum(map(len, frame))
        self.sent_bytes += size
        if len(batch) > 1 and size <= JOIN_BYTES:
            batch = [b"".join(batch)]
        if unacknowledged is not None and batch:
            unacknowledged.add(batch if len(batch) > 1 else batch[0], size)
        return batch
