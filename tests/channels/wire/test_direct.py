"""Large arrays go from producer to consumer, past the owner of their channel."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from functools import partial

import numpy as np
import pytest

from rlinf_async.channels import (
    Channel,
    ChannelClosed,
    ChannelEmpty,
    ConnectionLost,
    EndOfChannel,
    Receiver,
)
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import Direct, Router, connect
from rlinf_async.channels.wire.pool import Pool
from rlinf_async.channels.wire.protocol import Fetch, Payload, PayloadRef
from tests.channels.wire.direct_kit import (
    ELEMENTS,
    Item,
    Party,
    holding_fetches,
    item,
    items,
    world,
)
from tests.channels.wire.harness import SECRET, Turns, until
from tests.net.cutter import Cutter, cutter

SIZE = 8 * ELEMENTS


async def fill(producer: Party, channel: Channel[Item], count: int) -> None:
    """Put so many, and let the sender open."""
    sender = producer.sender(channel)
    for number in range(count):
        await sender.put(item(number))
    await sender.flush()
    assert statistics_of(channel.queue).depth == count


async def spoil(receiver: Receiver[Item]) -> None:
    """Take two under a lease, write to one, and fail."""
    with contextlib.suppress(LookupError):
        async with receiver.lease(weight=2) as batch:
            assert len(batch) == 2
            batch[0].values[:] = -1
            raise LookupError


@pytest.mark.parametrize("capacity", [1, 3, 8])
async def test_the_arrays_do_not_pass_the_owner(capacity: int) -> None:
    channel = items(capacity)
    async with world() as one:
        producer, consumer = await one.producer(), await one.consumer()
        sender, receiver = producer.sender(channel), consumer.receiver(channel)

        async def put() -> None:
            with sender:
                for number in range(40):
                    await sender.put(item(number), weight=1 + number % 3)

        async def get() -> list[int]:
            found = [(await receiver.get()).check() for _ in range(10)]
            for _ in range(5):
                found += [one.check() for one in await receiver.get_batch(weight=6, at_least=1)]
                async with receiver.lease(weight=6, at_least=1) as batch:
                    found += [one.check() for one in batch]
            return found + [one.check() async for one in receiver]

        _, found = await asyncio.gather(put(), get())
        assert found == list(range(40))
        fetched, passed = consumer.got
        assert fetched >= 40  # more where prefetched ones went back for a batch
        assert passed == 0
        await until(lambda: not producer.kept)
        seen = statistics_of(channel.queue)
        assert (seen.direct, seen.loaded, seen.lost, seen.copied) == (40, 0, 0, 0)
        put_edge, *taken = seen.edges
        assert (put_edge.items, put_edge.direct) == (40, 40)
        assert sum(edge.nbytes for edge in taken) >= put_edge.nbytes > 40 * SIZE
        assert sum(edge.direct for edge in taken) >= 40
        assert one.passed() < 2 * SIZE


async def test_small_items_and_what_is_too_much_go_through_the_owner() -> None:
    channel = items()
    async with world() as one:
        producer, consumer = await one.producer(most=2 * SIZE), await one.consumer()
        sender, receiver = producer.sender(channel), consumer.receiver(channel)
        await sender.put(Item(7, np.zeros(1_000, np.int64)))
        for number in range(3):
            await sender.put(item(number))
        assert producer.kept == 2 * SIZE
        assert (await receiver.get()).number == 7
        assert [(await receiver.get()).check() for _ in range(3)] == [0, 1, 2]
        assert statistics_of(channel.queue).direct == 2


async def test_what_the_producer_does_to_its_array_afterwards_is_not_seen() -> None:
    channel = items()
    async with world() as one:
        producer, consumer = await one.producer(), await one.consumer()
        mine = item(1)
        await producer.sender(channel).put(mine)
        mine.values[:] = 2
        got = await consumer.receiver(channel).get()
        assert got.check() == 1
        got.values[:] = 3


async def test_on_the_producers_host_they_go_by_shared_memory() -> None:
    channel = items()
    with tempfile.TemporaryDirectory(prefix="direct-") as folder:
        async with world() as one:
            producer = await one.producer(listen=[f"{folder}/s", "tcp://127.0.0.1:0"], least=1)
            consumer = await one.consumer()
            await producer.sender(channel).put(Item(1, np.ones(ELEMENTS * 10, np.int64)))
            got = await consumer.receiver(channel).get()
            assert (got.values == 1).all()
            assert producer.direct is not None
            [[server], []] = [[*one.connections] for one in producer.direct._servers]
            assert server.memory.sent_shared == 1
        assert not os.listdir(folder)


async def test_the_owner_of_the_channel_fetches_what_it_takes_itself() -> None:
    channel = items()
    async with world() as one:
        producer = await one.producer()
        await fill(producer, channel, 8)
        receiver = channel.receiver
        with pytest.raises(ChannelEmpty, match="still on its way from its producer"):
            receiver.get_nowait()
        await until(lambda: statistics_of(channel.queue).loaded)
        assert receiver.get_nowait().check() == 0
        assert (await receiver.get()).check() == 1
        assert [each.check() for each in await receiver.get_batch(weight=3)] == [2, 3, 4]
        await spoil(receiver)
        async with receiver.lease(weight=2) as batch:
            assert [each.check() for each in batch] == [5, 6]
            assert batch.deliveries == [2, 2]
        assert statistics_of(channel.queue).loaded >= 7
        await until(lambda: producer.kept <= SIZE)


async def test_they_stay_until_the_lease_is_acknowledged() -> None:
    channel = items(max_deliveries=2)
    async with world() as one:
        producer, consumer = await one.producer(), await one.consumer()
        await fill(producer, channel, 2)
        receiver = consumer.receiver(channel)
        await spoil(receiver)
        assert producer.kept == 2 * SIZE
        async with receiver.lease(weight=2) as batch:
            assert [each.check() for each in batch] == [0, 1]
            assert batch.deliveries == [2, 2]
        await until(lambda: not producer.kept)


async def test_an_item_that_is_given_up_is_among_the_dead_letters_with_its_array() -> None:
    channel = items(max_deliveries=1)
    async with world() as one:
        producer, consumer = await one.producer(), await one.consumer()
        await fill(producer, channel, 1)
        with pytest.raises(LookupError):
            async with consumer.receiver(channel).lease():
                raise LookupError
        await until(lambda: channel.dead_letters)
        assert channel.dead_letters[0].item.check() == 0
        await until(lambda: not producer.kept)


async def test_who_cannot_reach_the_producer_gets_them_through_the_owner() -> None:
    channel = items()
    async with world() as one:
        producer, consumer, plain = await one.producer(), await one.consumer(), await one.plain()
        assert producer.direct is not None
        producer.direct.addresses[:] = ["tcp://127.0.0.1:1", "/nowhere/s"]
        await fill(producer, channel, 6)
        receiver = consumer.receiver(channel)
        assert [(await receiver.get()).check() for _ in range(2)] == [0, 1]
        async with receiver.lease(weight=2) as batch:
            assert [each.check() for each in batch] == [2, 3]
        assert [each.check() for each in await plain.receiver(channel).get_batch(weight=2)] == [
            4,
            5,
        ]
        assert consumer.got == (0, 4)
        assert statistics_of(channel.queue).loaded == 6
        await until(lambda: not producer.kept)


async def test_a_producer_of_another_cluster_at_that_address_gets_nobody_anything() -> None:
    channel = items()
    async with world() as one:
        producer, consumer = await one.producer(), await one.consumer()
        other = await Direct.open(b"x" * 32, name="other", listen=["tcp://127.0.0.1:0"])
        assert producer.direct is not None
        producer.direct.addresses[:] = other.addresses
        await fill(producer, channel, 1)
        assert (await consumer.receiver(channel).get()).check() == 0
        assert consumer.got == (0, 1)
        await other.close()


async def test_a_producer_that_ends_in_order_gives_what_it_keeps_to_the_owner() -> None:
    channel = items()
    async with world() as one:
        producer, consumer = await one.producer(), await one.consumer()
        await fill(producer, channel, 5)
        receiver = consumer.receiver(channel)
        assert (await receiver.get()).check() == 0
        await producer.leave()
        assert producer.kept == 0
        assert [(await receiver.get()).check() for _ in range(4)] == [1, 2, 3, 4]
        seen = statistics_of(channel.queue)
        assert seen.loaded >= 4
        assert seen.lost == 0


async def test_what_dies_with_its_producer_is_counted_and_whoever_gets_is_given_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    channel = items()
    async with world() as one:
        dying, living, consumer = (
            await one.producer("dying"), await one.producer("living"), await one.consumer()
        )  # fmt: skip
        await fill(dying, channel, 3)
        sender = living.sender(channel)
        await sender.put(item(9))
        await sender.flush()
        with caplog.at_level(logging.ERROR):
            await dying.die()
            await until(lambda: statistics_of(channel.queue).lost)
        assert "channel 'items': 3 items are lost, since dying was lost before any" in caplog.text
        seen = statistics_of(channel.queue)
        assert (seen.depth, seen.lost, seen.puts, seen.gets) == (1, 3, 4, 0)
        assert (await consumer.receiver(channel).get()).check() == 9
        assert statistics_of(channel.queue).gets == 1


async def test_a_batch_that_is_being_collected_goes_on_without_what_died() -> None:
    channel = items()
    async with world() as one:
        dying, living, consumer = (
            await one.producer("dying"), await one.producer("living"), await one.consumer()
        )  # fmt: skip
        await fill(dying, channel, 2)
        getting = asyncio.create_task(consumer.receiver(channel).get_batch(weight=3))
        await until(lambda: statistics_of(channel.queue).waiting_getters)
        await dying.die()
        await until(lambda: statistics_of(channel.queue).lost == 2)
        await fill_more(living, channel, 3)
        assert [each.check() for each in await getting] == [0, 1, 2]


async def fill_more(producer: Party, channel: Channel[Item], count: int) -> None:
    sender = producer.sender(channel)
    for number in range(count):
        await sender.put(item(number))
    await sender.flush()


@pytest.mark.parametrize("lease", [False, True])
@pytest.mark.parametrize("here", [False, True])
async def test_an_item_that_was_taken_but_not_fetched_when_its_producer_died_is_lost(
    lease: bool, here: bool
) -> None:
    """The consumer has been told of it, and asks the owner in vain."""
    channel = items()
    async with world() as one:
        dying, consumer = await one.producer("dying"), await one.consumer()
        receiver = channel.receiver if here else consumer.receiver(channel)
        assert dying.direct is not None
        await fill(dying, channel, 2)

        async def take() -> None:
            if lease:
                async with receiver.lease(weight=2, at_least=1):
                    raise AssertionError("there was nothing")
            await receiver.get()

        with holding_fetches(dying) as held:
            taking = asyncio.create_task(take())
            await until(lambda: held)
            await dying.die()
        channel.close()
        with pytest.raises(EndOfChannel):
            await taking
        seen = statistics_of(channel.queue)
        assert (seen.lost, seen.gets, seen.depth, seen.leases_out) == (2, 0, 0, 0)


async def test_a_cancelled_get_leaves_the_item_where_it_was() -> None:
    channel = items()
    async with world() as one:
        producer, consumer = await one.producer(), await one.consumer()
        await fill(producer, channel, 2)
        receiver = consumer.receiver(channel)
        with holding_fetches(producer) as held:
            getting = asyncio.create_task(receiver.get())
            await until(lambda: len(held) == 1)
            batch = asyncio.create_task(receiver.get_batch(weight=1))
            await until(lambda: len(held) == 2)
            assert statistics_of(channel.queue).depth == 0
            for task in (getting, batch):
                task.cancel()
            await asyncio.wait([getting, batch])
            await until(lambda: statistics_of(channel.queue).depth == 2)
        assert [(await receiver.get()).check() for _ in range(2)] == [0, 1]
        seen = statistics_of(channel.queue)
        assert (seen.gets, seen.unconfirmed, seen.lost) == (2, 0, 0)


async def test_a_put_that_is_cancelled_or_refused_keeps_nothing() -> None:
    channel = items(1)
    async with world() as one:
        producer = await one.producer()
        await fill(producer, channel, 1)
        sender = producer.sender(channel)
        putting = asyncio.create_task(sender.put(item(1)))
        await until(lambda: statistics_of(channel.queue).waiting_putters)
        assert producer.kept == 2 * SIZE
        putting.cancel()
        await asyncio.wait([putting])
        await until(lambda: producer.kept == SIZE)
        early = asyncio.create_task(sender.put(item(2)))
        await until(lambda: producer.kept == 2 * SIZE)  # it may not have been sent yet
        early.cancel()
        await asyncio.wait([early])
        await until(lambda: producer.kept == SIZE)
        refused = asyncio.create_task(sender.put(item(3)))
        await until(lambda: statistics_of(channel.queue).waiting_putters)
        channel.close()
        with pytest.raises(ChannelClosed):
            await refused
        await until(lambda: producer.kept == SIZE)


@pytest.mark.parametrize("room", [True, False], ids=["shared", "no room"])
async def test_large_arrays_are_copied_a_piece_for_each_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    for module in ("encoded", "wire.pool", "wire.retained_payloads"):
        monkeypatch.setattr(f"rlinf_async.channels.{module}.PIECE_BYTES", SIZE)
    channel = items()
    async with world() as one:
        producer, consumer = await one.producer(), await one.consumer()
        sender, receiver = producer.sender(channel), consumer.receiver(channel)
        await fill(producer, channel, 1)  # room is lent by this
        assert (await receiver.get()).check() == 0
        await until(lambda: not producer.kept)
        if not room:
            monkeypatch.setattr(Pool, "begin", lambda self, buffers: None)
        turns = Turns()
        large = Item(7, np.arange(20 * ELEMENTS))
        await sender.put(large)
        assert turns.stop() >= 20
        assert producer.kept == 20 * SIZE
        assert ((await receiver.get()).values == large.values).all()
        assert consumer.got == (2, 0)
        putting = asyncio.create_task(sender.put(large))
        await until(lambda: not producer.kept)
        await asyncio.sleep(0)
        putting.cancel()
        await asyncio.wait([putting])
        assert putting.cancelled()
        assert producer.kept == 0
        assert statistics_of(channel.queue).depth == 0


async def test_a_fetch_that_outlives_its_direct_connects_to_nobody() -> None:
    async with world() as one:
        producer, consumer = await one.producer(), await one.consumer()
        assert producer.direct is not None
        assert consumer.direct is not None
        left = PayloadRef(0, 1, [SIZE], producer.direct.token, "", producer.direct.addresses)
        await consumer.direct.close()
        assert await consumer.direct.fetch(left) is None
        assert not consumer.direct._links


def arrived(net: Cutter) -> int:
    return sum(passed["to client"] for passed in net.passed)


def arrived_beyond(net: Cutter, before: int) -> bool:
    return arrived(net) > before


async def test_a_cut_in_the_middle_of_a_fetch_costs_nothing() -> None:
    channel = items(32)
    async with world() as one:
        producer, consumer = await one.producer(), await one.consumer()
        assert producer.direct is not None
        async with cutter(producer.direct.addresses[0], None) as net:
            producer.direct.addresses[:] = [net.address]
            await fill(producer, channel, 30)
            receiver = consumer.receiver(channel)
            for number in range(30):
                getting = asyncio.create_task(receiver.get())
                if number:  # the first one connects
                    await until(partial(arrived_beyond, net, arrived(net)))
                    net.cut_all()
                assert (await getting).check() == number
            assert len(net.passed) > 5
            assert consumer.got == (30, 0)
        seen = statistics_of(channel.queue)
        assert (seen.gets, seen.loaded, seen.lost, seen.unconfirmed) == (30, 0, 0, 0)


async def test_a_consumer_that_is_lost_while_it_fetches_leaves_the_item_to_another() -> None:
    channel = items()
    async with world() as one:
        producer, dying, other = (
            await one.producer(), await one.consumer("dying"), await one.plain()
        )  # fmt: skip
        await fill(producer, channel, 2)
        with holding_fetches(producer) as held:
            leasing = asyncio.create_task(take_one(dying, channel))
            await until(lambda: len(held) == 1)
            await dying.die()
            with pytest.raises(ConnectionLost):
                await leasing
        async with other.receiver(channel).lease(weight=2) as batch:
            assert [each.check() for each in batch] == [0, 1]
            assert batch.deliveries == [2, 1]


async def take_one(party: Party, channel: Channel[Item]) -> None:
    async with party.receiver(channel).lease():
        raise AssertionError("it was taken")


async def test_who_does_not_know_the_token_gets_nothing() -> None:
    channel = items()
    async with world() as one:
        producer = await one.producer()
        await fill(producer, channel, 1)
        assert producer.direct is not None
        connection = await connect(
            producer.direct.addresses[0], SECRET, name="guessing", router=Router()
        )
        for token in (b"", bytes(16)):
            said, body = await connection.request("payload.fetch", Fetch(token, 1), reply=Payload)
            assert (said.here, body) == (False, None)
        said, body = await connection.request(
            "payload.fetch", Fetch(producer.direct.token, 1), reply=Payload
        )
        assert isinstance(body, Encoded)
        assert said.here
        connection.close()
        await connection.wait_closed()


async def test_a_producer_that_announces_other_arrays_than_it_has_is_found_out() -> None:
    channel = items()
    async with world() as one:
        producer, consumer = await one.producer(), await one.consumer()
        await fill(producer, channel, 2)
        assert producer.direct is not None
        producer.direct._retained[1] = [bytearray(5)]
        assert (await consumer.receiver(channel).get()).check() == 1
        assert statistics_of(channel.queue).lost == 1
        producer.direct._retained[1] = [bytearray(SIZE)]  # as it was counted


async def fail_under_a_lease(party: Party, channel: Channel[Item], dying: Party) -> None:
    """Take all that there is, while this producer dies, and give it back."""
    with contextlib.suppress(LookupError):
        async with party.receiver(channel).lease(weight=statistics_of(channel.queue).depth):
            await dying.die()
            raise LookupError


async def test_a_batch_without_what_died_is_fetched_once() -> None:
    channel = items(32)
    async with world() as one:
        dying, living, consumer = (
            await one.producer("dying"), await one.producer("living"), await one.consumer()
        )  # fmt: skip
        senders = [dying.sender(channel), living.sender(channel)]
        for number in range(20):
            await senders[number % 2].put(item(number))
        await fail_under_a_lease(consumer, channel, dying)
        before, _ = consumer.got
        with channel.sender.open():
            batch = await consumer.receiver(channel).get_batch(weight=20, at_least=10)
        assert [each.check() for each in batch] == [*range(1, 20, 2)]
        assert consumer.got[0] - before <= 20
        assert statistics_of(channel.queue).lost == 10


async def test_get_nowait_passes_over_what_died() -> None:
    channel = items()
    async with world() as one:
        dying, living, consumer = (
            await one.producer("dying"), await one.producer("living"), await one.consumer()
        )  # fmt: skip
        for number, party in enumerate((dying, dying, living)):
            await party.sender(channel).put(item(number))
        await fail_under_a_lease(consumer, channel, dying)
        await until(lambda: statistics_of(channel.queue).depth == 3)
        receiver = channel.receiver.clone()
        with contextlib.suppress(ChannelEmpty):
            receiver.get_nowait()  # begins to fetch
        got = list[int]()
        while not got:
            with contextlib.suppress(ChannelEmpty):
                got.append(receiver.get_nowait().check())
            await asyncio.sleep(0)
        assert got == [2]
        assert statistics_of(channel.queue).lost == 2
        receiver.close()


async def test_a_put_over_a_lost_connection_keeps_nothing() -> None:
    channel = items()
    async with world() as one:
        producer = await one.producer()
        sender = producer.sender(channel)
        await sender.put(item(0))
        producer.connection.abort("a test")
        assert producer.kept == 0
        for _ in range(3):
            with pytest.raises(ConnectionLost):
                await sender.put(item(1))
        assert producer.kept == 0
