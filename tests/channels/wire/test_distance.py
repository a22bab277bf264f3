"""What counts as far, and what is put and got over a connection that does."""

from __future__ import annotations

import secrets
import socket
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rlinf_async.channels import Channel, ItemTooLarge
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import frames as framing
from rlinf_async.channels.wire.session import link as distance
from tests.channels.wire.direct_kit import ELEMENTS, Item, item, world
from tests.channels.wire.harness import wired

COUNT = 40


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the system does not say")
async def test_the_system_says_how_far_the_other_side_of_tcp_is() -> None:
    async with wired(address="tcp://127.0.0.1:0") as owner:
        near = await owner.join("worker")
        assert 0 < near.round_trip < 1
        assert near.local_host == "127.0.0.1"


async def test_a_name_without_a_file_is_an_address_of_this_host() -> None:
    async with wired(address=f"@rlinf-test-{secrets.token_hex(8)}") as owner:
        connection = await owner.join("worker")
        assert connection.local
        assert connection.round_trip == 0
        assert connection.local_host is None


async def test_far_puts_of_arrays_do_not_ask_and_are_not_changed_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distance, "FAR_SECONDS", 0.0)
    channel = Channel(Item, name="items", capacity=2 * COUNT)
    async with wired(address="tcp://127.0.0.1:0") as owner:
        connection = await owner.join("worker")
        sender, receiver = owner.sender(channel, connection), owner.receiver(channel, connection)
        values = np.empty(ELEMENTS, np.int64)
        for number in range(COUNT):
            values[:] = number
            await sender.put(Item(number, values))
        asked = statistics_of(channel.queue).credit_waits
        await sender.flush()
        got = [(await receiver.get()).check() for _ in range(COUNT)]
        assert got == [*range(COUNT)]
        assert asked < COUNT // 4


async def test_far_puts_of_arrays_that_are_too_small_to_stay_do_not_ask_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distance, "FAR_SECONDS", 0.0)
    channel = Channel(Item, name="items", capacity=2 * COUNT)
    async with world() as one:
        producer, consumer = await one.producer(least=10**6), await one.consumer()
        sender, receiver = producer.sender(channel), consumer.receiver(channel)
        for number in range(COUNT):
            await sender.put(item(number))
        asked = statistics_of(channel.queue).credit_waits
        assert [(await receiver.get()).check() for _ in range(COUNT)] == [*range(COUNT)]
        assert asked < COUNT // 4
        assert statistics_of(channel.queue).direct == 0


class Titled(msgspec.Struct):
    """An item whose MessagePack can be of any size."""

    title: str
    values: NDArray[np.int64]


async def test_an_item_that_no_message_can_hold_is_refused_and_its_sender_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distance, "FAR_SECONDS", 0.0)
    monkeypatch.setattr(framing, "MAX_DATA_BYTES", 1_000)
    channel = Channel(Titled, name="items")
    async with wired(address="tcp://127.0.0.1:0") as owner:
        connection = await owner.join("worker")
        sender, receiver = owner.sender(channel, connection), owner.receiver(channel, connection)
        for length in (10, 20, 2_000, 30):
            with pytest.raises(ItemTooLarge) if length == 2_000 else nullcontext():
                await sender.put(Titled("a" * length, np.zeros(1_000, np.int64)))
        assert [len((await receiver.get()).title) for _ in range(3)] == [10, 20, 30]
        await sender.flush()
        reasons = list[str]()
        connection.on_close(lambda _, reason: reasons.append(reason))
        connection.close()
        await connection.wait_closed()
        assert reasons == ["it was closed"]
