"""Deliveries when things cross: what was taken is said once, what comes back comes back once."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

from rlinf_async.channels import (
    Channel,
    ChannelClosed,
    ConnectionLost,
    EndOfChannel,
    Receiver,
)
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import owner_deliveries, protocol, receiving
from rlinf_async.channels.wire.frames import FrameType, pack_small
from tests.channels.wire.harness import Wired, settle, until, wired

pytestmark = pytest.mark.usefixtures("prefetch_at_once")


async def prefetched(owner: Wired, channel: Channel[int], count: int = 20) -> tuple[Any, Any, int]:
    """A connection, its receiver that has items of this channel in advance, and how many it has
    got."""
    connection = await owner.join()
    receiver: Any = owner.receiver(channel, connection)
    for number in range(count):
        channel.sender.put_nowait(number)
    for number in range(3):
        assert await receiver.get() == number
    await settle()
    assert statistics_of(channel.queue).prefetched > 0
    return connection, receiver, 3


async def rest_of(receiver: Receiver[int]) -> list[int]:
    return [number async for number in receiver]


async def test_a_batch_that_is_cancelled_before_it_was_sent_still_says_what_was_taken() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection, receiver, count = await prefetched(owner, channel)
        connection.outbox.pause()  # the owner reads nothing for a while
        receiver._link._low = -1
        while receiver._link.items:
            assert await receiver.get() == count
            count += 1
        asking = asyncio.create_task(receiver.get_batch(weight=5))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        connection.outbox.resume()
        channel.close()
        assert await rest_of(receiver) == list(range(count, 20))
        connection.close()
        await connection.wait_closed()
        assert statistics_of(channel.queue).unconfirmed == 0


async def test_what_was_taken_is_said_before_a_close_though_the_get_that_said_it_is_cancelled() -> (
    None
):
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection, receiver, count = await prefetched(owner, channel)
        got = list(range(count))
        connection.outbox.pause()
        receiver._link._low = -1

        async def consume() -> None:
            while True:
                got.append(await receiver.get())

        consuming = asyncio.create_task(consume())
        await until(lambda: receiver._link.waiting)
        receiver.close()
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
        connection.outbox.resume()
        await settle()
        channel.close()
        assert got + await rest_of(channel.receiver) == list(range(20))
        connection.close()
        await connection.wait_closed()


async def test_a_lost_process_with_very_many_waiting_gets_gives_back_what_they_had() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        gets = [asyncio.ensure_future(receiver.get_batch(weight=10))]
        await until(lambda: channel.waits())
        gets += [asyncio.ensure_future(receiver.get_batch(weight=1)) for _ in range(2000)]
        await until(lambda: statistics_of(channel.queue).waiting_getters == 2001)
        for number in range(3):
            channel.sender.put_nowait(number)
        [there] = owner.server.connections
        there.abort("a test")
        found = await asyncio.gather(*gets, return_exceptions=True)
        assert all(isinstance(one, ConnectionLost) for one in found)
        assert statistics_of(channel.queue).depth == 3
        assert await channel.receiver.get_batch(weight=3) == [0, 1, 2]


async def test_a_batch_that_arrives_with_the_end_of_its_connection_is_not_taken_twice() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        batch = asyncio.ensure_future(owner.receiver(channel, connection).get_batch(weight=3))
        await until(lambda: channel.waits())
        for number in range(3):
            channel.sender.put_nowait(number)
        [there] = owner.server.connections
        there.abort("a test")  # in the turn in which it was served
        with pytest.raises(ConnectionLost):
            await batch
        assert await channel.receiver.get_batch(weight=3) == [0, 1, 2]


async def test_gets_whose_receiver_closes_in_the_turn_in_which_they_are_served_take_nothing() -> (
    None
):
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection, receiver, count = await prefetched(owner, channel)
        gets = [asyncio.ensure_future(receiver.get()) for _ in range(20)]
        await asyncio.sleep(0)
        receiver.close()
        done = await asyncio.gather(*gets, return_exceptions=True)
        got = [one for one in done if isinstance(one, int)]
        assert all(isinstance(one, (int, ChannelClosed)) for one in done)
        await settle()
        channel.close()
        assert sorted(got + await rest_of(channel.receiver)) == list(range(count, 20))
        connection.close()
        await connection.wait_closed()


async def test_a_process_that_stands_still_with_a_batch_asked_for_holds_up_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner_deliveries, "RECALL_SECONDS", 0.01)
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection, receiver, count = await prefetched(owner, channel)
        ahead = statistics_of(channel.queue).prefetched
        links = receiving.ReceiverLinks.of(connection)
        monkeypatch.setattr(links, "return_items", lambda *_: None)  # it does not answer a recall
        batch = asyncio.ensure_future(receiver.get_batch(weight=1))
        assert await channel.receiver.get() == count + ahead
        assert channel.receiver.get_nowait() == count + ahead + 1
        assert not batch.done()
        monkeypatch.undo()
        links.return_items(receiver._number, None)
        assert await batch == [count]
        connection.close()
        await connection.wait_closed()


async def test_waits_that_end_with_the_channel_are_counted_and_leave_no_keys() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        sender = channel.sender.open()
        gets = [asyncio.ensure_future(receiver.get(key=key)) for key in range(50)]
        await until(lambda: statistics_of(channel.queue).waiting_getters == 50)
        before = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > before)
        sender.close()
        found = await asyncio.gather(*gets, return_exceptions=True)
        assert all(isinstance(one, EndOfChannel) for one in found)
        seen = statistics_of(channel.queue)
        assert seen.get_waits == 50
        assert seen.get_wait_seconds > 0
        assert channel.queue.keys == {}
        connection.close()
        await connection.wait_closed()


# ---- peers that break the protocol


async def test_a_receipt_for_a_delivery_settles_nothing() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        receiver: Any = owner.receiver(channel, connection)
        for number in range(20):
            channel.sender.put_nowait(number)
        get = protocol.Get(receiver._number, None, 1, None, "p", 0, False, 5)
        kinds: Any = protocol.Delivered | int
        answer = await connection.ask("channel.get", get, reply=kinds)
        receipt = pack_small(FrameType.RECEIPTS, 0, struct.pack("<Q", answer.number))
        connection.outbox.add(receipt)
        await settle()
        connection.close()
        await connection.wait_closed()
        await until(lambda: not owner.server.connections)
        channel.close()
        assert await rest_of(channel.receiver) == list(range(20))


async def test_items_for_another_channel_than_their_senders_end_the_connection() -> None:
    mine, other = Channel(int, name="mine"), Channel(int, name="other")
    async with wired() as owner:
        connection = await owner.join()
        sender: Any = owner.sender(mine, connection)
        credited: Any = owner.sender(other, connection)
        for number in range(2):
            await credited.put(number)
        await until(lambda: statistics_of(other.queue).credit)
        run = protocol.Run(credited._wire.queue, sender._number, None, 1, 1)
        connection.notify("channel.transfer", protocol.Transfer([run], [1]), Encoded(b"\x01"))
        _, reason = await owner.lost.get()
        assert "not their sender's" in reason
        assert statistics_of(other.queue).depth == 2


async def test_credit_that_is_recalled_and_not_returned_is_recalled_again() -> None:
    channel = Channel(int, name="numbers", capacity=8)
    async with wired() as owner:
        connection = await owner.join()
        sender: Any = owner.sender(channel, connection)
        for number in range(2):
            await sender.put(number)
        await until(lambda: statistics_of(channel.queue).credit)
        accounts = sender._transfers.accounts
        credit, answers = protocol.Credit(sender._wire.queue, None, 0, None), [1]
        give_back = accounts._return

        def nothing_at_first(account: Any) -> None:
            if answers.pop():
                answers.append(0)
                connection.notify("credit.return", credit)
            else:
                answers.append(0)
                give_back(account)

        accounts._return = nothing_at_first
        for number in range(6):  # the last of them wait for what is credit
            await channel.sender.put(number)
        assert statistics_of(channel.queue).depth == 8
        connection.close()
        await connection.wait_closed()
