"""How full a key is can be asked of every end, in one call."""

from __future__ import annotations

import asyncio

from rlinf_async.channels import Channel
from rlinf_async.channels.queue import statistics_of
from tests.channels.transport import Transport


async def test_every_end_says_how_full_a_key_is(transport: Transport) -> None:
    channel = Channel(int, name="numbers", capacity=3, max_weight=10)
    sender, receiver = await transport.ends(channel)
    for end in (sender, receiver, channel):
        state = await end.state(key="env")
        assert (state.depth, state.weight, state.room, state.room_weight) == (0, 0, 3, 10)
        assert state.empty
        assert not state.full
    await sender.put(1, key="env", weight=4)
    await sender.put(2, key="env", weight=6)
    await sender.flush()
    for end in (sender, receiver, channel):
        state = await end.state(key="env")
        assert (state.depth, state.weight, state.room, state.room_weight) == (2, 10, 1, 0)
        assert state.full  # by weight
        assert not state.empty
        assert (await end.state()).empty
    assert await receiver.get(key="env") == 1
    for end in (sender, receiver, channel):
        assert (await end.state(key="env")).depth == 1
        assert (await end.statistics()).depth == 1


async def test_the_number_of_items_alone_can_make_a_key_full(transport: Transport) -> None:
    sender, _ = await transport.ends(Channel(int, name="numbers", capacity=2))
    for number in range(2):
        await sender.put(number)
    await sender.flush()
    state = await sender.state()
    assert (state.depth, state.room, state.room_weight) == (2, 0, None)
    assert state.full


async def test_leased_items_are_not_queued_but_not_settled_either(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers", capacity=2))
    await sender.put(1)
    async with receiver.lease():
        state = await sender.state()
        assert (state.depth, state.unsettled) == (0, 1)
    await transport.settle()
    assert (await sender.state()).unsettled == 0


async def test_what_a_waiting_batch_has_collected_is_counted_apart(transport: Transport) -> None:
    """It takes up no room, and stays in the channel if the batch is cancelled."""
    channel = Channel(int, name="numbers", capacity=2)
    sender, receiver = await transport.ends(channel)
    getting = asyncio.create_task(receiver.get_batch(weight=5))
    await transport.settle()
    for number in range(4):
        await sender.put(number)
    await sender.flush()
    await transport.settle()
    for end in (sender, receiver):
        state = await end.state()
        assert (state.depth, state.collected, state.room) == (0, 4, 2)
    assert (statistics_of(channel.queue).depth, statistics_of(channel.queue).collected) == (0, 4)
    getting.cancel()
    await asyncio.wait([getting])
    await transport.settle()
    assert (statistics_of(channel.queue).depth, statistics_of(channel.queue).collected) == (4, 0)
