"""The life of ends: opened by use, closed, failed; and what the other side sees of it."""

from __future__ import annotations

import asyncio

import pytest

from rlinf_async.channels import (
    Channel,
    ChannelClosed,
    ChannelEmpty,
    ChannelError,
    ChannelFailed,
    EndOfChannel,
    NoReceivers,
)
from rlinf_async.channels.queue import statistics_of
from tests.channels.transport import Transport


async def test_receivers_drain_what_is_left_and_then_end(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    for number in range(3):
        await sender.put(number)
    sender.close()
    assert [number async for number in receiver] == [0, 1, 2]
    with pytest.raises(EndOfChannel, match="'numbers' has ended"):
        await receiver.get()


async def test_the_end_comes_with_the_last_sender_only(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    other = sender.clone()
    await transport.settle()
    waiting = asyncio.create_task(receiver.get())
    sender.close()
    await transport.settle()
    assert not waiting.done()
    other.close()
    with pytest.raises(EndOfChannel):
        await waiting


async def test_a_channel_without_a_sender_yet_has_not_ended() -> None:
    channel = Channel(int, name="numbers")
    with pytest.raises(ChannelEmpty, match="'numbers' is empty"):
        channel.receiver.get_nowait()
    channel.sender.open().close()
    with pytest.raises(EndOfChannel):
        channel.receiver.get_nowait()


@pytest.mark.parametrize("own", [True, False])
async def test_a_sender_that_is_closed_before_it_put_anything_ends_its_channel(own: bool) -> None:
    channel = Channel(int, name="numbers")
    (channel.sender if own else channel.sender.clone()).close()
    with pytest.raises(EndOfChannel):
        channel.receiver.get_nowait()


@pytest.mark.parametrize("own", [True, False])
async def test_a_receiver_that_is_closed_before_it_got_anything_refuses_puts(own: bool) -> None:
    channel = Channel(int, name="numbers")
    (channel.receiver if own else channel.receiver.clone()).close()
    with pytest.raises(NoReceivers):
        channel.sender.put_nowait(0)


async def test_an_unused_end_of_an_ended_channel_can_be_closed() -> None:
    closed, failed = Channel(int, name="closed"), Channel(int, name="failed")
    closed.close()
    failed.fail("no more")
    for channel in (closed, failed):
        channel.sender.close()
        channel.receiver.close()
        assert not channel.queue.senders
        assert not channel.queue.receivers


async def test_the_end_reaches_every_waiting_get_under_every_key(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    tasks: list[asyncio.Task[object]] = [
        asyncio.create_task(receiver.get()),
        asyncio.create_task(receiver.get()),
        asyncio.create_task(receiver.get(key="env")),
        asyncio.create_task(receiver.get_batch(weight=4, key=7)),
    ]
    await transport.settle()
    sender.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [EndOfChannel] * 4


async def test_a_put_that_waits_is_delivered_before_the_end(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers", capacity=1))
    other = sender.clone()
    await sender.put(0)
    waiting = asyncio.create_task(other.put(1))
    await transport.settle()
    sender.close()
    assert [await receiver.get(), await receiver.get()] == [0, 1]
    await waiting
    other.close()
    with pytest.raises(EndOfChannel):
        await receiver.get()


async def test_a_closed_end_that_is_used_again_raises(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    sender.close()
    sender.close()
    receiver.close()
    receiver.close()
    with pytest.raises(ChannelClosed, match="'numbers' was closed"):
        await sender.put(1)
    with pytest.raises(ChannelClosed, match="'numbers' was closed"):
        await receiver.get()
    with pytest.raises(ChannelClosed):
        await anext(receiver)
    with pytest.raises(ChannelClosed):
        sender.open()


async def test_closing_a_receiver_wakes_its_own_waiting_get(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    other = receiver.clone()
    await transport.settle()
    waiting = asyncio.create_task(receiver.get_batch(weight=2))
    await transport.settle()
    await sender.put(1)
    receiver.close()
    with pytest.raises(ChannelClosed):
        await waiting
    assert await other.get() == 1  # what the batch had collected stays in the channel
    other.close()


async def test_closing_a_sender_wakes_its_own_waiting_put(transport: Transport) -> None:
    channel = Channel(int, name="numbers", capacity=1)
    sender, receiver = await transport.ends(channel)
    other = sender.clone()
    await sender.put(0)
    await transport.settle()
    waiting = asyncio.create_task(sender.put(1))
    await transport.settle()
    sender.close()
    with pytest.raises(ChannelClosed):
        await waiting
    assert await receiver.get() == 0
    await other.put(2)
    assert await receiver.get() == 2
    assert statistics_of(channel.queue).puts == 2
    other.close()


async def test_puts_raise_once_every_receiver_has_closed(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers", capacity=1))
    await sender.put(0)
    await sender.put(0, key="env")
    tasks = [asyncio.create_task(sender.put(1, key=key)) for key in (None, None, "env")]
    await transport.settle()
    receiver.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [NoReceivers] * 3
    with pytest.raises(NoReceivers, match="'numbers' has no receiver left"):
        await sender.put(2)


async def test_a_new_receiver_makes_a_channel_usable_again(transport: Transport) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    await sender.put(0)
    receiver.close()
    await transport.settle()
    with channel.receiver.clone() as later:
        await sender.put(1)
        assert [await later.get(), await later.get()] == [0, 1]


async def test_closing_the_channel_keeps_what_is_queued(transport: Transport) -> None:
    channel = Channel(int, name="numbers", capacity=1)
    sender, receiver = await transport.ends(channel)
    await sender.put(0)
    waiting = asyncio.create_task(sender.put(1))
    await transport.settle()
    channel.close()
    with pytest.raises(ChannelClosed, match="'numbers' was closed"):
        await waiting
    with pytest.raises(ChannelClosed, match="'numbers' was closed"):
        await sender.put(2)
    assert [number async for number in receiver] == [0]


async def test_closing_the_channel_ends_waiting_gets(transport: Transport) -> None:
    channel = Channel(int, name="numbers")
    _, receiver = await transport.ends(channel)
    waiting = asyncio.create_task(receiver.get())
    await transport.settle()
    channel.close()
    with pytest.raises(EndOfChannel):
        await waiting


async def test_a_failure_reaches_every_waiting_use_of_both_sides(transport: Transport) -> None:
    channel = Channel(int, name="numbers", capacity=1)
    sender, receiver = await transport.ends(channel)
    await sender.put(0)
    tasks: list[asyncio.Task[object]] = [
        asyncio.create_task(sender.put(1)),
        asyncio.create_task(receiver.get(key="env")),
        asyncio.create_task(receiver.get_batch(weight=2, key="env")),
    ]
    await transport.settle()
    sender.clone().fail(ValueError("the simulator diverged"))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [ChannelFailed] * 3
    for result in results:
        assert "'numbers' failed: ValueError: the simulator diverged" in str(result)


async def test_a_failure_reaches_every_later_use_of_both_sides(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    other = sender.clone()
    await sender.put(0)
    sender.fail("out of tokens")
    await transport.settle()
    with pytest.raises(ChannelFailed, match="out of tokens"):
        await other.put(1)
    other.close()
    for _ in range(2):
        with pytest.raises(ChannelFailed, match="out of tokens"):
            await receiver.get()
    with pytest.raises(ChannelFailed, match="out of tokens"):
        async with receiver.lease():
            pytest.fail("a failed channel granted a lease")


async def test_a_failure_is_chained_to_its_cause_in_this_process() -> None:
    channel = Channel(int, name="numbers")
    cause = ValueError("the simulator diverged")
    waiting = asyncio.create_task(channel.receiver.get())
    await asyncio.sleep(0)
    channel.fail(cause)
    channel.fail("the first error stays")
    with pytest.raises(ChannelFailed) as first:
        await waiting
    with pytest.raises(ChannelFailed) as second:
        await channel.receiver.get()
    assert first.value.__cause__ is cause
    assert second.value.__cause__ is cause
    assert first.value is not second.value


def test_a_failed_channel_says_so_rather_than_full_or_empty() -> None:
    channel = Channel(int, name="numbers", capacity=1)
    channel.sender.put_nowait(0)
    channel.receiver.open()
    channel.fail("broken")
    with pytest.raises(ChannelFailed):
        channel.sender.put_nowait(1)
    with pytest.raises(ChannelFailed):
        channel.receiver.get_nowait()


def test_everything_that_a_channel_raises_is_a_channel_error() -> None:
    channel = Channel(int, name="numbers")
    channel.sender.open().close()
    with pytest.raises(ChannelError):
        channel.receiver.get_nowait()


async def test_ends_are_counted_from_their_first_use() -> None:
    channel = Channel(int, name="numbers")
    assert (statistics_of(channel.queue).senders, statistics_of(channel.queue).receivers) == (0, 0)
    await channel.sender.put(1)
    with channel.receiver as receiver, receiver.clone():
        seen = statistics_of(channel.queue)
        assert (seen.senders, seen.receivers) == (1, 2)
    seen = statistics_of(channel.queue)
    assert (seen.senders, seen.receivers) == (1, 0)


async def test_an_end_names_its_channel_and_type(transport: Transport) -> None:
    for end in await transport.ends(Channel(int, name="numbers")):
        assert (end.channel_name, end.item_type) == ("numbers", int)
        assert repr(end).endswith("of 'numbers' [int]>")


def test_a_channel_shows_its_name_and_depth() -> None:
    channel = Channel(int, name="numbers", capacity=3)
    channel.sender.put_nowait(1)
    assert repr(channel) == "<Channel 'numbers' depth=1/3>"
    assert (channel.name, channel.item_type) == ("numbers", int)
