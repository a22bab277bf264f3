"""The messages in a stream of bytes, found again. Pure: no socket and no clock.

A message that one frame holds, which almost every one is, is read in one step: its header is looked
at once, and its parts are cut straight out of what arrived. Everything else goes the long way; but
a chunk of a large message is not held until it is complete: its bytes go where they belong as they
arrive. Where that place is known before they arrive, a socket is read straight into it::

    feed(header) -> space(): the chunk -> filled(count) ... -> space(): the next header
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.wire.frames.framing import (
    HEADER,
    MAX_FRAME_BYTES,
    MAX_HEAD_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Flag,
    FrameType,
    check_header,
)
from rlinf_async.channels.wire.frames.messages import Message
from rlinf_async.channels.wire.frames.recycled import RECYCLED_BYTES, Recycled, thread_recycled
from rlinf_async.channels.wire.frames.reserved import MAPPED_BYTES, reserve
from rlinf_async.channels.wire.movement import movement

_BODY, _MORE = int(Flag.BODY), int(Flag.MORE)  # enums are slow to ask
_CHUNK, _REQUEST = int(FrameType.CHUNK), int(FrameType.REQUEST)
_HEADER_BYTES: Final = HEADER.size
_QUICK: Final = struct.Struct("<IIIIIQ")
"""The header, with version, type, lane and flags as one number."""
_PLAIN: Final = {
    PROTOCOL_VERSION | kind << 8 | lane << 16 | flags << 24: (kind, lane, flags)
    for kind in map(int, FrameType)
    for lane in (0, 1)
    for flags in (0, _BODY, int(Flag.RECEIPT), _BODY | int(Flag.RECEIPT))
    if kind != _CHUNK
}
"""What that number is for a message that one frame holds, without arrays beside it."""


class Frame(NamedTuple):
    """A frame as it came: a header that makes sense, and the bytes behind it."""

    type: int
    lane: int
    flags: int
    tables: int
    head: int
    data: int
    number: int
    payload: memoryview


class MessageReader:
    """Finds the messages in a stream of bytes. At most one of them is incomplete at any time."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._rest = bytearray()
        self._needed = _HEADER_BYTES
        self._incoming: _Incoming | None = None
        self._chunk = 0  # bytes of the last one that have not arrived
        self._max_message_bytes = max_message_bytes
        self._recycled = thread_recycled()
        self._header = memoryview(bytearray(_HEADER_BYTES))

    def space(self) -> memoryview | None:
        """Where the bytes that come next are to be read to, before `filled`; None where they are
        given to `feed`."""
        incoming = self._incoming
        if incoming is None or self._rest or (place := incoming.place) is None:
            return None
        return place[: self._chunk] if self._chunk else self._header

    def filled(self, count: int) -> Iterator[Message]:
        """So many bytes were read into the `space`; the message that they complete.

        Raises:
            MalformedFrame: the bytes are not of this protocol.
        """
        incoming = self._incoming
        if incoming is None or not self._chunk:
            yield from self.feed(bytes(self._header[:count]))
            return
        self._chunk -= count
        incoming.filled(count)
        if not incoming.missing:
            self._incoming = None
            yield incoming.message()

    def feed(self, received: bytes) -> Iterator[Message]:
        """The messages that these bytes complete.

        Raises:
            MalformedFrame: the bytes are not of this protocol.
        """
        if self._rest:
            self._rest += received
            if len(self._rest) < self._needed:
                movement.count += len(received)
                return
            received = bytes(self._rest)
            self._rest.clear()
        start, end = 0, len(received)
        self._needed = _HEADER_BYTES
        if self._chunk:
            start = min(self._chunk, end)
            self._chunk -= start
            message = self._take(memoryview(received)[:start])
            if message is not None:
                yield message
        while end - start >= _HEADER_BYTES:
            length, word, tables, size, data, number = _QUICK.unpack_from(received, start)
            first = start + _HEADER_BYTES
            middle, stop = first + size, first + length
            plain = _PLAIN.get(word)
            if (
                plain is not None
                and stop <= end
                and middle + data == stop
                and (plain[2] & _BODY or not data)
                and not tables
                and size <= MAX_HEAD_BYTES
                and length <= MAX_FRAME_BYTES
            ):
                kind, lane, flags = plain
                body = Encoded(received[middle:stop]) if flags & _BODY else None
                start = stop
                yield Message(kind, number, flags, lane, received[first:middle], body)
                continue
            frame = _frame(received, start)
            if stop > end:
                if frame.type != _CHUNK:
                    self._needed = stop - start
                    break
                self._chunk, stop = stop - end, end
            start = stop
            message = self._read(frame)
            if message is not None:
                yield message
        if start < end:
            self._rest += memoryview(received)[start:]

    @property
    def held(self) -> int:
        """Bytes of an incomplete frame that are held back."""
        return len(self._rest)

    def forget(self, number: int) -> None:
        """The rest of this request will not come: its sender gave it up."""
        frame = None if self._incoming is None else self._incoming.frame
        if frame is not None and frame.type == _REQUEST and frame.number == number:
            self._incoming = None

    def _read(self, frame: Frame) -> Message | None:
        if frame.type == _CHUNK:
            return self._continue(frame)
        return self._begin(frame) if frame.flags & _MORE else _whole(frame)

    def _begin(self, frame: Frame) -> Message | None:
        if self._incoming is not None:
            raise MalformedFrame(
                f"message {frame.number} begins in parts while {self._incoming.frame.number} is "
                "incomplete"
            )
        sizes, head, rest = _split(frame)
        total = frame.data + sum(sizes)
        if total > self._max_message_bytes:
            raise MalformedFrame(
                f"a message of {total} bytes, at most {self._max_message_bytes} are allowed"
            )
        self._incoming = _Incoming(frame, head, sizes, self._recycled)
        return self._take(rest)

    def _continue(self, frame: Frame) -> Message | None:
        if self._incoming is None or self._incoming.frame.number != frame.number:
            raise MalformedFrame(f"a part of message {frame.number}, which was not begun")
        return self._take(frame.payload)

    def _take(self, received: memoryview) -> Message | None:
        incoming = self._incoming
        if incoming is None:
            raise MalformedFrame(f"{len(received)} bytes more than the message that they are for")
        incoming.fill(received)
        if incoming.missing:
            return None
        self._incoming = None
        return incoming.message()


