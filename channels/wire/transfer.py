"""Messages: what one frame says, or one frame and the chunks that follow it. Pure."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final, NamedTuple

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.wire.framing import (
    CHUNK_BYTES,
    MAX_MESSAGE_BYTES,
    Bytes,
    Flag,
    Frame,
    FrameReader,
    FrameType,
    check_sizes,
    pack_header,
)

CONTROL, DATA = 0, 1
_BODY, _MORE, _SHARED = int(Flag.BODY), int(Flag.MORE), int(Flag.SHARED)  # enums are slow to ask
SHARE_BYTES: Final = 64 * 1024
"""Arrays of a message that take less together always go through the socket."""


class Later(Enum):
    """A body that cannot be sent yet: the peer is being asked whether it has the memory open."""

    LATER = 0


LATER: Final = Later.LATER
Share = Callable[[Encoded], Encoded | Later | None]
"""The body as it travels if its arrays lie in shared memory; None if they cannot."""


class Message(NamedTuple):
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
        """The next frame's parts; none of them if it has to wait; None when all were given."""
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
    if share is not None and total - len(body.data) >= SHARE_BYTES:
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
    return b"".join((header, table, head, body.data))


def _table(body: Encoded) -> bytes:
    sizes = [len(buffer) for buffer in body.buffers]
    return struct.pack(f"<{len(sizes)}Q", *sizes) if sizes else b""


def _chunked(
    kind: int, number: int, head: bytes, body: Encoded, lane: int, flags: int
) -> Iterator[list[Bytes]]:
    table = _table(body)
    header = pack_header(
        len(table) + len(head),
        kind,
        number,
        lane=lane,
        flags=flags,
        tables=len(body.buffers),
        head=len(head),
        data=len(body.data),
    )
    yield [b"".join((header, table, head))]
    for part in (body.data, *body.buffers):
        whole = memoryview(part)
        for start in range(0, len(whole), CHUNK_BYTES):
            chunk = whole[start : start + CHUNK_BYTES]
            yield [pack_header(len(chunk), FrameType.CHUNK, number, lane=lane), chunk]


class _Incoming:
    """A message whose body has not arrived completely. Memory is taken as its bytes arrive."""

    __slots__ = ("_index", "_sizes", "frame", "head", "missing", "parts")

    def __init__(self, frame: Frame, head: bytes, sizes: tuple[int, ...]) -> None:
        self.frame = frame
        self.head = head
        self._sizes = (frame.data, *sizes)
        self.parts = [bytearray() for _ in self._sizes]
        self.missing = sum(self._sizes)
        self._index = 0

    def fill(self, received: memoryview) -> None:
        """Put the next bytes where they belong."""
        if len(received) > self.missing:
            raise MalformedFrame(
                f"{len(received)} bytes arrived for message {self.frame.number}, of which only "
                f"{self.missing} were missing"
            )
        self.missing -= len(received)
        while received:
            part, size = self.parts[self._index], self._sizes[self._index]
            taken = min(size - len(part), len(received))
            part += received[:taken]
            received = received[taken:]
            if len(part) == size:
                self._index += 1

    def message(self) -> Message:
        frame = self.frame
        body = Encoded(bytes(self.parts[0]), self.parts[1:])
        return Message(frame.type, frame.number, frame.flags, frame.lane, self.head, body)


class MessageReader:
    """Finds the messages in a stream of bytes. At most one of them is incomplete at any time."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._frames = FrameReader()
        self._incoming: _Incoming | None = None
        self._max_message_bytes = max_message_bytes

    def feed(self, received: bytes) -> Iterator[Message]:
        """The messages that these bytes complete.

        Raises:
            MalformedFrame: the bytes are not of this protocol.
        """
        for frame in self._frames.feed(received):
            if frame.type == FrameType.CHUNK:
                message = self._continue(frame)
            elif frame.flags & _MORE:
                message = self._begin(frame)
            else:
                message = _whole(frame)
            if message is not None:
                yield message

    @property
    def held(self) -> int:
        """Bytes of an incomplete frame that are held back."""
        return self._frames.held

    def forget(self, number: int) -> None:
        """The rest of this request will not come: its sender gave it up."""
        incoming = self._incoming
        if (
            incoming
            and incoming.frame.type == FrameType.REQUEST
            and incoming.frame.number == number
        ):
            self._incoming = None

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
        self._incoming = _Incoming(frame, head, sizes)
        return self._take(rest)

    def _continue(self, frame: Frame) -> Message | None:
        if self._incoming is None or self._incoming.frame.number != frame.number:
            raise MalformedFrame(f"a part of message {frame.number}, which was not begun")
        return self._take(frame.payload)

    def _take(self, received: memoryview) -> Message | None:
        incoming = self._incoming
        if incoming is None:
            return None
        incoming.fill(received)
        if incoming.missing:
            return None
        self._incoming = None
        return incoming.message()


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
