"""A connection between two processes: requests and notices in both directions.

What is kept, on whichever side:

* every request gets one reply, an error, or `ConnectionLost`; none waits for ever: a peer that
  says nothing for ``Heartbeat.limit`` seconds is given up;
* a cancelled request reaches its handler before anything that is asked later, and a reply that
  crosses it counts as not taken: the handler's ``undo`` runs;
* a reply that somebody took is confirmed (RECEIPTS), so its handler can forget it;
* what arrives is handled in the order in which it was sent, lane by lane.

::

    connecting --handshake--> open --close(), abort(), loss--> closed
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar, cast

import msgspec

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import (
    ChannelError,
    ConnectionLost,
    HandshakeFailed,
    MalformedFrame,
)
from rlinf_async.channels.waitfor import WaitFuture
from rlinf_async.channels.wire.auth import Handshake
from rlinf_async.channels.wire.failures import Report, rebuild, report
from rlinf_async.channels.wire.framing import Flag, FrameType, pack_small
from rlinf_async.channels.wire.heartbeat import Heartbeat, Pulse
from rlinf_async.channels.wire.outbox import Outbox
from rlinf_async.channels.wire.router import Reply, Request, Route, Router, Undo
from rlinf_async.channels.wire.transfer import CONTROL, DATA, Message, MessageReader, outgoing

R = TypeVar("R")
Closed = Callable[["Connection", str], None]

log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_decode_report = msgspec.msgpack.Decoder(Report).decode
MAX_UNSENT_MESSAGES = 65_536
"""A peer that asks but does not read the answers is not read any more from here on."""


class Connection(asyncio.Protocol):
    """One side of a connection. Made by `connect` and `serve`."""

    def __init__(
        self, router: Router, handshake: Handshake, heartbeat: Heartbeat, handshake_timeout: float
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._router = router
        self._handshake = handshake
        self._reader = MessageReader()
        self._outbox = Outbox(self._loop)
        self._transport: asyncio.Transport | None = None
        self._pulse = Pulse(heartbeat, self._outbox, self._silent)
        self._timer = self._loop.call_later(handshake_timeout, self._handshake_late)
        self._handshake_timeout = handshake_timeout
        self._numbers = 0
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._asked: dict[int, Request[Any]] = {}
        self._tasks: dict[asyncio.Task[Reply], Request[Any]] = {}
        self._untaken: dict[int, Undo] = {}
        self._taken: list[int] = []
        self._on_close: list[Closed] = []
        self._reason = ""
        self.closed = False
        self.opened: asyncio.Future[None] = self._loop.create_future()
        """done when the handshake is; with `HandshakeFailed` or `ConnectionLost` if it failed"""
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.received_bytes = 0

    # ---- for the user

    @property
    def peer(self) -> str:
        """The name that the other side proved in the handshake."""
        return self._handshake.peer

    @property
    def sent_bytes(self) -> int:
        return self._outbox.sent_bytes

    async def request(
        self,
        kind: str,
        meta: Any,
        body: Encoded | None = None,
        *,
        reply: type[R],
        control: bool = False,
        on_channel: bool = False,
    ) -> tuple[R, Encoded | None]:
        """Ask the peer; what it answers. Cancelling this cancels the peer's handler.

        Args:
            kind: which of the peer's handlers.
            meta: its arguments, a small msgspec Struct.
            reply: the Struct that the peer answers with.
            control: go ahead of all data (a body over 256 KiB goes with the data all the same).
            on_channel: this is a wait on a channel, in the sense of `WaitFuture`.

        Raises:
            ChannelError: as the handler raised it.
            RemoteError: the handler raised something else.
            ConnectionLost: the connection was lost before the answer came.
            ItemTooLarge: the message is over a limit; nothing was sent.
        """
        future: asyncio.Future[Message] = (
            WaitFuture(loop=self._loop) if on_channel else self._loop.create_future()
        )
        number = self._ask(future, kind, meta, body, CONTROL if control else DATA)
        try:
            message = await future
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        if message.flags & Flag.RECEIPT:
            self._confirm(number)
        try:
            answer: R = _reply_decoder(reply)(message.head)
        except msgspec.DecodeError as error:
            raise self._malformed(f"the answer to {kind!r}: {error}") from error
        return answer, message.body

    def notify(
        self, kind: str, meta: Any, body: Encoded | None = None, *, control: bool = False
    ) -> None:
        """Tell the peer something that it does not answer.

        Raises:
            ConnectionLost: the connection is closed.
            ItemTooLarge: the message is over a limit.
        """
        self._check_open()
        head = _head(kind, meta)
        self._send(FrameType.NOTICE, 0, head, body, CONTROL if control else DATA, 0, kind)

    def on_close(self, callback: Closed) -> None:
        """Call this once, with the reason, when the connection is closed or lost."""
        self._on_close.append(callback)

    def close(self, reason: str = "it was closed") -> None:
        """Send what waits to be sent, tell the peer, and close."""
        if self.closed:
            return
        if self.opened.done():
            self._outbox.add_control(pack_small(FrameType.GOODBYE, 0, reason.encode()[:1000]))
            self._flush_receipts()
            self._outbox.flush_all()
        if self._transport is not None:
            self._transport.close()
        self._lose(reason)

    def abort(self, reason: str) -> None:
        """Cut the connection at once."""
        if self._transport is not None:
            self._transport.abort()
        self._lose(reason)

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await asyncio.shield(self._ended)

    # ---- asking

    def _ask(
        self, future: asyncio.Future[Message], kind: str, meta: Any, body: Encoded | None, lane: int
    ) -> int:
        self._check_open()
        self._numbers = number = self._numbers + 1
        self._send(FrameType.REQUEST, number, _head(kind, meta), body, lane, 0, kind)
        self._pending[number] = future
        return number

    def _cancel(self, number: int) -> None:
        self._pending.pop(number, None)
        if self.closed or self._outbox.withdraw(number):
            return
        self._outbox.add_control(pack_small(FrameType.CANCEL, number))

    def _confirm(self, number: int) -> None:
        """Somebody has the reply; say so with the next write."""
        if not self._taken:
            self._loop.call_soon(self._flush_receipts)
        self._taken.append(number)

    def _flush_receipts(self) -> None:
        taken, self._taken = self._taken, []
        for start in range(0, len(taken), 8192):
            part = taken[start : start + 8192]
            self._outbox.add_control(
                pack_small(FrameType.RECEIPTS, 0, struct.pack(f"<{len(part)}Q", *part))
            )

    # ---- answering

    def send_reply(
        self, request: Request[Any], meta: Any, body: Encoded | None, undo: Undo | None
    ) -> None:
        """Use `Request.reply`."""
        if request.number and not self.closed:
            flags = Flag.RECEIPT if undo is not None else 0
            head = _encode(meta)
            self._send(
                FrameType.REPLY, request.number, head, body, request.lane, flags, request.kind
            )
            if undo is not None:
                self._untaken[request.number] = undo
            if self._outbox.waiting > MAX_UNSENT_MESSAGES and self._transport is not None:
                self._transport.pause_reading()
        elif undo is not None:
            undo(self._reason if self.closed else "a notice takes no reply")
        self._forget(request)

    def send_failure(self, request: Request[Any], error: BaseException) -> None:
        """Use `Request.fail`."""
        if request.number and not self.closed:
            head = _encode(report(error))
            self._send(FrameType.ERROR, request.number, head, None, request.lane, 0, request.kind)
        else:
            log.warning("notice %r of %s failed: %s", request.kind, self.peer, error)
        self._forget(request)

    def _forget(self, request: Request[Any]) -> None:
        request.open = False
        request.abandon = None
        self._asked.pop(request.number, None)

    def _send(
        self,
        kind: FrameType,
        number: int,
        head: bytes,
        body: Encoded | None,
        lane: int,
        flags: int,
        what: str,
    ) -> None:
        message, small = outgoing(kind, number, head, body, lane, flags=flags, what=what)
        if lane == CONTROL and small:
            for part in message.next_frame() or ():
                self._outbox.add_control(part)
        else:
            self._outbox.add_data(message)

    # ---- what the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        both_ways = cast("asyncio.Transport", transport)  # uvloop's are not of that class
        self._transport = both_ways
        self._outbox.attach(both_ways)
        both_ways.write(self._handshake.take_outgoing())

    def data_received(self, data: bytes) -> None:
        self._pulse.heard()
        self.received_bytes += len(data)
        if not self._handshake.done:
            data = self._greet(data)
        if data and not self.closed:
            self._read(data)
        if not self.closed:
            self._outbox.flush()

    def pause_writing(self) -> None:
        self._outbox.pause()

    def resume_writing(self) -> None:
        self._outbox.resume()
        if self._transport is not None and self._outbox.waiting <= MAX_UNSENT_MESSAGES // 2:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"{type(exc).__name__}: {exc}" if exc else "the other process closed it or died")
        self._transport = None
        if not self._ended.done():
            self._ended.set_result(None)

    # ---- reading

    def _greet(self, data: bytes) -> bytes:
        """Go on with the handshake; what arrived behind it."""
        handshake = self._handshake
        failure: HandshakeFailed | None = None
        try:
            handshake.feed(data)
        except HandshakeFailed as error:
            failure = error
        if self._transport is not None and (answer := handshake.take_outgoing()):
            self._transport.write(answer)
        if failure is not None:
            self._fail_handshake(failure)
        elif handshake.done:
            self._timer.cancel()
            self._pulse.start()
            self.opened.set_result(None)
        return handshake.rest

    def _handshake_late(self) -> None:
        self._fail_handshake(
            HandshakeFailed(f"no handshake within {self._handshake_timeout:g} seconds")
        )

    def _fail_handshake(self, error: HandshakeFailed) -> None:
        self.opened.set_exception(error)
        if self._transport is not None:
            self._transport.close()
        self._lose(str(error))

    def _read(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._receive(message)
                if self.closed:
                    return
        except (MalformedFrame, msgspec.DecodeError, UnicodeDecodeError, struct.error) as error:
            self._malformed(str(error))

    def _malformed(self, what: str) -> MalformedFrame:
        log.error("connection to %s is closed, it sent a malformed frame: %s", self.peer, what)
        self.close(f"a malformed frame: {what}")
        return MalformedFrame(f"{self.peer}: {what}")

    def _receive(self, message: Message) -> None:
        kind = message.type
        if kind in (FrameType.REQUEST, FrameType.NOTICE):
            self._handle(message)
        elif kind in (FrameType.REPLY, FrameType.ERROR):
            self._resolve(message)
        elif kind == FrameType.RECEIPTS:
            for (number,) in struct.iter_unpack("<Q", message.head):
                self._untaken.pop(number, None)
        elif kind == FrameType.CANCEL:
            self._cancelled(message.number)
        elif kind == FrameType.GOODBYE:
            self._leave(message.head.decode(errors="replace"))

    def _handle(self, message: Message) -> None:
        head = message.head
        size = head[0] + 1 if head else 0
        kind = head[1:size].decode()
        number = message.number if message.type == FrameType.REQUEST else 0
        route = self._router.routes.get(kind)
        if route is None:
            request = Request(self, kind, number, message.lane, None, None)
            request.fail(ChannelError(f"nobody answers requests of kind {kind!r} here"))
            return
        meta = route.decode(head[size:])
        request = Request(self, kind, number, message.lane, meta, message.body)
        if number:
            self._asked[number] = request
        self._answer(route, request)

    def _answer(self, route: Route, request: Request[Any]) -> None:
        if route.handle is not None:
            coroutine = route.handle(self, request.meta, request.body)
            self._start(request, coroutine)
        elif route.answer is not None:
            try:
                route.answer(request)
            except Exception as error:
                request.fail(error)

    def _start(self, request: Request[Any], coroutine: Any) -> None:
        running: Coroutine[Any, Any, Reply] = coroutine
        task = self._loop.create_task(running, name=f"{request.kind} for {self.peer}")
        self._tasks[task] = request
        request.abandon = partial(_cancel_task, task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Reply]) -> None:
        request = self._tasks.pop(task)
        if task.cancelled():
            request.fail(ChannelError(f"the handler of {request.kind!r} was cancelled"))
        elif (error := task.exception()) is not None:
            request.fail(error)
        else:
            try:
                request.reply(*task.result())
            except ChannelError as refused:
                request.fail(refused)

    def _resolve(self, message: Message) -> None:
        future = self._pending.pop(message.number, None)
        if future is None:
            if message.number > self._numbers:
                raise MalformedFrame(f"an answer to request {message.number}, which nobody made")
        elif not future.done():
            if message.type == FrameType.ERROR:
                future.set_exception(rebuild(_decode_report(message.head)))
            else:
                future.set_result(message)

    def _cancelled(self, number: int) -> None:
        self._reader.forget(number)
        request = self._asked.get(number)
        if request is not None:
            abandon = request.abandon
            self._forget(request)
            if abandon is not None:
                abandon()
        elif (undo := self._untaken.pop(number, None)) is not None:
            undo(None)

    # ---- ending

    def _check_open(self) -> None:
        if self.closed:
            raise self._lost()
        if not self._handshake.done:
            raise ConnectionLost("the connection is not open yet")

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"connection to {self.peer or 'a peer'!r} was lost: {self._reason}")

    def _silent(self, seconds: float) -> None:
        self.abort(f"nothing was heard for {seconds:.1f} s: the process is stopped, or blocked")

    def _leave(self, reason: str) -> None:
        if self._transport is not None:
            self._transport.close()
        self._lose(f"{self.peer} closed it: {reason}")

    def _lose(self, reason: str) -> None:
        """Give up what was under way, once."""
        if self.closed:
            return
        self.closed = True
        self._reason = reason
        self._timer.cancel()
        self._pulse.stop()
        self._outbox.detach()
        if not self.opened.done():
            self.opened.set_exception(self._lost())
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._lost())
        self._pending.clear()
        self._abandon_asked(reason)
        for callback in self._on_close:
            callback(self, reason)

    def _abandon_asked(self, reason: str) -> None:
        """The peer takes no answer any more: waiting first, so that nothing is handed to it."""
        for request in list(self._asked.values()):
            abandon = request.abandon
            self._forget(request)
            if abandon is not None:
                abandon()
        untaken, self._untaken = self._untaken, {}
        for undo in untaken.values():
            undo(reason)


_decoders: dict[Any, Callable[[bytes], Any]] = {}


def _reply_decoder(kind: Any) -> Callable[[bytes], Any]:
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind).decode
    return decoder


def _head(kind: str, meta: Any) -> bytes:
    name = kind.encode()
    return bytes((len(name),)) + name + _encode(meta)


def _cancel_task(task: asyncio.Task[Reply]) -> None:
    task.cancel()
