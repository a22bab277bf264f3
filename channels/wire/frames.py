"""Frames: how messages are cut into bytes, and found again. Pure: no socket and no clock.

A frame, all numbers little-endian::

    u32 length    bytes that follow the header
    u8  version   of the protocol
    u8  type      see `FrameType`
    u8  lane      0 control, 1 data
    u8  flags     see `Flag`
    u32 tables    how many buffers the message has
    u32 head      bytes of the head: what is asked, and with which arguments
    u32 data      bytes of the body's MessagePack
    u64 number    of the request that this belongs to
    -------------
    tables x u64  the size of each buffer
    head
    data, then the buffers: all of them, or with ``Flag.MORE`` only their beginning,
    while the rest follows in CHUNK frames of the same number

No frame is longer than `MAX_FRAME_BYTES`, whatever the message: so a control frame never waits
behind a large array.

A message that one frame holds, which almost every one is, is read in one step: its header is looked
at once, and its parts are cut straight out of what arrived. Everything else goes the long way; but
a chunk of a large message is not held until it is complete: its bytes go where they belong as they
arrive. Where that place is known before they arrive, a socket is read straight into it::

    feed(header) -> space(): the chunk -> filled(count) ... -> space(): the next header
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, IntEnum, IntFlag
from typing import Final, NamedTuple

import msgspec

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import ItemTooLarge, MalformedFrame
from rlinf_async.channels.wire.arrays import (
    MAPPED_BYTES,
    RECYCLED_BYTES,
    Recycled,
    reserve,
    thread_recycled,
)

PROTOCOL_VERSION: Final = 6
CHUNK_BYTES: Final = 256 * 1024
MAX_HEAD_BYTES: Final = 128 * 1024
MAX_BUFFERS: Final = 8 * 1024
MAX_FRAME_BYTES: Final = 512 * 1024
MAX_MESSAGE_BYTES: Final = 64 * 1024**3
"""most bytes of a message's body: its receiver must be ready to hold them in memory"""
MAX_DATA_BYTES: Final = 2 * 1024**3
"""most bytes of a message's MessagePack, which is encoded and decoded as one piece; arrays are
beside it"""

HEADER: Final = struct.Struct("<IBBBBIIIQ")

Bytes = bytes | bytearray | memoryview


class FrameType(IntEnum):
    """What a frame is for."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    """the reply, where the request failed"""
    CANCEL = 4
    """the request was given up, before its reply came or was taken"""
    NOTICE = 5
    """a request without a reply"""
    CHUNK = 6
    """more of the body of the message that was begun"""
    RECEIPTS = 7
    """replies that were taken (the head holds their numbers, u64)"""
    PING = 8
    """sign of life; the number says how many bytes have arrived"""
    GOODBYE = 9
    """the connection is closed on purpose; the head says why"""
    MEMORY = 10
    """about shared memory: the head says what (see `memory_protocol`)"""


class Flag(IntFlag):
    """What is special about a frame."""

    BODY = 1
    MORE = 2
    RECEIPT = 4
    """tell when you have taken this reply"""
    SHARED = 8
    """some arrays lie in shared memory: the first buffer says where"""


LAST_TYPE: Final = int(FrameType.MEMORY)
ALL_FLAGS: Final = 15
_BODY, _MORE, _SHARED = int(Flag.BODY), int(Flag.MORE), int(Flag.SHARED)  # enums are slow to ask
_pack = HEADER.pack
CONTROL, DATA = 0, 1


class Movement:
    """How much this process has moved over its connections: for who asks whether anything goes on.

    What is said of heartbeats, requests and answers is not counted, and a small item, which one
    frame holds, is counted by its channel. A large one takes its time, in which no channel changes.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0
        """bytes of large messages that have arrived or were copied to shared memory, and sockets
        that were made, or made again after a cut"""


movement: Final = Movement()
"""movement of this process"""


def pack_header(
    length: int,
    kind: int,
    number: int,
    *,
    lane: int = 0,
    flags: int = 0,
    tables: int = 0,
    head: int = 0,
    data: int = 0,
) -> bytes:
    """The 28 bytes in front of a frame."""
    return HEADER.pack(length, PROTOCOL_VERSION, kind, lane, flags, tables, head, data, number)


def pack_small(kind: FrameType, number: int = 0, head: bytes = b"") -> bytes:
    """A whole frame without a body."""
    size = len(head)
    return _pack(size, PROTOCOL_VERSION, kind, CONTROL, 0, 0, size, 0, number) + head


def pack_message(
    kind: int, number: int, head: bytes, data: bytes | None, lane: int, flags: int
) -> bytes:
    """The whole frame of a message without arrays beside it; ``data`` is its body's."""
    size = len(head)
    if data is None:
        return _pack(size, PROTOCOL_VERSION, kind, lane, flags, 0, size, 0, number) + head
    more = len(data)
    return (
        _pack(size + more, PROTOCOL_VERSION, kind, lane, flags | _BODY, 0, size, more, number)
        + head
        + data
    )


