"""Waiting until every other task waits, on virtual and on real loops."""

import asyncio
import itertools

import pytest

from rlinf_async.testing import Livelock, explore, wait_all_blocked
from rlinf_async.testing.pytest_plugin import RunOnLoop


async def wait_while_others_work() -> list[str]:
    done: list[str] = []
    forever = asyncio.Event()

    async def work() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        done.append("worked")
        await forever.wait()

    async def relay(source: asyncio.Future[str], target: asyncio.Future[str]) -> None:
        target.set_result(await source)

    loop = asyncio.get_running_loop()
    futures: list[asyncio.Future[str]] = [loop.create_future() for _ in range(10)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work())]
        for source, target in itertools.pairwise(futures):
            tasks.append(group.create_task(relay(source, target)))
        tasks.append(group.create_task(asyncio.sleep(3600)))
        await wait_all_blocked()
        done.append("blocked")
        loop.call_soon(futures[0].set_result, "relayed")
        await wait_all_blocked()
        done.append(futures[-1].result())
        for task in tasks:
            task.cancel()
    return done


EXPECTED = ["worked", "blocked", "relayed"]


def test_it_returns_once_others_wait_on_a_real_loop(run_on_loop: RunOnLoop) -> None:
    assert run_on_loop(wait_while_others_work()) == EXPECTED


def test_it_returns_once_others_wait_on_every_seed() -> None:
    assert all(done == EXPECTED for done in explore(wait_while_others_work))


async def two_callers() -> int:
    arrived = 0

    async def call() -> None:
        nonlocal arrived
        await wait_all_blocked()
        arrived += 1

    await asyncio.gather(call(), call())
    return arrived


def test_two_callers_do_not_wait_for_each_other(run_on_loop: RunOnLoop) -> None:
    assert run_on_loop(two_callers()) == 2


def test_two_callers_do_not_wait_for_each_other_on_every_seed() -> None:
    assert set(explore(two_callers)) == {2}


def test_on_a_virtual_loop_it_returns_before_the_clock_moves() -> None:
    async def main() -> float:
        sleeping = asyncio.create_task(asyncio.sleep(1))
        await wait_all_blocked()
        now = asyncio.get_running_loop().time()
        await sleeping
        return now

    assert set(explore(main)) == {0.0}


def test_a_task_that_never_waits_is_named(run_on_loop: RunOnLoop) -> None:
    async def main() -> None:
        async def spin() -> None:
            for _ in itertools.count():
                await asyncio.sleep(0)

        spinning = asyncio.create_task(spin(), name="spinner")
        try:
            with pytest.raises(Livelock, match="spinner stands in spin"):
                await wait_all_blocked(max_turns=50)
        finally:
            spinning.cancel()

    run_on_loop(main())
