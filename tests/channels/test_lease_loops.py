"""Working off a channel lease by lease."""

from __future__ import annotations

import contextlib

import pytest

from rlinf_async.channels import Channel, EndOfChannel
from tests.channels.transport import Transport


async def test_leases_go_on_until_the_channel_ends(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    for number in range(5):
        await sender.put(number)
    sender.close()
    seen = []
    with contextlib.suppress(EndOfChannel):
        while True:
            async with receiver.lease(weight=2) as items:
                seen.append(list(items))
    assert seen == [[0, 1], [2, 3], [4]]
    assert (await receiver.statistics()).leases_out == 0


async def test_a_lease_that_fails_in_a_loop_goes_back(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    await sender.put(1)

    async def work() -> None:
        with contextlib.suppress(EndOfChannel):
            while True:
                async with receiver.lease():
                    raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await work()
    async with receiver.lease() as items:
        assert (list(items), items.deliveries) == ([1], [2])


async def test_the_end_of_another_channel_inside_a_lease_does_not_look_like_the_end_of_this_one(
    transport: Transport,
) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    await sender.put(1)
    with pytest.raises(RuntimeError, match="inside a lease of channel 'numbers'"):
        async with receiver.lease():
            raise EndOfChannel("channel 'others' has ended")
    assert await receiver.get() == 1
