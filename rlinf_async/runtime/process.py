"""Workers as OS processes of this host, each with an event loop of its own.

::

    this process                                      a worker's process (child.py)
    queues of all channels                            ends of channels
    unix socket, owner only  <---- one connection --->  proves the cluster's secret
    log, or stderr           <---- lines --------------  what it prints
    pidfd of the process     ---- death --------------x
                                                      watches this process, and goes with it

The socket lives in a folder of the run's own, which is removed at the end; if this process is
killed, its workers see it, remove the folder and go.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

from rlinf_async.channels import Channel, Latest
from rlinf_async.channels.wire import HomeMaker, Traffic
from rlinf_async.rewards.ended import how_it_ended
from rlinf_async.runtime.backend import WorkerSpec, refuse_what_ray_has, with_rendezvous
from rlinf_async.runtime.child import Boot
from rlinf_async.runtime.devices import host_devices
from rlinf_async.runtime.forced_exit import kill_tree
from rlinf_async.runtime.forked import LOST, ForkedProcess
from rlinf_async.runtime.listeners import LISTEN_VARIABLE, Listeners, shared_secret
from rlinf_async.runtime.output import OutputLog, OutputPipe
from rlinf_async.runtime.remote_worker import CONNECT_SECONDS, Ended, RemoteWorker, RemoteWorkers
from rlinf_async.runtime.spawning import (
    check_importable,
    is_being_started,
    open_death,
    spawn_whole,
)
from rlinf_async.workers.context import Device
from rlinf_async.workers.errors import BuildError

log = logging.getLogger(__name__)
MAIN_GUARD = (
    "a script must start its cluster under 'if __name__ == \"__main__\":', because its workers "
    "import it"
)
CROWDED: Final = 4
"""worker processes per core, above which a warning is logged"""


class ChildProcess:
    """The process of one rank, a child of this one."""

    exit_seconds = 1.0

    def __init__(self, process: SpawnProcess, output: OutputPipe, output_place: str) -> None:
        self.host = socket.gethostname()
        self.pid = process.pid or 0
        self._process = process
        self._output = output
        self._output_place = output_place
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Ended] = self._loop.create_future()
        self._death_file = open_death(process)
        self._loop.add_reader(self._death_file, self._on_exit)

    def kill(self) -> None:
        """Kill the process, and the processes of the group that it leads."""
        kill_tree(self._process)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._death_file)
        os.close(self._death_file)
        if not isinstance(self._process, ForkedProcess) or self._process.exitcode == LOST:
            kill_tree(self._process)  # what it started and left behind; else its server has
        self._process.join()
        self._output.close()
        code = self._process.exitcode or 0
        self._process.close()
        if code == LOST:
            how = "the process from which it was forked was killed, and it was killed, too"
        else:
            how = how_it_ended(code)
        self.ended.set_result(Ended(how, self._hint(code)))

    def _hint(self, code: int) -> str:
        """Where to look if the process never connected."""
        if code < 0:
            return " (was memory used up? the kernel's log says so)"
        if self._output.opened:
            return f"; its error is {self._output_place}"
        # It ended while it imported the main module.
        return f"; its error is on the stderr of this process ({MAIN_GUARD})"


class ProcessBackend:
    """Starts a process for each rank and owns the queues of all channels."""

    def __init__(
        self,
        *,
        heartbeat_limit: float,
        listen: str | None = None,
        log: Path | None = None,
        connect_limit: float = CONNECT_SECONDS,
    ) -> None:
        listen = listen or os.environ.get(LISTEN_VARIABLE)
        secret = None if listen is None else shared_secret()
        self.workers = RemoteWorkers(
            Listeners(listen, heartbeat_limit=heartbeat_limit, secret=secret),
            heartbeat_limit=heartbeat_limit,
            connect_limit=connect_limit,
        )
        self._output = OutputLog(log)
        self._warned_of_load = False
        self._rendezvous = 0
        """number of rendezvous so far"""

    @property
    def isolates_devices(self) -> bool:
        return True

    def devices(self) -> Sequence[Device]:
        return host_devices()

    async def open(self) -> None:
        if is_being_started():
            raise BuildError(f"this is the process of a worker that is being started: {MAIN_GUARD}")
        await self.workers.open()

    @property
    def address(self) -> str | None:
        return self.workers.listeners.address

    def publish(self, channel: Channel[Any] | Latest[Any]) -> None:
        self.workers.publish(channel)

    async def home(self, name: str) -> HomeMaker | None:
        return await self.workers.home(name)

    async def place(self, ranks: Sequence[WorkerSpec]) -> Sequence[WorkerSpec]:
        refuse_what_ray_has(ranks)
        check_importable(ranks[0].cls)
        self._rendezvous += 1
        file = self.workers.listeners.socket.parent / f"rendezvous-{self._rendezvous}"
        return with_rendezvous(ranks, file.as_uri())

    async def release(self, ranks: Sequence[WorkerSpec]) -> None:
        pass

    async def start(self, spec: WorkerSpec) -> RemoteWorker:
        return await self.workers.start(spec, self._spawn)

    async def _spawn(self, boot: Boot) -> ChildProcess:
        output = OutputPipe(self._output, boot.spec.info.name)
        try:
            process = await spawn_whole(boot, output)
        except BaseException:
            output.close()
            raise
        output.started()
        return ChildProcess(process, output, self._output.place)

    def check_load(self, workers: int) -> None:
        cores = len(os.sched_getaffinity(0))
        if workers > CROWDED * cores and not self._warned_of_load:
            self._warned_of_load = True
            log.warning(
                "%d worker processes share %d cores: each is slow, also to answer heartbeats; "
                "start fewer workers, or pass a longer heartbeat_limit",
                workers,
                cores,
            )

    def cut_off(self) -> dict[str, float]:
        return self.workers.cut_off()

    def traffic(self) -> list[Traffic]:
        return self.workers.traffic()

    def pid(self, name: str) -> int | None:
        worker = self.workers.get(name)
        return None if worker is None else worker.process.pid

    def host(self, name: str) -> str | None:
        worker = self.workers.get(name)
        return None if worker is None else worker.process.host

    async def close(self) -> None:
        await self.workers.close()
