"""What a worker has: its place, a compute thread, hooks, and a loop that keeps answering."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

import rlinf_async as ra
from rlinf_async.deadlines import LoopWatch
from rlinf_async.workers.base import Device, WorkerContext, WorkerInfo, make
from rlinf_async.workers.host import WorkerHost, WorkerState, watch_log, watch_loop

setting: ContextVar[str] = ContextVar("setting", default="none")


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    """Real loops: the virtual one has no threads."""
    return str(request.param)


class Cook(ra.Worker):
    """Blocks in its compute thread until it is told to go on."""

    def __init__(self) -> None:
        self.named_in_init = self.name
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.log_of_life: list[str] = []

    async def setup(self) -> None:
        self.log_of_life.append("setup")

    async def teardown(self) -> None:
        self.log_of_life.append("teardown")

    def block(self) -> str:
        self.begun.set()
        self.may_end.wait()
        return threading.current_thread().name

    async def cook(self) -> str:
        return await self.compute(self.block)

    async def let_it_end(self) -> int:
        """Answers while `cook` blocks its thread."""
        await asyncio.to_thread(self.begun.wait)
        busy = self._context.computing
        self.may_end.set()
        return busy

    async def nested(self) -> list[int]:
        order: list[int] = []
        await asyncio.gather(*(self.compute(order.append, number) for number in range(5)))
        return order

    async def fails(self) -> None:
        await self.compute(int, "not a number")

    async def context(self) -> str:
        setting.set("mine")
        return await self.compute(setting.get)

    async def at_once(self) -> int:
        return 42

    async def boom(self) -> None:
        raise ValueError("boom")


def info(rank: int = 0, **more: object) -> WorkerInfo:
    return WorkerInfo(group="Cook", rank=rank, world_size=2, **more)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def ready_host(cls: type[ra.Worker] = Cook) -> WorkerHost:
    host = WorkerHost(cls, (), {}, info())
    await host.start()
    return host


async def call(host: WorkerHost, method: str) -> Any:
    """Run a method; cancelling this cancels it, and waits for its end."""
    over: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def ended(value: Any, error: BaseException | None) -> None:
        if error is None:
            over.set_result(value)
        else:
            over.set_exception(error)

    running = host.begin(method, {}, ended)
    try:
        return await asyncio.shield(over)
    except asyncio.CancelledError:
        running.cancel()
        await over
        raise


def test_a_worker_knows_its_place_before_its_constructor_runs() -> None:
    with ThreadPoolExecutor(1) as executor:
        devices = (Device("cuda", 3), Device("cuda", 4))
        context = WorkerContext(info(1, devices=devices, incarnation=2), executor)
        worker = make(Cook, context, (), {})
    assert isinstance(worker, Cook)
    assert worker.named_in_init == worker.name == "Cook[1]"
    assert (worker.rank, worker.world_size, worker.incarnation) == (1, 2, 2)
    assert (worker.device, worker.devices) == ("cuda:3", devices)
    assert worker.log.name == "rlinf_async.Cook[1]"
    assert repr(worker) == "<Cook[1]>"
    assert repr(Cook.__new__(Cook)) == "<Cook>"


async def test_a_call_is_answered_while_another_blocks_its_compute_thread(loop_kind: str) -> None:
    host = await ready_host()
    cooking = asyncio.create_task(call(host, "cook"))
    assert await call(host, "let_it_end") == 1
    assert (await cooking).startswith("Cook[0] compute")
    assert host.context.computing == 0
    await host.stop()


async def test_compute_keeps_the_order_in_which_it_was_asked(loop_kind: str) -> None:
    host = await ready_host()
    assert await call(host, "nested") == [0, 1, 2, 3, 4]
    assert await call(host, "context") == "mine"
    assert setting.get() == "none"
    with pytest.raises(ra.WorkerError, match="not a number"):
        await call(host, "fails")
    await host.stop()


async def test_a_cancelled_compute_leaves_what_runs_alone(loop_kind: str) -> None:
    host = await ready_host()
    worker = host._worker
    assert isinstance(worker, Cook)
    cooking = asyncio.create_task(call(host, "cook"))
    await asyncio.to_thread(worker.begun.wait)
    cooking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cooking
    assert (host.calls, host.context.computing) == ({}, 0)
    worker.may_end.set()
    assert await call(host, "context") == "mine"
    await host.stop()


async def test_a_host_goes_through_its_states(loop_kind: str) -> None:
    host = WorkerHost(Cook, (), {}, info())
    states = [host.state]
    await host.start()
    states.append(host.state)
    worker = host._worker
    assert isinstance(worker, Cook)
    await host.stop()
    await host.stop()
    assert [*states, host.state] == [WorkerState.CREATED, WorkerState.READY, WorkerState.STOPPED]
    assert worker.log_of_life == ["setup", "teardown"]
    with pytest.raises(ra.WorkerError, match="ChannelClosed"):
        await call(host, "cook")


class FailsInSetup(Cook):
    async def setup(self) -> None:
        await self.compute(threading.current_thread)
        raise LookupError("no camera")


async def test_a_failed_setup_is_told_and_leaves_no_thread(loop_kind: str) -> None:
    host = WorkerHost(FailsInSetup, (), {}, info())
    threads = threading.active_count()
    with pytest.raises(ra.WorkerError, match=r"Cook\[0\] failed in setup .*no camera") as caught:
        await host.start()
    assert isinstance(caught.value.__cause__, LookupError)
    assert host.state is WorkerState.FAILED
    await host.stop()
    await _until(lambda: threading.active_count() <= threads)


async def _until(condition: Callable[[], bool]) -> None:
    """A thread ends a moment after it was told to."""
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110  (threads set no event when they end)
            await asyncio.sleep(0.001)


class FailsInTeardown(Cook):
    async def teardown(self) -> None:
        raise ValueError("cannot let go")


async def test_a_failed_teardown_is_told(loop_kind: str) -> None:
    host = await ready_host(FailsInTeardown)
    with pytest.raises(ra.WorkerError, match=r"failed in teardown .*cannot let go"):
        await host.stop()
    assert host.state is WorkerState.STOPPED


async def test_a_failure_is_retrieved_although_its_caller_left(
    loop_kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = await ready_host()
    with pytest.raises(ra.WorkerError, match="boom"):
        await call(host, "boom")
    await host.stop()
    assert caplog.text == ""


def test_the_watchdog_names_who_blocks_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    reported = threading.Event()

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reported.set()

    def blocks_the_loop() -> LoopWatch:
        dog = watch_loop("Cook[0]", limit=0.05)  # the stack that it sees is this one at once
        assert reported.wait(60.0)
        return dog

    async def main() -> None:
        blocks_the_loop().stop()

    watch_log.addHandler(listening := Listening())
    try:
        asyncio.run(main())
    finally:
        watch_log.removeHandler(listening)
    assert caplog.text.count("has not answered") == 1
    assert "the event loop of Cook[0] has not answered for 0.1 s" in caplog.text
    assert "await self.compute(fn, ...)" in caplog.text
    assert "blocks_the_loop" in caplog.text


def test_the_watchdog_lets_a_loop_that_answers_alone_and_stops_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        dogs = [watch_loop(f"dog {number}", limit=30.0) for number in range(20)]
        for dog in dogs:
            dog.stop()

    asyncio.run(main())
    assert caplog.text == ""


def test_a_worker_leaves_only_the_collective_that_it_joined(tmp_path: Path) -> None:
    from torch import distributed

    class Joins(ra.Worker):
        async def setup(self) -> None:
            await self.join_collective()

    async def main(cls: type[ra.Worker], collective: str | None) -> bool:
        async with ra.Cluster.local() as cluster:
            await cluster.launch(cls, collective=collective)
            return distributed.is_initialized()

    assert asyncio.run(main(Joins, "gloo"))
    assert not distributed.is_initialized()
    mine = (tmp_path / "mine").as_uri()
    distributed.init_process_group("gloo", init_method=mine, rank=0, world_size=1)
    try:
        assert asyncio.run(main(Cook, None))
        assert distributed.is_initialized()
    finally:
        distributed.destroy_process_group()


def test_a_collective_that_was_not_asked_for_is_refused() -> None:
    class Lonely(ra.Worker):
        async def setup(self) -> None:
            await self.join_collective()

    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            with pytest.raises(ra.WorkerError, match=r'pass collective="gloo" \(CPU\)'):
                await cluster.launch(Lonely)

    asyncio.run(main())


@pytest.mark.parametrize("loop_kind", ["eager"])
async def test_a_method_that_ends_before_its_task_is_made_gives_its_result(loop_kind: str) -> None:
    host = await ready_host()
    try:
        assert await call(host, "at_once") == 42
        with pytest.raises(ra.WorkerError, match="boom"):
            await call(host, "boom")
        assert host.calls == {}
    finally:
        await host.stop()


class Panic(BaseException):
    """As extensions written in Rust raise it."""


class Panics(ra.Worker):
    """Raises what does not derive from Exception."""

    def __init__(self, error: type[BaseException] = Panic) -> None:
        self.error = error

    def panic(self) -> int:
        raise self.error("index out of bounds")

    async def count(self, numbers: ra.Sender[int], how: str) -> int:
        await numbers.put(1)
        if how == "in compute":
            return await self.compute(self.panic)
        return self.panic()


class PanicsInSetup(Panics):
    async def setup(self) -> None:
        self.panic()


@pytest.mark.parametrize("how", ["in its loop", "in compute"])
@pytest.mark.parametrize("error", [Panic, GeneratorExit, SystemExit])
def test_an_error_that_is_no_exception_fails_its_call_and_what_it_sends_to(
    error: type[BaseException], how: str
) -> None:
    async def main() -> None:
        taken: list[int] = []
        try:
            async with ra.Cluster.local() as cluster:
                numbers = cluster.channel(int, name="numbers")
                worker = (await cluster.launch(Panics, error))[0]
                running = worker.call(Panics.count, numbers.sender, how)
                taken.extend([number async for number in numbers.receiver])
                await running
        finally:
            assert taken == []  # the consumer does not take it for the end

    with pytest.raises(ra.WorkerError, match=rf"Panics\[0\].*count.*{error.__name__}"):
        asyncio.run(main())


def test_an_error_in_setup_that_is_no_exception_names_the_worker() -> None:
    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            await cluster.launch(PanicsInSetup)

    with pytest.raises(ra.WorkerError, match=r"PanicsInSetup\[0\].*Panic: index out of bounds"):
        asyncio.run(main())


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
async def test_compute_refuses_what_would_never_come_back(loop_kind: str) -> None:
    host = await ready_host()
    worker = host._worker
    assert worker is not None
    try:
        with pytest.raises(
            RuntimeError, match=r"next raised StopIteration.*give next\(\) a default"
        ):
            await worker.compute(next, iter([]))
        assert worker._context.computing == 0
        asynchronous: Any = Cook.cook
        with pytest.raises(TypeError, match=r"Cook.cook is async: await it"):
            await worker.compute(asynchronous, worker)
    finally:
        await host.stop()
