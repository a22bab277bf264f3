"""Starts and stops many ranks at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from rlinf_async.runtime.supervise import Supervisor

log = logging.getLogger(__name__)


async def all_or_none(tasks: list[asyncio.Task[None]]) -> None:
    """Await all tasks; at the first failure cancel the rest and raise it, not a group of one."""
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def settled(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait until all of these have ended, however they did."""
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless(hurry: asyncio.Event, *waits: Coroutine[Any, Any, None]) -> list[Any] | None:
    """What these gave, errors included; None if we were told not to wait for them."""
    every: asyncio.Future[Any] = asyncio.gather(*waits, return_exceptions=True)
    either: list[asyncio.Future[Any]] = [every]
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait([*either, hurried], return_when=asyncio.FIRST_COMPLETED)
    in_time = every.done()
    hurried.cancel()
    every.cancel()
    await asyncio.gather(every, hurried, return_exceptions=True)
    return every.result() if in_time else None


async def stop_all(supervisors: Sequence[Supervisor], grace: float) -> list[Any]:
    """Stop these ranks; what some raise does not hold the others back."""
    stops = (one.stop(grace) for one in supervisors)
    return await asyncio.gather(*stops, return_exceptions=True)


def tell(results: list[Any]) -> None:
    """A worker that fails while it is stopped hides no cause, and is not silent."""
    for result in results:
        if isinstance(result, Exception):
            log.error("while a worker was stopped: %s", result)
