"""A loop in virtual time whose process can be stopped for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rlinf_async.testing import VirtualLoop, run_on

SEEDS = range(20)


class StallingLoop(VirtualLoop):
    """When it goes on after a stall, timers that are due may come before what others said."""

    def stall(self, seconds: float) -> None:
        """This process is stopped for so long, now."""
        self._now += seconds


def stall(seconds: float) -> None:
    """The process that runs the loop is stopped for so long, now."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StallingLoop)
    loop.stall(seconds)


def stall_at(when: float, seconds: float) -> None:
    """The process is stopped for so long, so many seconds from now."""
    asyncio.get_running_loop().call_later(when, stall, seconds)


def explore_stalls(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run this in many orders."""
    for seed in SEEDS:
        run_on(StallingLoop(seed), main())
