"""The main function of a worker's process, and its messages with the owner of the cluster.

::

    to the worker      request                                   body of the reply
    worker.start       build the worker and run its setup
    worker.call        run a method; the body holds arguments    the result
    worker.ended       reply when a cancelled call has ended
    worker.leave       end a call in a moment in which nothing is under way in it; no answer but
                       that to the call
    worker.doing       report its open spans
    worker.standstill  report whether it could go on by itself
    worker.clock       say its time
    worker.home        let queues live there; where is that
    worker.work        report how long it worked on what         the sums
    worker.spans       send its spans since the last time        the spans
    worker.stop        cancel its calls, run teardown, and exit

Channels have messages of their own. Arguments and results travel as bytes by the annotations of the
method, and by nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

from rlinf_async.channels import ChannelError, ItemTooLarge, MalformedFrame, WireError
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.wire import ChannelServer, Connection, Direct, EndRef, Router, connect
from rlinf_async.channels.wire.adopting import Homes
from rlinf_async.channels.wire.codec import DecodeEnd, Decoder, Encoder, encode
from rlinf_async.channels.wire.frames import DATA, movement
from rlinf_async.channels.wire.protocol import Home, Nothing
from rlinf_async.channels.wire.remote_ends import RemoteEnd
from rlinf_async.channels.wire.session.connection import Request
from rlinf_async.channels.wire.session.requests import head_of
from rlinf_async.observe.trace import Span, SpanRecorder
from rlinf_async.processes import signal_at_end_of_parent
from rlinf_async.runtime.homes import CallEnds, WorkerHome
from rlinf_async.runtime.launching import pinned_cores
from rlinf_async.runtime.signals import ignore_in_worker, run
from rlinf_async.runtime.supervise import Doing, Standstill, WorkDone, WorkerSpec
from rlinf_async.runtime.wakers import current_is_internal, internal, what_can_go_on
from rlinf_async.workers import foreign_calls
from rlinf_async.workers.base import BuildError, Failure, WorkerError
from rlinf_async.workers.host import Invocation, WorkerHost, watch_loop
from rlinf_async.workers.methods import Method, method_of

CALL: Final = "worker.call"
ENDED: Final = "worker.ended"
LEAVE: Final = "worker.leave"


class MethodCall(msgspec.Struct, array_like=True, frozen=True):
    """A method and the names of the arguments that the body holds."""

    method: str
    names: tuple[str, ...]
    homed: tuple[EndRef, ...] = ()
    """ends among the arguments whose queues live with workers"""


class CallNumber(msgspec.Struct, array_like=True, frozen=True):
    """Number of the request by which a call was made."""

    number: int


class Leave(msgspec.Struct, array_like=True, frozen=True):
    """A call that is to leave the worker: see `Invocation.leave`."""

    number: int
    """number of the request by which it was made"""
    within: float
    """seconds after which it is cancelled in any case"""


class ClockTime(msgspec.Struct, array_like=True, frozen=True):
    """Answer to ``worker.clock``: ``CLOCK_MONOTONIC`` of the worker's host, in nanoseconds."""

    now: int


class CallOutcome(msgspec.Struct, array_like=True, frozen=True):
    """Success or failure; the result is in the body."""

    failure: Failure | None = None
    left: bool = False
    """whether the method was cancelled because the call left the worker"""


