"""What was written and may have to be written again. Pure: no socket, no clock.

A connection is one stream of bytes in each direction, whichever sockets carry it. Both sides count
what arrived; what is not acknowledged is kept, and goes out again on the next socket, from the very
byte at which the last one was cut. So nothing is lost or doubled, wherever the cut
was, and no frame needs a number.

::

    0 ------------- arrived ----------------- written ----> bytes of the stream
                       |<------ unacknowledged ---------->|
"""

from __future__ import annotations

from collections import deque
from typing import Final

from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.wire.frames.framing import Bytes

MAX_UNACKNOWLEDGED_BYTES: Final = 16 * 1024**2
"""More is not written before some of it arrived: data waits then, control goes on."""


class Unacknowledged:
    """The end of a stream that may not have arrived."""

    def __init__(self) -> None:
        self._limit = MAX_UNACKNOWLEDGED_BYTES
        self._batches: deque[list[Bytes] | bytes] = deque()
        self._ends: deque[int] = deque()  # where each of them ends
        self.written = 0
        """bytes, since the connection began"""
        self.arrived = 0
        """of them, as far as is known"""

    @property
    def pending(self) -> bool:
        """Whether anything may have to be written again."""
        return self.written > self.arrived

    @property
    def full(self) -> bool:
        """Whether no more data should be written."""
        return self.written - self.arrived >= self._limit

    def add(self, batch: list[Bytes], size: int) -> None:
        """This was written. Its parts must not change until they are acknowledged."""
        self.written += size
        self._batches.append(batch)
        self._ends.append(self.written)

    def add_frame(self, frame: bytes) -> None:
        """As `add`, for what is most: one whole, small frame. The garbage collector sees nothing of
        it."""
        self.written += len(frame)
        self._batches.append(frame)
        self._ends.append(self.written)

    def forget(self, arrived: int) -> None:
        """The other side has so many bytes of the stream.

        Raises:
            MalformedFrame: it cannot have them.
        """
        if arrived > self.written:
            raise MalformedFrame(f"{arrived} bytes arrived, though {self.written} were sent")
        self.arrived = max(self.arrived, arrived)
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
            rest += [batch] if isinstance(batch, bytes) else batch
        skipped = arrived - (self.written - sum(map(len, rest)))
        for index, part in enumerate(rest):
            if skipped < len(part):
                return [memoryview(part)[skipped:], *rest[index + 1 :]]
            skipped -= len(part)
        return []

    def clear(self) -> None:
        """Nothing will be written again."""
        self._batches.clear()
        self._ends.clear()
