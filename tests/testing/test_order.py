"""The order of steps: reproducible, different by seed, and always one that asyncio allows."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rlinf_async.testing import VirtualLoop, explore, run, run_on

SEEDS = range(200)


async def busy() -> list[tuple[int, int]]:
    """Tasks, timers, an executor, a task group, a gather and a wait over a set."""
    queue: asyncio.Queue[tuple[int, int]] = asyncio.Queue(2)
    got: list[tuple[int, int]] = []

    async def producer(number: int) -> None:
        for item in range(3):
            await queue.put((number, item))
            await asyncio.sleep(0.1 * number)
        await asyncio.to_thread(len, "inline")

    async def consumer() -> None:
        while True:
            got.append(await queue.get())

    async with asyncio.TaskGroup() as group:
        consumers = {group.create_task(consumer()) for _ in range(4)}
        producers = {asyncio.ensure_future(producer(number)) for number in range(3)}
        await asyncio.wait(producers)
        await asyncio.gather(*(asyncio.sleep(1) for _ in range(3)))
        for task in consumers:  # a set: its order must not depend on addresses
            task.cancel()
    return got


def trace_of(main: Callable[[], Coroutine[Any, Any, object]], seed: int | None) -> bytes:
    loop = VirtualLoop(seed)
    run_on(loop, main())
    return loop.trace


@pytest.mark.parametrize("seed", [None, 0, 1, 17])
def test_the_same_seed_gives_the_same_trace_byte_for_byte(seed: int | None) -> None:
    first = trace_of(busy, seed)
    clutter = [object() for _ in range(1000)]  # other addresses for what is made next
    assert trace_of(busy, seed) == first
    assert len(clutter) == 1000


def test_the_same_seed_gives_the_same_trace_in_another_process() -> None:
    program = (
        "import sys; from tests.testing.test_order import busy, trace_of; "
        "sys.stdout.buffer.write(trace_of(busy, 5))"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in (1, 2)
    }
    assert traces == {trace_of(busy, 5)}


def test_other_seeds_give_other_traces() -> None:
    assert len({trace_of(busy, seed) for seed in SEEDS}) > 0.95 * len(SEEDS)


def test_the_trace_has_no_addresses() -> None:
    assert b"0x" not in trace_of(busy, 0)


def test_without_a_seed_the_order_is_that_of_asyncio() -> None:
    async def main() -> str:
        said: list[str] = []

        async def say(letter: str) -> None:
            for _ in range(3):
                said.append(letter)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for letter in "abc":
                group.create_task(say(letter))
            asyncio.get_running_loop().call_soon(said.append, "-")
        return "".join(said)

    assert run(main(), seed=None) == asyncio.run(main()) == "abc-abcabc"


def test_callbacks_of_one_task_run_in_the_order_in_which_it_scheduled_them() -> None:
    async def main() -> list[int]:
        ran: list[int] = []
        for number in range(5):
            asyncio.get_running_loop().call_soon(ran.append, number)
        await asyncio.sleep(0)
        return ran

    assert all(ran == [0, 1, 2, 3, 4] for ran in explore(main, seeds=SEEDS))


def test_a_callback_that_schedules_callbacks_keeps_their_order() -> None:
    async def main() -> list[int]:
        ran: list[int] = []
        loop = asyncio.get_running_loop()

        def schedule() -> None:
            for number in range(4):
                loop.call_soon(ran.append, number)

        loop.call_soon(schedule)
        await asyncio.sleep(1)
        return ran

    assert all(ran == [0, 1, 2, 3] for ran in explore(main, seeds=SEEDS))


def test_a_waiter_goes_on_after_the_callbacks_that_its_future_already_had() -> None:
    async def main() -> bool:
        running: set[asyncio.Task[None]] = set()
        task = asyncio.create_task(asyncio.sleep(1))
        running.add(task)
        task.add_done_callback(running.discard)
        await task
        return not running

    assert all(explore(main, seeds=SEEDS))


def test_tasks_woken_together_run_in_every_order() -> None:
    async def main() -> str:
        woken: list[str] = []
        event = asyncio.Event()

        async def wait(letter: str) -> None:
            await event.wait()
            woken.append(letter)

        async with asyncio.TaskGroup() as group:
            for letter in "abc":
                group.create_task(wait(letter))
            await asyncio.sleep(1)
            event.set()
        return "".join(woken)

    assert set(explore(main, seeds=SEEDS)) == {"abc", "acb", "bac", "bca", "cab", "cba"}


def test_timers_of_the_same_time_run_in_every_order() -> None:
    async def main() -> str:
        ran: list[str] = []
        for letter in "ab":
            asyncio.get_running_loop().call_later(1, ran.append, letter)
        await asyncio.sleep(2)
        return "".join(ran)

    assert set(explore(main, seeds=SEEDS)) == {"ab", "ba"}


def test_an_item_and_a_timeout_of_the_same_time_come_in_either_order() -> None:
    async def main() -> str:
        queue: asyncio.Queue[str] = asyncio.Queue()
        asyncio.get_running_loop().call_later(1, queue.put_nowait, "item")
        try:
            async with asyncio.timeout(1):
                return await queue.get()
        except TimeoutError:
            return "timeout"

    assert set(explore(main, seeds=SEEDS)) == {"item", "timeout"}
