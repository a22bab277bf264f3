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
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import Final

from rlinf_async.channels.errors import ItemTooLarge, MalformedFrame

PROTOCOL_VERSION: Final = 5
CHUNK_BYTES: Final = 256 * 1024
MAX_HEAD_BYTES: Final = 128 * 1024
MAX_BUFFERS: Final = 8 * 1024
MAX_FRAME_BYTES: Final = 512 * 1024
MAX_MESSAGE_BYTES: Final = 64 * 1024**3
"""Of one message's body: what its receiver must be ready to hold in memory."""
MAX_DATA_BYTES: Final = 2 * 1024**3
"""Of its MessagePack, which is encoded and decoded as one piece; arrays are beside it."""

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
    """these replies were taken (the head holds their numbers, u64)"""
    PING = 8
    """nothing to say, but alive; the number says how many bytes have arrived"""
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
_BODY: Final = int(Flag.BODY)  # the enum is slow to ask
_pack = HEADER.pack


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
    return pack_header(len(head), kind, number, head=len(head)) + head


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
