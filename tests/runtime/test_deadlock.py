"""A deadlock is detected and reported, unless a worker could go on by itself."""

from __future__ import annotations

import _thread as threads
import asyncio
import inspect
import logging
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from functools import partial
from logging.handlers import QueueListener
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async import testing
from rlinf_async.channels import BatchResizingIterator, Channel
from rlinf_async.channels.batching import BlockingBatches, PullCancelled
from rlinf_async.channels.batching.driving import for_thread
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.statistics import ComputeThread, current_thread
from rlinf_async.channels.wire.frames import movement
from rlinf_async.runtime import deadlock
from rlinf_async.runtime.wakers import WorkEvent, free_task, what_can_go_on
from rlinf_async.testing import run, wait_all_blocked
from rlinf_async.workers.base import task_group
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

    async def hears(self, hear: ra.Receiver[Number], listening: bool) -> int:
        async with await _listen() if listening else nullcontext():
            return (await hear.get()).value

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


class Far(ra.Worker):
    """Sends or gets an array."""

    async def send(self, size: int, out: ra.Sender[np.ndarray]) -> None:
        await out.put(np.ones(size, np.uint8))

    async def get(self, items: ra.Receiver[np.ndarray]) -> int:
        return int((await items.get()).nbytes)


async def test_a_large_item_on_its_way_is_no_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlock, "PERIOD", 0.02)
    size = 256 << 20
    async with ra.Cluster.process(deadlock_after=0.1) as cluster:
        arrays = cluster.channel(np.ndarray, name="arrays")
        near = (await cluster.launch(Far, name="near"))[0]
        far = (await cluster.launch(Far, name="far"))[0]
        sending = near.call(Far.send, size, arrays.sender)
        assert await far.call(Far.get, arrays.receiver) == size
        await sending


@pytest.mark.parametrize(("moving", "periods", "expected"), [(0, 0.5, 2), (20, 5, 26)])
async def test_nothing_may_move_from_one_look_to_later_ones(
    monkeypatch: pytest.MonkeyPatch, moving: int, periods: float, expected: int
) -> None:
    """With bytes that move between the first looks. One look alone proves nothing."""
    looks = 0

    def look() -> str:
        nonlocal looks
        movement.count += looks < moving
        looks += 1
        return ""

    monkeypatch.setattr(deadlock, "PERIOD", period := 1 / 64)
    monkeypatch.setattr(deadlock, "what_can_go_on", look)
    with pytest.raises(ra.Deadlock):
        async with ra.Cluster.local(deadlock_after=periods * period) as cluster:
            await cluster.channel(Number, name="numbers").receiver.get()
    assert looks == expected


@pytest.mark.parametrize("place", ["driver", "worker"])
async def test_who_listens_is_not_deadlocked_and_the_warning_says_so(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(deadlock, "FIRST_REPORT", 0.5)
    warned: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def warning(text: str, *args: object) -> None:
        if not warned.done():
            warned.set_result(text % args)

    monkeypatch.setattr(deadlock.log, "warning", warning)
    async with new_cluster(deadlock_after=0.2) as cluster, AsyncExitStack() as stack:
        numbers = cluster.channel(Number, name="numbers")
        bob = (await cluster.launch(Polite, name="Bob"))[0]
        if place == "driver":
            await stack.enter_async_context(await _listen())
        asked = bob.call(Polite.hears, numbers.receiver, listening=place == "worker")
        warned.add_done_callback(lambda _: numbers.sender.put_nowait(Number(1)))
        assert await asked == 1
    assert "is not blocked: it listens at ('127.0.0.1', " in await warned


async def _listen() -> asyncio.Server:
    return await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)


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
    "a handler that gets": lambda c: _handled(c.receiver.get),
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
    "a handler that sleeps": lambda c: _handled(lambda: asyncio.sleep(3600)),
    "a handler that gives a plain future": lambda c: _handled(asyncio.Future),
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


async def _handled(handle: Callable[[], Awaitable[Any]]) -> None:
    """Pull from an iterator whose handler waits."""
    filled = Channel(Number, name="filled")
    filled.sender.put_nowait(Number(0))
    batches = BatchResizingIterator(
        filled.receiver, Ones(), total_batch_size=1, micro_batch_size=1,
        on_batch=lambda _: handle(),
    )  # fmt: skip
    await anext(batches)


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
        assert (what_can_go_on() == "") is (case in BLOCKED)
        task.cancel()
        await asyncio.wait([task])

    with asyncio.Runner(loop_factory=FACTORIES[kind]) as runner:
        runner.run(main())


