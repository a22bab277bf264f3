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
from contextlib import suppress
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

from rlinf_async import deadlines
from rlinf_async.channels import Channel, ConnectionLost, Latest
from rlinf_async.channels.wire import (
    ChannelServer,
    Connection,
    Router,
    Traffic,
    traffic_of,
)
from rlinf_async.channels.wire.links.protocol import Nothing
from rlinf_async.observe.trace import Span
from rlinf_async.rewards.ended import how_it_ended
from rlinf_async.runtime.backend import Activity, Cancel, WorkerSpec
from rlinf_async.runtime.child import Boot
from rlinf_async.runtime.forced_exit import kill_tree
from rlinf_async.runtime.launching import check_seconds
from rlinf_async.runtime.listeners import LISTEN_VARIABLE, Listeners
from rlinf_async.runtime.output import OutputLog, OutputPipe
from rlinf_async.runtime.protocol import Outcome, decode_spans
from rlinf_async.runtime.remote import RemoteCall
from rlinf_async.runtime.spawning import is_being_started, open_death, spawn_whole
from rlinf_async.runtime.stall import result_of
from rlinf_async.workers.errors import (
    BuildError,
    Failure,
    WorkerDied,
    WorkerError,
    WorkerUnresponsive,
)
from rlinf_async.workers.host import OnEnd
from rlinf_async.workers.methods import Method

log = logging.getLogger(__name__)
MAIN_GUARD = (
    "a script must start its cluster under 'if __name__ == \"__main__\":', because its workers "
    "import it"
)
EXIT_SECONDS = 1.0
"""time that a process which closed its connection has to exit by itself"""
CROWDED: Final = 4
"""worker processes per core, above which a warning is logged"""


class ProcessWorker:
    """One rank in a process of its own."""

    def __init__(
        self,
        spec: WorkerSpec,
        process: SpawnProcess,
        server: ChannelServer,
        output: OutputPipe,
        output_place: str,
    ) -> None:
        self.name = spec.info.name
        self._process = process
        self._output = output
        self._output_place = output_place
        self._server = server
        self._connection: Connection | None = None
        self._stopping = False
        self._kill_reason: str | None = None
        self._kill_timer: deadlines.Timer | None = None
        self._loop = asyncio.get_running_loop()
        self.pid = process.pid or 0
        self.died: asyncio.Future[WorkerDied] = self._loop.create_future()
        self.exited: asyncio.Future[None] = self._loop.create_future()
        self._death_file = open_death(process)
        self._loop.add_reader(self._death_file, self._on_exit)

    @property
    def connection(self) -> Connection | None:
        return self._connection

    async def attach(self, connected: asyncio.Future[Connection], limit: float) -> None:
        """Wait for the process to connect and its worker to be set up."""
        either: list[asyncio.Future[Any]] = [connected, self.died]
        with suppress(TimeoutError):
            async with deadlines.timeout(limit):
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self.died.done():
            raise self.died.result()
        if not connected.done():
            self.lose(f"its process did not connect within {limit:g} s")
            raise await result_of(self.died)
        self._connection = connected.result()
        outcome = await self._ask("worker.start")
        if outcome.failure is not None:
            raise WorkerError(outcome.failure)

    def begin(self, method: Method, arguments: dict[str, Any], on_end: OnEnd) -> Cancel:
        call = RemoteCall(self._live, self._server, self.died, method, on_end)
        call.send(arguments)
        return call.cancel

    async def activity(self) -> Activity:
        try:
            found, _ = await self._live.request(
                "worker.activity", Nothing(), reply=Activity, control=True
            )
        except ConnectionLost:
            return Activity()
        return found

    async def spans(self) -> list[Span]:
        try:
            _, body = await self._live.request("worker.spans", Nothing(), reply=Nothing)
        except ConnectionLost:
            return []
        return decode_spans(body)

    async def stop(self, grace: float) -> None:
        self._stopping = True
        outcome = Outcome()
        try:
            if grace > 0 and self._connection is not None and not self.exited.done():
                async with deadlines.timeout(grace):
                    outcome = await self._ask("worker.stop")
                    await result_of(self.exited)
        except TimeoutError:
            log.warning("%s did not stop within %.1f s and is killed", self.name, grace)
        except WorkerDied:
            pass
        await self.kill()
        if outcome.failure is not None:
            raise WorkerError(outcome.failure)

    async def kill(self) -> None:
        """Kill the process and what it started, if it still runs."""
        self._stopping = True
        if not self.exited.done():
            kill_tree(self._process)
            await result_of(self.exited)
        self.died.cancel()

    def lose(self, reason: str) -> None:
        """The connection is lost: kill the process for this reason, unless it soon ends itself."""
        if not self._stopping and not self.exited.done() and self._kill_timer is None:
            self._kill_timer = deadlines.Timer(EXIT_SECONDS, self._kill_for, reason)

    def _kill_for(self, reason: str) -> None:
        if not self.exited.done():
            self._kill_reason = reason
            kill_tree(self._process)

    async def _ask(self, kind: str) -> Outcome:
        try:
            outcome, _ = await self._live.request(kind, Nothing(), reply=Outcome, control=True)
        except ConnectionLost:
            raise await result_of(self.died) from None
        return outcome

    @property
    def _live(self) -> Connection:
        if self._connection is None:
            raise ConnectionLost(f"{self.name} has not connected yet")
        return self._connection

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._death_file)
        os.close(self._death_file)
        kill_tree(self._process)  # what it started and left behind
        self._process.join()
        self._output.close()
        code = self._process.exitcode or 0
        self._process.close()
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        if self._connection is not None:
            self._connection.peer_ended()
        if not self.died.done():
            self.died.set_result(self._death(code))
        if not self.exited.done():
            self.exited.set_result(None)

    def _death(self, code: int) -> WorkerDied:
        kind = WorkerDied if self._kill_reason is None else WorkerUnresponsive
        failure = Failure(
            worker=self.name,
            host=socket.gethostname(),
            pid=self.pid,
            method="its process",
            error_type=kind.__name__,
            message=self._kill_reason or f"the process ended by itself: {self._end_of(code)}",
            traceback="",
        )
        return kind(failure)

    def _end_of(self, code: int) -> str:
        """How the process ended, with a hint where it never connected."""
        end = how_it_ended(code)
        if self._connection is not None:
            return end
        if code < 0:
            return f"{end}, before it could connect (was memory used up? the kernel's log says so)"
        if self._output.opened:
            return f"{end}, before it could connect; its error is {self._output_place}"
        return (  # it ended while it imported the main module
            f"{end}, before it could connect; its error is on the stderr of this process "
            f"({MAIN_GUARD})"
        )


