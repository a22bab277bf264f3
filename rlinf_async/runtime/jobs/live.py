"""The live side of a run: the table in the terminal, the rows of the metrics, the spans."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from rlinf_async.channels import Channel
from rlinf_async.messages.embodied import TrainReport
from rlinf_async.observe.errors import ObserveError
from rlinf_async.observe.perfetto import write_perfetto
from rlinf_async.observe.progress import ChannelView, ProgressState, ProgressView, WorkerView
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.trace import Span
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.config import EmbodiedConfig
from rlinf_async.runtime.jobs.progress import Reached
from rlinf_async.runtime.stall import internal

PERIOD = 0.25
SPANS_EVERY = 40
"""periods between two collections of the workers' spans"""
SPANS_KEPT = 400_000


class Live:
    """Shows a run while it goes on, and collects what its trace is made of."""

    def __init__(
        self,
        config: EmbodiedConfig,
        folder: RunFolder,
        cluster: Cluster,
        reached: Reached,
        view: ProgressView,
    ) -> None:
        self._config = config
        self._folder = folder
        self._cluster = cluster
        self._reached = reached
        self._view = view
        self._task: asyncio.Task[None] | None = None
        self._last: TrainReport | None = None
        self.note = ""
        self._spans: list[Span] = []
        self._left_out = 0

    def row(self, report: TrainReport) -> dict[str, float]:
        """One row of the metrics. What was not measured stays out."""
        self._last = report
        reached = self._reached
        row = {
            "iteration": float(report.iteration),
            "version": float(report.version),
            "env_steps": float(reached.env_steps),
            "train_seconds": reached.train_seconds,
            "steps_per_second": reached.env_steps / max(reached.train_seconds, 1e-9),
            "episodes": float(reached.episodes),
            "staleness_mean": report.lag_mean,
            "staleness_max": float(report.lag_max),
            "second_trajectories": float(report.duplicates),
            **report.metrics,
        }
        if reached.returns:
            row["return"] = sum(reached.returns) / len(reached.returns)
        if reached.successes:
            row["success_rate"] = sum(reached.successes) / len(reached.successes)
        return row

    def show(self) -> None:
        """Draw the present state."""
        reached = self._reached
        self._view.update(
            ProgressState(
                run=f"{self._config.name} (seed {self._config.seed})",
                iteration=reached.version,
                iterations=self._config.iterations,
                env_steps=reached.env_steps,
                seconds=reached.train_seconds,
                steps_per_second=reached.env_steps / max(reached.train_seconds, 1e-9)
                if reached.version
                else None,
                return_=_mean(reached.returns),
                success_rate=_mean(reached.successes),
                staleness=self._last.lag_mean if self._last else None,
                channels=self._channels(),
                workers=self._workers(),
                note=self.note,
            )
        )

    def save_spans(self) -> None:
        """Write the trace."""
        try:
            write_perfetto(self._spans, self._folder.trace)
        except ObserveError as error:
            self.note = str(error)

    def _channels(self) -> list[ChannelView]:
        every = [one for one in self._cluster.channels.values() if isinstance(one, Channel)]
        return [
            ChannelView(name=one.name, depth=seen.depth, capacity=seen.capacity)
            for one, seen in ((one, one.statistics()) for one in every)
        ]

    def _workers(self) -> list[WorkerView]:
        waiting = {wait.party.partition(".")[0]: wait for wait in self._cluster.waits()[::-1]}
        views = []
        for group in self._cluster.groups.values():
            for supervisor in group.supervisors:
                wait = waiting.get(supervisor.name)
                views.append(
                    WorkerView(
                        name=supervisor.name,
                        doing="" if wait else "busy",
                        waiting_for=wait.channel if wait else None,
                        waiting_seconds=wait.seconds if wait else 0.0,
                        restarts=supervisor.restarts,
                    )
                )
        return views

    async def _run(self) -> None:
        ticks = 0
        while True:
            self.show()
            await asyncio.sleep(PERIOD)
            ticks += 1
            if ticks % SPANS_EVERY == 0:
                self.keep(await self._cluster.spans())

    def keep(self, spans: list[Span]) -> None:
        """Add spans to the trace; the newest are the ones that somebody will look at."""
        self._spans += spans
        if len(self._spans) > SPANS_KEPT:
            self._left_out += len(self._spans) - SPANS_KEPT
            del self._spans[:-SPANS_KEPT]

    def __enter__(self) -> Self:
        self._task = internal(asyncio.create_task(self._run(), name="live view"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()


def _mean(values: list[float] | list[bool]) -> float | None:
    return sum(values) / len(values) if values else None
