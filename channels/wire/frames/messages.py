"""Messages: what one frame says, or one frame and the chunks that follow it. Pure."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final

import msgspec

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.wire.frames.framing import (
    CHUNK_BYTES,
    Bytes,
    Flag,
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