def is_request(frame: bytes, number: int) -> bool:
    """Whether this frame, which `pack_message` made, is the request of this number."""
    header = HEADER.unpack_from(frame)
    return (header[2], header[-1]) == (FrameType.REQUEST, number)


def check_sizes(head: int, data: int, buffers: Sequence[Bytes], what: str) -> int:
    """The bytes of a message's body.

    Raises:
        ItemTooLarge: the message is over a limit, and must not be sent.
    """
    if head > MAX_HEAD_BYTES:
        raise ItemTooLarge(
            f"{what}: the arguments take {head} bytes, a message's head may take {MAX_HEAD_BYTES}: "
            "send large values in the body"
        )
    if len(buffers) > MAX_BUFFERS:
        raise ItemTooLarge(f"{what}: {len(buffers)} large arrays, a message may have {MAX_BUFFERS}")
    if data > MAX_DATA_BYTES:
        raise ItemTooLarge(
            f"{what}: {data} bytes of MessagePack, a message may have {MAX_DATA_BYTES}: send large "
            "values as arrays, or in parts"
        )
    total = data + sum(len(buffer) for buffer in buffers)
    if total > MAX_MESSAGE_BYTES:
        raise ItemTooLarge(
            f"{what}: {total} bytes encoded, a message may have {MAX_MESSAGE_BYTES}: "
            "send it in parts"
        )
    return total


def check_header(
    length: int, version: int, kind: int, lane: int, flags: int, tables: int, head: int, data: int
) -> None:
    """Refuse what no peer of this protocol sends, before anything is held in memory for it."""
    if version != PROTOCOL_VERSION:
        raise MalformedFrame(f"protocol version {version} in a frame, expected {PROTOCOL_VERSION}")
    if length > MAX_FRAME_BYTES:
        raise MalformedFrame(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES} are allowed")
    if not 1 <= kind <= LAST_TYPE:
        raise MalformedFrame(f"unknown frame type {kind}")
    if lane > 1 or flags > ALL_FLAGS:
        raise MalformedFrame(f"unknown lane {lane} or flags {flags:#x} in a frame")
    if head > MAX_HEAD_BYTES or tables > MAX_BUFFERS:
        raise MalformedFrame(
            f"a head of {head} bytes and {tables} buffers: at most {MAX_HEAD_BYTES} and "
            f"{MAX_BUFFERS} are allowed"
        )
    if data > MAX_DATA_BYTES:
        raise MalformedFrame(f"{data} bytes of MessagePack, at most {MAX_DATA_BYTES} are allowed")
    if kind != FrameType.CHUNK and head + 8 * tables > length:
        raise MalformedFrame(
            f"a frame of {length} bytes cannot hold a head of {head} and {tables} buffer sizes"
        )


SHARE_BYTES: Final = 64 * 1024
"""Arrays of a message that take less together always go through the socket."""


class Later(Enum):
    """A body that cannot be sent yet: the peer is being asked whether it has the memory open."""

    LATER = 0


LATER: Final = Later.LATER
Share = Callable[[Encoded], Encoded | Later | None]
"""The body as it travels if its arrays lie in shared memory; None if they cannot."""


class Message(msgspec.Struct, gc=False):
    """What arrived, complete."""

    type: int
    number: int
    flags: int
    lane: int
    head: bytes
    body: Encoded | None


class Outgoing:
    """A message on its way out, frame by frame."""

    __slots__ = ("_frames", "begun", "number", "request")

    def __init__(self, kind: FrameType, number: int, frames: Iterator[list[Bytes]]) -> None:
        self.request = kind == FrameType.REQUEST
        self.number = number
        self.begun = False
        self._frames = frames

    def next_frame(self) -> list[Bytes] | None:
        """Return the parts of the next frame; none of them if it has to wait; None when all were
        given."""
        frame = next(self._frames, None)
        self.begun = self.begun or frame != []
        return frame


def outgoing(
    kind: FrameType,
    number: int,
    head: bytes,
    body: Encoded | None,
    lane: int,
    *,
    flags: int = 0,
    what: str = "message",
    share: Share | None = None,
) -> tuple[Outgoing, bool]:
    """A message to send, and whether it fits one frame and is ready.

    Raises:
        ItemTooLarge: it is over a limit.
    """
    if body is None:
        check_sizes(len(head), 0, (), what)
        header = pack_header(len(head), kind, number, lane=lane, flags=flags, head=len(head))
        whole: list[Bytes] = [header + head]
        return Outgoing(kind, number, iter([whole])), True
    total = check_sizes(len(head), len(body.data), body.buffers, what)
    apart = total - len(body.data) >= SHARE_BYTES and not flags & _SHARED
    if share is not None and apart:
        return Outgoing(kind, number, _shared(kind, number, head, body, lane, flags, share)), False
    flags |= _BODY
    if total <= CHUNK_BYTES:
        first = _first_frame(kind, number, head, body, lane, flags, total)
        return Outgoing(kind, number, iter([[first, *body.buffers]])), True
    frames = _chunked(kind, number, head, body, lane, flags | _MORE)
    return Outgoing(kind, number, frames), False