class _Incoming:
    """A message whose body has not arrived completely. Memory is taken as its bytes arrive: what a
    header announces costs nothing yet."""

    __slots__ = (
        "_filled", "_index", "_recycled", "_sizes", "frame", "head", "missing", "parts", "place"
    )  # fmt: skip

    def __init__(
        self, frame: Frame, head: bytes, sizes: tuple[int, ...], recycled: Recycled
    ) -> None:
        self.frame = frame
        self.head = head
        self._sizes = (frame.data, *sizes)
        self._recycled = recycled
        self.parts: list[bytearray | memoryview] = [bytearray() for _ in self._sizes]
        self.missing = sum(self._sizes)
        self._index = 0  # of the part that is being filled
        self._filled = 0  # bytes of it
        self.place: memoryview | None = None
        """the rest of that part, where it has all of its memory already"""

    def fill(self, received: memoryview) -> None:
        """Put the next bytes where they belong."""
        if len(received) > self.missing:
            raise MalformedFrame(
                f"{len(received)} bytes arrived for message {self.frame.number}, of which only "
                f"{self.missing} were missing"
            )
        while received:
            if not self._filled:
                self._begin_part()
            taken = min(self._sizes[self._index] - self._filled, len(received))
            part = self.parts[self._index]
            if self.place is not None:
                self.place[:taken] = received[:taken]
            elif isinstance(part, bytearray):
                part += received[:taken]
            received = received[taken:]
            self.filled(taken)

    def filled(self, count: int) -> None:
        """So many more bytes of a part are where they belong."""
        self.missing -= count
        self._filled += count
        movement.count += count
        if self.place is not None:
            self.place = self.place[count:]
        if self._filled == self._sizes[self._index]:
            self.place = None
            part = self.parts[self._index]
            if self._index and isinstance(part, bytearray):
                self._recycled.keep(part)
            self._index, self._filled = self._index + 1, 0

    def _begin_part(self) -> None:
        """Bytes of the next part have come: find memory for it."""
        while not self._sizes[self._index]:
            self._index += 1
        size = self._sizes[self._index]
        if not self._index or size < RECYCLED_BYTES:
            return
        found = self._recycled.take(size) if size < MAPPED_BYTES else reserve(size)
        if found:
            self.parts[self._index] = found
            self.place = memoryview(found)

    def message(self) -> Message:
        frame = self.frame
        data = bytes(self.parts[0]) if self._sizes[0] else b""
        body = Encoded(data, self.parts[1:])
        return Message(frame.type, frame.number, frame.flags, frame.lane, self.head, body)


def _frame(received: bytes, start: int) -> Frame:
    """The frame that begins here, as far as it has arrived.

    Raises:
        MalformedFrame: no peer of this protocol sends it.
    """
    length, version, kind, lane, flags, tables, head, data, number = HEADER.unpack_from(
        received, start
    )
    check_header(length, version, kind, lane, flags, tables, head, data)
    first = start + _HEADER_BYTES
    payload = memoryview(received)[first : first + length]
    return Frame(kind, lane, flags, tables, head, data, number, payload)


def _split(frame: Frame) -> tuple[tuple[int, ...], bytes, memoryview]:
    """A frame's buffer sizes, its head, and the rest."""
    payload, start = frame.payload, 8 * frame.tables
    sizes = struct.unpack_from(f"<{frame.tables}Q", payload) if frame.tables else ()
    stop = start + frame.head
    return sizes, bytes(payload[start:stop]), payload[stop:]


def _whole(frame: Frame) -> Message:
    """The message of a frame that holds all of it."""
    if not frame.flags & _BODY:
        if len(frame.payload) != frame.head or frame.data or frame.tables:
            raise MalformedFrame(
                f"a frame without a body has {len(frame.payload)} bytes, its head {frame.head}"
            )
        head = bytes(frame.payload)
        return Message(frame.type, frame.number, frame.flags, frame.lane, head, None)
    sizes, head, rest = _split(frame)
    if len(rest) != frame.data + sum(sizes):
        raise MalformedFrame(
            f"a body of {len(rest)} bytes was announced as {frame.data + sum(sizes)}"
        )
    buffers, start = [], frame.data
    for size in sizes:
        buffers.append(bytearray(rest[start : start + size]))
        start += size
    body = Encoded(bytes(rest[: frame.data]), buffers)
    return Message(frame.type, frame.number, frame.flags, frame.lane, head, body)
