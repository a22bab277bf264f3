"""Every public method of every end does the same wherever its channel lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rlinf_async.channels import (
    Channel,
    ChannelClosed,
    ChannelError,
    ChannelFailed,
    EndOfChannel,
    Fresh,
    Latest,
    LatestReceiver,
    LatestSender,
    Receiver,
    Sender,
)
from rlinf_async.channels.wire.direct import host_id
from rlinf_async.channels.wire.homes import HomedQueues, HomeMaker
from rlinf_async.channels.wire.protocol import Home
from rlinf_async.channels.wire.session.connection import Router
from rlinf_async.channels.wire.session.endpoint import serve
from rlinf_async.testing import wait_all_blocked
from tests.channels.wire.direct_kit import LEAST, world
from tests.channels.wire.harness import SECRET, remote_latest_pair, remote_pair, settle, until


class Item(msgspec.Struct):
    """Its array is large enough to go past the owner."""

    version: int
    values: NDArray[np.int64]


def item(number: int) -> Item:
    return Item(number, np.full(LEAST // 8 + 1, number, np.int64))


class Ends(NamedTuple):
    """What a backend gives to a worker."""

    sender: Sender[Item]
    receiver: Receiver[Item]
    settle: Callable[[], Awaitable[None]]
    nowait: bool
    """whether the channel lives in this process"""


@asynccontextmanager
async def local() -> AsyncIterator[Ends]:
    channel = Channel(Item, name="items", capacity=4)
    yield Ends(channel.sender.clone("w"), channel.receiver.clone("w"), wait_all_blocked, True)


@asynccontextmanager
async def remote(address: str | None) -> AsyncIterator[Ends]:
    async with remote_pair(Channel(Item, name="items", capacity=4), address) as (sender, receiver):
        yield Ends(sender, receiver, settle, False)


@asynccontextmanager
async def past_the_owner() -> AsyncIterator[Ends]:
    channel = Channel(Item, name="items", capacity=4)
    async with world() as others:
        producer, consumer = await others.producer(), await others.consumer()
        yield Ends(producer.sender(channel), consumer.receiver(channel), settle, False)


@asynccontextmanager
async def homed() -> AsyncIterator[Ends]:
    router = Router()
    HomedQueues(router)
    async with await serve("tcp://127.0.0.1:0", SECRET, name="home", router=router) as server:
        home = Home("home", host_id(), (str(server.address),))
        maker = await HomeMaker.open(home, SECRET, "driver")
        channel = await maker.create(Item, name="items", capacity=4)
        try:
            yield Ends(channel.sender.clone("w"), channel.receiver.clone("w"), settle, False)
        finally:
            await maker.close()


BACKENDS: Final = {
    "local": local,
    "unix": lambda: remote(None),
    "tcp": lambda: remote("tcp://127.0.0.1:0"),
    "past the owner": past_the_owner,
    "homed": homed,
}


Use = Callable[[Ends], Awaitable[Any]]


def numbers(items: object) -> list[int]:
    """The versions of these items, whose arrays are as they were put."""
    found: Any = items
    for one in found:
        assert type(one) is Item
        assert (one.values == one.version).all()
    return [one.version for one in found]


async def raised(use: Awaitable[Any]) -> str:
    """The class of what it raises."""
    with pytest.raises(ChannelError) as found:
        await use
    return type(found.value).__name__


async def nowait(ends: Ends, call: Callable[[], Any]) -> Any:
    """What a call without waiting gives where the channel lives; elsewhere it says what to use."""
    if ends.nowait:
        return call()
    with pytest.raises(ChannelError, match=r"lives in another process .*: .* use await"):
        call()
    return None


async def fill(ends: Ends, count: int = 3) -> None:
    for number in range(count):
        await ends.sender.put(item(number))


async def put(ends: Ends) -> object:
    await ends.sender.put(item(7), key="k", weight=2)
    state = await ends.receiver.state(key="k")
    return state.depth, state.weight, numbers([await ends.receiver.get(key="k")])


async def put_nowait(ends: Ends) -> object:
    ends.receiver.open()
    return await nowait(ends, lambda: ends.sender.put_nowait(item(1)))


async def flush(ends: Ends) -> object:
    await fill(ends)
    await ends.sender.flush()
    return (await ends.receiver.state()).depth


async def fail(ends: Ends) -> object:
    getting = asyncio.ensure_future(ends.receiver.get())
    putting = await full(ends)
    await ends.settle()
    other = ends.sender.clone("other")
    ends.sender.fail(ValueError("loss is NaN"))
    ends.sender.fail("a later one")
    with pytest.raises(ChannelFailed, match="loss is NaN"):
        ends.sender.open()
    with pytest.raises(ChannelFailed, match="loss is NaN"):
        ends.sender.clone()
    found = [
        await raised(use)
        for use in (
            getting,
            putting,
            ends.sender.put(item(1)),
            ends.sender.put(item(1), key="k"),
            ends.sender.flush(),
            ends.sender.state(),
            ends.sender.statistics(),
            other.put(item(1)),
            ends.receiver.get(),
            ends.receiver.get_batch(weight=2),
        )
    ]
    other.close()
    ends.sender.close()
    other.close()
    with pytest.raises(ChannelClosed):
        other.fail("it was closed")
    return found


async def full(ends: Ends) -> asyncio.Future[None]:
    """A put that waits, since there is no room."""
    for number in range(4):
        await ends.sender.put(item(number), key="full")
    return asyncio.ensure_future(ends.sender.put(item(4), key="full"))


async def opened(end: Sender[Item] | Receiver[Item]) -> None:
    with end as itself:
        assert itself is end
    with pytest.raises(ChannelClosed):
        end.open()
    with pytest.raises(ChannelClosed):
        end.clone()


async def closed_sender(ends: Ends) -> object:
    await fill(ends, 1)
    ends.sender.close()
    ends.sender.close()
    got = numbers([await ends.receiver.get()])
    return got, await raised(ends.receiver.get()), await uses(ends.sender)


async def closed_receiver(ends: Ends) -> object:
    ends.receiver.close()
    await ends.settle()
    return await raised(ends.sender.put(item(1))), await uses(ends.receiver)


async def uses(end: Sender[Item] | Receiver[Item]) -> list[str]:
    """What every use of an end raises."""
    found = [end.state(), end.statistics()]
    if isinstance(end, Sender):
        return [await raised(use) for use in (*found, end.put(item(1)), end.flush())]
    lease, lag = end.lease(), end.get_within_lag(current=1, max_lag=1)
    takes = end.get(), end.get_batch(weight=2), lease.__aenter__(), lag
    return [await raised(use) for use in (*found, *takes)]


async def cloned(ends: Ends) -> object:
    with ends.sender.clone("a") as sender, ends.receiver.clone("b") as receiver:
        await sender.put(item(1))
        return numbers([await receiver.get()])


async def statistics(end: Sender[Item] | Receiver[Item], ends: Ends) -> object:
    await fill(ends)
    await ends.sender.flush()
    found = await end.statistics()
    return found.name, found.puts, found.depth, found.senders, found.receivers


async def state(end: Sender[Item] | Receiver[Item], ends: Ends) -> object:
    await fill(ends)
    await ends.sender.flush()
    found = await end.state()
    return found.depth, found.weight, found.collected, found.empty


async def described(end: Sender[Item] | Receiver[Item]) -> object:
    return end.channel_name, end.item_type


async def get(ends: Ends) -> object:
    await fill(ends)
    return numbers([await ends.receiver.get() for _ in range(3)])


async def get_nowait(ends: Ends) -> object:
    await fill(ends)
    return await nowait(ends, lambda: numbers([ends.receiver.get_nowait()]))


async def get_batch(ends: Ends) -> object:
    await fill(ends)
    await ends.sender.flush()
    return numbers(await ends.receiver.get_batch(weight=9, at_least=2))


async def lease(ends: Ends) -> object:
    await fill(ends)
    async with ends.receiver.lease(weight=2) as batch:
        found = numbers(batch), batch.deliveries
        batch.replace(1, item(8))
    return found, numbers([await ends.receiver.get(), await ends.receiver.get()])


async def within_lag(ends: Ends) -> object:
    await fill(ends)
    found = [await ends.receiver.get_within_lag(current=2, max_lag=1) for _ in range(3)]
    await ends.settle()
    stale = (await ends.receiver.statistics()).stale
    return [(isinstance(one, Fresh), one.item.version, one.lag) for one in found], stale


SENDER: Final[dict[str, Use]] = {
    "put": put,
    "put_nowait": put_nowait,
    "flush": flush,
    "fail": fail,
    "open": lambda ends: opened(ends.sender),
    "close": closed_sender,
    "clone": cloned,
    "statistics": lambda ends: statistics(ends.sender, ends),
    "state": lambda ends: state(ends.sender, ends),
    "channel_name": lambda ends: described(ends.sender),
    "item_type": lambda ends: described(ends.sender),
}
RECEIVER: Final[dict[str, Use]] = {
    "get": get,
    "get_nowait": get_nowait,
    "get_batch": get_batch,
    "lease": lease,
    "get_within_lag": within_lag,
    "open": lambda ends: opened(ends.receiver),
    "close": closed_receiver,
    "clone": cloned,
    "statistics": lambda ends: statistics(ends.receiver, ends),
    "state": lambda ends: state(ends.receiver, ends),
    "channel_name": lambda ends: described(ends.receiver),
    "item_type": lambda ends: described(ends.receiver),
}


def public(end: type) -> set[str]:
    """The names that a worker may use of an end."""
    return {name for cls in end.__mro__ for name in vars(cls) if not name.startswith("_")}


def test_the_tables_have_every_public_name_of_every_end() -> None:
    assert public(Sender) == SENDER.keys()
    assert public(Receiver) == RECEIVER.keys()
    assert public(LatestSender) == LATEST_SENDER.keys()
    assert public(LatestReceiver) == LATEST_RECEIVER.keys()


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "local"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("sender", name) for name in SENDER] + [("receiver", name) for name in RECEIVER],
)
async def test_an_end_does_the_same_on_every_backend(kind: str, name: str, backend: str) -> None:
    use = (SENDER if kind == "sender" else RECEIVER)[name]
    async with local() as ends:
        here = await use(ends)
    async with BACKENDS[backend]() as ends:
        there = await use(ends)
    assert there == (None if name.endswith("_nowait") else here)


# ---- Latest


class LatestEnds(NamedTuple):
    latest: Latest[Item]
    sender: LatestSender[Item]
    receiver: LatestReceiver[Item]
    settle: Callable[[], Awaitable[None]]


@asynccontextmanager
async def latest_ends(backend: str) -> AsyncIterator[LatestEnds]:
    latest = Latest(Item, name="weights")
    if backend == "local":
        yield LatestEnds(latest, latest.sender, latest.receiver, wait_all_blocked)
        return
    address = "tcp://127.0.0.1:0" if backend == "tcp" else None
    async with remote_latest_pair(latest, address) as (sender, receiver):
        yield LatestEnds(latest, sender, receiver, settle)


async def poll(ends: LatestEnds) -> int | None:
    """The newest version by `get_nowait`, once what is under way has arrived."""
    found = ends.receiver.get_nowait()
    if found is None:
        await ends.settle()
        found = ends.receiver.get_nowait()
    return None if found is None else numbers([found])[0]


async def publish(ends: LatestEnds) -> object:
    versions = [await ends.sender.publish(item(number)) for number in (1, 2)]
    return versions, numbers([await ends.receiver.get()]), ends.receiver.version


async def close_latest(ends: LatestEnds) -> object:
    await ends.sender.publish(item(1))
    ends.sender.close()
    left = numbers([one async for one in ends.receiver])
    with pytest.raises(EndOfChannel):
        await poll(ends)
    return left, await raised(ends.receiver.get()), await raised(ends.sender.publish(item(2)))


async def polled(ends: LatestEnds) -> object:
    """A worker polls for new weights between its steps."""
    found: list[tuple[int | None, int]] = []
    for published in (0, 1, 0, 2):
        for _ in range(published):
            await ends.sender.publish(item(ends.latest.version + 1))
        await ends.settle()
        found.append((await poll(ends), ends.receiver.version))
    waits = ends.latest.waits(), (await ends.latest.statistics()).waiting
    ends.sender.close()
    with pytest.raises(EndOfChannel):
        await poll(ends)
    return found, waits


async def polled_then_waited(ends: LatestEnds) -> object:
    await ends.sender.publish(item(1))
    found = [await poll(ends)]
    getting = asyncio.ensure_future(ends.receiver.get())
    await ends.settle()
    await ends.sender.publish(item(2))
    found += numbers([await getting])
    found.append(await poll(ends))
    await ends.sender.publish(item(3))
    await ends.settle()
    return [*found, await poll(ends)]


async def failed_latest(ends: LatestEnds) -> object:
    await poll(ends)
    ends.latest.fail(ValueError("loss is NaN"))
    await ends.settle()
    for _ in range(2):
        with pytest.raises(ChannelFailed, match="loss is NaN"):
            await poll(ends)
    return await raised(ends.receiver.get())


async def cloned_latest(ends: LatestEnds) -> object:
    await ends.sender.publish(item(1))
    first = await poll(ends)
    clone = ends.receiver.clone()
    await ends.sender.publish(item(2))
    return first, clone.version, numbers([await clone.get()])


LATEST_SENDER: Final[dict[str, Callable[[LatestEnds], Awaitable[Any]]]] = {
    "publish": publish,
    "close": close_latest,
    "channel_name": failed_latest,
    "item_type": failed_latest,
}
LATEST_RECEIVER: Final[dict[str, Callable[[LatestEnds], Awaitable[Any]]]] = {
    "get": polled_then_waited,
    "get_nowait": polled,
    "clone": cloned_latest,
    "channel_name": failed_latest,
    "item_type": failed_latest,
}


@pytest.mark.parametrize("backend", ["unix", "tcp"])
@pytest.mark.parametrize("name", sorted({*LATEST_SENDER, *LATEST_RECEIVER}))
async def test_an_end_of_a_latest_does_the_same_on_every_backend(name: str, backend: str) -> None:
    use = (LATEST_RECEIVER | LATEST_SENDER)[name]
    async with latest_ends("local") as ends:
        here = await use(ends)
    async with latest_ends(backend) as ends:
        there = await use(ends)
    assert there == here


async def test_a_receiver_that_polled_and_was_dropped_is_sent_nothing_more() -> None:
    async with latest_ends("unix") as ends:
        dropped = ends.receiver.clone()
        assert dropped.get_nowait() is None
        await until(lambda: ends.latest._waits)
        del dropped
        await until(lambda: not ends.latest._waits)