def _shared(
    kind: FrameType,
    number: int,
    head: bytes,
    body: Encoded,
    lane: int,
    flags: int,
    share: Share,
) -> Iterator[list[Bytes]]:
    """One frame, made when it is due: only what is sent at once is lent."""
    while (travels := share(body)) is LATER:
        yield []
    if travels is not None:
        flags |= _BODY | _SHARED
        size = len(travels.data) + sum(map(len, travels.buffers))
        first = _first_frame(kind, number, head, travels, lane, flags, size)
        yield [first, *travels.buffers]
        return
    message, _ = outgoing(kind, number, head, body, lane, flags=flags)
    while frame := message.next_frame():
        yield frame


def _first_frame(
    kind: int, number: int, head: bytes, body: Encoded, lane: int, flags: int, total: int
) -> bytes:
    """A frame with all of the body, up to where its buffers begin."""
    return _opening(kind, number, head, body, lane, flags, total) + body.data


def _opening(
    kind: int, number: int, head: bytes, body: Encoded, lane: int, flags: int, total: int
) -> bytes:
    """The beginning of a message, up to its body, of which ``total`` bytes are in this frame."""
    table = _table(body)
    header = pack_header(
        len(table) + len(head) + total,
        kind,
        number,
        lane=lane,
        flags=flags,
        tables=len(body.buffers),
        head=len(head),
        data=len(body.data),
    )
    return b"".join((header, table, head))


def _table(body: Encoded) -> bytes:
    sizes = [len(buffer) for buffer in body.buffers]
    return struct.pack(f"<{len(sizes)}Q", *sizes) if sizes else b""


def _chunked(
    kind: int, number: int, head: bytes, body: Encoded, lane: int, flags: int
) -> Iterator[list[Bytes]]:
    yield [_opening(kind, number, head, body, lane, flags, 0)]
    for part in (body.data, *body.buffers):
        whole = memoryview(part)
        for start in range(0, len(whole), CHUNK_BYTES):
            chunk = whole[start : start + CHUNK_BYTES]
            yield [pack_header(len(chunk), FrameType.CHUNK, number, lane=lane), chunk]


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
"""meaning of the first number of a message that one frame holds, without arrays beside it"""


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
    """Finds the messages in a stream of bytes. At most one message is incomplete at any time."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._rest = bytearray()
        self._needed = _HEADER_BYTES
        self.incoming: _Incoming | None = None
        """the message that has not arrived completely"""
        self._chunk = 0  # bytes of the last one that have not arrived
        self._max_message_bytes = max_message_bytes
        self._recycled = thread_recycled()
        self._header = memoryview(bytearray(_HEADER_BYTES))

    def space(self) -> memoryview | None:
        """Where the bytes that come next are to be read to, before `filled`; None where they are
        given to `feed`."""
        incoming = self.incoming
        if incoming is None or self._rest or (place := incoming.place) is None:
            return None
        return place[: self._chunk] if self._chunk else self._header

    def filled(self, count: int) -> Iterator[Message]:
        """Take ``count`` bytes that were read into the `space`; yield the messages that they
        complete.

        Raises:
            MalformedFrame: the bytes are not of this protocol.
        """
        incoming = self.incoming
        if incoming is None or not self._chunk:
            yield from self.feed(bytes(self._header[:count]))
            return
        self._chunk -= count
        incoming.filled(count)
        if not incoming.missing:
            self.incoming = None
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
        frame = None if self.incoming is None else self.incoming.frame
        if frame is not None and frame.type == _REQUEST and frame.number == number:
            self.incoming = None

    def _read(self, frame: Frame) -> Message | None:
        if frame.type == _CHUNK:
            return self._continue(frame)
        return self._begin(frame) if frame.flags & _MORE else _whole(frame)

    def _begin(self, frame: Frame) -> Message | None:
        if self.incoming is not None:
            raise MalformedFrame(
                f"message {frame.number} begins in parts while {self.incoming.frame.number} is "
                "incomplete"
            )
        sizes, head, rest = _split(frame)
        total = frame.data + sum(sizes)
        if total > self._max_message_bytes:
            raise MalformedFrame(
                f"a message of {total} bytes, at most {self._max_message_bytes} are allowed"
            )
        self.incoming = _Incoming(frame, head, sizes, self._recycled)
        return self._take(rest)

    def _continue(self, frame: Frame) -> Message | None:
        if self.incoming is None or self.incoming.frame.number != frame.number:
            raise MalformedFrame(f"a part of message {frame.number}, which was not begun")
        return self._take(frame.payload)

    def _take(self, received: memoryview) -> Message | None:
        incoming = self.incoming
        if incoming is None:
            raise MalformedFrame(f"{len(received)} bytes more than the message that they are for")
        incoming.fill(received)
        if incoming.missing:
            return None
        self.incoming = None
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
        """Take ``count`` more bytes of a part, which are where they belong."""
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
