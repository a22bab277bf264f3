"""The wire between real processes, and what is left when one dies or stops."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AbstractAsyncContextManager

import msgspec

from rlinf_async.channels import Channel
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import EndRef
from rlinf_async.channels.wire.session.streams import Heartbeat
from rlinf_async.deadlines import Patience
from tests.channels.wire import remote_worker
from tests.channels.wire.harness import Wired, until, wired
from tests.channels.wire.running import running


def worker(
    owner: Wired, ref: EndRef, what: str
) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """A process that does this with that end; dead when the block ends."""
    text = msgspec.json.encode(ref).decode()
    return running(remote_worker, owner.server.address, text, what)


def producer(
    owner: Wired, channel: Channel[int], count: int
) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """A process that puts so many numbers."""
    return worker(owner, owner.channels.end_ref(channel.sender, "w"), str(count))


async def filled(count: int) -> Channel[int]:
    channel = Channel(int, name="numbers", capacity=count)
    with channel.sender.clone("filler") as sender:
        for number in range(count):
            await sender.put(number)
    return channel


async def test_items_put_by_another_process_arrive_in_order() -> None:
    channel = Channel(int, name="numbers", capacity=4)
    async with wired() as owner, producer(owner, channel, 100) as process:
        assert await channel.receiver.get_batch(weight=100) == list(range(100))
        assert await process.wait() == 0


async def test_a_killed_holder_loses_nothing() -> None:
    channel = await filled(5)
    async with wired() as owner:
        ref = owner.channels.end_ref(channel.receiver, "w")
        async with worker(owner, ref, "die holding") as process:
            name, reason = await owner.lost.get()
            assert await process.wait() == -signal.SIGKILL
            assert name == "die holding"
            assert reason == "the other process closed it or died; its process has ended"
        async with channel.receiver.lease(weight=5) as batch:
            assert [*batch] == [0, 1, 2, 3, 4]
            assert batch.deliveries == [2, 2, 2, 1, 1]


async def test_a_killed_holder_at_the_other_end_of_tcp_loses_nothing() -> None:
    """It cannot be told from a cut network: its items come back when patience is over."""
    channel = await filled(5)
    async with wired(address="tcp://127.0.0.1:0", patience=0.5) as owner:
        ref = owner.channels.end_ref(channel.receiver, "w")
        async with worker(owner, ref, "die holding") as process:
            name, reason = await owner.lost.get()
            assert await process.wait() == -signal.SIGKILL
            assert name == "die holding"
            assert reason.endswith("; it was not resumed within 0.5 s")
        async with channel.receiver.lease(weight=5) as batch:
            assert [*batch] == [0, 1, 2, 3, 4]
            assert batch.deliveries == [2, 2, 2, 1, 1]


async def test_a_process_killed_while_it_waits_leaves_what_was_collected_for_it() -> None:
    channel = await filled(5)
    async with wired() as owner:
        with channel.sender.clone("open"):
            ref = owner.channels.end_ref(channel.receiver, "w")
            async with worker(owner, ref, "die getting"):
                await owner.lost.get()
            assert channel.waits() == []
            assert await channel.receiver.get_batch(weight=2) == [3, 4]


async def test_a_stopped_holder_is_noticed_by_its_heartbeat() -> None:
    channel = await filled(3)
    async with wired() as owner:
        ref = owner.channels.end_ref(channel.receiver, "w")
        async with worker(owner, ref, "stop holding"):
            await until(lambda: statistics_of(channel.queue).leases_out)
            [connection] = owner.server.connections  # to start, it may take its time
            monitor = connection.monitor
            monitor._heartbeat = Heartbeat.of(0.4)
            monitor._patience = Patience(0.4, monitor._heartbeat.interval)
            monitor.start()
            _, reason = await owner.lost.get()
            assert reason.startswith("nothing was heard for 0.")
            assert reason.endswith("s: the process is stopped, or blocked")
        async with channel.receiver.lease(weight=3) as batch:
            assert [*batch] == [0, 1, 2]
            assert batch.deliveries == [2, 2, 2]