Undo = Callable[[], Any]
Make = Callable[[Channel[Number]], Coroutine[Any, Any, Undo]]


def _each(*undo: Undo) -> Undo:
    return lambda: [one() for one in undo] and None


async def _tcp_server(channel: Channel[Number]) -> Undo:
    return (await _listen()).close


async def _unix_server(channel: Channel[Number]) -> Undo:
    with tempfile.TemporaryDirectory() as folder:
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(asyncio.Protocol, f"{folder}/socket")
    return server.close


class Puts(asyncio.Protocol):
    """Puts a number when bytes come."""


async def _connection(channel: Channel[Number]) -> Undo:
    ours, theirs = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(Puts, sock=ours)
    return _each(transport.abort, theirs.close)


async def _datagrams(channel: Channel[Number]) -> Undo:
    class Datagrams(Puts, asyncio.DatagramProtocol):
        pass

    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(Datagrams, local_addr=("127.0.0.1", 0))
    return transport.abort


async def _reader(channel: Channel[Number]) -> Undo:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    loop.add_reader(ours, channel.sender.put_nowait, Number(0))
    return _each(lambda: loop.remove_reader(ours), ours.close, theirs.close)


async def _timer(channel: Channel[Number]) -> Undo:
    return asyncio.get_running_loop().call_later(3600, channel.sender.close).cancel


async def _timer_of_a_task(channel: Channel[Number]) -> Undo:
    task = asyncio.ensure_future(channel.receiver.get())
    timer = asyncio.get_running_loop().call_later(3600, task.cancel)
    return _each(timer.cancel, task.cancel)


async def _thread(channel: Channel[Number]) -> Undo:
    over = threading.Event()
    threading.Thread(target=over.wait, name="feeds").start()
    return over.set


async def _loop_in_a_thread(channel: Channel[Number]) -> Undo:
    other = asyncio.new_event_loop()
    thread = threading.Thread(target=other.run_forever, name="another loop")
    thread.start()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), other).result()
    stop = partial(other.call_soon_threadsafe, other.stop)
    return _each(stop, thread.join, other.close)


async def _main_in_a_thread(channel: Channel[Number]) -> Undo:
    over = asyncio.Event()
    begun: Future[asyncio.AbstractEventLoop] = Future()

    async def main() -> None:
        begun.set_result(asyncio.get_running_loop())
        await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="another main")
    thread.start()
    stop = partial(begun.result().call_soon_threadsafe, over.set)
    return _each(stop, thread.join)


async def _thread_below_threading(channel: Channel[Number]) -> Undo:
    begun, over, ended = threading.Event(), threading.Event(), threading.Event()

    def feed() -> None:
        begun.set()
        over.wait()
        ended.set()

    threads.start_new_thread(feed, ())
    begun.wait()
    return _each(over.set, ended.wait)


async def _thread_that_logs(channel: Channel[Number]) -> Undo:
    listener = QueueListener(SimpleQueue(), logging.NullHandler())
    listener.start()
    return listener.stop


async def _timer_thread(channel: Channel[Number]) -> Undo:
    loop = asyncio.get_running_loop()
    timer = threading.Timer(3600, loop.call_soon_threadsafe, [channel.sender.close])
    timer.start()
    return timer.cancel


async def _executor(channel: Channel[Number]) -> Undo:
    over = threading.Event()
    asyncio.get_running_loop().run_in_executor(None, over.wait)
    return over.set


async def _handler(channel: Channel[Number]) -> Undo:
    before = signal.signal(signal.SIGUSR2, lambda *_: channel.sender.close())
    return lambda: signal.signal(signal.SIGUSR2, before)


async def _handler_of_the_loop(channel: Channel[Number]) -> Undo:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, channel.sender.close)
    return lambda: loop.remove_signal_handler(signal.SIGUSR2)


async def _nothing(channel: Channel[Number]) -> Undo:
    return lambda: None


