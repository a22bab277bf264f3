"""Detects a deadlock, or a blocked event loop of this process, and reports who waits for whom.

Once a second the counts of all channels are compared with those of the last look. Only where none
has changed, every worker is asked whether it could go on by itself, up to the first that can. When
nobody can, here or there, and nothing has moved for ``limit`` seconds (no item, and no byte of a
large one) in which somebody waited on a channel, that is a deadlock: it is raised with the report.
While somebody still could (a timer, a computation, a socket, a thread), the waits are only
reported, with who that is, ever more rarely. The waits themselves are looked at only then.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlinf_async.channels import Channel, Latest, Statistics
from rlinf_async.channels.statistics import Wait
from rlinf_async.channels.wire.frames import movement
from rlinf_async.deadlines import LoopWatch
from rlinf_async.runtime.supervise import Standstill, Supervisor
from rlinf_async.runtime.wakers import internal, what_can_go_on
from rlinf_async.workers.base import Deadlock
from rlinf_async.workers.host import watch_loop

log = logging.getLogger(__name__)
PERIOD = 1.0
"""seconds between two looks"""
FIRST_REPORT = 30.0
"""seconds without movement before the first report; from report to report they double"""


class DeadlockWatch:
    """Watches the channels and the workers of one cluster.

    Args:
        homed: looks at the channels whose queues live with workers; ``waits`` then knows theirs.
        waits: gives the waits on the channels, the longest first.
        report: gives who waits for whom, for a person.
        on_deadlock: called with the `Deadlock`.
        limit: seconds without progress that count as a deadlock; None: waits are only reported.
    """

    def __init__(
        self,
        channels: Mapping[str, Channel[Any] | Latest[Any]],
        supervisors: Callable[[], list[Supervisor]],
        *,
        homed: Callable[[], Awaitable[Sequence[Statistics]]],
        waits: Callable[[], list[Wait]],
        report: Callable[[], str],
        on_deadlock: Callable[[Deadlock], None],
        limit: float | None,
    ) -> None:
        self._channels = channels
        self._supervisors = supervisors
        self._homed = homed
        self._waits = waits
        self._report = report
        self._on_deadlock = on_deadlock
        self._limit = math.inf if limit is None else limit
        self._task: asyncio.Task[None] | None = None
        self._watchdog: LoopWatch | None = None
        self._counts: list[object] = []
        """what has moved on each channel, at the last look"""
        self._moved: dict[str, int] = {}
        """what each process that was asked since an item moved has moved"""
        self._still = 0.0
        self._proven = -PERIOD
        self._report_at = FIRST_REPORT

    def start(self) -> None:
        """Begin, unless time is virtual: there the loop itself sees that nothing can happen."""
        loop = asyncio.get_running_loop()
        if getattr(loop, "virtual", False):
            hooks: list[Any] | None = getattr(loop, "describe", None)
            if isinstance(hooks, list):
                hooks.append(self._report)
            return
        self._watchdog = watch_loop("the process that started the workers")
        self._task = internal(asyncio.create_task(self._run(), name="deadlock watch"))

    def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
        if self._watchdog is not None:
            self._watchdog.stop()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            await self._look()

    async def _look(self) -> None:
        every = (*self._channels.values(), *await self._homed())
        before, self._counts = self._counts, [_count(one) for one in every]
        if before != self._counts:
            self._begin_again()
            return
        still = self._still + PERIOD
        found = await self._standstills(every=still >= self._report_at)
        moved = {name: one.moved for name, one in found.items()}
        if any(self._moved.get(name, count) != count for name, count in moved.items()):
            self._begin_again()
            self._moved = moved
            return
        self._moved |= moved
        self._still = still
        free = [
            f"  {name} is not blocked: {one.unless}" for name, one in found.items() if one.unless
        ]
        self._proven = -PERIOD if free else self._proven + PERIOD
        if self._proven < self._limit and self._still < self._report_at:
            return
        waits = self._waits()
        waited = waits[0].seconds if waits else 0.0
        self._still = min(self._still, waited)  # before that, nobody waited
        if min(self._proven, waited) >= self._limit:
            self._on_deadlock(Deadlock(self._text(self._proven)))
        elif self._still >= self._report_at:
            self._report_at *= 2
            report = "\n".join([self._report(), *await self._at_work(), *free])
            log.warning("nothing has moved for %.0f s; %s", self._still, report)

    def _begin_again(self) -> None:
        self._still = 0.0
        self._report_at = FIRST_REPORT
        self._moved.clear()
        # The first look at which nobody can go on only says from where on nothing may move.
        self._proven = -PERIOD

    def _text(self, seconds: float) -> str:
        return (
            f"every worker waits for another, and nothing has moved for {seconds:.0f} s\n"
            + self._report()
        )

    async def _at_work(self) -> list[str]:
        """A line for every worker that has open spans: it may wait for something else too."""
        lines = []
        for supervisor in self._supervisors():
            handle = supervisor.live
            doing = await handle.doing() if handle is not None else ()
            if doing:
                lines.append(f"  {supervisor.name} is at work: {', '.join(doing)}")
        return lines

    async def _standstills(self, *, every: bool) -> dict[str, Standstill]:
        """Whether this process and the workers stand still, by name; where not ``every`` one is
        wanted, up to the first that does not."""
        found = {"main": Standstill(what_can_go_on(), movement.count)}
        for supervisor in self._supervisors():
            if not every and any(one.unless for one in found.values()):
                break
            handle = supervisor.at_work
            if handle is None:
                found[supervisor.name] = Standstill("it is being started")
            elif supervisor.starting_successor:
                found[supervisor.name] = Standstill("its successor is being started")
            else:
                found[supervisor.name] = await handle.standstill()
        return found


def _count(one: Channel[Any] | Latest[Any] | Statistics) -> object:
    """What changes whenever something moves on a channel."""
    if isinstance(one, Channel):
        return one.queue.sequence, one.queue.gets, one.queue.leases_ended
    if isinstance(one, Statistics):
        return one.puts, one.gets, one.leases_out
    return one.version
