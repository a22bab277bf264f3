"""Work that goes on when nobody waits for it any more."""

from __future__ import annotations

import asyncio

import pytest

from rlinf_async.backends.base import ShieldedTasks


async def fails(when: asyncio.Event) -> None:
    await when.wait()
    raise OSError("too late")


async def test_an_error_after_the_wait_was_cancelled_is_dropped() -> None:
    shielded, go_on = ShieldedTasks(), asyncio.Event()
    waiting = asyncio.create_task(shielded.run(fails(go_on)))
    await asyncio.sleep(0)  # it has begun
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go_on.set()
    await shielded.wait()  # and the loop has no error that nobody handled


async def test_an_error_that_is_waited_for_is_raised() -> None:
    shielded, go_on = ShieldedTasks(), asyncio.Event()
    go_on.set()
    with pytest.raises(OSError, match="too late"):
        await shielded.run(fails(go_on))
