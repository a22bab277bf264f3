"""Small items in advance travel as one list, and are settled one by one as all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlinf_async.channels import Channel, MalformedFrame
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import owner_deliveries
from rlinf_async.channels.wire.codec import Decoder, Encoder, ItemCodec
from tests.channels.wire.harness import remote_pair, settle, wired

pytestmark = pytest.mark.usefixtures("prefetch_at_once")
BYTES = 1 << 17


def test_a_list_holds_what_fits_and_comes_back_as_it_went() -> None:
    encoder, decoder = Encoder(), Decoder(dict[str, int])
    items = [{"number": number} for number in range(300)]
    count, data = encoder.encode_list(items, BYTES, BYTES) or (0, b"")
    assert (count, decoder.decode_list(data)) == (300, items)
    count, data = encoder.encode_list(items, 100, BYTES) or (0, b"")
    assert 0 < count < 20
    assert decoder.decode_list(data) == items[:count]


@pytest.mark.parametrize("bad", [b"x" * 65, object(), 2**70, [[object()]]])
def test_a_list_ends_before_an_item_that_is_too_large_or_cannot_travel(bad: Any) -> None:
    count, data = Encoder().encode_list([b"1", b"2", bad, b"4"], BYTES, 64) or (0, b"")
    assert (count, Decoder(bytes).decode_list(data)) == (2, [b"1", b"2"])
    assert Encoder().encode_list([bad], BYTES, 64) == (0, b"\xdd\0\0\0\0")


def test_an_item_with_large_arrays_is_in_no_list() -> None:
    encoder, large = Encoder(), np.zeros(10_000, np.float32)
    assert encoder.encode_list([large[:3], large], BYTES, BYTES) is None
    assert encoder.encode_list([[large, object()]], BYTES, BYTES) == (0, b"\xdd\0\0\0\0")
    assert encoder.encode(large[:3]).buffers == []
    count, data = encoder.encode_list([large[:3], large[:2]], BYTES, BYTES) or (0, b"")
    found = Decoder(NDArray[np.float32]).decode_list(data)
    assert [count, *map(len, found)] == [2, 3, 2]


def test_untyped_items_travel_in_a_list_too() -> None:
    codec = ItemCodec(Any)
    assert codec.encode_list is not None
    assert codec.decode_list is not None
    count, data = codec.encode_list([[1, {"a": 2}], [3], object()], BYTES, BYTES) or (0, b"")
    assert (count, codec.decode_list(data)) == (2, [[1, {"a": 2}], [3]])


def test_of_a_list_with_an_item_of_another_type_each_can_be_looked_at_alone() -> None:
    decoder = Decoder(int)
    _, data = Encoder().encode_list([1, "two", 3], BYTES, BYTES) or (0, b"")
    one, two, three = decoder.decode_list(data)
    assert [decoder.decode(one), decoder.decode(three)] == [1, 3]
    with pytest.raises(MalformedFrame, match="int"):
        decoder.decode(two)
    for cut in (b"", b"\x01", data[:-1], data + b"\x01"):
        with pytest.raises(MalformedFrame, match="list"):
            decoder.decode_list(cut)


async def test_items_of_the_owner_go_as_one_list_and_those_of_others_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[int, int]] = []
    answer = owner_deliveries.RemoteDelivery._answer_with_list

    def listed(self: Any) -> bool:
        done = answer(self)
        sent.append((self.unsettled, done))
        return done

    monkeypatch.setattr(owner_deliveries.RemoteDelivery, "_answer_with_list", listed)
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, receiver):
        for number in range(40):
            channel.sender.put_nowait(number)
        assert [await receiver.get() for _ in range(40)] == list(range(40))
        assert max(sent) > (8, False)
        assert all(done for _, done in sent)
        await settle()
        seen = statistics_of(channel.queue)
        assert (seen.gets, seen.prefetched, seen.depth) == (40, 0, 0)
        assert sum(edge.items for edge in seen.edges) == 40
        sent.clear()
        channel.sender.put_nowait(0)
        for number in range(1, 20):
            await sender.put(number)
        assert [await receiver.get() for _ in range(20)] == list(range(20))
        assert not any(done for _, done in sent)


async def test_what_a_batch_recalls_of_a_list_comes_to_it_in_order() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (_, receiver):
        for number in range(40):
            channel.sender.put_nowait(number)
        assert [await receiver.get() for _ in range(5)] == list(range(5))
        await settle()
        assert statistics_of(channel.queue).prefetched
        assert await receiver.get_batch(weight=20) == list(range(5, 25))
        assert [await receiver.get() for _ in range(15)] == list(range(25, 40))


async def test_an_item_of_a_list_that_its_receiver_declares_otherwise_is_buried_alone() -> None:
    channel: Channel[Any] = Channel(object, name="anything")
    async with wired() as owner:
        connection = await owner.join()
        wrong: Any = owner.receiver(channel, connection)
        wrong._wire.decode = Decoder(int).decode
        wrong._wire.decode_list = Decoder(int).decode_list
        wrong._link._decode_list = Decoder(int).decode_list
        for item in (0, 1, 2, 3, "four", 5, 6):
            channel.sender.put_nowait(item)
        found: list[Any] = []
        for _ in range(7):
            try:
                found.append(await wrong.get())
            except MalformedFrame:
                found.append("wrong")
        assert found == [0, 1, 2, 3, "wrong", 5, 6]
        await settle()
        assert [letter.item for letter in channel.dead_letters] == ["four"]
        seen = statistics_of(channel.queue)
        assert (seen.gets, seen.depth, seen.prefetched) == (7, 0, 0)
        connection.close()
        await connection.wait_closed()


@pytest.mark.parametrize("body", [None, Encoded(b"\x93\x01\x02\x03"), Encoded(b"\x01")])
async def test_an_owner_that_announces_another_list_than_it_sends_is_refused(
    body: Encoded | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)

        def lie(self: Any) -> bool:
            self.request.reply(2, body, unsettled=self)
            return True

        monkeypatch.setattr(owner_deliveries.RemoteDelivery, "_answer_with_list", lie)
        monkeypatch.setattr(owner_deliveries.RemoteDelivery, "_may_prefetch", lambda *_: True)
        for number in range(20):
            channel.sender.put_nowait(number)
        assert [await receiver.get() for _ in range(2)] == [0, 1]
        with pytest.raises(MalformedFrame, match="list"):
            await receiver.get()
        assert connection.closed
