"""Workers as coroutines of this event loop: plain breakpoints, and deterministic under the virtual
loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlinf_async.observe.trace import Span, SpanRecorder
from rlinf_async.runtime.launching import host_devices
from rlinf_async.runtime.signals import make_temporary_folder, remove_temporary_folder
from rlinf_async.runtime.supervise import (
    Backend,
    MethodRun,
    Standstill,
    WorkDone,
    WorkerHandle,
    WorkerSpec,
    on_this_host,
)
from rlinf_async.runtime.wakers import free_task
from rlinf_async.workers.base import BuildError, Device, WorkerDied
from rlinf_async.workers.host import OnEnd, WorkerHost
from rlinf_async.workers.methods import Method

log = logging.getLogger(__name__)


class LocalWorker(WorkerHandle):
    """One rank in this process."""

    def __init__(self, host: WorkerHost, recorder: SpanRecorder) -> None:
        self._host = host
        self._recorder = recorder
        self.died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()

    def begin(self, method: Method, arguments: dict[str, Any], on_end: OnEnd) -> MethodRun:
        return self._host.begin(method.name, arguments, on_end)

    async def doing(self) -> tuple[str, ...]:
        return (*self._host.doing(), *self._recorder.doing())

    async def standstill(self) -> Standstill:
        return Standstill(self._host.context.what_works or free_task(self._host.calls))

    async def spans(self) -> list[Span]:
        return self._recorder.take()

    async def work(self) -> WorkDone:
        return WorkDone.of(self._recorder.meter)

    async def stop(self, grace: float) -> None:
        self.died.cancel()
        try:
            async with asyncio.timeout(grace):
                await self._host.stop()
        except TimeoutError:
            log.warning(
                "%s did not stop within %.1f s and is left behind", self._host.info.name, grace
            )


class LocalBackend(Backend):
    """Starts workers in this event loop. Only one rank of a group may use torch.distributed
    here."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def devices(self) -> Sequence[Device]:
        return host_devices()

    async def open(self) -> None:
        self._folder = make_temporary_folder()

    async def place(self, ranks: Sequence[WorkerSpec]) -> Sequence[WorkerSpec]:
        if self._folder is None:
            raise RuntimeError("the cluster was not entered")
        return on_this_host(ranks, self._folder)

    async def start(self, spec: WorkerSpec) -> LocalWorker:
        if spec.info.collective is not None and spec.info.world_size > 1:
            raise BuildError(
                f"{spec.info.group}: torch.distributed needs a process for each rank, and "
                f"Cluster.local() has one for all {spec.info.world_size}: use Cluster.process()"
            )
        recorder = SpanRecorder(spec.info.name, clock=_clock(asyncio.get_running_loop()))
        host = WorkerHost(
            spec.cls, spec.args, spec.kwargs, spec.info, recorder.span, recorder.meter
        )
        await host.start()
        return LocalWorker(host, recorder)

    async def close(self) -> None:
        if self._folder is not None:
            remove_temporary_folder(self._folder)


def _clock(loop: asyncio.AbstractEventLoop) -> Callable[[], int]:
    """Nanoseconds of the clock that the loop goes by: spans of virtual time are in virtual time."""
    if not getattr(loop, "virtual", False):
        return time.monotonic_ns
    return lambda: round(loop.time() * 1e9)
