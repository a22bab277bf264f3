"""The end of a channel while leases are out: their items may still come back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from rlinf_async.channels import Channel, EndOfChannel, Receiver, current_party
from rlinf_async.channels.queue import statistics_of
from rlinf_async.testing import wait_all_blocked
from tests.channels.transport import Transport

T = TypeVar("T")


async def run_as(party: str, work: Callable[[], Awaitable[T]]) -> T:
    """Do something as this worker."""
    current_party.set(party)
    return await work()


def spawn(party: str, work: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
    """A task that does something as this worker."""
    return asyncio.create_task(run_as(party, work), name=party)


class Holder:
    """A worker that takes a lease and keeps it until it is told how to end."""

    def __init__(self, receiver: Receiver[int], party: str) -> None:
        self.granted = asyncio.Event()
        self.finish: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task = spawn(party, lambda: self._hold(receiver))

    async def _hold(self, receiver: Receiver[int]) -> None:
        async with receiver.lease():
            self.granted.set()
            await self.finish


async def test_others_wait_for_a_lease_and_get_its_item_when_the_holder_fails(
    transport: Transport,
) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    await sender.put(0)
    holder = Holder(receiver, "Env[0].run")
    await holder.granted.wait()
    sender.close()
    waiting = spawn("Env[1].run", receiver.get)
    await transport.settle()
    assert not waiting.done()
    holder.finish.set_exception(RuntimeError("the holder broke"))
    assert await waiting == 0
    with pytest.raises(RuntimeError, match="the holder broke"):
        await holder.task


async def test_others_see_the_end_once_the_lease_is_acknowledged(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    await sender.put(0)
    holder = Holder(receiver, "Env[0].run")
    await holder.granted.wait()
    sender.close()
    waiting = [spawn(f"Env[{rank}].run", receiver.get) for rank in (1, 2)]
    await transport.settle()
    assert not any(task.done() for task in waiting)
    holder.finish.set_result(None)
    for task in waiting:
        with pytest.raises(EndOfChannel):
            await task
    await holder.task


async def test_others_see_the_end_once_the_item_is_a_dead_letter(transport: Transport) -> None:
    channel = Channel(int, name="numbers", max_deliveries=1)
    sender, receiver = await transport.ends(channel)
    await sender.put(0, key=None)
    holder = Holder(receiver, "Env[0].run")
    await holder.granted.wait()
    sender.close()
    waiting = spawn("Env[1].run", receiver.get)
    await transport.settle()
    holder.finish.set_exception(RuntimeError("the holder broke"))
    with pytest.raises(EndOfChannel):
        await waiting
    with pytest.raises(RuntimeError):
        await holder.task
    assert len(channel.dead_letters) == 1


async def test_a_holder_does_not_wait_for_its_own_lease(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    await sender.put(0)
    async with receiver.lease():
        sender.close()
        with pytest.raises(EndOfChannel):
            await receiver.get()


async def test_a_lease_of_another_key_does_not_delay_the_end(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    await sender.put(0)
    holder = Holder(receiver, "Env[0].run")
    await holder.granted.wait()
    sender.close()
    with pytest.raises(EndOfChannel):
        await run_as("Env[1].run", lambda: receiver.get(key="env"))
    holder.finish.set_result(None)
    await holder.task


async def test_holders_that_wait_for_one_another_at_the_end_are_let_go(
    transport: Transport,
) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    for number in range(3):
        await sender.put(number)

    everybody_holds_one = asyncio.Barrier(3)

    async def prefetch() -> int:
        """Hold one item while waiting for the next, as a worker that prefetches does."""
        async with receiver.lease() as batch:
            await everybody_holds_one.wait()
            async for _ in receiver:
                pytest.fail("there was no item left")
            return batch[0]

    workers = [spawn(f"Env[{rank}].run", prefetch) for rank in range(3)]
    await transport.settle()
    sender.close()
    assert sorted(await asyncio.gather(*workers)) == [0, 1, 2]
    await transport.settle()
    assert statistics_of(channel.queue).leases_out == 0


async def test_a_batch_that_collects_at_the_end_waits_for_a_lease(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    await sender.put(0)
    holder = Holder(receiver, "Env[0].run")
    await holder.granted.wait()
    batch = spawn("Env[1].run", lambda: receiver.get_batch(weight=5))
    await sender.put(1)
    sender.close()
    await transport.settle()
    assert not batch.done()
    holder.finish.set_exception(RuntimeError("the holder broke"))
    assert await batch == [0, 1]
    with pytest.raises(RuntimeError):
        await holder.task


async def test_an_item_that_a_cancelled_get_gives_back_is_not_hidden_by_the_end() -> None:
    channel = Channel(int, name="numbers")
    sender = channel.sender.open()
    first = asyncio.create_task(channel.receiver.get())
    other = channel.receiver.clone()
    second = asyncio.create_task(other.get())
    await wait_all_blocked()
    await sender.put(1)  # handed to the first, which is cancelled before it runs
    first.cancel()
    sender.close()
    assert await second == 1
    other.close()
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_two_tasks_of_one_worker_see_each_others_leases() -> None:
    channel = Channel(int, name="numbers")
    with channel.sender as sender:
        await sender.put(1)
    holder = Holder(channel.receiver, "Solver[0].run")
    await holder.granted.wait()
    clone = channel.receiver.clone()
    other = spawn("Solver[0].run", clone.get)
    await wait_all_blocked()
    holder.finish.set_exception(ValueError("the holder fails"))
    assert await other == 1
    clone.close()
    with pytest.raises(ValueError, match="the holder fails"):
        await holder.task


async def in_wait_for(get: Callable[[], Awaitable[int]]) -> int:
    return await asyncio.wait_for(get(), timeout=1000)


async def in_a_timeout(get: Callable[[], Awaitable[int]]) -> int:
    async with asyncio.timeout(1000):
        return await get()


async def in_gather(get: Callable[[], Awaitable[int]]) -> int:
    [found] = await asyncio.gather(get())
    return found


async def in_a_shield(get: Callable[[], Awaitable[int]]) -> int:
    return await asyncio.shield(get())


async def in_a_task(get: Callable[[], Awaitable[int]]) -> int:
    async def run() -> int:
        return await asyncio.create_task(in_wait_for(get))

    return await asyncio.create_task(run())


async def in_a_group(get: Callable[[], Awaitable[int]]) -> int:
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(in_wait_for(get))
    except* EndOfChannel as several:
        raise several.exceptions[0] from None
    return running.result()


@pytest.mark.parametrize(
    "way", [in_wait_for, in_a_timeout, in_gather, in_a_shield, in_a_task, in_a_group]
)
async def test_however_the_holder_of_a_lease_waits_it_sees_the_end(
    transport: Transport, way: Callable[[Callable[[], Awaitable[int]]], Awaitable[int]]
) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    for number in range(3):
        await sender.put(number)
    sender.close()
    async with receiver.lease():
        async with receiver.lease():
            pass
        assert await way(receiver.get) == 2
        with pytest.raises(EndOfChannel):
            await way(receiver.get)
    with pytest.raises(EndOfChannel):
        async with receiver.lease():
            pass


async def test_what_was_started_in_a_lease_that_is_over_waits_as_others_do(
    transport: Transport,
) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    await sender.put(0)
    await sender.put(1)
    async with receiver.lease():
        started = asyncio.Event()
        later = asyncio.create_task(_get_after(started, receiver))
    holder = Holder(receiver, "Env[0].run")
    await holder.granted.wait()
    sender.close()
    started.set()
    await transport.settle()
    assert not later.done()
    holder.finish.set_exception(RuntimeError("the holder broke"))
    assert await later == 1
    with pytest.raises(RuntimeError, match="the holder broke"):
        await holder.task


async def _get_after(event: asyncio.Event, receiver: Receiver[int]) -> int:
    await event.wait()
    return await receiver.get()


async def test_consumers_inside_a_lease_of_another_channel_wait_for_one_another(
    transport: Transport,
) -> None:
    """A worker that holds a ticket has two tasks consume numbers: each is on its own."""
    tickets, ticket = await transport.ends(Channel(int, name="tickets"))
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    await tickets.put(0)
    await sender.put(1)
    async with ticket.lease():
        holder = Holder(receiver, "Env[0].run")
        await holder.granted.wait()
        sender.close()
        waiting = spawn("Env[0].run", receiver.get)
        await transport.settle()
        assert not waiting.done()
        holder.finish.set_exception(RuntimeError("the holder broke"))
        assert await waiting == 1
    with pytest.raises(RuntimeError, match="the holder broke"):
        await holder.task
