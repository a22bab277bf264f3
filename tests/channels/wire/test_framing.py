"""Frames and messages, without a socket: whatever is cut is found again, and nothing else is."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.channels import ItemTooLarge, MalformedFrame
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.wire import frames as framing
from rlinf_async.channels.wire import frames as transfer
from rlinf_async.channels.wire.frames import (
    CHUNK_BYTES,
    CONTROL,
    DATA,
    HEADER,
    MAX_FRAME_BYTES,
    Flag,
    FrameType,
    Message,
    MessageReader,
    outgoing,
    pack_header,
)
from rlinf_async.channels.wire.frames import PROTOCOL_VERSION as VERSION

bodies = st.none() | st.builds(
    Encoded, st.binary(max_size=300), st.lists(st.builds(bytearray, st.binary(max_size=300)))
)
messages = st.lists(
    st.tuples(st.sampled_from([FrameType.REQUEST, FrameType.REPLY]), st.binary(max_size=50), bodies)
)


def frames(
    kind: FrameType, number: int, head: bytes, body: Encoded | None, lane: int = DATA
) -> Iterator[bytes]:
    """The bytes of a message, frame by frame."""
    message, _ = outgoing(kind, number, head, body, lane)
    while (parts := message.next_frame()) is not None:
        yield b"".join(parts)


def same(found: Encoded | None, sent: Encoded | None) -> bool:
    if found is None or sent is None:
        return found is sent
    return found.data == sent.data and [*map(bytes, found.buffers)] == [*map(bytes, sent.buffers)]


@given(messages, st.integers(1, 200))
def test_messages_are_found_however_the_stream_is_cut(
    sent: list[tuple[FrameType, bytes, Encoded | None]], step: int
) -> None:
    stream = b"".join(
        frame for number, one in enumerate(sent, 1) for frame in frames(one[0], number, *one[1:])
    )
    reader = MessageReader()
    found: list[Message] = []
    for start in range(0, len(stream), step):
        found += reader.feed(stream[start : start + step])
    assert [one.number for one in found] == list(range(1, len(sent) + 1))
    for one, (kind, head, body) in zip(found, sent, strict=True):
        assert (one.type, one.head) == (kind, head)
        assert same(one.body, body)


@given(
    st.lists(st.integers(0, 2 * CHUNK_BYTES + 5), max_size=4),
    st.integers(0, CHUNK_BYTES + 9),
    st.integers(CHUNK_BYTES // 3, 3 * CHUNK_BYTES),
)
def test_a_large_message_is_put_together_from_its_chunks(
    sizes: list[int], data: int, step: int
) -> None:
    body = Encoded(b"d" * data, [bytearray([i]) * size for i, size in enumerate(sizes)])
    stream = b"".join(frames(FrameType.REQUEST, 7, b"head", body))
    reader = MessageReader()
    [found] = [
        message
        for start in range(0, len(stream), step)
        for message in reader.feed(stream[start : start + step])
    ]
    assert found.head == b"head"
    assert same(found.body, body)


def test_what_arrived_of_a_chunk_goes_to_its_message_at_once() -> None:
    body = Encoded(b"", [bytearray(b"x" * 2 * CHUNK_BYTES)])
    stream = b"".join(frames(FrameType.REQUEST, 7, b"head", body))
    reader = MessageReader()
    for start in range(0, len(stream), 10_000):
        list(reader.feed(stream[start : start + 10_000]))
        assert reader.held < HEADER.size


@pytest.mark.parametrize("step", [7, 100, 1000, 10 * CHUNK_BYTES])
def test_a_chunk_with_more_than_its_message_is_refused_wherever_it_is_cut(step: int) -> None:
    *begun, last = frames(FrameType.REQUEST, 1, b"h", Encoded(b"d" * (CHUNK_BYTES + 90)))
    stream = b"".join([*begun, struct.pack("<I", 90 + len(b"extra")), last[4:], b"extra"])
    reader = MessageReader()
    parts = (stream[start : start + step] for start in range(0, len(stream), step))
    with pytest.raises(MalformedFrame, match=r"more than the message|arrived for message"):
        list(chain.from_iterable(map(reader.feed, parts)))


def test_no_frame_is_longer_than_the_limit_and_chunks_are_short() -> None:
    body = Encoded(b"d", [bytearray(10 * CHUNK_BYTES)])
    for frame in frames(FrameType.REQUEST, 1, b"h" * 1000, body):
        assert len(frame) <= CHUNK_BYTES + 2000 < MAX_FRAME_BYTES


def test_a_control_frame_passes_between_the_chunks_of_a_large_message() -> None:
    chunks = list(frames(FrameType.REQUEST, 1, b"h", Encoded(b"d" * (3 * CHUNK_BYTES))))
    [ping] = frames(FrameType.NOTICE, 0, b"ping", None, CONTROL)
    assert len(chunks) == 4
    found = list(MessageReader().feed(b"".join([*chunks[:2], ping, *chunks[2:]])))
    assert [message.head for message in found] == [b"ping", b"h"]


def test_a_message_that_its_sender_gave_up_is_forgotten() -> None:
    chunks = list(frames(FrameType.REQUEST, 1, b"h", Encoded(b"d" * (3 * CHUNK_BYTES))))
    reader = MessageReader()
    assert list(reader.feed(b"".join(chunks[:2]))) == []
    reader.forget(1)
    [after] = reader.feed(b"".join(frames(FrameType.REQUEST, 2, b"after", None)))
    assert after.number == 2


def test_giving_up_a_request_leaves_the_answer_of_the_same_number_alone() -> None:
    chunks = list(frames(FrameType.REPLY, 1, b"h", Encoded(b"d" * (2 * CHUNK_BYTES))))
    reader = MessageReader()
    assert list(reader.feed(chunks[0])) == []
    reader.forget(1)
    [found] = reader.feed(b"".join(chunks[1:]))
    assert found.head == b"h"


@given(st.binary(min_size=HEADER.size, max_size=400))
def test_random_bytes_are_refused_or_wait_for_more_but_never_crash(noise: bytes) -> None:
    reader = MessageReader()
    try:
        list(reader.feed(noise))
    except MalformedFrame:
        return
    assert reader.held <= MAX_FRAME_BYTES + HEADER.size


@given(st.data())
def test_a_frame_with_one_changed_byte_is_refused_or_read_but_never_crashes(
    data: st.DataObject,
) -> None:
    body = Encoded(b"body", [bytearray(b"one"), bytearray(b"two")])
    frame = bytearray(b"".join(frames(FrameType.REQUEST, 3, b"head", body)))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = list(MessageReader().feed(bytes(frame)))
    except MalformedFrame:
        return
    assert len(found) <= 1


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ((MAX_FRAME_BYTES + 1, VERSION, 1, 0, 0, 0, 0, 0, 1), f"at most {MAX_FRAME_BYTES}"),
        ((0, 9, 1, 0, 0, 0, 0, 0, 1), "protocol version 9"),
        ((0, VERSION, 77, 0, 0, 0, 0, 0, 1), "unknown frame type 77"),
        ((0, VERSION, 1, 5, 0, 0, 0, 0, 1), "unknown lane 5"),
        ((0, VERSION, 1, 0, 128, 0, 0, 0, 1), "flags 0x80"),
        ((0, VERSION, 1, 0, 1, 10**9, 0, 0, 1), "1000000000 buffers"),
        ((3, VERSION, 1, 0, 1, 0, 4, 0, 1), "cannot hold a head of 4"),
        ((0, VERSION, 1, 0, 1, 0, 0, 5, 1), "was announced as 5"),
        ((0, VERSION, 6, 0, 0, 0, 0, 0, 8), "a part of message 8, which was not begun"),
    ],
)
def test_a_malformed_header_is_refused_with_the_numbers(header: tuple[int, ...], said: str) -> None:
    with pytest.raises(MalformedFrame, match=said):
        list(MessageReader().feed(HEADER.pack(*header)))


def test_a_message_over_the_limit_is_refused_before_memory_is_taken() -> None:
    chunks = list(frames(FrameType.REQUEST, 1, b"h", Encoded(b"d" * (2 * CHUNK_BYTES))))
    with pytest.raises(MalformedFrame, match="at most 1000 are allowed"):
        list(MessageReader(max_message_bytes=1000).feed(chunks[0]))


def test_memory_is_taken_as_the_bytes_arrive_not_as_they_are_announced() -> None:
    reader = MessageReader()
    header = pack_header(8, FrameType.REQUEST, 1, lane=DATA, flags=Flag.BODY | Flag.MORE, tables=1)
    tracemalloc.start()
    try:
        assert list(reader.feed(header + struct.pack("<Q", 1 << 30))) == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_more_bytes_than_were_announced_are_refused() -> None:
    chunks = list(frames(FrameType.REQUEST, 1, b"h", Encoded(b"d" * (CHUNK_BYTES + 1))))
    with pytest.raises(MalformedFrame, match="only 1 were missing"):
        list(MessageReader().feed(b"".join([*chunks[:2], chunks[1]])))


def test_what_is_too_large_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(ItemTooLarge, match="1001 bytes encoded, a message may have 1000"):
        outgoing(FrameType.REQUEST, 1, b"", Encoded(b"d" * 1001), DATA, what="put")
    with pytest.raises(ItemTooLarge, match="the arguments take"):
        outgoing(FrameType.REQUEST, 1, b"h" * (framing.MAX_HEAD_BYTES + 1), None, DATA, what="put")
    many = Encoded(b"", [bytearray()] * (framing.MAX_BUFFERS + 1))
    with pytest.raises(ItemTooLarge, match="large arrays"):
        outgoing(FrameType.REQUEST, 1, b"", many, transfer.DATA, what="put")
