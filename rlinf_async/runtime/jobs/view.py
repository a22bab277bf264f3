"""What is seen of a run of any kind: the live view in the terminal, the same as a file for other
processes, and the trace it leaves.

`ChannelRates` compares counts of channels, edges and connections with those of the look before;
workers are not asked for them. `LiveView` asks workers for their spans, and waits for none.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple, Self

from rlinf_async import deadlines
from rlinf_async.channels import Channel, Statistics
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.statistics import Edge, Wait
from rlinf_async.channels.wire.session.connection import Traffic
from rlinf_async.observe.files import ObserveError
from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.observe.progress import (
    ChannelView,
    EdgeView,
    ProgressState,
    ProgressView,
    WaitView,
    WorkerView,
)
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.sinks.opened import OpenSinks
from rlinf_async.observe.status import Status, write_status
from rlinf_async.observe.trace import Counter, CountRates, Span, write_perfetto
from rlinf_async.observe.waits import Facts
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.waits import WaitsFile, WaitsRecorder
from rlinf_async.runtime.recording import summary_of
from rlinf_async.runtime.signals import run_signals
from rlinf_async.runtime.supervise import Supervisor, WorkerHandle
from rlinf_async.runtime.wakers import internal

PERIOD: Final = 0.25
"""seconds between two drawings"""
RATES_EVERY_NS: Final = 200_000_000
"""nanoseconds between two looks at the counts, at least: rates of shorter times jump"""
COUNTERS_KEPT: Final = 200_000
"""values in the trace; the oldest go first"""
SPANS_EVERY = 10.0
"""seconds between two collections of the workers' spans"""
SPANS_LIMIT = 2.0
"""seconds that a worker has to hand its spans over; it may be stopped, or dying"""
SPANS_KEPT = 400_000
"""spans of a run that are kept, the newest; the others are counted"""
LOOK_EVERY = 1.0
"""seconds between two questions to the workers what they do; a shorter wait counts as work"""
STATUS_EVERY = 1.0
"""seconds between two writings of the status, which other processes read"""
WAITS_WRITTEN = 200
"""number of waits in the status, the longest ones"""


