"""Items larger than one frame by far: in pieces, in place, and within bounds on both sides."""

from __future__ import annotations

import asyncio
import mmap
import os
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rlinf_async.channels import Channel, ItemTooLarge, MalformedFrame
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import arrays as reserved
from rlinf_async.channels.wire import frames as framing
from rlinf_async.channels.wire import frames as incoming
from rlinf_async.channels.wire.codec import Decoder, encode
from rlinf_async.channels.wire.frames import (
    CHUNK_BYTES,
    DATA,
    HEADER,
    Flag,
    FrameType,
    MessageReader,
    outgoing,
    pack_header,
)
from rlinf_async.testing import wait_all_blocked
from tests.channels.wire.harness import remote_pair, wired

GIB = 1024**3
SIZE = 3 * CHUNK_BYTES + 5


class Item(msgspec.Struct):
    number: int
    values: NDArray[np.uint8]


def resident() -> int:
    """Bytes of this process's memory that are there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# ---- pieces


def test_a_message_of_more_than_4_gib_is_cut_without_being_copied() -> None:
    nothing = memoryview(mmap.mmap(-1, 5 * GIB))  # addresses without memory
    message, small = outgoing(FrameType.REQUEST, 1, b"h", Encoded(b"d", [nothing]), DATA)
    assert not small
    tracemalloc.start()
    try:
        first, data, *chunks = (message.next_frame() for _ in range(100))
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()
    assert first is not None
    assert len(first[0]) == HEADER.size + 8 + 1
    assert data is not None
    assert bytes(data[1]) == b"d"
    assert all(chunk is not None and len(chunk[1]) == CHUNK_BYTES for chunk in chunks)


@pytest.mark.parametrize("step", [1000, CHUNK_BYTES, 10 * CHUNK_BYTES])
def test_a_large_array_is_filled_in_place_as_its_pieces_arrive(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(incoming, "MAPPED_BYTES", CHUNK_BYTES)
    arrays = [np.arange(size, dtype=np.uint8) for size in (SIZE, 7000, SIZE + 1)]
    body = encode(arrays)
    message, _ = outgoing(FrameType.REQUEST, 1, b"h", body, DATA)
    sent = b"".join(bytes(part) for frame in iter(message.next_frame, None) for part in frame)
    reader = MessageReader()
    (found,) = [
        one for at in range(0, len(sent), step) for one in reader.feed(sent[at : at + step])
    ]
    assert found.body is not None
    assert [*map(reserved.is_reserved, found.body.buffers)] == [True, False, True]
    decoded: list[Any] = Decoder(list[np.ndarray[Any, Any]]).decode(found.body)
    assert all((here == there).all() for here, there in zip(decoded, arrays, strict=True))
    decoded[0][:] = 1  # it is the reader's own: and no copy of what arrived
    assert bytes(found.body.buffers[0][:3]) == b"\x01\x01\x01"


def test_where_the_system_gives_no_addresses_it_grows_as_it_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError("out of memory")

    monkeypatch.setattr(incoming, "MAPPED_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(mmap, "mmap", refused)
    message, _ = outgoing(FrameType.REQUEST, 1, b"h", encode(np.ones(SIZE, np.uint8)), DATA)
    reader = MessageReader()
    found = [
        one
        for frame in iter(message.next_frame, None)
        for one in reader.feed(b"".join(map(bytes, frame)))
    ]
    assert found[0].body is not None
    assert bytes(found[0].body.buffers[0]) == b"\x01" * SIZE


def test_who_announces_much_and_sends_little_makes_little_memory_be_held() -> None:
    sizes = [20 * GIB, 20 * GIB, 10 * GIB]
    table = b"".join(size.to_bytes(8, "little") for size in sizes)
    flags = int(Flag.BODY | Flag.MORE)
    header = pack_header(
        len(table), FrameType.REQUEST, 1, lane=DATA, flags=flags, tables=len(sizes), data=0
    )
    chunk = pack_header(1000, FrameType.CHUNK, 1, lane=DATA) + bytes(1000)
    readers = [MessageReader() for _ in range(8)]
    before = resident()
    for reader in readers:
        assert list(reader.feed(header + table + chunk)) == []
    assert resident() - before < 64 * 1024**2


def test_messagepack_that_could_not_be_decoded_as_one_is_refused_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(framing, "MAX_DATA_BYTES", 1000)
    with pytest.raises(ItemTooLarge, match=r"1001 bytes of MessagePack.*as arrays"):
        outgoing(FrameType.REQUEST, 1, b"", Encoded(bytes(1001)), DATA)
    flags = int(Flag.BODY | Flag.MORE)
    header = pack_header(0, FrameType.REQUEST, 1, lane=DATA, flags=flags, data=1001)
    with pytest.raises(MalformedFrame, match="1001 bytes of MessagePack"):
        list(MessageReader().feed(header))


# ---- items that no message can hold


@pytest.mark.parametrize("how", ["get", "get_batch", "lease"])
async def test_an_item_over_the_limit_is_buried_and_the_next_one_is_delivered(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    channel = Channel(Item, name="items")
    async with remote_pair(channel) as (sender, receiver):
        monkeypatch.setattr(framing, "MAX_MESSAGE_BYTES", 300_000)
        await channel.sender.put(Item(1, np.zeros(400_000, np.uint8)))
        await channel.sender.put(Item(2, np.zeros(10, np.uint8)))
        with pytest.raises(ItemTooLarge, match=r"'items'.* may have 300000"):
            await taken(receiver, how)
        assert (await taken(receiver, how)).number == 2
        (dead,) = channel.dead_letters
        assert dead.item.number == 1
        assert "ItemTooLarge" in dead.error
        with pytest.raises(ItemTooLarge):  # who puts it from elsewhere is told at once
            await sender.put(Item(3, np.zeros(400_000, np.uint8)))
        assert statistics_of(channel.queue).depth == 0


async def test_one_of_a_batch_that_is_over_the_limit_is_buried_and_the_others_go_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = Channel(Item, name="items")
    async with remote_pair(channel) as (_, receiver):
        monkeypatch.setattr(framing, "MAX_MESSAGE_BYTES", 300_000)
        for number, size in enumerate((10, 400_000, 10)):
            await channel.sender.put(Item(number, np.zeros(size, np.uint8)))
        with pytest.raises(ItemTooLarge):
            await receiver.get_batch(weight=3)
        assert [item.number for item in await receiver.get_batch(weight=2)] == [0, 2]
        assert len(channel.dead_letters) == 1


async def taken(receiver: Any, how: str) -> Any:
    if how == "get":
        return await receiver.get()
    if how == "get_batch":
        return (await receiver.get_batch(weight=1))[0]
    async with receiver.lease() as leased:
        return leased[0]


# ---- items that wait for room


async def test_a_large_put_that_waits_for_room_does_not_keep_others_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.session.connection.MAX_HELD_BYTES", 100_000)
    full, other = Channel(bytes, name="full", capacity=1), Channel(bytes, name="other", capacity=1)
    async with wired() as owner:
        connection = await owner.join()
        sender, beside = owner.sender(full, connection), owner.sender(other, connection)
        await sender.put(b"first")
        await beside.put(b"first")
        large = asyncio.ensure_future(sender.put(bytes(250_000)))
        await wait_all_blocked()
        small = asyncio.ensure_future(beside.put(bytes(30_000)))
        await wait_all_blocked()
        assert not large.done()
        assert not small.done()
        with pytest.raises(ItemTooLarge, match="beside the largest"):  # it stays bounded
            await beside.put(bytes(200_000))
        for channel in (full, other):
            assert await channel.receiver.get() == b"first"
        await large
        await small
        assert len(await full.receiver.get()) == 250_000
        assert len(await other.receiver.get()) == 30_000
        connection.close()
        await connection.wait_closed()


# ---- a real one


@pytest.mark.slow
async def test_an_array_of_more_than_2_gib_arrives() -> None:
    channel = Channel(Item, name="items")
    async with remote_pair(channel, "tcp://127.0.0.1:0") as (sender, receiver):
        values = np.zeros(2 * GIB + 12_345, np.uint8)  # most of it takes no memory here
        values[[0, GIB, -1]] = 1, 2, 3
        putting = asyncio.ensure_future(sender.put(Item(1, values)))
        found = await receiver.get()
        await putting
        assert found.values.nbytes == values.nbytes
        assert found.values[[0, GIB, -1]].tolist() == [1, 2, 3]