class ProcessBackend:
    """Starts a process for each rank and owns the queues of all channels."""

    def __init__(
        self,
        *,
        heartbeat_limit: float,
        listen: str | None = None,
        log: Path | None = None,
        connect_limit: float = 120.0,
    ) -> None:
        check_seconds("heartbeat_limit", heartbeat_limit, "60 or so")
        self._heartbeat_limit = heartbeat_limit
        self._connect_limit = connect_limit
        self._output = OutputLog(log)
        self._warned_of_load = False
        self._listeners = Listeners(
            listen or os.environ.get(LISTEN_VARIABLE), heartbeat_limit=heartbeat_limit
        )
        self._router = Router()
        self._channels = ChannelServer(self._router)
        self._expected: dict[str, asyncio.Future[Connection]] = {}
        self._workers: dict[str, ProcessWorker] = {}

    @property
    def isolates_devices(self) -> bool:
        return True

    async def open(self) -> None:
        if is_being_started():
            raise BuildError(f"this is the process of a worker that is being started: {MAIN_GUARD}")
        await self._listeners.open(self._router, self._on_connect, self._on_disconnect)

    @property
    def address(self) -> str | None:
        return self._listeners.address

    def publish(self, channel: Channel[Any] | Latest[Any]) -> None:
        self._channels.publish(channel)

    async def start(self, spec: WorkerSpec) -> ProcessWorker:
        life = f"{spec.info.name}#{spec.info.incarnation}"
        connected: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        boot = Boot(
            spec=spec,
            life=life,
            socket=str(self._listeners.socket),
            secret=self._listeners.secret,
            heartbeat_limit=self._heartbeat_limit,
        )
        self._expected[life] = connected
        try:
            process, output = await self._spawn(boot)
            worker = ProcessWorker(spec, process, self._channels, output, self._output.place)
            self._workers[spec.info.name] = worker
            try:
                await worker.attach(connected, self._connect_limit)
            except BaseException:
                await worker.kill()
                raise
        finally:
            self._expected.pop(life, None)
        return worker

    async def _spawn(self, boot: Boot) -> tuple[SpawnProcess, OutputPipe]:
        output = OutputPipe(partial(self._output.write, boot.spec.info.name))
        try:
            process = await spawn_whole(boot, output)
        except BaseException:
            output.close()
            raise
        output.started()
        return process, output

    def rendezvous(self, group: str, launch: int) -> str:
        return (self._listeners.socket.parent / f"{group}-{launch}.store").as_uri()

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
        connections = {name: worker.connection for name, worker in self._workers.items()}
        return {
            name: one.reconnection.seconds
            for name, one in connections.items()
            if one is not None and one.reconnecting
        }

    def traffic(self) -> list[Traffic]:
        connections = (worker.connection for worker in self._workers.values())
        return [traffic_of(one) for one in connections if one is not None]

    def pid(self, name: str) -> int | None:
        worker = self._workers.get(name)
        return None if worker is None or worker.exited.done() else worker.pid

    async def close(self) -> None:
        for worker in list(self._workers.values()):
            await worker.kill()
        await self._listeners.close()

    def _on_connect(self, connection: Connection) -> None:
        expected = self._expected.get(connection.peer)
        if expected is None or expected.done():
            log.warning("refused the connection of unknown peer %r", connection.peer)
            connection.abort(f"not an expected worker: {connection.peer!r}")
            return
        expected.set_result(connection)

    def _on_disconnect(self, connection: Connection, reason: str) -> None:
        worker = self._workers.get(connection.peer.rpartition("#")[0])
        if worker is not None and worker.connection is connection:
            worker.lose(reason)