class ChannelRates:
    """Traffic of the channels, edges and connections of a cluster, per second."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rates = CountRates()
        self.counters: deque[Counter] = deque(maxlen=COUNTERS_KEPT)
        """values of all looks, for the trace"""
        self._looked = 0
        self.channels: Sequence[ChannelView] = ()
        self.edges: Sequence[EdgeView] = ()

    def look(self) -> None:
        """Take the counts, if the last look was long enough ago."""
        now = time.monotonic_ns()
        if now - self._looked < RATES_EVERY_NS:
            return
        self._looked = now
        every = [one for one in self._cluster.channels.values() if isinstance(one, Channel)]
        seen = [statistics_of(one.queue) for one in every]
        self.channels = [self._channel(one, now) for one in seen]
        self.edges = [self._edge(one.name, edge, now) for one in seen for edge in one.edges]
        for traffic in self._cluster.traffic():
            self._connection(traffic, now)

    def _channel(self, seen: Statistics, now: int) -> ChannelView:
        counts = {"items/s": float(seen.gets), "put waits/s": float(seen.put_waits)}
        rates = self._rates.per_second(seen.name, now, counts)
        self._keep(f"channel {seen.name}", now, {"depth": float(seen.depth), **rates})
        return ChannelView(
            name=seen.name,
            depth=seen.depth,
            capacity=seen.capacity,
            items_per_second=rates["items/s"],
        )

    def _edge(self, channel: str, edge: Edge, now: int) -> EdgeView:
        worker = edge.party.partition(".")[0]
        sends = edge.end == "sender"
        name = f"{worker} -> {channel}" if sends else f"{channel} -> {worker}"
        counts = {
            "items/s": float(edge.items),
            "MB/s": edge.nbytes / 1e6,
            "credit waits/s": float(edge.credit_waits),
            "shared/s": float(edge.shared),
            "copied/s": float(edge.copied),
        }
        rates = self._rates.per_second(f"{edge.end} {edge.party} {channel}", now, counts)
        self._keep(name, now, rates if sends else {key: rates[key] for key in ("items/s", "MB/s")})
        return EdgeView(
            name=name,
            items_per_second=rates["items/s"],
            bytes_per_second=rates["MB/s"] * 1e6,
            shared=edge.shared,
            copied=edge.copied,
            credit_waits=edge.credit_waits,
        )

    def _connection(self, traffic: Traffic, now: int) -> None:
        counts = {
            "sent MB/s": traffic.sent_bytes / 1e6,
            "received MB/s": traffic.received_bytes / 1e6,
            "shared/s": float(traffic.sent_shared + traffic.received_shared),
            "copied/s": float(traffic.sent_copied + traffic.received_copied),
        }
        rates = self._rates.per_second(f"connection {traffic.peer}", now, counts)
        self._keep(f"connection {traffic.peer}", now, {**rates, "unsent": float(traffic.unsent)})

    def _keep(self, track: str, now: int, values: dict[str, float]) -> None:
        self.counters.append(Counter(track, now, values))


class Headline(NamedTuple):
    """The top line of the live view."""

    run: str
    iteration: int
    iterations: int
    figures: Sequence[tuple[str, str]]


class LiveView:
    """Shows a run while it goes on, and collects spans and counters for its trace.

    Args:
        folder: the run's folder.
        cluster: the run's cluster.
        view: where to show it.
        headline: returns the top line, now.
        facts: returns what the job says of what was trained since the last call.
        sinks: where the rows of metrics go besides the CSV.
    """

    def __init__(
        self,
        folder: RunFolder,
        cluster: Cluster,
        view: ProgressView,
        headline: Callable[[], Headline],
        facts: Callable[[], Facts] = Facts,
        sinks: OpenSinks | None = None,
    ) -> None:
        self._sinks = sinks
        self._folder = folder
        self._cluster = cluster
        self._view = view
        self._headline = headline
        self._tasks: list[asyncio.Task[None]] = []
        self.note = ""
        """what the run does now, beside training: one sentence, or nothing"""
        self._spans: list[Span] = []
        self._rates = ChannelRates(cluster)
        self._doing: dict[str, str] = {}
        """open spans, by worker"""
        self._collecting = asyncio.Lock()
        self._write_at = float("-inf")  # when the status is next written
        self._ending = False
        self._shown: ProgressState | None = None
        self._facts = facts
        self._waits: WaitsRecorder | None = None
        self.left_out: Counts[str] = Counts()
        """spans left out of the trace, by worker"""

    def metrics(self, resume_at: int | None) -> MetricsWriter:
        """Return what writes the rows of the run; ``resume_at`` is the last step that it keeps of
        an earlier start."""
        sinks = () if self._sinks is None else self._sinks
        return MetricsWriter(self._folder.path, resume_at=resume_at, sinks=sinks)

    def show(self) -> None:
        """Draw the present state, and write it now and then."""
        self._rates.look()
        state = self._shown = self._state()
        self._view.update(state)
        if self._waits is not None:
            self._waits.boundary(state.iteration)
        ending = run_signals().terminating
        now = time.monotonic()
        if now >= self._write_at or ending != self._ending:
            self._write_at = now + STATUS_EVERY
            state.waits = [_wait(one) for one in self._cluster.waits()[:WAITS_WRITTEN]]
            self._write(state, ending=ending)

    def training_begins(self) -> None:
        """Record from now on who waits for whom: workers serve, the next iteration begins."""
        trained = self._headline().iteration
        file = WaitsFile(self._folder.waits, trained)
        self._waits = WaitsRecorder(
            self._cluster, self._facts, file.write, start=self._folder.start
        )
        self._waits.begin(trained)

    def _state(self) -> ProgressState:
        run, iteration, iterations, figures = self._headline()
        if (recorder := self._cluster.recorder) is not None:
            figures = [*figures, ("recorded", summary_of(recorder.state))]
        return ProgressState(
            run=run,
            iteration=iteration,
            iterations=iterations,
            figures=figures,
            channels=self._rates.channels,
            edges=self._rates.edges,
            workers=self._workers(),
            note=self.note,
        )

    def _write(self, state: ProgressState, *, ending: bool) -> None:
        self._ending = ending
        grace = run_signals().grace_seconds
        status = Status(time=time.time(), ending=ending, grace_seconds=grace, shown=state)
        write_status(self._folder.status, status)

    async def write_trace(self) -> None:
        """Collect the last spans and write the trace; write what is left of the waits."""
        try:
            if self._waits is not None:
                await self._waits.finish(self._headline().iteration)
            await self._collect()
        finally:
            try:
                write_perfetto(
                    self._spans,
                    self._folder.trace,
                    left_out=self.left_out,
                    counters=self._rates.counters,
                )
            except ObserveError as error:
                print(f"the trace was not written: {error}", file=sys.stderr)

    def _workers(self) -> list[WorkerView]:
        longest = {wait.party.partition(".")[0]: wait for wait in self._cluster.waits()[::-1]}
        return [
            self._worker(supervisor, longest.get(supervisor.name))
            for group in self._cluster.groups.values()
            for supervisor in group.supervisors
        ]

    def _worker(self, supervisor: Supervisor, wait: Wait | None) -> WorkerView:
        """A worker, and its longest wait."""
        doing = self._doing.get(supervisor.name, "")
        if wait and wait.seconds > LOOK_EVERY and doing:
            wait = None  # one of its tasks waits, another works
        return WorkerView(
            name=supervisor.name,
            doing="" if wait else doing or "busy",
            waiting_for=wait.channel if wait else None,
            waiting_seconds=wait.seconds if wait else 0.0,
            restarts=supervisor.restarts + self._folder.restarts_before.get(supervisor.name, 0),
            replaced=supervisor.replaced,
            failure=supervisor.last_failure,
            host=self._cluster.host(supervisor.name),
            devices=[str(device) for device in supervisor.devices],
            live=supervisor.live is not None,
        )

    async def _draw(self) -> None:
        while True:
            self.show()
            await asyncio.sleep(PERIOD)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            for group in self._cluster.groups.values():
                for supervisor in group.supervisors:
                    handle = supervisor.live
                    self._doing[supervisor.name] = await _doing(handle) if handle else ""

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(SPANS_EVERY)
            await self._collect()

    async def _collect(self) -> None:
        """Collect the spans of every worker that answers in time; the others keep theirs."""
        async with self._collecting:
            supervisors = [
                one for group in self._cluster.groups.values() for one in group.supervisors
            ]
            for one in supervisors:
                left, one.spans_left = one.spans_left, []
                self.keep(left)
            handles = [one.live for one in supervisors]
            taken = (self._take(handle) for handle in handles if handle is not None)
            await asyncio.gather(*taken)

    async def _take(self, handle: WorkerHandle) -> None:
        with suppress(TimeoutError):
            async with deadlines.timeout(SPANS_LIMIT):
                self.keep(await handle.spans())

    def keep(self, spans: list[Span]) -> None:
        """Add spans to the trace, which keeps the newest ones."""
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
        if self._shown is not None:
            self._write(self._shown, ending=True)


def _wait(wait: Wait) -> WaitView:
    return WaitView(
        party=wait.party,
        operation=wait.operation,
        channel=wait.channel,
        key=wait.key,
        seconds=wait.seconds,
        unblockers=wait.unblockers,
    )


async def _doing(handle: WorkerHandle) -> str:
    """The open spans of a worker; empty where it does not answer in time."""
    with suppress(TimeoutError):
        async with deadlines.timeout(LOOK_EVERY):
            return ", ".join(sorted(set(await handle.doing())))
    return ""