class ArgumentsCodec:
    """Encodes the arguments of one method, given under these names, and decodes its result.

    For one thread.
    """

    def __init__(self, method: Method, names: tuple[str, ...]) -> None:
        self.method = method
        self._head = head_of(CALL, MethodCall(method.name, names))
        self._names = names
        types: Any = tuple[tuple(method.types[name] for name in names)]  # type: ignore[misc]
        self._encoder = Encoder(self._lend)
        self._server: ChannelServer | None = None
        self._lent: list[int] = []
        self._homed: list[EndRef] = []
        self._ends: DecodeEnd = _refuse
        self._decoder = Decoder(types, lambda ref, item_type: self._ends(ref, item_type))
        self._result = Decoder(method.returns)

    def encode(
        self, arguments: dict[str, Any], server: ChannelServer
    ) -> tuple[bytes, Encoded, Sequence[int]]:
        """Head and body of a request that calls the method with these arguments, and the numbers of
        the channel ends among them, which are lent by this.

        Raises:
            BuildError: an argument cannot cross to another process; nothing is lent.
        """
        self._server, self._lent, self._homed = server, [], []
        try:
            body = self._encoder.encode(tuple(arguments.values()))
        except BaseException as error:
            for number in self._lent:
                server.take_back(number)
            if isinstance(error, TypeError):
                raise BuildError(f"an argument of {self.method.label}: {error}") from error
            raise
        finally:
            self._server = None
        head = self._head
        if self._homed:
            head = head_of(CALL, MethodCall(self.method.name, self._names, tuple(self._homed)))
        return head, body, self._lent

    def decode(self, body: Encoded | None, ends: DecodeEnd) -> dict[str, Any]:
        """Decode the arguments; channel ends are made by ``ends``."""
        if body is None:
            raise MalformedFrame(f"a call of {self.method.label} came without its arguments")
        self._ends = ends
        try:
            values = self._decoder.decode(body)
        finally:
            self._ends = _refuse
        return dict(zip(self._names, values, strict=True))

    def decode_result(self, body: Encoded | None) -> Any:
        """Decode what the method returned, by its return annotation."""
        if body is None:
            raise MalformedFrame(f"the result of {self.method.label} is missing")
        try:
            return self._result.decode(body)
        except MalformedFrame as error:
            raise MalformedFrame(
                f"the result of {self.method.label} is not what its return annotation says: {error}"
            ) from error

    def _lend(self, end: Any) -> EndRef:
        if self._server is None:
            raise RuntimeError("ends are lent only while arguments are encoded")
        homed = end.on_loan() if isinstance(end, RemoteEnd) else None
        if homed is not None:
            self._homed.append(homed)
            return homed
        local: Any = end
        ref = self._server.lend(local)
        self._lent.append(ref.number)
        return ref


class _PerThread(threading.local):
    """Encoders and decoders of a thread: each is for one thread."""

    def __init__(self) -> None:
        self.arguments: dict[tuple[Method, tuple[str, ...]], ArgumentsCodec] = {}
        self.encode_result = Encoder().encode


_per_thread = _PerThread()
_spans = Decoder(list[Span])


def arguments_codec(method: Method, names: tuple[str, ...]) -> ArgumentsCodec:
    """The codec of a method; made once for each thread."""
    codecs = _per_thread.arguments
    found = codecs.get((method, names))
    if found is None:
        found = codecs[method, names] = ArgumentsCodec(method, names)
    return found


def encode_result(method: Method, value: Any) -> Encoded:
    """Encode what a method returned.

    Raises:
        TypeError: it cannot cross to another process.
    """
    try:
        return _per_thread.encode_result(value)
    except TypeError as error:
        raise TypeError(f"what {method.label} returned cannot travel: {error}") from error


def decode_spans(body: Encoded | None) -> list[Span]:
    """The spans in the answer to ``worker.spans``."""
    found: list[Span] = [] if body is None else _spans.decode(body)
    return found


def _refuse(ref: Any, item_type: Any) -> Any:
    raise MalformedFrame("no end of a channel is expected here")


ORPHAN_SECONDS = 0.5
"""time that a process which lost its connection waits to see whether its parent is gone"""
CHILDREN_SECONDS = 0.5
"""time that each process which a worker started has to end once it is asked to"""

RETURNED = CallOutcome()
LEFT = CallOutcome(left=True)


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """Start message of a process. Sent through the inherited pipe, not through a socket."""

    spec: WorkerSpec
    life: str
    socket: str
    """path of the Unix socket on the driver's host"""
    address: str | None
    """address for other hosts, ``tcp://host:port`` or ``tls://host:port``"""
    secret: bytes
    heartbeat_limit: float


