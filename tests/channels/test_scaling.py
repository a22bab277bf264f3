"""What happens once does not cost more because much else is there: no scan of all keys, ends, links
or workers for one event. Counted in lines of code that run, which no busy machine changes."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from types import CodeType, FrameType
from typing import Any, Final

import pytest

from rlinf_async.channels import Channel, EndOfChannel, Latest
from rlinf_async.testing import wait_all_blocked
from tests.channels.wire.harness import remote_pair, settle, wired

SMALL: Final = 300
"""More than any table of a fixed size here has."""
GROWTH: Final = 2.6
"""How much more twice as many may cost: twice, and a logarithm. A scan costs four times."""

FEW: Final = 80
"""Lines for each: something that begins late may grow faster up to here."""

Scenario = Callable[[int, Callable[[], None]], Awaitable[None]]
"""Does something with so many; what comes after the call of its argument is counted."""


async def counted(scenario: Scenario, size: int) -> Counter[str]:
    """How many lines of each function ran, by name: each turn of a loop is one at least."""
    lines: Counter[str] = Counter()
    ours: dict[CodeType, bool] = {}

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code not in ours:
            ours[code] = "channels/" in code.co_filename
        return count if ours[code] else None

    def count(frame: FrameType, event: str, _: Any) -> Any:
        lines[frame.f_code.co_qualname] += 1
        return count

    before = sys.gettrace()
    try:
        await scenario(size, lambda: sys.settrace(enter))
    finally:
        sys.settrace(before)
    return lines


# ---- local


async def keys_that_wait(size: int, begin: Callable[[], None]) -> None:
    channel = Channel(int, name="n")
    gets = [asyncio.ensure_future(channel.receiver.get(key=key)) for key in range(size)]
    await wait_all_blocked()
    begin()
    for key in range(size):
        await channel.sender.put(key, key=key)
    await asyncio.gather(*gets)


async def keys_with_items(size: int, begin: Callable[[], None]) -> None:
    channel = Channel(int, name="n")
    begin()
    for key in range(size):
        await channel.sender.put(key, key=key)
    for key in range(size):
        await channel.receiver.get(key=key)


async def senders_that_close(size: int, begin: Callable[[], None]) -> None:
    channel = Channel(int, name="n")
    senders = [channel.sender.clone() for _ in range(size)]
    for key in range(size):
        await channel.sender.put(key, key=key)
    begin()
    for sender in senders:
        sender.close()


async def only_senders_that_close(size: int, begin: Callable[[], None]) -> None:
    channel = Channel(int, name="n")
    with channel.sender.clone() as sender:
        for key in range(size):
            await sender.put(key, key=key)
    begin()
    for _ in range(size):
        channel.sender.clone().close()


async def receivers_that_close(size: int, begin: Callable[[], None]) -> None:
    channel = Channel(int, name="n")
    receivers = [channel.receiver.clone() for _ in range(size)]
    keep = channel.receiver.open()
    for key in range(size):
        await channel.sender.put(key, key=key)
    begin()
    for receiver in receivers:
        receiver.close()
    keep.close()


async def only_receivers_that_close(size: int, begin: Callable[[], None]) -> None:
    channel = Channel(int, name="n")
    for key in range(size):
        await channel.sender.put(key, key=key)
    begin()
    for _ in range(size):
        channel.receiver.clone().close()


async def senders_that_close_while_they_wait(size: int, begin: Callable[[], None]) -> None:
    channel = Channel(int, name="n", capacity=1)
    keep = channel.sender.open()
    senders = [channel.sender.clone() for _ in range(size)]
    puts = []
    for key, sender in enumerate(senders):
        await sender.put(0, key=key)
        puts.append(asyncio.ensure_future(sender.put(1, key=key)))
    await wait_all_blocked()
    begin()
    for sender in senders:
        sender.close()
    await asyncio.gather(*puts, return_exceptions=True)
    keep.close()


async def receivers_that_close_while_they_wait(size: int, begin: Callable[[], None]) -> None:
    channel = Channel(int, name="n")
    receivers = [channel.receiver.clone() for _ in range(size)]
    gets = [asyncio.ensure_future(one.get(key=key)) for key, one in enumerate(receivers)]
    await wait_all_blocked()
    begin()
    for receiver in receivers:
        receiver.close()
    await asyncio.gather(*gets, return_exceptions=True)


async def receivers_of_one_key(size: int, begin: Callable[[], None]) -> None:
    channel = Channel(int, name="n", capacity=size)
    receivers = [channel.receiver.clone() for _ in range(size)]
    gets = [asyncio.ensure_future(one.get()) for one in receivers]
    await wait_all_blocked()
    begin()
    for number in range(size // 2):
        await channel.sender.put(number)
    for get in gets[size // 2 :]:
        get.cancel()
    await asyncio.gather(*gets, return_exceptions=True)
    for receiver in receivers:
        receiver.close()


async def puts_that_wait(size: int, begin: Callable[[], None]) -> None:
    channel = Channel(int, name="n", capacity=1)
    senders = [channel.sender.clone() for _ in range(size)]
    puts = [asyncio.ensure_future(one.put(0)) for one in senders]
    await wait_all_blocked()
    begin()
    for _ in range(size // 2):
        await channel.receiver.get()
    for put in puts[size // 2 + 1 :]:
        put.cancel()
    await asyncio.gather(*puts, return_exceptions=True)
    for sender in senders:
        sender.close()


async def leases_at_the_end(size: int, begin: Callable[[], None]) -> None:
    """Everybody holds an item of a key of their own, and others wait for it, when the channel
    ends."""
    channel = Channel(int, name="n")
    finish = asyncio.Event()

    async def hold(key: int) -> None:
        async with channel.receiver.lease(key=key):
            await finish.wait()

    sender = channel.sender.open()
    for key in range(size):
        await sender.put(key, key=key)
    holding = [asyncio.ensure_future(hold(key)) for key in range(size)]
    await wait_all_blocked()
    waiting = [asyncio.ensure_future(channel.receiver.get(key=key)) for key in range(size)]
    await wait_all_blocked()
    begin()
    sender.close()
    finish.set()
    await asyncio.gather(*holding)
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, EndOfChannel)


async def keys_that_end(size: int, begin: Callable[[], None]) -> None:
    channel = Channel(int, name="n")
    with channel.sender as sender:
        for key in range(size):
            await sender.put(key, key=key)
    begin()
    for key in range(size):
        await channel.receiver.get(key=key)
    for key in range(size):
        with pytest.raises(EndOfChannel):
            await channel.receiver.get(key=key)


async def readers_of_a_latest(size: int, begin: Callable[[], None]) -> None:
    latest = Latest(int, name="n")
    gets = [asyncio.ensure_future(latest.receiver.get()) for _ in range(size)]
    await wait_all_blocked()
    begin()
    for get in gets[size // 2 :]:
        get.cancel()
    await latest.sender.publish(1)
    await asyncio.gather(*gets, return_exceptions=True)


# ---- remote


async def remote_keys_that_wait(size: int, begin: Callable[[], None]) -> None:
    channel = Channel(int, name="n")
    async with remote_pair(channel) as (_, receiver):
        begin()
        gets = [asyncio.ensure_future(receiver.get(key=key)) for key in range(size)]
        await asyncio.sleep(0)
        for key in range(size):
            await channel.sender.put(key, key=key)
        await asyncio.gather(*gets)
        sys.settrace(None)


async def remote_keys_one_after_the_other(size: int, begin: Callable[[], None]) -> None:
    channel = Channel(int, name="n", capacity=8)
    async with remote_pair(channel) as (sender, receiver):
        begin()
        for key in range(size):
            for number in range(3):
                await sender.put(number, key=key)
            for _ in range(3):
                await receiver.get(key=key)
        sys.settrace(None)


async def remote_ends_that_close(size: int, begin: Callable[[], None]) -> None:
    channel = Channel(int, name="n", capacity=size)
    async with wired() as owner:
        connection = await owner.join()
        ends = [
            (owner.sender(channel, connection), owner.receiver(channel, connection))
            for _ in range(size)
        ]
        begin()
        for number, (sender, receiver) in enumerate(ends):
            await sender.put(number, key=number)
            await receiver.get(key=number)
        for sender, receiver in ends:
            sender.close()
            receiver.close()
        await settle()
        sys.settrace(None)
        connection.close()
        await connection.wait_closed()


LOCAL: Final[list[Scenario]] = [
    keys_that_wait,
    keys_with_items,
    keys_that_end,
    senders_that_close,
    only_senders_that_close,
    senders_that_close_while_they_wait,
    receivers_that_close,
    only_receivers_that_close,
    receivers_that_close_while_they_wait,
    receivers_of_one_key,
    puts_that_wait,
    leases_at_the_end,
    readers_of_a_latest,
]
REMOTE: Final[list[Scenario]] = [
    remote_keys_that_wait,
    remote_keys_one_after_the_other,
    remote_ends_that_close,
]


@pytest.mark.parametrize("scenario", LOCAL + REMOTE, ids=lambda scenario: scenario.__name__)
def test_twice_as_many_cost_about_twice_as_much(scenario: Scenario) -> None:
    small, large = (asyncio.run(counted(scenario, size)) for size in (SMALL, 2 * SMALL))
    grown = {
        name: (small[name], count)
        for name, count in large.items()
        if count > GROWTH * small[name] and count > FEW * SMALL
    }
    assert not grown, f"lines with {SMALL} and {2 * SMALL}: {grown}"
