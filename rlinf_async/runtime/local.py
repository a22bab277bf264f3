"""Workers as coroutines of this event loop: plain breakpoints, and deterministic under the virtual
loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlinf_async.channels import Channel, Latest
from rlinf_async.channels.wire import HomeMaker, Traffic
from rlinf_async.observe.trace import Span, SpanRecorder
from rlinf_async.runtime.launching import host_devices
from rlinf_async.runtime.signals import make_temporary_folder, remove_temporary_folder
from rlinf_async.runtime.supervise import (
    Cancel,
    Standstill,
    WorkerSpec,
    refuse_what_ray_has,
    with_rendezvous,
)
from rlinf_async.runtime.wakers import free_task
from rlinf_async.workers.base import BuildError, Device, WorkerDied
from rlinf_async.workers.host import OnEnd, WorkerHost
from rlinf_async.workers.methods import Method

log = logging.getLogger(__name__)


class LocalWorker:
    """One rank in this process."""

    def __init__(self, host: WorkerHost, recorder: SpanRecorder) -> None:
        self._host = host
        self._recorder = recorder
        self.died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()

    def begin(self, method: Method, arguments: dict[str, Any], on_end: OnEnd) -> Cancel:
        return self._host.begin(method.name, arguments, on_end).cancel

    async def doing(self) -> tuple[str, ...]:
        return self._recorder.doing()

    async def standstill(self) -> Standstill:
        return Standstill(self._host.context.what_works or free_task(self._host.calls))

    async def spans(self) -> list[Span]:
        return self._recorder.take()

    async def stop(self, grace: float) -> None:
        self.died.cancel()
        try:
            async with asyncio.timeout(grace):
                await self._host.stop()
        except TimeoutError:
            log.warning(
                "%s did not stop within %.1f s and is left behind", self._host.info.name, grace
            )


class LocalBackend:
    """Starts workers in this event loop. Only one rank of a group may use torch.distributed
    here."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._rendezvous = 0
        """number of rendezvous so far"""

    @property
    def address(self) -> None:
        return None

    @property
    def isolates_devices(self) -> bool:
        return False

    def devices(self) -> Sequence[Device]:
        return host_devices()

    async def open(self) -> None:
        self._folder = make_temporary_folder()

    def publish(self, channel: Channel[Any] | Latest[Any]) -> None:
        pass

    async def home(self, name: str) -> HomeMaker | None:
        return None

    async def place(self, ranks: Sequence[WorkerSpec]) -> Sequence[WorkerSpec]:
        if self._folder is None:
            raise RuntimeError("the cluster was not entered")
        refuse_what_ray_has(ranks)
        self._rendezvous += 1
        return with_rendezvous(ranks, (self._folder / f"rendezvous-{self._rendezvous}").as_uri())

    async def release(self, ranks: Sequence[WorkerSpec]) -> None:
        pass

    async def start(self, spec: WorkerSpec) -> LocalWorker:
        if spec.info.collective is not None and spec.info.world_size > 1:
            raise BuildError(
                f"{spec.info.group}: torch.distributed needs a process for each rank, and "
                f"Cluster.local() has one for all {spec.info.world_size}: use Cluster.process()"
            )
        recorder = SpanRecorder(spec.info.name, clock=_clock(asyncio.get_running_loop()))
        host = WorkerHost(spec.cls, spec.args, spec.kwargs, spec.info, recorder.span)
        await host.start()
        return LocalWorker(host, recorder)

    def traffic(self) -> list[Traffic]:
        return []

    def check_load(self, workers: int) -> None:
        pass

    def cut_off(self) -> dict[str, float]:
        return {}

    def pid(self, name: str) -> int | None:
        return None

    def host(self, name: str) -> str | None:
        return None

    async def close(self) -> None:
        if self._folder is not None:
            remove_temporary_folder(self._folder)


def _clock(loop: asyncio.AbstractEventLoop) -> Callable[[], int]:
    """Nanoseconds of the clock that the loop goes by: spans of virtual time are in virtual time."""
    if not getattr(loop, "virtual", False):
        return time.monotonic_ns
    return lambda: round(loop.time() * 1e9)
