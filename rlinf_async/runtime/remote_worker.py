"""Workers in processes of their own: listening sockets, connection, calls, liveness, orderly end.

::

    RemoteBackend                                    all of a cluster: the queues of its channels
     +-- Listeners      Unix socket for this host; TCP at one address where others may connect
     +-- RemoteWorker   one rank: connection, calls, death
          +-- RemoteCall      a call, until its reply arrives; no task waits for it
          +-- WorkerProcess   its process: how it is killed, and how its end is seen

Only the `WorkerProcess` differs between backends: a child of this process, or an actor of Ray. Both
sockets lead to the same channels, and ask for proof of the cluster's secret.

A call that is cancelled has ended once its method has: until then its channel ends stay open, so
what the method had put by then is in its channels. A worker that does not report the end within
`CANCEL_SECONDS`, because it is blocked or cut off, is not waited for. The request to report the end
goes ahead of all data; its reply comes behind what the method has put.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from rlinf_async import deadlines
from rlinf_async.channels import Channel, ConnectionLost, Latest, MalformedFrame, WireError
from rlinf_async.channels.wire import ChannelServer, Connection, Router, Server, serve
from rlinf_async.channels.wire.frames import CONTROL, Message
from rlinf_async.channels.wire.homes import HomeMaker
from rlinf_async.channels.wire.protocol import Home, Nothing
from rlinf_async.channels.wire.session.connection import Closed, Traffic, traffic_of
from rlinf_async.channels.wire.session.endpoint import Opened
from rlinf_async.channels.wire.session.requests import UNREADABLE, head_of
from rlinf_async.channels.wire.session.tls import HOW, load_secret
from rlinf_async.deadlines import Timer
from rlinf_async.observe.trace import PeerClock, Span
from rlinf_async.runtime.child import (
    CALL,
    ENDED,
    LEAVE,
    ArgumentsCodec,
    Boot,
    CallNumber,
    CallOutcome,
    ClockTime,
    Leave,
    arguments_codec,
    calls_file,
    decode_spans,
)
from rlinf_async.runtime.launching import check_seconds
from rlinf_async.runtime.signals import make_temporary_folder, remove_temporary_folder
from rlinf_async.runtime.supervise import (
    Backend,
    Doing,
    MethodRun,
    ProcessEnd,
    Standstill,
    WorkDone,
    WorkerHandle,
    WorkerProcess,
    WorkerSpec,
)
from rlinf_async.runtime.wakers import result_of
from rlinf_async.workers.base import (
    BuildError,
    Failure,
    WorkerDied,
    WorkerError,
    WorkerUnresponsive,
)
from rlinf_async.workers.foreign_calls import FailedEpisode, last_words, peek
from rlinf_async.workers.host import OnEnd
from rlinf_async.workers.methods import Method

M = TypeVar("M")
Death: TypeAlias = "asyncio.Future[WorkerDied]"

CANCEL_SECONDS: Final = 2.0
"""seconds that a worker has to report the end of a cancelled call"""
log = logging.getLogger(__name__)
_decode_outcome = msgspec.msgpack.Decoder(CallOutcome).decode
_RETURNED = msgspec.msgpack.encode(CallOutcome())


class RemoteCall:
    """Receives the reply to one call, and passes it to ``on_end``.

    Results are passed on at once, failures and cancellations with the next turn of the loop: what
    they lead to must not happen while arrived messages are still being handled.
    """

    __slots__ = (
        "_codec",
        "_connection",
        "_death",
        "_ended",
        "_lent",
        "_method",
        "_number",
        "_on_end",
        "_server",
    )

    def __init__(
        self,
        connection: Connection,
        server: ChannelServer,
        death: Death,
        method: Method,
        on_end: OnEnd,
    ) -> None:
        self._connection = connection
        self._server = server
        self._death = death
        self._method = method
        self._codec: ArgumentsCodec
        self._on_end = on_end
        self._lent: Sequence[int] = ()
        self._number = 0
        self._ended = False

    def send(self, arguments: dict[str, Any]) -> None:
        """Ask the worker to run the method.

        Raises:
            BuildError, ItemTooLarge: an argument or the result type cannot cross to another
                process; nothing was sent.
            ConnectionLost: the connection is lost for good.
        """
        self._codec = arguments_codec(self._method, tuple(arguments))
        head, body, self._lent = self._codec.encode(arguments, self._server)
        try:
            self._number = self._connection.post(self, CALL, head, body)
        except ConnectionLost:
            self._wait_for_death()
        except BaseException:
            self._take_back()
            raise

    def cancel(self) -> None:
        """Cancel the method."""
        if self._ended:
            return
        never_sent = self._connection.give_up(self._number)
        self._death.remove_done_callback(self._died)
        if never_sent:
            self.cancelled()
            return
        cancelled = _Cancelled(self)
        try:
            head = head_of(ENDED, CallNumber(self._number))
            self._connection.post(cancelled, ENDED, head, lane=CONTROL)
        except ConnectionLost as error:
            cancelled.set_exception(error)

    def leave(self, within: float) -> None:
        """Have the method end where nothing is under way in it, in ``within`` seconds: the call
        then ends as cancelled."""
        if not self._ended:
            with suppress(ConnectionLost):  # then the worker will be lost, too
                self._connection.notify(LEAVE, Leave(self._number, within))

    def cancelled(self) -> None:
        """End as cancelled: the method has ended, or will not be waited for."""
        self._fail(asyncio.CancelledError())

    def cancel_timed_out(self) -> None:
        """End as cancelled, though the worker has not reported that the method has ended."""
        cut = self._connection.reconnecting
        log.warning(
            "%s was cancelled, and %s within %g s: what it puts now is refused",
            self._method.label,
            "its worker is cut off (reconnecting) and could not report that it ended"
            if cut
            else "did not end",
            CANCEL_SECONDS,
        )
        self.cancelled()

    # ---- for the connection

    def done(self) -> bool:
        return self._ended

    def set_result(self, message: Message, /) -> None:
        """Take the reply."""
        if message.head != _RETURNED and self._failed(message.head):
            return
        try:
            value = self._codec.decode_result(message.body)
        except Exception as error:
            self._fail(error)
            return
        self._ended = True
        if self._lent:
            self._take_back()
        self._on_end(value, None)

    def set_exception(self, error: BaseException, /) -> None:
        """The call was refused; or the connection is lost, and then the worker will be, too."""
        if isinstance(error, ConnectionLost):
            self._wait_for_death()
        else:
            self._fail(error)

    # ---- inside

    def _failed(self, head: bytes) -> bool:
        """Whether the reply says that the method failed; then the call fails."""
        try:
            outcome = _decode_outcome(head)
        except UNREADABLE as error:
            self._fail(MalformedFrame(f"the reply to a call of {self._method.label}: {error}"))
            raise
        if outcome.failure is not None:
            self._fail(WorkerError(outcome.failure))
        elif outcome.left:
            self.cancelled()
        return outcome.left or outcome.failure is not None

    def _wait_for_death(self) -> None:
        self._death.add_done_callback(self._died)

    def _died(self, death: Death) -> None:
        self._fail(asyncio.CancelledError() if death.cancelled() else death.result())

    def _fail(self, error: BaseException) -> None:
        if not self._ended:
            self._ended = True
            self._take_back()
            asyncio.get_running_loop().call_soon(self._on_end, None, error)

    def _take_back(self) -> None:
        for number in self._lent:
            self._server.take_back(number)
        self._lent = ()


class _Cancelled:
    """Receives the reply that the method of a cancelled call has ended."""

    def __init__(self, call: RemoteCall) -> None:
        self._call = call
        self._timer = Timer(CANCEL_SECONDS, call.cancel_timed_out)

    def done(self) -> bool:
        return self._call.done()

    def set_result(self, message: Message, /) -> None:
        self._timer.cancel()
        self._call.cancelled()

    def set_exception(self, error: BaseException, /) -> None:
        self._timer.cancel()
        self._call.cancelled()


LISTEN_VARIABLE: Final = "RLINF_ASYNC_LISTEN"


class Listeners:
    """The listening sockets of one cluster.

    Args:
        listen: where other hosts reach it, ``tcp://host:port``; None for nowhere.
        secret: secret that both sides prove; by default a new one.
    """

    def __init__(
        self, listen: str | None, *, heartbeat_limit: float, secret: bytes | None = None
    ) -> None:
        self.listen = listen
        self._heartbeat_limit = heartbeat_limit
        self._folder: Path | None = None
        self._inner: Server | None = None
        self._outer: Server | None = None
        self.secret = secret or secrets.token_bytes(32)

    @property
    def socket(self) -> Path:
        """The Unix socket."""
        if self._folder is None:
            raise RuntimeError("the cluster was not entered")
        return self._folder / "driver.sock"

    @property
    def address(self) -> str | None:
        """Address at which other hosts reach the cluster; None where it does not listen."""
        return None if self._outer is None else self._outer.address

    async def open(self, router: Router, on_connect: Opened, on_disconnect: Closed) -> None:
        """Listen for connections.

        Raises:
            BuildError: a socket cannot be made; none is left.
        """
        self._folder = make_temporary_folder()

        async def listen_at(address: str | Path) -> Server:
            return await serve(
                address,
                self.secret,
                name="driver",
                router=router,
                on_connect=on_connect,
                on_disconnect=on_disconnect,
                heartbeat_limit=self._heartbeat_limit,
            )

        try:
            self._inner = await listen_at(self.socket)
            if self.listen is not None:
                self._outer = await listen_at(self.listen)
        except (OSError, WireError) as error:
            raise BuildError(self._explain(error)) from error
        finally:
            if self._inner is None or (self.listen is not None and self._outer is None):
                await self.close()

    async def close(self) -> None:
        """Close every connection, and leave no socket and no folder."""
        for server in (self._outer, self._inner):
            if server is not None:
                await server.close()
        if self._folder is not None:
            remove_temporary_folder(self._folder)

    def _explain(self, error: Exception) -> str:
        if self._inner is not None:
            return f"listen={self.listen!r}: {error}"
        return (
            f"the cluster's socket {self.socket} cannot be made ({error}): let TMPDIR name a "
            "folder with a short path that can be written to"
        )


def shared_secret() -> bytes:
    """The secret that processes of other hosts know too.

    Raises:
        BuildError: it is not set, or cannot be used.
    """
    try:
        secret = load_secret()
    except (OSError, ValueError) as error:
        raise BuildError(f"the cluster's secret cannot be used: {error}") from error
    if secret is None:
        raise BuildError(f"a cluster that listens for other hosts needs a secret: {HOW}")
    return secret


CONNECT_SECONDS: Final = 120.0
"""time that a started process has to connect"""
SET_UP_SECONDS: Final = 60.0
"""time that a worker is in its ``__init__`` and ``setup`` before it is first said that it is"""


Spawn: TypeAlias = Callable[[Boot], Awaitable[WorkerProcess]]
"""Starts the process of a rank."""


class RemoteWorker(WorkerHandle):
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
        """connection to the worker's process; None until it has connected"""
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
        self._report_set_up(SET_UP_SECONDS)
        try:
            outcome = await self.ask("worker.start", CallOutcome)
        finally:
            self._set_up.cancel()
        if outcome.failure is not None:
            raise WorkerError(outcome.failure)

    def _report_set_up(self, seconds: float) -> None:
        """Say after so many seconds that the worker is not set up yet, and then ever more rarely:
        there is no limit, since a large model may take an hour."""

        def report() -> None:
            log.warning(
                "%s has been in its __init__ and setup for %g s (process %d on %s: `py-spy dump "
                "--pid %d` shows where)",
                *(self.name, seconds, self.process.pid, self.process.host, self.process.pid),
            )
            self._report_set_up(2 * seconds)

        passed = 0.0 if seconds == SET_UP_SECONDS else seconds / 2
        self._set_up = deadlines.Timer(seconds - passed, report)

    def begin(self, method: Method, arguments: dict[str, Any], on_end: OnEnd) -> MethodRun:
        call = RemoteCall(self._live, self._server, self.died, method, on_end)
        call.send(arguments)
        return call

    async def ask(self, kind: str, reply: type[M]) -> M:
        """Return the process's answer. Raises `WorkerDied`."""
        try:
            return await self._answer(kind, reply)
        except ConnectionLost:
            raise await result_of(self.died) from None

    async def doing(self) -> tuple[str, ...]:
        try:
            return (await self._answer("worker.doing", Doing)).spans
        except ConnectionLost:
            return ()

    async def standstill(self) -> Standstill:
        try:
            return await self._answer("worker.standstill", Standstill)
        except ConnectionLost:
            return Standstill("its connection was lost")

    async def spans(self) -> list[Span]:
        try:
            sent = time.monotonic_ns()
            clock = await self._answer("worker.clock", ClockTime)
            self._clock.measure(sent, clock.now, time.monotonic_ns())
            _, body = await self._live.request("worker.spans", Nothing(), reply=Nothing)
        except ConnectionLost:
            return []
        return self._clock.aligned(decode_spans(body))

    async def work(self) -> WorkDone:
        try:
            return await self._answer("worker.work", WorkDone)
        except ConnectionLost:
            return WorkDone()

    async def stop(self, grace: float) -> None:
        self._stopping = True
        outcome = CallOutcome()
        try:
            if grace > 0 and self.connection is not None and not self.process.ended.done():
                async with deadlines.timeout(grace):
                    outcome = await self.ask("worker.stop", CallOutcome)
                    await result_of(self.process.ended)
        except TimeoutError:
            during = peek(self._calls).during
            log.warning("%s did not stop within %.1f s and is killed%s", self.name, grace, during)
        except WorkerUnresponsive as death:  # in the close of an environment
            log.warning("%s; it was about to stop", death.summary)
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

    async def _answer(self, kind: str, reply: type[M]) -> M:
        found, _ = await self._live.request(kind, Nothing(), reply=reply, control=True)
        return found

    @property
    def _live(self) -> Connection:
        if self.connection is None:
            raise ConnectionLost(f"{self.name} has not connected yet")
        return self.connection

    def _on_end(self, ended: asyncio.Future[ProcessEnd]) -> None:
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        if self.connection is not None:
            self.connection.peer_ended()
        if not self.died.done():
            self.died.set_result(self._death(ended.result()))

    def _death(self, ended: ProcessEnd) -> WorkerDied:
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
            failed=_failed(last.failed, reason, ended.how),
        )
        return kind(failure)


