"""Where blocking work runs, and that no two pieces of it ever run at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import pytest

import rlinf_async as ra
from rlinf_async.testing import explore
from rlinf_async.workers.host import Pace

P = ParamSpec("P")
R = TypeVar("R")


class Busy(ra.Worker):
    """Works for a while, in whichever thread its pace chooses."""

    def __init__(self) -> None:
        self.pace = Pace(self)
        self.inside = 0
        self.computed = 0

    async def compute(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        self.computed += 1
        return await super().compute(fn, *args, **kwargs)

    async def places(self, kind: str, seconds: float, times: int) -> list[bool]:
        """Whether each piece ran in the event loop's thread."""
        here = threading.get_ident()
        return [await self.pace.run(kind, self._work, seconds) == here for _ in range(times)]

    async def cancelled(self) -> list[bool]:
        """Give work up while it runs in the thread, and begin some other at once."""
        loop = asyncio.get_running_loop()
        started = asyncio.Event()
        release = threading.Event()
        await self.places("short", 0.0, 2)

        def slow() -> None:
            self.inside += 1
            loop.call_soon_threadsafe(started.set)
            release.wait(60)
            self.inside -= 1

        task = asyncio.create_task(self.pace.run("slow", slow))
        await started.wait()
        task.cancel()
        await asyncio.wait([task])
        loop.call_soon(release.set)
        return await self.places("short", 0.0, 2)

    async def fails(self, times: int) -> str:
        """Raise in each piece; the last error's text."""
        said = ""
        for _ in range(times):
            try:
                await self.pace.run("fails", self._fail)
            except ZeroDivisionError as error:
                said = str(error)
        return said

    async def handed_over(self, seconds: float) -> int:
        """Work three times; how often the work was given to the compute thread."""
        before = self.computed
        await self.places("step", seconds, 3)
        return self.computed - before

    def _work(self, seconds: float) -> int:
        if self.inside:
            raise RuntimeError("two pieces run at once")
        self.inside += 1
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        self.inside -= 1
        return threading.get_ident()

    def _fail(self) -> None:
        raise ZeroDivisionError("as expected")


async def test_short_work_moves_to_the_loop_once_it_was_seen_to_be_short() -> None:
    async with ra.Cluster.local() as cluster:
        busy = await cluster.launch(Busy)
        places = await busy[0].call(Busy.places, "step", 0.0, 30)
        assert places[0] is False
        assert sum(places) > 15  # a busy machine may send some back


async def test_long_work_stays_in_the_thread() -> None:
    async with ra.Cluster.local() as cluster:
        busy = await cluster.launch(Busy)
        assert not any(await busy[0].call(Busy.places, "step", 0.004, 5))


async def test_work_that_became_long_leaves_the_loop_after_one_piece() -> None:
    async with ra.Cluster.local() as cluster:
        busy = await cluster.launch(Busy)
        await busy[0].call(Busy.places, "step", 0.0, 3)
        assert sum(await busy[0].call(Busy.places, "step", 0.004, 6)) <= 1


async def test_kinds_of_work_are_judged_apart() -> None:
    async with ra.Cluster.local() as cluster:
        busy = await cluster.launch(Busy)
        await busy[0].call(Busy.places, "step", 0.0, 3)
        assert await busy[0].call(Busy.places, "reset", 0.0, 1) == [False]


async def test_work_left_in_the_thread_by_a_cancelled_caller_is_never_run_into() -> None:
    async with ra.Cluster.local() as cluster:
        busy = await cluster.launch(Busy)
        assert (await busy[0].call(Busy.cancelled))[0] is False


async def test_an_error_is_raised_where_it_was_asked_for_in_either_place() -> None:
    async with ra.Cluster.local() as cluster:
        busy = await cluster.launch(Busy)
        assert await busy[0].call(Busy.fails, 3) == "as expected"


def test_in_virtual_time_work_takes_none_so_that_every_run_decides_alike() -> None:
    async def body() -> list[int]:
        async with ra.Cluster.local() as cluster:
            busy = await cluster.launch(Busy)
            return [await busy[0].call(Busy.handed_over, seconds) for seconds in (0.0, 0.002)]

    assert explore(body, seeds=[1, 1]) == [[1, 0]] * 2


@pytest.mark.parametrize("times", [1, 2])
async def test_without_a_limit_nothing_runs_on_the_loop(times: int) -> None:
    class Rendering(Busy):
        def __init__(self) -> None:
            super().__init__()
            self.pace = Pace(self, short=0.0)

    async with ra.Cluster.local() as cluster:
        busy = await cluster.launch(Rendering)
        assert not any(await busy[0].call(Rendering.places, "step", 0.0, times))
