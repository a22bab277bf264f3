"""The worker groups of a cluster by name: how they come to be, and how they end.

::

    launch --place--> devices are reserved --start--> all ranks serve, or none is left
                           |                              |
                           +------- close ----------------+--> calls end, then workers
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rlinf_async.observe.trace import Span
from rlinf_async.runtime.backend import Backend, WorkerSpec
from rlinf_async.runtime.calls import GroupCall
from rlinf_async.runtime.group import WorkerGroup
from rlinf_async.runtime.launching import Launch
from rlinf_async.runtime.supervise import (
    Never,
    Supervisor,
    all_ended,
    all_or_none,
    log_failed_stops,
    stop_all,
    unless,
)
from rlinf_async.workers.base import Worker
from rlinf_async.workers.errors import BuildError

W = TypeVar("W", bound=Worker)
log = logging.getLogger(__name__)


class ClusterGroups:
    """Starts groups on a backend, and ends them.

    Args:
        grace: seconds that workers get to finish when they are stopped.
        on_failure: told of a call that failed.
        on_idle_death: told of a worker that died while nobody called it, and stays dead.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        grace: float,
        on_failure: Callable[[BaseException, GroupCall[Any]], None],
        on_idle_death: Callable[[BaseException], None],
    ) -> None:
        self._backend = backend
        self._grace = grace
        self._on_failure = on_failure
        self._on_idle_death = on_idle_death
        self.by_name: dict[str, WorkerGroup[Any]] = {}
        self.closing = False
        """whether the cluster is being left: what starts is cancelled"""
        self._starting: set[asyncio.Task[Any]] = set()
        self._placing: set[str] = set()
        """names of groups whose devices are being reserved"""
        self._spans: list[Span] = []

    def check_name(self, name: str) -> None:
        """Raise `BuildError` where a name is taken."""
        if name in self.by_name or name in self._placing:
            raise BuildError(f"there is a group {name!r} already: pass another name=")

    async def start(
        self, worker: type[W], launch: Launch, ranks: list[WorkerSpec]
    ) -> WorkerGroup[W]:
        """Reserve what the ranks need, and start all of them, or none.

        Raises:
            BuildError: they cannot be had or started; the cluster was left meanwhile.
            WorkerError: ``__init__`` or ``setup`` raised in a rank.
        """
        placed = await self._place(launch.group, ranks)
        supervisors = [
            Supervisor(self._backend, spec, launch.restart or Never(), self._on_idle_death)
            for spec in placed
        ]
        made = WorkerGroup(worker, launch.group, supervisors, self._on_failure)
        self.by_name[launch.group] = made
        self._backend.check_load(len(self.supervisors()))
        starts = [asyncio.create_task(one.start(), name=one.name) for one in supervisors]
        self._starting.update(starts)
        try:
            await all_or_none(starts)
        except BaseException as error:  # the ranks that did start are of no use alone
            log_failed_stops(await stop_all(supervisors, self._grace))
            del self.by_name[launch.group]
            await self._backend.release(placed)
            self._explain_end(launch.group, error)
            raise
        finally:
            self._starting.difference_update(starts)
        return made

    async def _place(self, group: str, ranks: list[WorkerSpec]) -> Sequence[WorkerSpec]:
        """Reserve what a launch needs; ended with the cluster."""
        placing = asyncio.create_task(self._backend.place(ranks), name=f"place {group}")
        self._placing.add(group)
        self._starting.add(placing)
        try:
            return await placing
        except BaseException as error:
            placing.cancel()
            [placed] = await asyncio.gather(placing, return_exceptions=True)
            if not isinstance(placed, BaseException):  # just when this was cancelled
                await self._backend.release(placed)
            self._explain_end(group, error)
            raise
        finally:
            self._placing.discard(group)
            self._starting.discard(placing)

    def _explain_end(self, group: str, error: BaseException) -> None:
        """Raise `BuildError` for a launch whose starts were cancelled by `close`."""
        task = asyncio.current_task()
        by_others = task is None or not task.cancelling()
        if self.closing and by_others and isinstance(error, asyncio.CancelledError):
            raise BuildError(f"{group}: this cluster was left while it started") from None

    def supervisors(self) -> list[Supervisor]:
        """Those of all ranks."""
        return [one for group in self.by_name.values() for one in group.supervisors]

    async def spans(self) -> list[Span]:
        """All spans that workers have recorded since the last time."""
        for supervisor in self.supervisors():
            handle = supervisor.handle_nowait()
            if handle is not None:
                self._spans += await handle.spans()
        taken, self._spans = self._spans, []
        return taken

    async def close(self, hurry: asyncio.Event) -> list[Any]:
        """End calls and starts, then the workers; without grace once ``hurry`` is set.

        Returns what stopping each worker raised, or None, see `log_failed_stops`.
        """
        calls = [call for group in self.by_name.values() for call in group.calls]
        for group in self.by_name.values():
            group.ended = True
        for call in calls:
            call.cancel()
        for start in self._starting:
            start.cancel()
        ending = (call.finished(self._grace) for call in calls)
        await unless(hurry, *ending, all_ended(self._starting))
        supervisors = self.supervisors()
        results = await unless(hurry, *(one.stop(self._grace) for one in supervisors))
        if results is None:
            log.warning("interrupted again: workers are killed")
            results = await stop_all(supervisors, 0.0)
        return results
