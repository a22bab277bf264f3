"""Sees a deadlock, or whoever blocks this process's event loop, and says who waits for whom.

Once a second, and only while somebody has waited on a channel for longer than that, every worker is
asked whether it could go on by itself. When nobody can, here or there, and nothing has moved for
``deadlock_after`` seconds, that is a deadlock: it is raised with the report. While somebody still
could (a timer, a computation, a socket), the waits are only reported, ever more rarely.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from rlinf_async.channels import Statistics
from rlinf_async.runtime.stall import all_blocked, internal
from rlinf_async.workers.errors import Deadlock
from rlinf_async.workers.watchdog import Watchdog

if TYPE_CHECKING:
    from rlinf_async.runtime.cluster import Cluster

log = logging.getLogger(__name__)
PERIOD = 1.0
FIRST_REPORT = 30.0


class Watch:
    """Watches one cluster."""

    def __init__(self, cluster: Cluster, deadlock_after: float | None) -> None:
        self._cluster = cluster
        self._limit = deadlock_after
        self._task: asyncio.Task[None] | None = None
        self._watchdog: Watchdog | None = None
        self._progress: object = None
        self._still = 0.0
        self._proven = 0.0
        self._report_at = FIRST_REPORT

    def start(self) -> None:
        """Begin, unless time is virtual: there the loop itself sees that nothing can happen."""
        loop = asyncio.get_running_loop()
        if getattr(loop, "virtual", False):
            hooks: list[Any] | None = getattr(loop, "describe", None)
            if isinstance(hooks, list):
                hooks.append(self._cluster.report)
            return
        self._watchdog = Watchdog("the process that started the workers")
        self._watchdog.start()
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
        waits = self._cluster.waits()
        progress = self._moved()
        if progress != self._progress or not waits or waits[0].seconds < PERIOD:
            self._progress, self._still, self._proven = progress, 0.0, 0.0
            self._report_at = FIRST_REPORT
            return
        self._still += PERIOD
        self._proven = self._proven + PERIOD if await self._nobody_can_go_on() else 0.0
        if self._limit is not None and self._proven >= self._limit:
            self._cluster.abort(Deadlock(self._say(self._proven)))
        elif self._still >= self._report_at:
            self._report_at *= 2
            report = "\n".join([self._cluster.report(), *await self._at_work()])
            log.warning("nothing has moved for %.0f s; %s", self._still, report)

    def _say(self, seconds: float) -> str:
        return (
            f"every worker waits for another, and nothing has moved for {seconds:.0f} s\n"
            + self._cluster.report()
        )

    def _moved(self) -> object:
        """Changes whenever an item moves on any channel."""
        return [
            (seen.puts, seen.gets, seen.leases_out)
            if isinstance(seen := channel.statistics(), Statistics)
            else seen.version
            for channel in self._cluster.channels.values()
        ]

    async def _at_work(self) -> list[str]:
        """A line for every worker that has open spans: it may wait for something else too."""
        lines = []
        for group in self._cluster.groups.values():
            for supervisor in group.supervisors:
                handle = supervisor.handle_nowait()
                doing = (await handle.activity()).doing if handle is not None else ()
                if doing:
                    lines.append(f"  {supervisor.name} is at work: {', '.join(doing)}")
        return lines

    async def _nobody_can_go_on(self) -> bool:
        if not all_blocked(asyncio.all_tasks()):
            return False
        for group in self._cluster.groups.values():
            for supervisor in group.supervisors:
                handle = supervisor.handle_nowait()
                if handle is None or not (await handle.activity()).blocked:
                    return False
        return True
