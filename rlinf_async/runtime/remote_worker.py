"""Workers in processes of their own: connection, calls, liveness and orderly end.

::

    RemoteWorkers                                    all of a cluster: channels, listening sockets
     +-- RemoteWorker   one rank: connection, calls, death
          +-- WorkerProcess   its process: how it is killed, and how its end is seen

Only the `WorkerProcess` differs between backends: a child of this process, or an actor of Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from rlinf_async import deadlines
from rlinf_async.channels import Channel, ConnectionLost, Latest
from rlinf_async.channels.wire import (
    ChannelServer,
    Connection,
    Home,
    HomeMaker,
    Router,
    Traffic,
    traffic_of,
)
from rlinf_async.channels.wire.links.protocol import Nothing
from rlinf_async.observe.clocks import PeerClock
from rlinf_async.observe.trace import Span
from rlinf_async.runtime.backend import Cancel, Doing, Standstill, WorkerSpec
from rlinf_async.runtime.child import Boot, calls_file
from rlinf_async.runtime.launching import check_seconds
from rlinf_async.runtime.listeners import Listeners
from rlinf_async.runtime.protocol import ClockTime, Outcome, decode_spans
from rlinf_async.runtime.remote_call import RemoteCall
from rlinf_async.runtime.stall import result_of
from rlinf_async.workers.errors import Failure, WorkerDied, WorkerError, WorkerUnresponsive
from rlinf_async.workers.foreign_calls import last_words
from rlinf_async.workers.host import OnEnd
from rlinf_async.workers.methods import Method

log = logging.getLogger(__name__)
CONNECT_SECONDS: Final = 120.0
"""time that a started process has to connect"""


class Ended(msgspec.Struct, frozen=True):
    """How a worker's process ended."""

    how: str
    """``"exit code 1"``, ``"its node was lost"``"""
    hint: str = ""
    """where to look, if the process never connected"""


class WorkerProcess(Protocol):
    """The process of one rank."""

    host: str
    """name of its host"""
    pid: int
    exit_seconds: float
    """time that a process which closed its connection has to be seen to end by itself"""
    ended: asyncio.Future[Ended]
    """set once it is gone"""

    def kill(self) -> None:
        """Kill the process and what it started; `ended` is set soon."""
        ...


Spawn: TypeAlias = Callable[[Boot], Awaitable[WorkerProcess]]
"""Starts the process of a rank."""


class RemoteWorker:
    """One rank in a process of its own."""

    def __init__(
        self,
        name: str,
        process: WorkerProcess,
        server: ChannelServer,
        *,
        heartbeat_limit: float,
        calls: Path,
    ) -> None:
        self.name = name
        self._heartbeat_limit, self._calls = heartbeat_limit, calls
        self.process = process
        self.connection: Connection | None = None
        """None until its process has connected"""
        self._server = server
        self._stopping = False
        self._kill_reason: str | None = None
        self._kill_timer: deadlines.Timer | None = None
        self._clock = PeerClock()
        self.died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        process.ended.add_done_callback(self._on_end)

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
        self.connection = connected.result()
        outcome = await self._ask("worker.start")
        if outcome.failure is not None:
            raise WorkerError(outcome.failure)

    def begin(self, method: Method, arguments: dict[str, Any], on_end: OnEnd) -> Cancel:
        call = RemoteCall(self._live, self._server, self.died, method, on_end)
        call.send(arguments)
        return call.cancel

    async def doing(self) -> tuple[str, ...]:
        try:
            found, _ = await self._live.request(
                "worker.doing", Nothing(), reply=Doing, control=True
            )
        except ConnectionLost:
            return ()
        return found.spans

    async def standstill(self) -> Standstill:
        try:
            found, _ = await self._live.request(
                "worker.standstill", Nothing(), reply=Standstill, control=True
            )
        except ConnectionLost:
            return Standstill("its connection was lost")
        return found

    async def home(self) -> Home:
        """Where the process is reached by those who use queues that live there."""
        try:
            found, _ = await self._live.request("worker.home", Nothing(), reply=Home, control=True)
        except ConnectionLost:
            raise await result_of(self.died) from None
        return found

    async def spans(self) -> list[Span]:
        try:
            sent = time.monotonic_ns()
            clock, _ = await self._live.request(
                "worker.clock", Nothing(), reply=ClockTime, control=True
            )
            self._clock.measure(sent, clock.now, time.monotonic_ns())
            _, body = await self._live.request("worker.spans", Nothing(), reply=Nothing)
        except ConnectionLost:
            return []
        return self._clock.aligned(decode_spans(body))

    async def stop(self, grace: float) -> None:
        self._stopping = True
        outcome = Outcome()
        try:
            if grace > 0 and self.connection is not None and not self.process.ended.done():
                async with deadlines.timeout(grace):
                    outcome = await self._ask("worker.stop")
                    await result_of(self.process.ended)
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
        if not self.process.ended.done():
            self.process.kill()
            await result_of(self.process.ended)
        self.died.cancel()

    def lose(self, reason: str) -> None:
        """The connection is lost: kill the process for this reason, unless it soon ends itself."""
        if not self._stopping and not self.process.ended.done() and self._kill_timer is None:
            self._kill_timer = deadlines.Timer(self.process.exit_seconds, self._kill_for, reason)

    def _kill_for(self, reason: str) -> None:
        if not self.process.ended.done():
            self._kill_reason = reason
            self.process.kill()

    async def _ask(self, kind: str) -> Outcome:
        try:
            outcome, _ = await self._live.request(kind, Nothing(), reply=Outcome, control=True)
        except ConnectionLost:
            raise await result_of(self.died) from None
        return outcome

    @property
    def _live(self) -> Connection:
        if self.connection is None:
            raise ConnectionLost(f"{self.name} has not connected yet")
        return self.connection

    def _on_end(self, ended: asyncio.Future[Ended]) -> None:
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        if self.connection is not None:
            self.connection.peer_ended()
        if not self.died.done():
            self.died.set_result(self._death(ended.result()))

    def _death(self, ended: Ended) -> WorkerDied:
        last = last_words(self._calls)
        reason = last.reason or self._kill_reason
        waited = last.waited if last.reason or reason is None else self._heartbeat_limit
        how = ended.how
        if self.connection is None:
            how = f"{how}, before it could connect{ended.hint}"
        message = last.reason or f"{reason or f'the process ended by itself: {how}'}{last.during}"
        kind = WorkerUnresponsive if waited else WorkerDied
        failure = Failure(
            worker=self.name,
            host=self.process.host,
            pid=self.process.pid,
            method="its process",
            error_type=kind.__name__,
            message=message,
            traceback="",
            waited=waited,
        )
        return kind(failure)


