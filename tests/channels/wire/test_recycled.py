"""Memory of arrays that arrived, used again for those that arrive next."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.wire.arrays import RECYCLED_BYTES, Recycled, thread_recycled
from rlinf_async.channels.wire.frames import (
    DATA,
    HEADER,
    FrameType,
    Message,
    MessageReader,
    outgoing,
    pack_header,
)

SIZE = 700_000


def stream(*arrays: np.ndarray) -> bytes:
    """A message with these, as it is written."""
    body = Encoded(b"item", [one.view(np.uint8).data for one in arrays])
    message, _ = outgoing(FrameType.NOTICE, 0, b"head", body, DATA)
    frames: list[bytes] = []
    while (frame := message.next_frame()) is not None:
        frames += [bytes(part) for part in frame]
    return b"".join(frames)


def read(reader: MessageReader, written: bytes, most: int) -> list[Message]:
    """As a socket is read: to where the reader says, at most so many bytes at a time."""
    found: list[Message] = []
    at = 0
    while at < len(written):
        space = reader.space()
        count = min(most, len(written) - at, most if space is None else len(space))
        came, at = written[at : at + count], at + count
        if space is None:
            found += reader.feed(came)
        else:
            space[:count] = came
            found += reader.filled(count)
    return found


def arrays_of(message: Message) -> list[np.ndarray]:
    assert message.body is not None
    return [np.frombuffer(one, np.uint8) for one in message.body.buffers]


def numbered(number: int, size: int = SIZE) -> np.ndarray:
    return np.arange(number, number + size).astype(np.uint8)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1 << 20, (SIZE,)),
        (1 << 20, (33 << 20,)),
        (50_000, (SIZE, 0, RECYCLED_BYTES - 1, SIZE)),
        (24, (SIZE, 0, SIZE)),
        (7, (RECYCLED_BYTES,)),
    ],
)
def test_what_is_read_straight_into_place_is_what_was_written(
    most: int, sizes: Sequence[int]
) -> None:
    reader = MessageReader()
    for number in range(3):  # from the second on, where another array was
        sent = [numbered(number, size) for size in sizes]
        (message,) = read(reader, stream(*sent), most)
        for one, came in zip(sent, arrays_of(message), strict=True):
            assert np.array_equal(one, came)


def test_an_array_that_is_in_use_keeps_its_memory() -> None:
    reader = MessageReader()
    reader._recycled = Recycled()
    (first,) = read(reader, stream(numbered(1)), 1 << 20)
    held = arrays_of(first)[0][10:20]  # a view of a view
    del first
    (second,) = read(reader, stream(numbered(2)), 1 << 20)
    assert held.tolist() == numbered(1)[10:20].tolist()
    assert arrays_of(second)[0][0] == 2


def test_memory_that_nobody_uses_is_used_again() -> None:
    recycled = Recycled()
    recycled.keep(buffer := bytearray(SIZE))
    name = id(buffer)
    assert recycled.take(SIZE) is None  # it is in use here
    view = memoryview(buffer)[5:6]
    del buffer
    assert recycled.take(SIZE) is None
    del view
    gc.collect()
    assert id(recycled.take(SIZE)) == name
    assert recycled.kept_bytes == 0


def test_no_more_is_kept_than_the_limit() -> None:
    recycled = Recycled(limit=4 * SIZE)
    for size in (SIZE, SIZE + 1, SIZE, SIZE + 2, SIZE, SIZE):
        recycled.keep(bytearray(size))
    assert recycled.kept_bytes <= 4 * SIZE
    assert recycled.take(SIZE + 1) is None  # what was not asked for longest went first
    recycled.keep(bytearray(5 * SIZE))
    assert recycled.take(5 * SIZE) is None


def test_a_size_whose_memory_was_all_taken_makes_room_as_any_other() -> None:
    recycled = Recycled(limit=2 * SIZE)
    recycled.keep(bytearray(SIZE + 1))
    assert recycled.take(SIZE + 1) is not None
    for _ in range(3):
        recycled.keep(bytearray(SIZE))
    assert recycled.kept_bytes == 2 * SIZE


def test_each_thread_has_its_own() -> None:
    here = thread_recycled()
    assert thread_recycled() is here
    with ThreadPoolExecutor(1) as other:
        assert other.submit(thread_recycled).result() is not here


def test_a_chunk_that_is_longer_than_its_message_is_malformed() -> None:
    reader = MessageReader()
    for _ in range(2):
        (message,) = read(reader, stream(numbered(1)), 1 << 20)
        del message
    whole = stream(numbered(3))
    last = SIZE % (256 * 1024) + HEADER.size  # where the last chunk begins, from the end
    longer = pack_header(last - HEADER.size + 9, FrameType.CHUNK, 0, lane=DATA)
    read(reader, whole[:-last], 1 << 20)
    with pytest.raises(MalformedFrame, match="9 bytes more than the message"):
        read(reader, longer + whole[HEADER.size - last :] + bytes(9), 1 << 20)