def child_main(output: None, boot: Boot) -> None:
    """Serve one worker until asked to stop, or until the process that started this one is gone.

    Args:
        output: an `OutputPipe`, of which only the effect arrives here: this process prints there.
    """
    os.setsid()  # a Ctrl-C is for the driver; and what starts here can be ended as one group
    ignore_in_worker()
    signal_at_end_of_parent(signal.SIGCONT)  # one that is stopped must see the end, and clean up
    faulthandler.enable()
    faulthandler.cancel_dump_traceback_later()  # it has begun: see `_print_into`
    folder = Path(boot.socket).parent
    threading.Thread(
        target=_go_with_parent, args=(folder,), name="parent watch", daemon=True
    ).start()
    asked_to_stop = serve(boot)
    remove_unused_torch_cache(folder.parent)
    if not asked_to_stop:  # a connection breaks some moments before its process is seen to be gone
        _go_with_parent(folder, ORPHAN_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a compute thread that is still busy must not hold the process back


def serve(boot: Boot) -> bool:
    """Serve one worker until asked to stop (True) or cut off (False); what it started has ended."""
    _show_name(boot.spec.info.name)
    _pin(boot)
    file = calls_file(Path(boot.socket).parent, boot.life)
    foreign_calls.note_in(file if file.parent.is_dir() else None)  # of the driver's host, or not
    gc.freeze()  # what was imported stays: the collector need not look at it again and again
    asked_to_stop = run(Child(boot).serve())
    _end_children()
    return asked_to_stop


def calls_file(folder: Path, life: str) -> Path:
    """Return the file in which a worker notes the call of somebody else's code that it is in: see
    `foreign_calls`."""
    return folder / f"calls-{quote(life, safe='')}"


def _show_name(name: str) -> None:
    """Be ``Actor[0]`` in top, ps and py-spy, not one python among many (15 characters, Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name[:15], encoding="utf-8")


def _pin(boot: Boot) -> None:
    cores = pinned_cores(boot.spec.info.devices)
    if not cores:
        return
    os.sched_setaffinity(0, cores)
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(cores))  # it was imported where there were more: see `forked`


def remove_unused_torch_cache(temporary: Path) -> None:
    """Remove torch's folder for compiled code from the temporary folder, if it is empty.

    The first step of an optimizer imports ``torch._dynamo``, which makes it, and notes it in the
    environment.
    """
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    if folder.parent == temporary and folder.name.startswith("torchinductor_"):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _end_children() -> None:
    """Ask the processes that the worker started to end; those that do not are killed later, with
    the group."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(CHILDREN_SECONDS)


def _go_with_parent(folder: Path, within: float | None = None) -> None:
    """If the parent ends within ``within`` seconds (None: ever), remove its folder and exit, with
    all processes that were started here. Nobody else would."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join(within)
    if not parent.is_alive():
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)


class Child:
    """Serves the process that owns the cluster."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        spec = boot.spec
        self._recorder = SpanRecorder(spec.info.name)
        self._host = WorkerHost(
            spec.cls,
            spec.args,
            spec.kwargs,
            spec.info,
            self._recorder.span,
            self._recorder.meter,
        )
        self._stopped = asyncio.Event()
        self._asked_to_stop = False
        self._direct: Direct | None = None
        self._home = WorkerHome(boot.life, boot.secret, boot.address, boot.heartbeat_limit)
        self._homes = Homes(
            boot.secret,
            boot.life,
            lambda: self._home.found,
            heartbeat_limit=boot.heartbeat_limit,
        )
        self._flushing: set[asyncio.Task[None]] = set()
        self._ending: dict[int, Request[CallNumber] | None] = {}
        """cancelled calls whose methods have not ended, and the requests to reply to when they
        have"""
        self._leaving: set[int] = set()
        """calls that leave this worker"""
        self._adopting: dict[int, tuple[Request[MethodCall], asyncio.Task[None]]] = {}
        """calls whose method is entered once their ends are this process's own"""

    async def serve(self) -> bool:
        """Connect, serve, and return once asked to stop (True) or cut off (False)."""
        current_is_internal()
        watchdog = watch_loop(self._boot.spec.info.name)
        connection = await connect(
            self._address(),
            self._boot.secret,
            name=self._boot.life,
            router=self._router(),
            heartbeat_limit=self._boot.heartbeat_limit,
        )
        connection.on_close(lambda _, reason: self._stopped.set())
        await self._stopped.wait()
        connection.close()
        await connection.wait_closed()
        await self._homes.close()
        await self._home.close()
        if self._direct is not None:
            await self._direct.close()
        watchdog.stop()
        return self._asked_to_stop

    def _address(self) -> str:
        """The Unix socket on the driver's host, the other address elsewhere."""
        if self._boot.address is None or Path(self._boot.socket).is_socket():
            return self._boot.socket
        return self._boot.address

    def _router(self) -> Router:
        router = Router()
        router.add("worker.start", Nothing, self._start)
        router.add_sync(CALL, MethodCall, self._call)
        router.add_sync(ENDED, CallNumber, self._reply_when_ended)
        router.add_sync(LEAVE, Leave, self._leave)
        router.add_sync(
            "worker.doing",
            Nothing,
            lambda request: request.reply(Doing((*self._host.doing(), *self._recorder.doing()))),
        )
        router.add_sync("worker.standstill", Nothing, self._standstill)
        router.add_sync(
            "worker.clock", Nothing, lambda request: request.reply(ClockTime(time.monotonic_ns()))
        )
        router.add_sync(
            "worker.spans",
            Nothing,
            lambda request: request.reply(Nothing(), encode(self._recorder.take())),
        )
        router.add_sync(
            "worker.work",
            Nothing,
            lambda request: request.reply(WorkDone.of(self._recorder.meter)),
        )
        router.add("worker.home", Nothing, self._listen)
        router.add("worker.stop", Nothing, self._stop)
        return router

    async def _start(
        self, connection: Connection, meta: Nothing, body: Encoded | None
    ) -> tuple[CallOutcome, None]:
        try:
            self._direct = await Direct.of_worker(
                connection,
                self._boot.secret,
                name=self._boot.life,
                retain=not self._boot.spec.restartable,
            )
            await self._host.start()
        except WorkerError as error:
            return CallOutcome(error.failure), None
        except (ValueError, WireError) as error:
            return CallOutcome(self._host.wrap(error, "its Direct").failure), None
        return CallOutcome(), None

    def _call(self, request: Request[MethodCall]) -> None:
        ends = CallEnds(request.connection, self._direct)
        if request.meta.homed:
            adopting = self._later(self._call_adopting(request, ends))
            request.abandon = partial(_cancel, adopting)
            self._adopting[request.number] = request, adopting
            adopting.add_done_callback(lambda _: self._adopting.pop(request.number, None))
        else:
            self._begin(request, ends)

    async def _call_adopting(self, request: Request[MethodCall], ends: CallEnds) -> None:
        """Begin once the ends whose queues live with workers are this process's own."""
        try:
            await ends.adopt(request.meta.homed, self._homes)
        except ChannelError as error:
            request.reply(CallOutcome(self._host.wrap(error, request.meta.method).failure))
        else:
            self._begin(request, ends)

    def _begin(self, request: Request[MethodCall], client: CallEnds) -> None:
        call, body, request.body = request.meta, request.body, None
        try:
            cls = self._boot.spec.cls
            codec = arguments_codec(method_of(cls, getattr(cls, call.method)), call.names)
            arguments = codec.decode(body, client.end)
            running = self._host.begin(
                call.method, arguments, partial(self._returned, request, codec.method, client)
            )
        except WorkerError as error:
            request.reply(CallOutcome(error.failure))
        except Exception as error:  # an argument cannot be decoded
            request.reply(CallOutcome(self._host.wrap(error, call.method).failure))
        else:
            running.number = request.number
            request.abandon = partial(self._cancel, request.number, running)

    def _leave(self, request: Request[Leave]) -> None:
        number = request.meta.number
        if number in self._adopting:
            asked, adopting = self._adopting[number]
            adopting.cancel()
            asked.reply(LEFT)
        for running in list(self._host.calls.values()):
            if running.number == number:
                self._leaving.add(number)
                running.leave(request.meta.within)

    def _cancel(self, number: int, running: Invocation) -> None:
        self._ending[number] = None
        running.cancel()

    def _reply_when_ended(self, request: Request[CallNumber]) -> None:
        request.lane = DATA  # the reply comes behind what the method has put
        number = request.meta.number
        if number in self._ending:
            self._ending[number] = request
        else:
            request.reply(Nothing())

    def _returned(
        self,
        request: Request[MethodCall],
        method: Method,
        client: CallEnds,
        value: Any,
        error: BaseException | None,
    ) -> None:
        left = request.number in self._leaving
        self._leaving.discard(request.number)
        if error is not None:
            if isinstance(error, WorkerError):
                request.reply(CallOutcome(error.failure))
            elif left and request.number not in self._ending:
                self._later(self._reply_left(request, client))
            else:
                request.fail(ChannelError(f"{method.label} was cancelled"))
            asked = self._ending.pop(request.number, None)
            if asked is not None and client.has_homes:
                self._later(self._reply_flushed(asked, client))
            elif asked is not None:  # all that the method put was sent before this
                asked.reply(Nothing())
        elif client.has_senders:
            flushing = self._later(self._flush(request, method, client, value))
            request.abandon = partial(_cancel, flushing)
        else:
            self._reply(request, method, value)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do this in a task of the runtime's own."""
        task = internal(asyncio.create_task(work))
        self._flushing.add(task)
        task.add_done_callback(self._flushing.discard)
        return task

    async def _reply_flushed(self, asked: Request[CallNumber], client: CallEnds) -> None:
        """Say that a cancelled method has ended, when what it put is in its channels."""
        with contextlib.suppress(Exception):  # the call was cancelled: nobody is told
            await client.flush()
        asked.reply(Nothing())

    async def _reply_left(self, request: Request[MethodCall], client: CallEnds) -> None:
        """Say that a call has left, when what it put is in its channels."""
        try:
            await client.flush()
        except Exception as error:
            request.reply(CallOutcome(self._host.wrap(error, request.meta.method).failure))
        else:
            request.reply(LEFT)

    async def _flush(
        self, request: Request[MethodCall], method: Method, client: CallEnds, value: Any
    ) -> None:
        """Reply when what the call put is in its channels."""
        try:
            await client.flush()
        except Exception as error:
            request.reply(CallOutcome(self._host.wrap(error, method.name).failure))
        else:
            self._reply(request, method, value)

    def _reply(self, request: Request[MethodCall], method: Method, value: Any) -> None:
        try:
            body = encode_result(method, value)
        except Exception as error:  # the result cannot be encoded
            request.reply(CallOutcome(self._host.wrap(error, method.name).failure))
            return
        try:
            request.reply(RETURNED, body)
        except ItemTooLarge as refused:
            request.fail(refused)

    def _standstill(self, request: Request[Nothing]) -> None:
        unless = self._host.context.what_works or what_can_go_on()
        request.reply(Standstill(unless, movement.count))

    async def _listen(
        self, connection: Connection, meta: Nothing, body: Encoded | None
    ) -> tuple[Home, None]:
        return await self._home.listen(connection), None

    async def _stop(
        self, connection: Connection, meta: Nothing, body: Encoded | None
    ) -> tuple[CallOutcome, None]:
        self._asked_to_stop = True
        try:
            await self._host.stop()
        except WorkerError as error:
            return CallOutcome(error.failure), None
        finally:
            asyncio.get_running_loop().call_soon(self._stopped.set)
        return CallOutcome(), None


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
