"""Items with large arrays: put without asking, and made ready before they are asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rlinf_async.channels import Channel, ConnectionLost, NoReceivers, encoded
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.key_queue import Entry
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import ChannelServer, Connection, Router, protocol
from rlinf_async.channels.wire import owner_deliveries as ready
from rlinf_async.channels.wire.codec import encode
from rlinf_async.channels.wire.owner_credit import FAR_ARRAYS_BYTES
from rlinf_async.testing import wait_all_blocked
from tests.channels.wire.harness import Turns, Wired, anything_fits, until, wired

SIZE = 50_000


class Item(msgspec.Struct):
    number: int
    values: NDArray[np.float32]


def item(number: int, size: int = SIZE) -> Item:
    return Item(number, np.full(size, number, np.float32))


def check(taken: Item, number: int) -> None:
    assert taken.number == number
    assert (taken.values == number).all()


def lent_to(sender: Any) -> int:
    """Items that this sender can put without asking."""
    return int(sender._account.items)


@asynccontextmanager
async def lending(
    capacity: int = 16,
) -> AsyncIterator[tuple[Wired, Connection, Channel[Item], Any]]:
    """A sender in another process, which was lent room, and has its memory open at the owner."""
    async with wired() as owner:
        channel = Channel(Item, name="items", capacity=capacity)
        connection = await owner.join()
        sender = owner.sender(channel, connection)
        for number in range(2):
            await sender.put(item(number))
        await until(lambda: lent_to(sender))
        for number in range(2):
            check(await channel.receiver.get(), number)
        yield owner, connection, channel, sender
        connection.close()
        await connection.wait_closed()


# ---- put without asking


async def test_a_large_item_is_put_into_lent_room_at_once_and_may_change_afterwards() -> None:
    async with lending() as (_, _, channel, sender):
        mine = item(2)
        putting = sender.put(mine)
        with pytest.raises(StopIteration):  # without a turn of the loop
            putting.send(None)
        mine.values[:] = -1
        check(await channel.receiver.get(), 2)
        seen = statistics_of(channel.queue)
        assert seen.shared == seen.puts == 3
        assert seen.edges[0].items == 3


async def test_small_and_large_items_arrive_in_the_order_of_their_puts() -> None:
    async with lending(capacity=64) as (_, _, channel, sender):
        sizes = [4, SIZE, 4, 4, SIZE, SIZE, 2000, SIZE, 4] * 20

        async def put_all() -> None:
            for number, size in enumerate(sizes):
                await sender.put(item(number, size))

        putting = asyncio.create_task(put_all())
        for number in range(len(sizes)):
            check(await channel.receiver.get(), number)
        await putting


async def test_large_items_never_exceed_the_capacity() -> None:
    async with lending(capacity=8) as (_, _, channel, sender):

        async def put_all() -> None:
            for number in range(40):
                await sender.put(item(number))

        putting = asyncio.create_task(put_all())
        for number in range(40):
            await wait_all_blocked()
            assert statistics_of(channel.queue).depth + channel.queue.credit <= 8
            check(await channel.receiver.get(), number)
        await putting


async def test_others_have_a_turn_while_many_large_items_are_put(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.sending.TURN_BYTES", 3 * 4 * SIZE)
    async with lending(capacity=64) as (_, _, channel, sender):
        assert lent_to(sender) > 8
        turns: list[int] = []

        async def put_all() -> None:
            for number in range(8):
                await sender.put(item(number))
                turns.append(number)

        putting = asyncio.create_task(put_all())
        seen = 0
        while not putting.done():
            await asyncio.sleep(0)
            assert len(turns) - seen <= 3
            seen = len(turns)
        for number in range(8):
            check(await channel.receiver.get(), number)


async def test_who_put_a_large_item_that_nobody_could_take_is_told_and_its_memory_is_free() -> None:
    async with lending() as (_, connection, channel, sender):
        channel.receiver.close()
        await sender.put(item(2))  # it cannot know yet
        with pytest.raises(NoReceivers):
            await sender.flush()
        assert statistics_of(channel.queue).refused == 1
        await until(lambda: connection.memory.lent == 0)


async def test_who_put_large_items_that_were_not_confirmed_is_told_when_the_owner_is_lost() -> None:
    async with lending() as (owner, connection, _, sender):
        (theirs,) = owner.server.connections
        await sender.put(item(2))
        await sender.put(item(3))
        theirs.abort("it dies here")
        await connection.wait_closed()
        with pytest.raises(ConnectionLost, match="2 items of this sender were not confirmed"):
            await sender.put(item(4))


async def test_where_memory_is_not_shared_large_items_are_asked_for() -> None:
    async with lending() as (_, connection, channel, sender):
        connection._sharing._pid = 0  # as over TCP
        asked = sender._account.puts
        await sender.put(item(2))
        assert sender._account.puts == asked + 1
        check(await channel.receiver.get(), 2)
        assert statistics_of(channel.queue).copied == 1


@pytest.mark.parametrize("sizes", [[1, 1], [2]])
async def test_arrays_that_would_fill_the_owners_memory_unasked_end_the_connection(
    sizes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    async with lending() as (_, connection, channel, sender):
        connection._sharing._pid = 0  # they go through the socket
        beside = memoryview(bytearray(FAR_ARRAYS_BYTES + 1))
        run = protocol.Run(sender._account.queue, sender._number, None, 1, len(sizes))
        body = Encoded(bytes(sum(sizes)), [beside])
        connection.notify("channel.transfer", protocol.Transfer([run], sizes), body)
        await connection.wait_closed()
        assert statistics_of(channel.queue).depth == 0
        assert "arrays came unasked" in caplog.text


# ---- made ready


@asynccontextmanager
async def taking(count: int) -> AsyncIterator[tuple[Wired, Connection, Channel[Item], Any]]:
    """A receiver in another process that took the first of so many large items."""
    async with wired() as owner:
        channel = Channel(Item, name="items", capacity=16)
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        for number in range(count):
            await channel.sender.put(item(number))
        check(await receiver.get(), 0)
        yield owner, connection, channel, receiver
        connection.close()
        await connection.wait_closed()


async def test_the_next_large_item_is_copied_before_it_is_asked_for() -> None:
    async with taking(3) as (_, _, channel, receiver):
        await wait_all_blocked()
        head, behind = channel.queue.unkeyed.entries
        made: Encoded = head.ready
        assert ready.encoded_entry(head, channel.queue) is made
        assert (head.ready, behind.ready) == (None, None)
        head.ready = made
        made.buffers[0][:] = bytes(len(made.buffers[0]))  # this, and no other copy, is sent
        taken = await receiver.get()
        assert not taken.values.any()
        check(await receiver.get(), 2)


async def test_who_is_here_gets_an_item_that_was_made_ready_as_it_was_put() -> None:
    async with wired() as owner:
        channel = Channel(Item, name="items", capacity=16)
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        items = [item(number) for number in range(2)]
        for one in items:
            await channel.sender.put(one)
        check(await receiver.get(), 0)
        await wait_all_blocked()
        assert channel.queue.unkeyed.entries[0].ready is not None
        assert await channel.receiver.get() is items[1]
        connection.close()
        await connection.wait_closed()


async def test_a_lease_of_what_was_made_ready_goes_back_and_comes_again() -> None:
    async with taking(2) as (_, _, _, receiver):
        await wait_all_blocked()
        with contextlib.suppress(ValueError):
            async with receiver.lease() as leased:
                check(leased[0], 1)
                raise ValueError
        async with receiver.lease() as leased:
            check(leased[0], 1)
            assert leased.deliveries == [2]


async def test_the_item_after_a_large_lease_is_made_ready_too() -> None:
    async with taking(3) as (_, _, channel, receiver):
        channel.queue.unkeyed.entries[0].ready = channel.queue.unkeyed.entries[1].ready = None
        async with receiver.lease() as leased:
            check(leased[0], 1)
            await wait_all_blocked()
            assert channel.queue.unkeyed.entries[0].ready is not None


async def test_an_item_that_cannot_travel_is_told_to_who_asks_for_it_not_before() -> None:
    async with wired() as owner:
        channel = Channel[Any](object, name="items", capacity=16)
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        await channel.sender.put(np.zeros(SIZE))
        channel.queue.fits = anything_fits
        await channel.sender.put(object())
        await receiver.get()
        await wait_all_blocked()
        assert channel.dead_letters == []
        with pytest.raises(Exception, match="object cannot travel"):
            await receiver.get()
        assert len(channel.dead_letters) == 1
        connection.close()
        await connection.wait_closed()


async def test_very_large_items_are_copied_when_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ready, "READY_BYTES", 4 * SIZE)
    async with wired() as owner:
        channel = Channel(Item, name="items", capacity=16)
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        for number, size in enumerate((SIZE, 2 * SIZE, SIZE, SIZE)):
            await channel.sender.put(item(number, size))
        seen = []
        for number in range(3):
            check(await receiver.get(), number)
            await wait_all_blocked()
            seen.append(channel.queue.unkeyed.entries[0].ready is not None)
        assert seen == [False, False, True]
        connection.close()
        await connection.wait_closed()


def test_what_travels_is_made_once_and_not_kept_twice() -> None:
    entry: Any = Entry(item(1), 1, 1)
    channel = Channel(Item, name="items")
    ChannelServer(Router()).publish(channel)
    assert ready.encoded_entry(entry, channel.queue).data == encode(item(1)).data
    assert entry.ready is None


# ---- leased where the channel lives


async def test_the_arrays_of_a_lease_are_copied_a_piece_for_each_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with lending() as (_, _, channel, sender):
        for number in range(5):
            await sender.put(item(number))
        await until(lambda: statistics_of(channel.queue).depth == 5)
        monkeypatch.setattr(encoded, "PIECE_BYTES", 4 * SIZE // 10)
        turns = Turns()
        async with channel.receiver.lease(weight=5) as leased:
            assert turns.stop() >= 50
            for number, one in enumerate(leased):
                check(one, number)


async def test_a_lease_that_is_cancelled_while_its_arrays_are_copied_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with lending() as (_, _, channel, sender):
        await sender.put(item(1))
        await until(lambda: statistics_of(channel.queue).depth)
        monkeypatch.setattr(encoded, "PIECE_BYTES", 1000)

        async def work() -> None:
            async with channel.receiver.lease():
                raise AssertionError("it was cancelled before")

        working = asyncio.create_task(work())
        await until(lambda: statistics_of(channel.queue).leases_out)
        working.cancel()
        await asyncio.wait([working])
        assert working.cancelled()
        seen = statistics_of(channel.queue)
        assert (seen.depth, seen.leases_out, seen.redelivered) == (1, 0, 0)
        check(await channel.receiver.get(), 1)
