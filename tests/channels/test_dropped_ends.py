"""An end that is dropped without being closed says so, and closes: nobody waits for it for ever."""

from __future__ import annotations

import asyncio
import gc

import pytest

from rlinf_async.channels import Channel, EndOfChannel, NoReceivers
from tests.channels.transport import Transport


async def test_a_clone_that_is_dropped_open_is_closed_with_a_warning(transport: Transport) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    clone = sender.clone()
    await clone.put(1)
    sender.close()
    with pytest.warns(ResourceWarning, match="a sender of channel 'numbers' was dropped while"):
        del clone
    assert await receiver.get() == 1
    with pytest.raises(EndOfChannel):
        await receiver.get()


async def test_a_new_receiver_that_is_dropped_open_is_closed_with_a_warning() -> None:
    channel = Channel(int, name="numbers")
    receiver = channel.receiver.clone()
    with pytest.warns(ResourceWarning, match="a receiver of channel 'numbers' was dropped while"):
        del receiver
    await asyncio.sleep(0)
    with pytest.raises(NoReceivers):
        await channel.sender.put(1)


async def test_ends_that_go_with_their_channel_say_nothing(
    recwarn: pytest.WarningsRecorder,
) -> None:
    channel = Channel(int, name="numbers")
    clone, other = channel.sender.clone(), channel.receiver.clone()
    await clone.put(1)
    del channel, clone, other
    gc.collect()
    assert [one for one in recwarn if one.category is ResourceWarning] == []


async def test_an_end_that_was_closed_says_nothing(
    recwarn: pytest.WarningsRecorder,
) -> None:
    channel = Channel(int, name="numbers")
    closed = channel.receiver.clone()
    closed.close()
    del closed
    gc.collect()
    assert [one for one in recwarn if one.category is ResourceWarning] == []
