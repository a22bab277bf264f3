"""The guards of ``conftest.py`` do fail the tests that they are there for."""

from __future__ import annotations

import asyncio
import time

import pytest

from rlinf_async.testing import InvariantBroken, LoopBlocked, Unhandled, no_tasks_left
from tests.loops import FACTORIES, VIRTUAL, run_on_kind


@pytest.mark.parametrize("kind", [*FACTORIES, VIRTUAL])
def test_a_test_that_leaves_a_task_fails(kind: str) -> None:
    async def main() -> None:
        left = asyncio.create_task(asyncio.Event().wait())
        await asyncio.sleep(0)
        try:
            no_tasks_left()
        finally:
            left.cancel()

    with pytest.raises(InvariantBroken, match="1 tasks have not finished"):
        run_on_kind(kind, main)


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_test_that_blocks_its_loop_fails(kind: str) -> None:
    async def main() -> None:
        await asyncio.sleep(0)
        time.sleep(1.5)  # noqa: ASYNC251  the very mistake

    with pytest.raises(LoopBlocked, match="did not answer"):
        run_on_kind(kind, main)


@pytest.mark.parametrize("kind", [*FACTORIES, VIRTUAL])
def test_an_error_that_reaches_nobody_fails_the_test(kind: str) -> None:
    async def main() -> None:
        def broken() -> None:
            raise ValueError("in a callback")

        asyncio.get_running_loop().call_soon(broken)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with pytest.raises(Unhandled):
        run_on_kind(kind, main)


def test_eager_tasks_run_up_to_their_first_wait_at_once() -> None:
    async def main() -> None:
        seen: list[object] = []

        async def work() -> None:
            seen.append(asyncio.current_task())
            async with asyncio.timeout(1):
                await asyncio.sleep(0)
            seen.append("end")

        creator = asyncio.current_task()
        task = asyncio.create_task(work())
        assert seen == [task]
        assert asyncio.current_task() is creator
        await task
        assert seen == [task, "end"]

    run_on_kind("eager", main)
