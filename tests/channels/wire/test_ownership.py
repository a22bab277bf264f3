"""What the owner of a channel does when those who use it cancel, close, fail or disappear."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rlinf_async.channels import (
    Channel,
    ChannelClosed,
    ChannelError,
    ConnectionLost,
    EndOfChannel,
    ItemTooLarge,
    Latest,
    LatestReceiver,
    LeaseLost,
    MalformedFrame,
    NoReceivers,
    Receiver,
    Sender,
    WrongItemType,
    current_party,
)
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import ChannelClient, Connection, EndRef
from rlinf_async.channels.wire.codec import encode
from rlinf_async.testing import wait_all_blocked
from tests.channels.wire.harness import (
    PATIENCE,
    Wired,
    anything_fits,
    remote_pair,
    until,
    wired,
)


class Sample(msgspec.Struct):
    """Something with an array."""

    number: int
    values: NDArray[np.float32] | None = None


class Versioned(msgspec.Struct):
    """Something that weights of a version have made."""

    version: int


async def filled(channel: Channel[int], count: int) -> None:
    with channel.sender.clone("filler") as sender:
        for number in range(count):
            await sender.put(number)


async def cut(connection: Connection, owner: Wired) -> None:
    """Lose this connection as if its process had died."""
    connection.abort("a test")
    await connection.wait_closed()
    await until(lambda: connection.closed and not owner.server.connections)


async def test_an_item_with_a_large_array_passes_to_a_local_receiver() -> None:
    channel = Channel(Sample, name="samples")
    async with remote_pair(channel) as (sender, _):
        await sender.put(Sample(1, np.arange(1_000_000, dtype=np.float32)))
        found = await channel.receiver.get()
        assert found.values is not None
        assert found.values[-1] == 999_999
        found.values[0] = 7


async def test_a_forwarded_item_is_never_decoded_by_the_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = Channel(Sample, name="samples")
    async with remote_pair(channel) as (sender, receiver):
        monkeypatch.setattr(channel.queue, "decode", lambda item: pytest.fail("decoded"))
        await sender.put(Sample(1))
        assert (await receiver.get()).number == 1


async def test_a_wrong_item_is_refused_before_it_is_sent() -> None:
    channel = Channel(Sample, name="samples")
    async with remote_pair(channel) as (sender, _):
        wrong: Any = "text"
        with pytest.raises(WrongItemType, match="channel 'samples' carries Sample, not str"):
            await sender.put(wrong)
        bad: Any = np.array([object()])
        with pytest.raises(WrongItemType, match=r"'samples' .*: Sample\.values: .*Python objects"):
            await sender.put(Sample(1, bad))
        assert statistics_of(channel.queue).puts == 0


async def test_an_item_that_lies_about_its_type_is_buried_and_the_rest_stays() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, receiver):
        liar: Any = sender
        await sender.put(1)
        liar._wire.fits = anything_fits
        await liar.put("two")
        await sender.put(3)
        local = channel.receiver
        with pytest.raises(MalformedFrame, match="not a int"):
            await local.get_batch(weight=3)
        assert await local.get_batch(weight=2) == [1, 3]
        [letter] = channel.dead_letters
        assert isinstance(letter.item, Encoded)
        await liar.put("four")
        with pytest.raises(
            MalformedFrame, match="channel 'numbers' of owner: what arrived is not a int"
        ):
            await receiver.get()


async def test_an_item_that_cannot_be_read_is_buried_and_its_neighbours_stay() -> None:
    channel = Channel(int, name="numbers", max_deliveries=2)
    async with remote_pair(channel) as (sender, receiver):
        liar: Any = sender
        liar._wire.fits = anything_fits

        async def put_three() -> None:
            for item in (1, "text", 3):
                await liar.put(item)

        await put_three()
        with pytest.raises(MalformedFrame, match=r"'numbers' of owner: .* not a int: Expected"):
            await receiver.get_batch(weight=3)
        assert await receiver.get_batch(weight=2) == [1, 3]
        await put_three()
        with pytest.raises(MalformedFrame, match="declare the same type"):
            async with receiver.lease(weight=3):
                pytest.fail("it was handed out")
        async with receiver.lease(weight=2) as taken:
            assert list(taken) == [1, 3]
            assert taken.deliveries == [1, 1]
        await until(lambda: not statistics_of(channel.queue).leases_out)
        assert len(channel.dead_letters) == 2
        assert "Expected `int`, got `str`" in channel.dead_letters[0].error


async def test_a_local_item_that_cannot_travel_is_buried_and_named() -> None:
    channel = Channel(Sample, name="samples")
    async with remote_pair(channel) as (_, receiver):
        bad: Any = np.array([object()])
        local = channel.sender
        channel.queue.fits = anything_fits
        await local.put(Sample(1))
        await local.put(Sample(2, bad))
        with pytest.raises(WrongItemType, match=r"'samples': Sample\.values"):
            await receiver.get_batch(weight=2)
        assert (await receiver.get()).number == 1
        assert channel.dead_letters[0].item.number == 2


async def test_a_batch_that_is_too_large_stays_in_the_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = Channel(bytes, name="blobs")
    async with remote_pair(channel) as (_, receiver):
        monkeypatch.setattr("rlinf_async.channels.wire.frames.MAX_MESSAGE_BYTES", 300_000)
        for _ in range(2):
            await channel.sender.put(bytes(200_000))
        with pytest.raises(ItemTooLarge, match=r"'blobs'.*smaller batch"):
            await receiver.get_batch(weight=2)
        with pytest.raises(ItemTooLarge, match=r"'blobs'.*smaller batch"):
            async with receiver.lease(weight=2):
                pytest.fail("it was handed out")
        assert statistics_of(channel.queue).leases_out == 0
        assert len(await receiver.get()) == 200_000


@pytest.mark.parametrize("turns", range(14))
async def test_a_get_cancelled_at_any_point_leaves_the_items_in_order(turns: int) -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (_, receiver):
        await filled(channel, 3)
        getting = asyncio.create_task(receiver.get())
        for _ in range(turns):
            await asyncio.sleep(0)
        getting.cancel()
        [first] = await asyncio.gather(getting, return_exceptions=True)
        taken = [] if isinstance(first, asyncio.CancelledError) else [first]
        rest = await receiver.get_batch(weight=3 - len(taken))
        assert taken + rest == [0, 1, 2]


@pytest.mark.parametrize("turns", range(14))
async def test_a_put_cancelled_at_any_point_leaves_no_item(turns: int) -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        putting = asyncio.create_task(sender.put(1))
        for _ in range(turns):
            await asyncio.sleep(0)
        putting.cancel()
        [outcome] = await asyncio.gather(putting, return_exceptions=True)
        expected = 0 if isinstance(outcome, asyncio.CancelledError) else 1
        assert (await sender.statistics()).depth == expected


@pytest.mark.parametrize("turns", range(14))
async def test_a_lease_cancelled_at_any_point_counts_only_what_was_held(turns: int) -> None:
    channel = Channel(int, name="numbers")

    async def hold(receiver: Receiver[int]) -> None:
        async with receiver.lease() as batch:
            held.append(batch[0])
            await asyncio.Event().wait()

    async with remote_pair(channel) as (_, receiver):
        await filled(channel, 1)
        held: list[int] = []
        holding = asyncio.create_task(hold(receiver))
        for _ in range(turns):
            await asyncio.sleep(0)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        async with receiver.lease() as batch:
            assert [*batch] == [0]
            assert batch.deliveries == [1 + len(held)]


async def test_a_lost_connection_gives_its_leases_back_in_order_with_their_count() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        await filled(channel, 5)
        async with asyncio.timeout(PATIENCE):
            _, first = await receiver._take(2, None, None)
            _, second = await receiver._take(2, None, None)
        assert [*first, *second] == [0, 1, 2, 3]
        await cut(connection, owner)
        with channel.receiver.clone("after") as after:
            async with after.lease(weight=5) as batch:
                assert [*batch] == [0, 1, 2, 3, 4]
                assert batch.deliveries == [2, 2, 2, 2, 1]
        assert statistics_of(channel.queue).redelivered == 4


async def test_a_lease_whose_connection_was_lost_cannot_be_acknowledged() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        await filled(channel, 1)
        with pytest.raises(LeaseLost, match="connection to owner was lost"):
            async with receiver.lease():
                await cut(connection, owner)


async def test_whoever_left_a_lease_knows_that_its_items_are_consumed() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        await filled(channel, 1)
        async with receiver.lease():
            pass
        await cut(connection, owner)
        assert statistics_of(channel.queue).redelivered == 0


async def test_a_connection_lost_before_the_acknowledgement_arrived_is_reported() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        await filled(channel, 1)
        delivery, _ = await receiver._take(1, None, None)
        connection.outbox.pause()  # it is not sent
        leaving = asyncio.create_task(receiver._acknowledge(delivery))
        await asyncio.sleep(0)
        await cut(connection, owner)
        with pytest.raises(LeaseLost, match="connection to owner was lost"):
            await leaving
        async with channel.receiver.lease() as batch:
            assert batch.deliveries == [2]


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_acknowledgement_holds(turns: int) -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (_, receiver):
        await filled(channel, 2)
        delivery, _ = await receiver._take(1, None, None)
        leaving = asyncio.create_task(receiver._acknowledge(delivery))
        for _ in range(turns):
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert await receiver.get() == 1
        assert statistics_of(channel.queue).leases_out == int(turns == 0)  # never begun


async def test_a_lease_that_is_not_held_cannot_be_acknowledged() -> None:
    async with remote_pair(Channel(int, name="numbers")) as (_, receiver):
        with pytest.raises(LeaseLost, match="the lease is not held by worker"):
            await receiver._acknowledge((77, 0, 1))


async def test_a_lost_connection_abandons_its_waits() -> None:
    channel = Channel(int, name="numbers", capacity=1)
    empty = Channel(int, name="empty")
    async with wired() as owner:
        connection = await owner.join()
        sender = owner.sender(channel, connection)
        waiting = [
            asyncio.create_task(owner.receiver(empty, connection).get()),
            asyncio.create_task(sender.put(1)),
            asyncio.create_task(sender.put(2)),
        ]
        await until(lambda: len(channel.waits()) + len(empty.waits()) == 2)
        await cut(connection, owner)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(outcomes[0], ConnectionLost)
        assert isinstance(outcomes[2], ConnectionLost)
        assert channel.waits() == empty.waits() == []
        assert statistics_of(channel.queue).depth == 1
        await empty.sender.put(5)
        assert await empty.receiver.get() == 5


async def test_items_on_their_way_to_a_lost_connection_go_back_to_the_head() -> None:
    channel = Channel(bytes, name="blobs")
    async with wired() as owner:
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        transport: Any = connection.transport
        transport.pause_reading()
        for letter in b"abc":
            await channel.sender.put(bytes([letter]) * 2_000_000)
        getting = [asyncio.create_task(receiver.get()) for _ in range(2)]
        await until(lambda: statistics_of(channel.queue).gets == 2)
        await cut(connection, owner)
        await asyncio.gather(*getting, return_exceptions=True)
        local = channel.receiver
        assert [(await local.get())[:1] for _ in range(3)] == [b"a", b"b", b"c"]
        assert statistics_of(channel.queue).unconfirmed == 2


async def test_an_item_within_the_lag_whose_process_dies_is_counted_as_one_of_a_get() -> None:
    channel = Channel(Versioned, name="samples")
    async with wired() as owner:
        connection = await owner.join()
        receiver = owner.receiver(channel, connection)
        getting = asyncio.create_task(receiver.get_within_lag(current=3, max_lag=2))
        await until(channel.waits)
        connection.outbox.pause()  # that it was taken is not sent
        await channel.sender.put(Versioned(2))
        assert (await getting).lag == 1
        await cut(connection, owner)
        seen = await channel.statistics()
        assert (seen.unconfirmed, seen.redelivered) == (1, 0)
        async with channel.receiver.lease() as batch:
            assert batch.deliveries == [1]


async def test_ends_that_the_runtime_opened_outlive_the_connection_until_released() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        first, second = await owner.join("w#0"), await owner.join("w#1")
        ref = owner.channels.end_ref(channel.sender, "w")
        await owner_put(first, ref, 1)
        first.abort("a test")
        await until(lambda: len(owner.server.connections) == 1)
        await owner_put(second, ref, 2)
        assert statistics_of(channel.queue).senders == 1
        owner.channels.release(ref.number)
        owner.channels.release(ref.number)
        assert await channel.receiver.get_batch(weight=9) == [1, 2]
        with pytest.raises(ChannelClosed, match=f"end {ref.number} of w#1 was closed"):
            await owner_put(second, ref, 3)
        second.close()


async def owner_put(connection: Connection, ref: EndRef, number: int) -> None:
    sender = ChannelClient(connection).end(ref, int)
    assert isinstance(sender, Sender)
    await sender.put(number)


async def test_clones_of_a_lost_connection_are_closed() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        sender = owner.sender(channel, connection)
        clone = sender.clone("helper")
        sender.close()
        await clone.put(1)
        assert statistics_of(channel.queue).senders == 1
        await cut(connection, owner)
        assert statistics_of(channel.queue).senders == 0
        assert await channel.receiver.get() == 1
        with pytest.raises(EndOfChannel):
            await channel.receiver.get()


async def test_a_clone_of_a_closed_channel_says_so_when_it_is_used() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        channel.close()
        clone = sender.clone()
        with pytest.raises(ChannelClosed, match="'numbers' was closed"):
            await clone.put(1)
        clone.close()


async def test_the_nowait_forms_say_that_the_channel_lives_elsewhere() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, receiver):
        with pytest.raises(
            ChannelError, match=r"'numbers' lives in another process \(owner\).*put"
        ):
            sender.put_nowait(1)
        with pytest.raises(ChannelError, match=r"lives in another process .*await get\(\)"):
            receiver.get_nowait()


async def test_a_wait_is_reported_with_the_remote_workers_method() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (_, receiver):
        current_party.set("Doubler[1].run")
        getting = asyncio.create_task(receiver.get())
        await until(channel.waits)
        [wait] = channel.waits()
        assert (wait.party, wait.unblockers) == ("Doubler[1].run", ("w",))
        getting.cancel()
        await asyncio.gather(getting, return_exceptions=True)


async def test_a_settled_lease_is_settled_before_anything_later() -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, receiver):
        await filled(channel, 2)
        async with receiver.lease(weight=2):
            pass
        assert (await sender.statistics()).leases_out == 0


async def test_closing_the_last_remote_receiver_ends_waiting_puts() -> None:
    channel = Channel(int, name="numbers", capacity=1)
    async with remote_pair(channel) as (sender, receiver):
        await sender.put(1)
        putting = asyncio.create_task(sender.put(2))
        await until(channel.waits)
        receiver.close()
        with pytest.raises(NoReceivers):
            await putting


async def test_an_end_that_is_itself_remote_cannot_be_given_on() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner, wired() as other:
        connection = await owner.join()
        sender = owner.sender(channel, connection)
        with pytest.raises(ChannelError, match="its channel does not live in this one"):
            other.channels.end_ref(sender, "w")
        connection.close()


async def test_an_end_used_as_another_kind_is_refused() -> None:
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        connection = await owner.join()
        ref = owner.channels.end_ref(channel.receiver, "w")
        with pytest.raises(ChannelError, match="is a receiver: it cannot do this"):
            await owner_put(connection, EndRef(ref.number, "sender", "numbers"), 1)
        connection.close()


async def test_a_slow_consumer_bounds_what_its_producer_sends() -> None:
    channel = Channel(bytes, name="blobs", capacity=2)
    async with wired() as owner:
        connection = await owner.join()
        sender = owner.sender(channel, connection)

        async def produce() -> None:
            for _ in range(50):
                await sender.put(bytes(500_000))

        producing = asyncio.create_task(produce())
        local = channel.receiver
        for taken in range(50):
            await until(lambda: channel.waits() or producing.done())
            assert connection.sent_bytes <= (taken + 3) * 501_000
            assert len(await local.get()) == 500_000
        await producing
        connection.close()


async def test_latest_values_reach_other_processes_and_are_encoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latest = Latest(Sample, name="weights")
    async with wired() as owner:
        encoded: list[Any] = []

        def counted(value: Any) -> Encoded:
            encoded.append(value)
            return encode(value)

        connections = [await owner.join(f"w{number}") for number in range(3)]
        receivers = [owner.latest_receiver(latest, one) for one in connections]
        monkeypatch.setattr(latest, "_encode", counted)
        await latest.sender.publish(Sample(1, np.ones(100_000, np.float32)))
        for receiver in receivers:
            found = await receiver.get()
            assert found.values is not None
            assert found.values.sum() == 100_000
        assert len(encoded) == 1
        for one in connections:
            one.close()


async def next_value(receiver: LatestReceiver[int]) -> int:
    return await receiver.get()


async def test_a_wait_for_a_newer_version_ends_with_its_connection() -> None:
    latest = Latest(int, name="version")
    async with wired() as owner:
        connection = await owner.join()
        waiting = asyncio.create_task(next_value(owner.latest_receiver(latest, connection)))
        await until(latest.waits)
        await cut(connection, owner)
        await wait_all_blocked()
        assert latest.waits() == []
        with pytest.raises(ConnectionLost):
            await waiting
