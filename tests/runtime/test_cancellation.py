"""A cluster that is cancelled at any point ends: no task waits for ever, no process is left."""

# ruff: noqa: PT012  (it is leaving the cluster that raises)

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

import rlinf_async as ra
from rlinf_async.channels.queue import statistics_of
from rlinf_async.testing import explore, no_tasks_left, wait_all_blocked
from tests.channels.wire.harness import PATIENCE
from tests.runtime.kit import Doubler, NewCluster, Number, Waiter, connection_to, kill, waiting
from tests.runtime.scripts import wait_until_stopped


async def test_a_cancelled_call_ends_its_methods(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        _, running, started = await waiting(cluster, 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(ra.EndOfChannel):
            await started.receiver.get()


async def test_a_call_begins_on_every_rank_though_it_is_cancelled_at_once(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        waiters = await cluster.launch(Waiter, count=2)
        for _ in range(3):
            running = waiters.call(Waiter.counts)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert await waiters.call(Waiter.count) == [3, 3]


async def test_a_cancelled_await_cancels_the_call(new_cluster: NewCluster) -> None:
    async with new_cluster() as cluster:
        started = cluster.channel(str, name="started")
        waiter = (await cluster.launch(Waiter))[0]
        running = waiter.call(Waiter.forever, started.sender)
        await started.receiver.get()
        begun = asyncio.Event()

        async def wait() -> None:
            begun.set()  # and goes on until it waits
            await running

        task = asyncio.create_task(wait())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ra.EndOfChannel):
            await started.receiver.get()


async def test_a_cancelled_await_leaves_the_call_to_the_others_that_await_it(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster() as cluster:
        numbers = cluster.channel(Number, name="numbers")
        running = (await cluster.launch(Waiter))[0].call(Waiter.for_item, numbers.receiver)
        begun = [asyncio.Event(), asyncio.Event()]

        async def wait(begins: asyncio.Event) -> int:
            begins.set()  # and goes on until it waits
            return await running

        first, second = (asyncio.create_task(wait(one)) for one in begun)
        for one in begun:
            await one.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await numbers.sender.put(Number(7))
        assert await second == 7


async def test_a_timeout_around_the_cluster_ends_it(new_cluster: NewCluster) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3600.0) as limit, new_cluster() as cluster:
            await waiting(cluster, 2)
            limit.reschedule(asyncio.get_running_loop().time())
            await asyncio.Event().wait()


async def busy(channels: list[ra.Channel[Number]]) -> None:
    """Two stages under way, for a cancellation to fall into."""
    async with ra.Cluster.local() as cluster:
        channels += [cluster.channel(Number, name=name, capacity=2) for name in "abc"]
        a, b, c = channels
        first = await cluster.launch(Doubler, count=2, name="first")
        second = await cluster.launch(Doubler, count=2, name="second")
        one = first.call(Doubler.run, a.receiver, b.sender)
        second.call(Doubler.leased, b.receiver, c.sender)
        with a.sender as sender:
            for value in range(20):
                await sender.put(Number(value))
                await c.receiver.get()
        await one


@pytest.mark.parametrize("steps", [1, 10, 30, 60, 100, 150, 200, 260])
def test_cancelled_after_any_number_of_steps_nothing_waits(steps: int) -> None:
    async def main() -> None:
        channels: list[ra.Channel[Number]] = []
        task = asyncio.create_task(busy(channels))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None
        for channel in channels:
            assert channel.waits() == []
            assert statistics_of(channel.queue).leases_out == 0
        no_tasks_left()

    explore(main, seeds=range(40))


def test_a_second_cancellation_while_it_ends_still_leaves_nothing() -> None:
    async def main() -> None:
        channels: list[ra.Channel[Number]] = []
        task = asyncio.create_task(busy(channels))
        for _ in range(120):
            await asyncio.sleep(0)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([task])
        no_tasks_left()

    explore(main, seeds=range(100))


def test_cancelled_calls_leave_the_channel_to_others() -> None:
    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            numbers = cluster.channel(Number, name="numbers")
            waiters = await cluster.launch(Waiter, count=3)
            sender = numbers.sender.open()
            running = waiters.call(Waiter.for_item, numbers.receiver)
            one = waiters[0].call(Waiter.for_item, numbers.receiver)
            both = asyncio.gather(running, one, return_exceptions=True)
            await wait_all_blocked()
            running.cancel()
            await sender.put(Number(1))
            sender.close()
            cancelled, got = await both
            assert isinstance(cancelled, asyncio.CancelledError)
            if isinstance(got, ra.WorkerError):  # a cancelled one had taken it already
                assert got.failure.error_type == "EndOfChannel"
            else:
                assert got == 1
            assert numbers.waits() == []

    explore(main, seeds=range(200))


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_a_call_cancelled_before_it_began_ends(steps: int) -> None:
    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            numbers = cluster.channel(Number, name="numbers")
            waiters = await cluster.launch(Waiter, count=2)
            running = waiters.call(Waiter.for_item, numbers.receiver)
            for _ in range(steps):
                await asyncio.sleep(0)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert numbers.waits() == []
            assert statistics_of(numbers.queue).receivers == 0

    explore(main, seeds=range(40))


class Stubborn(ra.Worker):
    """Ignores its cancellation, and then hangs in its teardown."""

    async def run(self, started: ra.Sender[str]) -> None:
        await started.put(self.name)
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if self.world_size == 1:
                    raise

    async def teardown(self) -> None:
        await asyncio.Event().wait()


async def test_who_hangs_in_teardown_is_ended_after_the_grace(
    new_cluster: NewCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with new_cluster(grace=0.3) as cluster:
        await cluster.launch(Stubborn)
    assert "Stubborn[0] did not stop within 0.3 s" in caplog.text


async def test_cancelled_while_it_leaves_it_does_not_wait_for_the_grace(
    new_cluster: NewCluster,
) -> None:
    left = asyncio.Event()

    async def hanging() -> None:
        async with new_cluster(grace=100.0) as cluster:
            await cluster.launch(Stubborn)
            left.set()

    task = asyncio.create_task(hanging())
    await left.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Streamer(ra.Worker):
    """Puts numbers for as long as it is let, and remembers how many puts have returned."""

    count = 0

    async def stream(self, numbers: ra.Sender[int]) -> None:
        while True:
            await numbers.put(self.count)
            self.count += 1

    async def counted(self) -> int:
        return self.count


async def test_what_a_cancelled_call_had_put_is_in_its_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlinf_async.runtime.remote_worker.CANCEL_SECONDS", PATIENCE)
    async with ra.Cluster.process() as cluster:
        streamer = (await cluster.launch(Streamer))[0]
        numbers = cluster.channel(int, name="numbers", capacity=64)
        receiver, seen = numbers.receiver.open(), 0
        with numbers.sender:
            for _ in range(20):
                running = streamer.call(Streamer.stream, numbers.sender)
                for _ in range(1000):
                    assert await receiver.get() == seen
                    seen += 1
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                count = await streamer.call(Streamer.counted)
                assert [await receiver.get() for _ in range(seen, count)] == [*range(seen, count)]
                seen = count
                assert statistics_of(numbers.queue).depth == 0
        assert statistics_of(numbers.queue).refused == 0


class Deaf(ra.Worker):
    """Ignores every cancellation."""

    async def run(self, started: ra.Sender[str]) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await started.put(self.name)
                await asyncio.Event().wait()


async def test_a_method_that_does_not_end_when_it_is_cancelled_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlinf_async.runtime.remote_worker.CANCEL_SECONDS", 0.1)
    async with ra.Cluster.process(grace=0.3) as cluster:
        started = cluster.channel(str, name="started")
        running = (await cluster.launch(Deaf)).call(Deaf.run, started.sender)
        assert await started.receiver.get() == "Deaf[0]"
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert "Deaf.run was cancelled, and did not end within 0.1 s" in caplog.text


async def test_a_cancelled_call_that_was_never_sent_ends_at_once() -> None:
    async with ra.Cluster.process() as cluster:
        started = cluster.channel(str, name="started")
        waiters = await cluster.launch(Waiter)
        outbox = connection_to(waiters).outbox
        outbox.pause()  # as where the worker reads nothing
        running = waiters.call(Waiter.forever, started.sender)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert outbox.waiting == 0
        outbox.resume()


async def test_the_end_of_a_cancelled_call_does_not_wait_behind_data(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlinf_async.runtime.remote_worker.CANCEL_SECONDS", PATIENCE)
    async with ra.Cluster.process() as cluster:
        waiters, running, _ = await waiting(cluster)
        unacknowledged = connection_to(waiters).outbox.unacknowledged
        assert unacknowledged is not None
        limit, unacknowledged._limit = unacknowledged._limit, 0  # data waits; control goes on
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        unacknowledged._limit = limit
    assert "did not end" not in caplog.text


async def test_a_cancelled_call_of_a_worker_that_is_cut_off_is_logged_as_such(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlinf_async.runtime.remote_worker.CANCEL_SECONDS", 0.1)
    async with ra.Cluster.process() as cluster:
        waiters, running, _ = await waiting(cluster)
        pid = kill(cluster, "Waiter[0]", signal.SIGSTOP)  # it does not connect again
        wait_until_stopped(pid)
        connection_to(waiters).drop_link()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        os.kill(pid, signal.SIGCONT)
    assert "Waiter.forever was cancelled, and its worker is cut off (reconnecting)" in caplog.text
