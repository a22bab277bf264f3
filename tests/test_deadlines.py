"""Limits on how long somebody else may take, which a stall of this process does not run out."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

import pytest

from rlinf_async import deadlines
from rlinf_async.runtime.wakers import WorkEvent, what_can_go_on
from tests.stalling import explore_stalls, stall, stall_at

LIMIT = 2.0
LONG = 10 * LIMIT
LOOK = LIMIT / deadlines.LOOKS


def now() -> float:
    return asyncio.get_running_loop().time()


def said_after(seconds: float) -> asyncio.Future[str]:
    """What the other side says so many seconds from now."""
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(seconds, future.set_result, "said")
    return future


def never() -> asyncio.Future[str]:
    """What the other side never says."""
    return asyncio.get_running_loop().create_future()


def test_who_says_nothing_has_its_limit() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with deadlines.timeout(LIMIT):
                await never()
        assert now() == LIMIT

    explore_stalls(main)


def test_what_comes_in_time_is_no_timeout() -> None:
    async def main() -> None:
        async with deadlines.timeout(LIMIT):
            assert await said_after(0.9 * LIMIT) == "said"
        assert now() == 0.9 * LIMIT

    explore_stalls(main)


@pytest.mark.parametrize("when", [0.0, 0.3, 0.5, 0.99])
def test_a_stall_of_this_process_does_not_run_a_limit_out(when: float) -> None:
    async def main() -> None:
        said = never()

        def go_on() -> None:  # what was said meanwhile is read some turns later
            stall(LONG)
            asyncio.get_running_loop().call_later(LOOK / 2, said.set_result, "said")

        asyncio.get_running_loop().call_later(when * LIMIT, go_on)
        async with deadlines.timeout(LIMIT):
            assert await said == "said"

    explore_stalls(main)


def test_who_says_nothing_has_its_limit_without_the_stall() -> None:
    async def main() -> None:
        stall_at(LIMIT / 2, LONG)
        with pytest.raises(TimeoutError):
            async with deadlines.timeout(LIMIT):
                await never()
        assert LONG + LIMIT - LOOK <= now() <= LONG + LIMIT + LOOK

    explore_stalls(main)


def test_one_stall_after_another_does_not_run_a_limit_out() -> None:
    async def main() -> None:
        between = LONG + LOOK / 2
        said = said_after(0.9 * LIMIT + 3 * between)
        for n in range(3):
            stall_at(0.9 * LIMIT + n * between, LONG)
        async with deadlines.timeout(LIMIT):
            assert await said == "said"

    explore_stalls(main)


def test_a_process_that_is_always_late_comes_to_the_end_of_a_limit_too() -> None:
    async def main() -> None:
        async def stalls() -> None:
            while True:
                await asyncio.sleep(LOOK / 2)
                stall(LIMIT / 2)

        stalling = asyncio.create_task(stalls())
        with pytest.raises(TimeoutError):
            async with deadlines.timeout(LIMIT):
                await never()
        stalling.cancel()
        assert now() > 10 * LIMIT

    explore_stalls(main)


def test_being_cancelled_is_no_timeout() -> None:
    async def main() -> None:
        async def waits() -> None:
            async with deadlines.timeout(LIMIT):
                await never()

        task = asyncio.create_task(waits())
        await asyncio.sleep(LIMIT / 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(2 * LIMIT)

    explore_stalls(main)


def test_an_error_in_time_is_raised_as_it_is() -> None:
    async def fails() -> None:
        async with deadlines.timeout(LIMIT):
            await asyncio.sleep(LIMIT / 2)
            raise ValueError("a test")

    async def main() -> None:
        with pytest.raises(ValueError, match="a test"):
            await fails()
        await asyncio.sleep(2 * LIMIT)

    explore_stalls(main)


@pytest.mark.parametrize("outer", [LIMIT / 2, 2 * LIMIT])
def test_the_shorter_of_two_limits_ends_first(outer: float) -> None:
    async def main() -> None:
        ended = list[str]()

        async def inner() -> None:
            try:
                async with deadlines.timeout(LIMIT):
                    await never()
            except TimeoutError:
                ended.append("inner")
                await never()

        with pytest.raises(TimeoutError):
            async with deadlines.timeout(outer):
                await inner()
        assert ended == (["inner"] if outer > LIMIT else [])
        assert now() == outer

    explore_stalls(main)


def test_a_timer_calls_once_and_not_when_it_was_cancelled() -> None:
    async def main() -> None:
        called = list[str]()
        deadlines.Timer(LIMIT, called.append, "one")
        other = deadlines.Timer(LIMIT, called.append, "two")
        await asyncio.sleep(0.9 * LIMIT)
        assert other.left == pytest.approx(0.1 * LIMIT)
        other.cancel()
        await asyncio.sleep(LIMIT)
        assert called == ["one"]
        assert other.left == 0.0

    explore_stalls(main)


def test_what_is_left_of_a_limit_is_kept_over_a_stall() -> None:
    async def main() -> None:
        timer = deadlines.Timer(LIMIT, lambda: None)
        await asyncio.sleep(LIMIT / 2 + LOOK / 2)
        stall(LONG)
        assert LIMIT / 2 - LOOK <= timer.left <= LIMIT / 2
        await asyncio.sleep(LOOK / 2)
        assert LIMIT / 2 - LOOK <= timer.left <= LIMIT / 2
        timer.cancel()

    explore_stalls(main)


async def test_a_cancelled_timer_holds_nothing() -> None:
    class Owner:
        def call(self) -> None: ...

    owner = Owner()
    gone: Callable[[], Owner | None] = weakref.ref(owner)
    timer = deadlines.Timer(LIMIT, owner.call)
    timer.cancel()
    del owner
    assert gone() is None


async def test_who_has_a_limit_can_go_on_by_itself() -> None:
    async def waits() -> None:
        async with deadlines.timeout(1000.0):
            await WorkEvent().wait()

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "asyncio.timeout() in task" in what_can_go_on()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