async def _cancelled_timer(channel: Channel[Number]) -> Undo:
    asyncio.get_running_loop().call_later(3600, channel.sender.close).cancel()
    return lambda: None


async def _closed_server(channel: Channel[Number]) -> Undo:
    for make in (_tcp_server, _unix_server):
        (await make(channel))()
    return lambda: None


async def _idle_executor(channel: Channel[Number]) -> Undo:
    await asyncio.to_thread(len, "idle afterwards")
    return lambda: None


async def _idle_subprocess(channel: Channel[Number]) -> Undo:
    """Whoever awaits what it says, or its end, is a task."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)
    return lambda: process.communicate(b"")


async def _thread_that_pulls(channel: Channel[Number]) -> Undo:
    """It waits for the channel as the tasks do."""
    view = _view(channel.receiver)

    def pull() -> None:
        with suppress(PullCancelled):
            next(view, None)

    thread = threading.Thread(target=pull)
    thread.start()
    while not statistics_of(channel.queue).waiting_getters > 1:  # noqa: ASYNC110 - another thread does it
        await asyncio.sleep(0)
    return _each(view.close, thread.join)


FROM_OUTSIDE: dict[str, tuple[Make, str]] = {
    "a server": (_tcp_server, "it listens at ('127.0.0.1', "),
    "a server at a Unix socket": (_unix_server, "it listens at "),
    "a connection": (_connection, "a connection is read by tests.runtime.test_deadlock.Puts"),
    "a socket for datagrams": (_datagrams, "a connection is read by tests.runtime"),
    "a reader": (_reader, "Sender.put_nowait is called when a file can be read or written"),
    "a timer": (_timer, "a timer will call "),
    "a timer that cancels a task": (_timer_of_a_task, "a timer will call "),
    "a thread": (_thread, "thread 'feeds' runs"),
    "a loop in a thread": (_loop_in_a_thread, "thread 'another loop' runs"),
    "a main in a thread": (_main_in_a_thread, "thread 'another main' runs"),
    "a thread below threading": (_thread_below_threading, "a thread runs _thread_below_threading"),
    "a timer of threading": (_timer_thread, "thread 'Thread-"),
    "a thread of an executor": (_executor, "runs"),
    "a handler of a signal": (_handler, "handles a signal"),
    "a handler of the loop": (_handler_of_the_loop, "handles a signal"),
}
OF_NO_EFFECT: dict[str, tuple[Make, str]] = {
    "nothing": (_nothing, ""),
    "a cancelled timer": (_cancelled_timer, ""),
    "closed servers": (_closed_server, ""),
    "an idle thread of an executor": (_idle_executor, ""),
    "a thread that logs": (_thread_that_logs, ""),
    "an idle subprocess": (_idle_subprocess, ""),
    "a thread that waits for the channel": (_thread_that_pulls, ""),
}


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("case", [*FROM_OUTSIDE, *OF_NO_EFFECT])
def test_what_may_wake_a_task_from_outside_is_seen_on_every_loop(kind: str, case: str) -> None:
    make, expected = {**FROM_OUTSIDE, **OF_NO_EFFECT}[case]

    async def main() -> None:
        channel = Channel(Number, name="numbers", capacity=1)
        waiting = asyncio.ensure_future(channel.receiver.get())
        undo = await make(channel)
        await wait_all_blocked()
        seen = what_can_go_on()
        if inspect.isawaitable(undone := undo()):
            await undone
        waiting.cancel()
        await asyncio.wait([waiting])
        if case != "a thread that waits for the channel":
            assert expected in seen
        assert bool(seen) is bool(expected), seen

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
        channel.sender.put_nowait(Number(0))
        assert "may go on by itself" in what_can_go_on()
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

    async def look() -> None:
        for _ in range(50):
            assert what_can_go_on() == "thread 'tuples_0' runs"

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # else the heap must be large for a thread to be interrupted
    try:
        with ThreadPoolExecutor(1, "tuples") as threads:
            made = threads.submit(make_tuples)
            began.wait()
            with asyncio.Runner(loop_factory=FACTORIES["uvloop"]) as runner:
                runner.run(look())
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
    assert free_task(asyncio.all_tasks())
    await asyncio.wrap_future(waiting)
    assert thread.waits == 0
