"""The live side of a run of any kind: the table in the terminal, and the spans."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self

from rlinf_async import patient
from rlinf_async.observe.errors import ObserveError
from rlinf_async.observe.perfetto import write_perfetto
from rlinf_async.observe.progress import ProgressState, ProgressView, WorkerView
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.trace import Span
from rlinf_async.runtime.backend import WorkerHandle
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.flows import Flows
from rlinf_async.runtime.stall import internal

PERIOD = 0.25
SPANS_EVERY = 10.0
"""seconds between two collections of the workers' spans"""
SPANS_LIMIT = 2.0
"""seconds that a worker has to hand its spans over; it may be stopped, or dying"""
SPANS_KEPT = 400_000
LOOK_EVERY = 1.0
"""seconds between two questions to the workers what they are doing; shorter waits are not busy"""


class Headline(NamedTuple):
    """What a job says of itself, on top of the live view."""

    run: str
    iteration: int
    iterations: int
    figures: Sequence[tuple[str, str]]


class Live:
    """Shows a run while it goes on, and collects what its trace is made of."""

    def __init__(
        self,
        folder: RunFolder,
        cluster: Cluster,
        view: ProgressView,
        headline: Callable[[], Headline],
    ) -> None:
        self._folder = folder
        self._cluster = cluster
        self._view = view
        self._headline = headline
        self._tasks: list[asyncio.Task[None]] = []
        self.note = ""
        self._spans: list[Span] = []
        self._flows = Flows(cluster)
        self._collecting = asyncio.Lock()
        self._doing: dict[str, str] = {}
        self.left_out: Counter[str] = Counter()
        """spans that had to go, by worker"""

    def show(self) -> None:
        """Draw the present state."""
        run, iteration, iterations, figures = self._headline()
        self._flows.look()
        self._view.update(
            ProgressState(
                run=run,
                iteration=iteration,
                iterations=iterations,
                figures=figures,
                channels=self._flows.channels,
                edges=self._flows.edges,
                workers=self._workers(),
                note=self.note,
            )
        )

    async def leave_trace(self) -> None:
        """Collect the last spans and write the trace, however the run ends."""
        try:
            await self._collect()
        finally:
            try:
                write_perfetto(
                    self._spans,
                    self._folder.trace,
                    left_out=self.left_out,
                    counters=self._flows.counters,
                )
            except ObserveError as error:
                print(f"the trace was not written: {error}", file=sys.stderr)

    def _workers(self) -> list[WorkerView]:
        waiting = {wait.party.partition(".")[0]: wait for wait in self._cluster.waits()[::-1]}
        views = []
        for group in self._cluster.groups.values():
            for supervisor in group.supervisors:
                wait, doing = waiting.get(supervisor.name), self._doing.get(supervisor.name, "")
                if wait and wait.seconds > LOOK_EVERY and doing:
                    wait = None  # one of its tasks waits, another works
                views.append(
                    WorkerView(
                        name=supervisor.name,
                        doing="" if wait else doing or "busy",
                        waiting_for=wait.channel if wait else None,
                        waiting_seconds=wait.seconds if wait else 0.0,
                        restarts=supervisor.restarts,
                    )
                )
        return views

    async def _draw(self) -> None:
        while True:
            self.show()
            await asyncio.sleep(PERIOD)

    async def _look(self) -> None:
        """Ask every worker which spans it has open."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            for group in self._cluster.groups.values():
                for supervisor in group.supervisors:
                    handle, doing = supervisor.handle_nowait(), ""
                    if handle is not None:
                        with suppress(TimeoutError):
                            async with patient.timeout(LOOK_EVERY):
                                doing = ", ".join(sorted(set((await handle.activity()).doing)))
                    self._doing[supervisor.name] = doing

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(SPANS_EVERY)
            await self._collect()

    async def _collect(self) -> None:
        """Take the spans of every worker that answers in time; the others keep theirs."""
        async with self._collecting:
            supervisors = [
                one for group in self._cluster.groups.values() for one in group.supervisors
            ]
            handles = [one.handle_nowait() for one in supervisors]
            taken = (self._take(handle) for handle in handles if handle is not None)
            await asyncio.gather(*taken)

    async def _take(self, handle: WorkerHandle) -> None:
        with suppress(TimeoutError):
            async with patient.timeout(SPANS_LIMIT):
                self.keep(await handle.spans())

    def keep(self, spans: list[Span]) -> None:
        """Add spans to the trace; the newest are the ones that somebody will look at."""
        self._spans += spans
        surplus = len(self._spans) - SPANS_KEPT
        if surplus > 0:
            self.left_out.update(span.worker for span in self._spans[:surplus])
            del self._spans[:surplus]

    def __enter__(self) -> Self:
        self._tasks = [
            internal(asyncio.create_task(self._draw(), name="live view")),
            internal(asyncio.create_task(self._follow(), name="collect spans")),
            internal(asyncio.create_task(self._look(), name="what workers do")),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
