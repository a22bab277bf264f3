"""Leases: taken but not consumed until the block ends normally."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from rlinf_async.channels import (
    Channel,
    EndOfChannel,
    Lease,
    LeaseLost,
    Receiver,
    Sender,
    WrongItemType,
)
from rlinf_async.channels.key_queue import Outcome
from rlinf_async.channels.queue import statistics_of
from tests.channels.transport import Transport


class Crash(Exception):
    """What goes wrong inside a lease."""


@asynccontextmanager
async def broken_lease(receiver: Receiver[int], weight: int = 1) -> AsyncIterator[Lease[int]]:
    """A lease whose holder breaks where the block ends."""
    with suppress(Crash):
        async with receiver.lease(weight=weight) as batch:
            yield batch
            raise Crash("the worker broke")


async def crash_holding(receiver: Receiver[int], weight: int = 1) -> list[int]:
    """Take a lease and fail inside it; the delivery counts that were seen."""
    async with broken_lease(receiver, weight) as batch:
        return list(batch.deliveries)


async def put_all(sender: Sender[int], count: int) -> None:
    for number in range(count):
        await sender.put(number)


async def test_leaving_a_lease_normally_consumes_its_items(transport: Transport) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    await put_all(sender, 3)
    async with receiver.lease(weight=2) as batch:
        assert list(batch) == [0, 1]
        assert (len(batch), batch[0], batch[-1], list(batch[:1])) == (2, 0, 1, [0])
        assert list(batch.deliveries) == [1, 1]
        assert statistics_of(channel.queue).leases_out == 2
    await transport.settle()
    assert statistics_of(channel.queue).leases_out == 0
    assert await receiver.get() == 2


async def test_an_exception_puts_the_items_back_at_the_head_in_order(
    transport: Transport,
) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    await put_all(sender, 5)
    assert await crash_holding(receiver, weight=3) == [1, 1, 1]
    async with receiver.lease(weight=5) as batch:
        assert list(batch) == [0, 1, 2, 3, 4]
        assert list(batch.deliveries) == [2, 2, 2, 1, 1]
    await transport.settle()
    assert statistics_of(channel.queue).redelivered == 3


async def test_two_leases_returned_in_the_other_order_still_come_in_order(
    transport: Transport,
) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    await put_all(sender, 6)
    async with AsyncExitStack() as outer:
        earlier = await outer.enter_async_context(AsyncExitStack())
        assert list(await earlier.enter_async_context(broken_lease(receiver, 2))) == [0, 1]
        later = await outer.enter_async_context(AsyncExitStack())
        assert list(await later.enter_async_context(broken_lease(receiver, 2))) == [2, 3]
        await earlier.aclose()
        await later.aclose()
    assert [await receiver.get() for _ in range(6)] == list(range(6))


async def test_a_later_lease_that_returns_first_comes_after_the_earlier_one(
    transport: Transport,
) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    await put_all(sender, 6)
    async with broken_lease(receiver, weight=2) as outer:  # the outer lease, after the inner one
        assert list(outer) == [0, 1]
        assert await crash_holding(receiver, weight=2) == [1, 1]
    assert [await receiver.get() for _ in range(6)] == list(range(6))


async def test_a_batch_that_collects_takes_returned_items_first(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    await put_all(sender, 2)
    async with broken_lease(receiver):  # give 0 back while the second batch holds 4
        batch = asyncio.create_task(receiver.get_batch(weight=3))
        await transport.settle()
        await sender.put(2)
        await sender.put(3)
        assert await batch == [1, 2, 3]
        batch = asyncio.create_task(receiver.get_batch(weight=3))
        await sender.put(4)
        await transport.settle()
    await sender.put(5)
    assert await batch == [0, 4, 5]


async def test_leases_nest(transport: Transport) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    await put_all(sender, 3)
    async with receiver.lease() as outer:
        async with broken_lease(receiver):  # only the inner one goes back
            pass
        async with receiver.lease() as inner:
            assert (list(outer), list(inner)) == ([0], [1])
            assert statistics_of(channel.queue).leases_out == 2
    assert await receiver.get() == 2
    assert statistics_of(channel.queue).leases_out == 0


async def test_returned_items_reach_whoever_waits(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    other = receiver.clone()
    await sender.put(0)
    async with broken_lease(receiver):  # the holder broke
        waiting = asyncio.create_task(other.get())
        await transport.settle()
        assert not waiting.done()
    assert await waiting == 0
    other.close()


async def test_items_that_fail_too_often_become_dead_letters(transport: Transport) -> None:
    channel = Channel(int, name="numbers", max_deliveries=2)
    sender, receiver = await transport.ends(channel)
    await put_all(sender, 2)
    assert await crash_holding(receiver) == [1]
    assert await crash_holding(receiver) == [2]
    assert await receiver.get() == 1
    [letter] = channel.dead_letters
    assert (letter.item, letter.deliveries) == (0, 2)
    assert letter.error == "Crash: the worker broke"
    assert statistics_of(channel.queue).dead_letters == 1


async def test_a_cancelled_lease_counts_as_a_delivery(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    await sender.put(0)

    async def hold() -> None:
        async with receiver.lease():
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    await transport.settle()
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    async with receiver.lease() as batch:
        assert list(batch.deliveries) == [2]


async def test_a_lease_takes_by_weight_and_key_as_a_batch_does(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(str, name="words"))
    for word in ("aaa", "bb", "cccc"):
        await sender.put(word, key="env", weight=len(word))
    async with receiver.lease(weight=5, key="env") as batch:
        assert list(batch) == ["aaa", "bb"]
    async with receiver.lease(weight=3, at_least=1, key="env") as batch:
        assert list(batch) == ["cccc"]  # heavier than asked: alone


async def test_returned_items_may_exceed_the_capacity_and_then_puts_wait(
    transport: Transport,
) -> None:
    channel = Channel(int, name="numbers", capacity=2)
    sender, receiver = await transport.ends(channel)
    await put_all(sender, 2)
    async with broken_lease(receiver, weight=2):  # two come back to a full channel
        await sender.put(2)
        await sender.put(3)
    await transport.settle()
    assert statistics_of(channel.queue).depth == 4
    waiting = asyncio.create_task(sender.put(4))
    got = [await receiver.get(), await receiver.get()]
    await transport.settle()
    assert not waiting.done()
    got.append(await receiver.get())
    await waiting
    got += [await receiver.get(), await receiver.get()]
    assert got == [0, 1, 2, 3, 4]


async def hold_while_it_is_taken_back(channel: Channel[int], error: Exception | None) -> None:
    """Hold a lease that the channel takes back, as it does when a connection is cut."""
    async with channel.receiver.lease():
        [delivery] = channel.queue.unsettled()
        channel.queue.unkeyed.settle(delivery, Outcome.FAILED, error="the connection was cut")
        if error is not None:
            raise error


async def test_a_lease_that_was_taken_back_cannot_be_acknowledged() -> None:
    channel = Channel(int, name="numbers")
    channel.sender.put_nowait(0)
    with pytest.raises(LeaseLost, match=r"a lease on channel 'numbers' was taken back"):
        await hold_while_it_is_taken_back(channel, None)
    assert channel.receiver.get_nowait() == 0


async def test_an_error_inside_a_lease_that_was_taken_back_is_the_one_that_is_raised() -> None:
    channel = Channel(int, name="numbers")
    channel.sender.put_nowait(0)
    with pytest.raises(Crash, match="the first cause"):
        await hold_while_it_is_taken_back(channel, Crash("the first cause"))
    assert statistics_of(channel.queue).redelivered == 1


async def test_a_replaced_item_goes_back_as_its_replacement_to_its_place(
    transport: Transport,
) -> None:
    channel = Channel(int, name="numbers", capacity=4, max_deliveries=1)
    sender, receiver = await transport.ends(channel)
    await put_all(sender, 4)
    async with receiver.lease(weight=3) as batch:
        batch.replace(0, 100)
        batch.replace(2, 102)
        assert list(batch) == [0, 1, 2]
    await transport.settle()
    seen = statistics_of(channel.queue)
    assert (seen.leases_out, seen.depth, seen.dead_letters, seen.redelivered) == (0, 3, 0, 0)
    async with receiver.lease(weight=3) as batch:
        assert list(batch) == [100, 102, 3]
        assert list(batch.deliveries) == [1, 1, 1]


async def test_what_a_lease_replaced_is_as_it_was_if_its_block_fails(transport: Transport) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    await put_all(sender, 2)
    async with broken_lease(receiver) as batch:
        batch.replace(0, 100)
    assert [await receiver.get(), await receiver.get()] == [0, 1]


async def test_a_replacement_of_another_type_is_refused_and_the_item_stays(
    transport: Transport,
) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    await put_all(sender, 1)
    with pytest.raises(WrongItemType, match="'numbers'"):
        async with receiver.lease() as batch:
            batch.replace(0, "a text")
    with pytest.raises(IndexError, match="none of index 1"):
        async with receiver.lease() as batch:
            batch.replace(1, 5)
    assert await receiver.get() == 0


async def test_a_replacement_reaches_a_channel_whose_senders_have_closed(
    transport: Transport,
) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    await put_all(sender, 1)
    sender.close()
    with contextlib.suppress(EndOfChannel):
        while True:
            async with receiver.lease() as batch:
                if batch[0] < 3:
                    batch.replace(0, batch[0] + 1)
    await transport.settle()
    assert statistics_of(channel.queue).gets == 1