def _failed(episode: FailedEpisode | None, reason: str | None, how: str) -> FailedEpisode | None:
    """The episode that ended with a process; of a process that was killed from outside, or with its
    host, none is to blame."""
    by_itself = reason or how.startswith("exit code") or how.endswith(CRASHES)
    return episode if episode is None or by_itself else FailedEpisode()


CRASHES: Final = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS")
"""signals by which a process ends itself"""


class RemoteBackend(Backend):
    """A backend whose workers have processes of their own. It owns the queues of all channels.

    Args:
        heartbeat_limit: seconds after which a worker whose event loop does not answer is killed.
        listen, secret: as of `Listeners`.

    Raises:
        BuildError: invalid time limit.
    """

    isolates_devices = True

    def __init__(
        self, heartbeat_limit: float, listen: str | None = None, secret: bytes | None = None
    ) -> None:
        check_seconds("heartbeat_limit", heartbeat_limit, "60 or so")
        self.listeners = Listeners(listen, heartbeat_limit=heartbeat_limit, secret=secret)
        self.workers: dict[str, RemoteWorker] = {}
        """the last life of each that is ready, or is being started where there is no other"""
        self._lives: dict[str, RemoteWorker] = {}
        """lives whose processes have not ended: two of a worker that is being replaced"""
        self._heartbeat_limit = heartbeat_limit
        self._router = Router()
        self._channels = ChannelServer(self._router)
        self._expected: dict[str, asyncio.Future[Connection]] = {}
        self._makers: dict[str, HomeMaker] = {}

    @property
    def address(self) -> str | None:
        return self.listeners.address

    async def open(self) -> None:
        await self.listeners.open(self._router, self._on_connect, self._on_disconnect)

    def publish(self, channel: Channel[Any] | Latest[Any]) -> None:
        self._channels.publish(channel)

    def process(self, name: str) -> WorkerProcess | None:
        worker = self.workers.get(name)
        return None if worker is None or worker.process.ended.done() else worker.process

    async def start_by(self, spec: WorkerSpec, spawn: Spawn) -> RemoteWorker:
        """Start a rank's process by this, and run the worker's ``setup`` there.

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
            self._lives[life] = worker
            worker.process.ended.add_done_callback(lambda _: self._lives.pop(life, None))
            if self.process(spec.info.name) is None:
                self.workers[spec.info.name] = worker
            try:
                await worker.attach(connected, CONNECT_SECONDS)
            except BaseException:
                await worker.kill()
                raise
        finally:
            self._expected.pop(life, None)
        return worker

    def took_over(self, worker: WorkerHandle) -> None:
        if isinstance(worker, RemoteWorker):
            self.workers[worker.name] = worker

    async def home(self, name: str) -> HomeMaker:
        found = self._makers.get(name)
        if found is None:
            home = await self.workers[name].ask("worker.home", Home)
            found = self._makers[name] = await HomeMaker.open(
                home, self.listeners.secret, "driver", heartbeat_limit=self._heartbeat_limit
            )
        return found

    def cut_off(self) -> dict[str, float]:
        connections = {name: worker.connection for name, worker in self.workers.items()}
        return {
            name: one.reconnection.seconds
            for name, one in connections.items()
            if one is not None and one.reconnecting
        }

    def traffic(self) -> list[Traffic]:
        connections = (worker.connection for worker in self.workers.values())
        return [traffic_of(one) for one in connections if one is not None]

    async def close(self) -> None:
        for maker in self._makers.values():
            maker.connection.abort("the cluster was left")
        for worker in [*self._lives.values(), *self.workers.values()]:
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
        worker = self._lives.get(connection.peer)
        if worker is not None and worker.connection is connection:
            worker.lose(reason)