class RemoteWorkers:
    """The workers of one cluster that have processes of their own, and the queues of all channels.

    Args:
        listeners: where the processes connect.
        heartbeat_limit: seconds after which a worker whose event loop does not answer is killed.
        connect_limit: seconds that a started process has to connect.

    Raises:
        BuildError: invalid time limit.
    """

    def __init__(
        self,
        listeners: Listeners,
        *,
        heartbeat_limit: float,
        connect_limit: float = CONNECT_SECONDS,
    ) -> None:
        check_seconds("heartbeat_limit", heartbeat_limit, "60 or so")
        self.listeners = listeners
        self._heartbeat_limit = heartbeat_limit
        self._connect_limit = connect_limit
        self._router = Router()
        self._channels = ChannelServer(self._router)
        self._expected: dict[str, asyncio.Future[Connection]] = {}
        self._workers: dict[str, RemoteWorker] = {}
        self._makers: dict[str, HomeMaker] = {}

    def __getitem__(self, name: str) -> RemoteWorker:
        """The last life of a worker."""
        return self._workers[name]

    def get(self, name: str) -> RemoteWorker | None:
        """The last life of a worker; None where it was never started, or has ended."""
        worker = self._workers.get(name)
        return None if worker is None or worker.process.ended.done() else worker

    async def open(self) -> None:
        """Listen for the workers' processes."""
        await self.listeners.open(self._router, self._on_connect, self._on_disconnect)

    def publish(self, channel: Channel[Any] | Latest[Any]) -> None:
        """Register a channel, so that its ends can be given to workers."""
        self._channels.publish(channel)

    async def start(self, spec: WorkerSpec, spawn: Spawn) -> RemoteWorker:
        """Start a rank's process and run the worker's ``setup`` there.

        Raises:
            WorkerError: ``__init__`` or ``setup`` raised, or the process died.
        """
        life = f"{spec.info.name}#{spec.info.incarnation}"
        connected: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        boot = Boot(
            spec=spec,
            life=life,
            socket=str(self.listeners.socket),
            address=self.listeners.address,
            secret=self.listeners.secret,
            heartbeat_limit=self._heartbeat_limit,
        )
        self._expected[life] = connected
        try:
            worker = RemoteWorker(
                spec.info.name,
                await spawn(boot),
                self._channels,
                heartbeat_limit=self._heartbeat_limit,
                calls=calls_file(self.listeners.socket.parent, life),
            )
            self._workers[spec.info.name] = worker
            try:
                await worker.attach(connected, self._connect_limit)
            except BaseException:
                await worker.kill()
                raise
        finally:
            self._expected.pop(life, None)
        return worker

    async def home(self, name: str) -> HomeMaker:
        """Makes channels whose queues live with this worker.

        Raises:
            WorkerDied: it is gone.
            HomeLost: it cannot be reached from here.
        """
        found = self._makers.get(name)
        if found is None:
            home = await self._workers[name].home()
            found = self._makers[name] = await HomeMaker.open(
                home, self.listeners.secret, "driver", heartbeat_limit=self._heartbeat_limit
            )
        return found

    def cut_off(self) -> dict[str, float]:
        """Workers whose connection is cut, and for how many seconds they have been reconnecting."""
        connections = {name: worker.connection for name, worker in self._workers.items()}
        return {
            name: one.reconnection.seconds
            for name, one in connections.items()
            if one is not None and one.reconnecting
        }

    def traffic(self) -> list[Traffic]:
        """What went over each worker's connection."""
        connections = (worker.connection for worker in self._workers.values())
        return [traffic_of(one) for one in connections if one is not None]

    async def close(self) -> None:
        """Kill what still runs, and close every connection."""
        for maker in self._makers.values():
            maker.connection.abort("the cluster was left")
        for worker in list(self._workers.values()):
            await worker.kill()
        await self.listeners.close()

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
