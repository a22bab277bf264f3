"""A deadlock is detected and reported, unless a worker could go on by itself."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

import rlinf_async as ra
from rlinf_async import testing
from rlinf_async.channels import BatchResizingIterator, Channel
from rlinf_async.channels.batching import BlockingBatches
from rlinf_async.channels.batching.driving import for_thread
from rlinf_async.channels.waitfor import ComputeThread, current_thread
from rlinf_async.runtime import deadlock
from rlinf_async.runtime.stall import WorkEvent, all_blocked
from rlinf_async.testing import run, wait_all_blocked
from rlinf_async.workers.tasks import task_group
from tests.loops import FACTORIES
from tests.runtime.kit import NewCluster, Number


@pytest.fixture(
    params=[("local", "asyncio"), ("local", "uvloop"), ("process", "uvloop")], ids="-".join
)
def setting(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Not the virtual loop: it sees deadlocks itself."""
    chosen: tuple[str, str] = request.param
    return chosen


@pytest.fixture(autouse=True)
def short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look every 50 ms."""
    monkeypatch.setattr(deadlock, "PERIOD", 0.05)


class Polite(ra.Worker):
    """Waits to be spoken to, in one of several ways."""

    async def converse(self, hear: ra.Receiver[Number], say: ra.Sender[Number]) -> None:
        await say.put(await hear.get())

    async def gathers(self, hear: ra.Receiver[Number], say: ra.Sender[Number]) -> None:
        await asyncio.gather(self.converse(hear, say), hear.get())

    async def in_task_group(self, hear: ra.Receiver[Number], say: ra.Sender[Number]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.converse(hear, say))

    async def in_group_of_workers(self, hear: ra.Receiver[Number], say: ra.Sender[Number]) -> None:
        async with task_group() as group:
            group.create_task(self.converse(hear, say))

    async def pulls_in_thread(self, hear: ra.Receiver[Number], say: ra.Sender[Number]) -> None:
        await self.compute(next, _view(hear))
        await say.put(Number(0))

    async def computes_what_it_pulled(
        self, hear: ra.Receiver[Number], say: ra.Sender[Number]
    ) -> str:
        own = Channel(Number, name="own", capacity=1)
        view = _view(own.receiver)

        def pull_then_compute() -> None:
            next(view)
            threading.Event().wait(0.5)

        computation = asyncio.ensure_future(self.compute(pull_then_compute))
        await wait_all_blocked()
        own.sender.put_nowait(Number(0))
        await computation
        await say.put(Number(0))
        return "went on"

    async def with_timeout(self, hear: ra.Receiver[Number], say: ra.Sender[Number]) -> str:
        try:
            async with asyncio.timeout(0.5):
                await self.converse(hear, say)
        except TimeoutError:
            await say.put(Number(0))
            return "went on"
        return "was told"

    async def computes(self, hear: ra.Receiver[Number], say: ra.Sender[Number]) -> str:
        await self.compute(threading.Event().wait, 0.5)
        await say.put(Number(0))
        return "went on"

    async def sleeps(self, hear: ra.Receiver[Number], say: ra.Sender[Number]) -> str:
        await asyncio.sleep(0.5)
        await say.put(Number(0))
        return "went on"


class Ones:
    """Every number is a batch of one."""

    def size(self, batch: Number, /) -> int:
        return 1

    def slice(self, batch: Number, start: int, stop: int, /) -> Number:
        return batch

    def concat(self, batches: Sequence[Number], /) -> Number:
        return batches[0]

    def lengths(self, batch: Number, /) -> Sequence[int]:
        return [1]


def _view(receiver: ra.Receiver[Number]) -> BlockingBatches[Number]:
    """The numbers one by one, for a thread."""
    batches = BatchResizingIterator(receiver, Ones(), total_batch_size=1, micro_batch_size=1)
    return batches.blocking(asyncio.get_running_loop())


Method = Callable[[Polite, ra.Receiver[Number], ra.Sender[Number]], Coroutine[Any, Any, str | None]]


async def each_waits_for_the_other(cluster: ra.Cluster, first: Method) -> Any:
    there = cluster.channel(Number, name="there")
    back = cluster.channel(Number, name="back")
    ann = await cluster.launch(Polite, name="Ann")
    bob = await cluster.launch(Polite, name="Bob")
    one = ann[0].call(first, there.receiver, back.sender)
    bob[0].call(Polite.converse, back.receiver, there.sender)
    return await one


@pytest.mark.parametrize(
    "method",
    [
        Polite.converse,
        Polite.gathers,
        Polite.in_task_group,
        Polite.in_group_of_workers,
        Polite.pulls_in_thread,
    ],
)
async def test_a_deadlock_names_both_workers_their_channels_and_the_time(
    new_cluster: NewCluster, method: Method
) -> None:
    with pytest.raises(ra.Deadlock) as caught:
        async with new_cluster(deadlock_after=0.2) as cluster:
            await each_waits_for_the_other(cluster, method)
    report = str(caught.value)
    assert "every worker waits for another, and nothing has moved for 0 s" in report
    assert f"Ann[0].{method.__name__} has waited" in report
    assert "on channel 'there'; only Bob[0].converse can end this wait" in report
    assert f"on channel 'back'; only Ann[0].{method.__name__} can end this wait" in report


@pytest.mark.parametrize(
    "method",
    [Polite.with_timeout, Polite.computes, Polite.computes_what_it_pulled, Polite.sleeps],
)
async def test_who_can_go_on_by_itself_is_not_deadlocked(
    new_cluster: NewCluster, method: Method
) -> None:
    async with new_cluster(deadlock_after=0.2) as cluster:
        assert await each_waits_for_the_other(cluster, method) == "went on"


async def test_a_body_that_waits_for_a_producer_that_never_comes_gets_the_deadlock(
    new_cluster: NewCluster,
) -> None:
    with pytest.raises(ra.Deadlock, match=r"main has waited .* 'numbers'; no open sender"):
        async with new_cluster(deadlock_after=0.2) as cluster:
            await cluster.channel(Number, name="numbers").receiver.get()


async def test_a_limit_around_the_body_is_left_to_end_it(new_cluster: NewCluster) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5), new_cluster(deadlock_after=0.2) as cluster:
            await each_waits_for_the_other(cluster, Polite.converse)


async def test_without_a_limit_waits_are_only_reported(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlock, "FIRST_REPORT", 0.1)
    reported = asyncio.Event()
    monkeypatch.setattr(deadlock.log, "warning", lambda *_: reported.set())
    async with new_cluster(deadlock_after=None) as cluster:
        waiting = asyncio.ensure_future(each_waits_for_the_other(cluster, Polite.converse))
        await reported.wait()
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])


def test_the_virtual_loop_adds_the_report_of_the_cluster() -> None:
    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            await each_waits_for_the_other(cluster, Polite.converse)

    with pytest.raises(
        testing.Deadlock, match=r"Bob\[0\]\.converse has waited .* 'back'; only Ann"
    ):
        run(main())


BLOCKED: dict[str, Callable[[Channel[Number]], Coroutine[Any, Any, Any]]] = {
    "a get": lambda c: c.receiver.get(),
    "another task": lambda c: _await(asyncio.ensure_future(c.receiver.get())),
    "a gather": lambda c: _await(asyncio.gather(c.receiver.get(), c.receiver.get())),
    "an event of workers": lambda c: _get_then_set(c, WorkEvent()),
    "a task group": lambda c: _group(c.receiver.get()),
    "a task group of workers": lambda c: _group(c.receiver.get(), new=task_group),
}
FREE: dict[str, Callable[[Channel[Number]], Coroutine[Any, Any, Any]]] = {
    "a timer": lambda c: asyncio.sleep(3600),
    "an event": lambda c: asyncio.Event().wait(),
    "a get with a timeout": lambda c: _timeout(c.receiver.get()),
    "a get under wait_for": lambda c: asyncio.wait_for(c.receiver.get(), 3600),
    "a gather with a timer": lambda c: _await(asyncio.gather(c.receiver.get(), asyncio.sleep(99))),
    "a task group with a timer": lambda c: _group(c.receiver.get(), asyncio.sleep(99)),
    "a task group of workers with a timer": lambda c: _group(
        c.receiver.get(), asyncio.sleep(99), new=task_group
    ),
    "a task group under a timeout": lambda c: _timeout(_group(c.receiver.get())),
    "a plain future": lambda c: _await(asyncio.get_running_loop().create_future()),
}


async def _get_then_set(channel: Channel[Number], event: WorkEvent) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(event.wait())
        await channel.receiver.get()
        event.set()


async def _await(future: asyncio.Future[Any]) -> None:
    await future


async def _group(
    *waits: Coroutine[Any, Any, Any],
    new: Callable[[], AbstractAsyncContextManager[asyncio.TaskGroup]] = asyncio.TaskGroup,
) -> None:
    async with new() as group:
        for wait in waits:
            group.create_task(wait)


async def _timeout(wait: Coroutine[Any, Any, Any]) -> None:
    async with asyncio.timeout(3600):
        await wait


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("case", [*BLOCKED, *FREE])
def test_a_task_is_blocked_only_if_nothing_but_others_can_wake_it(kind: str, case: str) -> None:
    async def main() -> None:
        channel = Channel(Number, name="numbers")
        task = asyncio.create_task({**BLOCKED, **FREE}[case](channel))
        await wait_all_blocked()
        mine = asyncio.current_task()
        others = [one for one in asyncio.all_tasks() if one is not mine]
        assert all_blocked(others) is (case in BLOCKED)
        task.cancel()
        await asyncio.wait([task])

    with asyncio.Runner(loop_factory=FACTORIES[kind]) as runner:
        runner.run(main())


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("case", BLOCKED)
def test_a_task_that_was_woken_is_not_blocked_though_it_has_not_run_yet(
    kind: str, case: str
) -> None:
    async def main() -> None:
        channel = Channel(Number, name="numbers")
        task = asyncio.create_task(BLOCKED[case](channel))
        await wait_all_blocked()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        channel.sender.put_nowait(Number(0))
        assert not all_blocked(others)
        task.cancel()
        await asyncio.wait([task])

    with asyncio.Runner(loop_factory=FACTORIES[kind]) as runner:
        runner.run(main())


def test_who_looks_for_blocked_tasks_disturbs_no_thread_that_makes_a_tuple() -> None:
    """Python enlarges a tuple under construction only while nobody else holds it."""

    began, looked = threading.Event(), threading.Event()

    def make_tuples() -> None:
        while not looked.is_set():
            assert len(tuple(number for number in range(1000))) == 1000
            began.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # else the heap must be large for a thread to be interrupted
    try:
        with ThreadPoolExecutor(1) as threads:
            made = threads.submit(make_tuples)
            began.wait()
            for _ in range(50):
                assert all_blocked([])
            looked.set()
            made.result()
    finally:
        sys.setswitchinterval(interval)


async def test_every_task_that_waits_for_an_event_is_woken_once_and_clearing_it_affects_none() -> (
    None
):
    event = WorkEvent()
    waiting = [asyncio.ensure_future(event.wait()) for _ in range(3)]
    await wait_all_blocked()
    waiting[0].cancel()
    event.set()
    event.clear()
    await asyncio.wait(waiting)
    assert [one.cancelled() for one in waiting] == [True, False, False]
    later = asyncio.ensure_future(event.wait())
    await wait_all_blocked()
    assert not later.done()
    event.set()
    await later
    await event.wait()


async def test_a_thread_is_at_work_as_soon_as_what_it_waited_for_is_there() -> None:
    """The driver's end on the loop alone, without a thread that could be quick to wake up."""
    thread = ComputeThread()
    current_thread.set(thread)
    channel = Channel(Number, name="numbers")
    waiting = asyncio.run_coroutine_threadsafe(
        for_thread(channel.receiver.get()), asyncio.get_running_loop()
    )
    await wait_all_blocked()
    assert thread.waits == 1
    channel.sender.put_nowait(Number(0))
    assert not all_blocked(asyncio.all_tasks())
    await asyncio.wrap_future(waiting)
    assert thread.waits == 0
