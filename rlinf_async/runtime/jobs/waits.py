"""`WaitsRecorder`: once an iteration, who waited for whom and who worked on what.

::

                   waits for                               unblocked by
    boundary       nothing: waits on channels are summed
                   up here and now
    its task       the sums of every worker                the workers, or a limit of time

Nothing of it is on the way of an item: a channel counts a wait when it is over, a worker a span.
Workers are asked beside the run. Where iterations come faster than `SHORTEST`, or than workers
answer, several share a record.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import msgspec

from rlinf_async import deadlines
from rlinf_async.channels import Channel
from rlinf_async.channels.queue import waited_on
from rlinf_async.observe.files import RunFolderError, atomic_write
from rlinf_async.observe.trace import Work
from rlinf_async.observe.waits import (
    ChannelFlow,
    Cores,
    Facts,
    PartyWait,
    PartyWork,
    WaitsRecord,
    decode_waits,
    difference,
    waited_since,
)
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.supervise import Supervisor, WorkDone
from rlinf_async.runtime.wakers import internal

SHORTEST: Final = 0.2
"""seconds from one record to the next, at least"""
LIMIT: Final = 5.0
"""seconds that a worker has to answer; it may be stopped, or dying"""
CLOCKS: Final = Path("/proc/stat")
KEPT_WAITS: Final = 200
"""waits of a record, the longest ones"""


@runtime_checkable
class TellsFacts(Protocol):
    """A run that says what its iterations consist of."""

    def facts(self) -> Facts:
        """What was trained since the last time."""
        ...


class CoreClock:
    """How busy the cores of this host are that this process may use."""

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._last = self._read()

    def since_last(self) -> Cores | None:
        """Return the share since the last call; None where the system does not tell."""
        before, now = self._last, self._read()
        self._last = now
        if before is None or now is None:
            return None
        passed = now[1] - before[1]
        if passed <= 0:
            return None
        return Cores(count=len(self._cores), busy=round((now[0] - before[0]) / passed, 4))

    def _read(self) -> tuple[int, int] | None:
        """Ticks at work, and all ticks, of these cores."""
        try:
            lines = CLOCKS.read_text().splitlines()
        except OSError:
            return None
        mine = {f"cpu{number}" for number in self._cores}
        busy = every = 0
        for name, *ticks in (line.split() for line in lines if line.startswith("cpu")):
            if name in mine:
                counts = [int(one) for one in ticks[:8]]
                every += sum(counts)
                busy += sum(counts) - counts[3] - counts[4]
        return busy, every


class Moment(msgspec.Struct):
    """State of the sums at a boundary."""

    iteration: int
    at: float
    waited: list[PartyWait]
    flows: dict[str, tuple[int, int, int]]
    """puts, gets and depth of each channel"""


class WaitsRecorder:
    """Records the waits of a run.

    Args:
        cluster: the run's cluster.
        facts: returns what the job says of what was trained since the last call.
        write: gets each record.
        cores: whether the cores of this host are looked at; not in virtual time.
    """

    def __init__(
        self,
        cluster: Cluster,
        facts: Callable[[], Facts],
        write: Callable[[WaitsRecord], None],
        *,
        start: int = 1,
        cores: bool = True,
    ) -> None:
        self._cluster, self._facts, self._write, self._start = cluster, facts, write, start
        self._cores = CoreClock() if cores else None
        self._before: Moment | None = None
        self._work: dict[str, tuple[object, WorkDone]] = {}
        """by worker: whose sums they are (a life of it), and what they were"""
        self._asking: asyncio.Task[None] | None = None

    def begin(self, iteration: int) -> None:
        """Count from here on: workers serve, ``iteration`` iterations are trained."""
        self._before = self._moment(iteration)
        self._facts()
        self._asking = self._ask(None)

    def boundary(self, iteration: int) -> None:
        """One more iteration is trained: write a record, unless the last one is too new."""
        before = self._before
        if before is None:
            self.begin(iteration)
            return
        now = asyncio.get_running_loop().time()
        if iteration <= before.iteration or now - before.at < SHORTEST:
            return
        if self._asking is not None and not self._asking.done():
            return
        self._record(before, iteration)

    async def finish(self, iteration: int) -> None:
        """Write what is left."""
        if self._asking is not None:
            await asyncio.wait([self._asking])
        if self._before is not None and iteration > self._before.iteration:
            self._record(self._before, iteration)
            assert self._asking is not None
            await asyncio.wait([self._asking])

    def _record(self, before: Moment, iteration: int) -> None:
        now = self._before = self._moment(iteration)
        record = WaitsRecord(
            iteration=iteration,
            iterations=iteration - before.iteration,
            start=self._start,
            time=time.time(),
            seconds=round(now.at - before.at, 6),
            facts=self._facts(),
            waits=waited_since(now.waited, before.waited)[:KEPT_WAITS],
            channels=[
                ChannelFlow(
                    name=name,
                    puts=puts - before.flows.get(name, (0, 0, 0))[0],
                    gets=gets - before.flows.get(name, (0, 0, 0))[1],
                    depth=depth,
                )
                for name, (puts, gets, depth) in now.flows.items()
            ],
            cores=None if self._cores is None else self._cores.since_last(),
        )
        self._asking = self._ask(record)

    def _moment(self, iteration: int) -> Moment:
        queues = [one.queue for one in self._cluster.channels.values() if isinstance(one, Channel)]
        return Moment(
            iteration=iteration,
            at=asyncio.get_running_loop().time(),
            waited=[
                PartyWait(*msgspec.structs.astuple(one))
                for queue in queues
                for one in waited_on(queue)
            ],
            flows={
                one.name: (one.sequence - one.withdrawn, one.gets, len(one.unkeyed.entries))
                for one in queues
            },
        )

    def _ask(self, record: WaitsRecord | None) -> asyncio.Task[None]:
        return internal(asyncio.create_task(self._complete(record), name="waits of workers"))

    async def _complete(self, record: WaitsRecord | None) -> None:
        """Ask the workers, and write the record."""
        every = [one for group in self._cluster.groups.values() for one in group.supervisors]
        found = await asyncio.gather(*(self._of(one) for one in every))
        if record is not None:
            record.parties = [one for one in found if one is not None]
            self._write(record)

    async def _of(self, supervisor: Supervisor) -> PartyWork | None:
        """What a worker has done since it was asked last; None where it does not answer."""
        handle = supervisor.live
        if handle is None:
            return None
        try:
            async with deadlines.timeout(LIMIT):
                now = await handle.work()
        except TimeoutError:
            return None
        if not now.at:
            return None
        life, before = self._work.get(supervisor.name, (None, None))
        self._work[supervisor.name] = handle, now
        if before is None or life is not handle:
            return None  # counted from now on
        return PartyWork(
            worker=supervisor.name,
            role=supervisor.name.partition("[")[0].lower(),
            seconds=round((now.at - before.at) / 1e9, 6),
            work=_rounded(difference(now.work, before.work)),
            devices=[str(device) for device in supervisor.devices],
            host=self._cluster.host(supervisor.name) or "",
            restarts=supervisor.restarts,
        )


def _rounded(work: Sequence[Work]) -> list[Work]:
    return [
        msgspec.structs.replace(
            one,
            seconds=round(one.seconds, 6),
            total=round(one.total, 6),
            full=round(one.full, 6),
        )
        for one in work
    ]


class WaitsFile:
    """``waits.jsonl`` of a run that goes on.

    Args:
        path: path of the file.
        trained: iterations that the run goes on after: records of later ones go, as these
            iterations are trained again.
    """

    def __init__(self, path: Path, trained: int) -> None:
        self._path = path
        self._encode = msgspec.json.Encoder().encode
        if path.exists():
            with contextlib.suppress(OSError, RunFolderError):
                kept = [
                    one for one in decode_waits(path.read_bytes(), path) if one.iteration <= trained
                ]
                lines = b"".join(self._encode(one) + b"\n" for one in kept)
                atomic_write(path, lines, durable=False)

    def write(self, record: WaitsRecord) -> None:
        """Append a record, if that can be done: a run does not depend on it."""
        with contextlib.suppress(OSError), self._path.open("ab") as file:
            file.write(self._encode(record) + b"\n")
