"""The requests of this side, until they are answered or given up."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import ConnectionLost, MalformedFrame
from rlinf_async.channels.wire.frames.framing import MAX_HEAD_BYTES, Flag, FrameType, pack_small
from rlinf_async.channels.wire.frames.messages import DATA, Message
from rlinf_async.channels.wire.session.failures import Report, rebuild
from rlinf_async.channels.wire.session.outbox import Outbox

R = TypeVar("R")

_RECEIPT = int(Flag.RECEIPT)  # the enums are slow to ask
_REQUEST, _ERROR = FrameType.REQUEST, FrameType.ERROR
_encode = msgspec.msgpack.Encoder().encode
_decode_report = msgspec.msgpack.Decoder(Report).decode
_decoders: dict[Any, Callable[[bytes], Any]] = {}
_begins: dict[str, bytes] = {}


class ReplyTarget(Protocol):
    """What is given the answer: a future, or something with these methods of one."""

    def done(self) -> bool: ...

    def set_result(self, message: Message, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...


class Answer(Generic[R]):
    """What the peer answered."""

    __slots__ = ("_confirm", "_own_requests", "body", "meta", "number")

    def __init__(self, meta: R, message: Message, asking: OwnRequests) -> None:
        self.meta = meta
        self.body = message.body
        self.number = message.number
        """of the request"""
        self._confirm = bool(message.flags & _RECEIPT)
        self._own_requests = asking

    def take(self) -> None:
        """Confirm that it has arrived, if the peer asked for that."""
        if self._confirm:
            self._own_requests.confirm(self.number)


class OwnRequests:
    """The requests of this side of a connection that are not answered."""

    def __init__(self, outbox: Outbox) -> None:
        self._loop = asyncio.get_running_loop()
        self._outbox = outbox
        self._last = 0
        self._pending: dict[int, ReplyTarget] = {}
        self._taken: list[int] = []

    def ask(
        self, waiting: ReplyTarget, kind: str, head: bytes, body: Encoded | None, lane: int
    ) -> int:
        """Send a request whose answer this one gets; the request's number."""
        self._last = number = self._last + 1
        self._outbox.send(_REQUEST, number, head, body, lane, what=kind)
        self._pending[number] = waiting
        return number

    def cancel(self, number: int, *, withdraw: bool = True) -> bool:
        """Give this request up, answered or not; whether it was withdrawn before it was sent.

        Without ``withdraw`` it is sent in any case, with a cancellation behind it: it says more
        than what it asks for.
        """
        self._pending.pop(number, None)
        if not withdraw:
            self._outbox.send(FrameType.CANCEL, number, b"", None, DATA, what="a cancellation")
            return False
        withdrawn = self._outbox.withdraw(number)
        if not withdrawn:
            self._outbox.add_control(pack_small(FrameType.CANCEL, number))
        return withdrawn

    def confirm(self, number: int) -> None:
        """The answer was taken; confirm it with the next write."""
        if not self._taken:
            self._loop.call_soon(self.flush_receipts)
        self._taken.append(number)

    def flush_receipts(self) -> None:
        """Confirm the answers that were taken, now."""
        taken, self._taken = self._taken, []
        at_once = MAX_HEAD_BYTES // 8
        for start in range(0, len(taken), at_once):
            part = taken[start : start + at_once]
            self._outbox.add_control(
                pack_small(FrameType.RECEIPTS, 0, struct.pack(f"<{len(part)}Q", *part))
            )

    def resolve(self, message: Message) -> None:
        """An answer arrived.

        Raises:
            MalformedFrame, DecodeError: nobody asked for it, or it cannot be read.
        """
        failed = message.type == _ERROR
        error = rebuild(_decode_report(message.head)) if failed else None  # or a wait hangs
        future = self._pending.pop(message.number, None)
        if future is None:
            if message.number > self._last:
                raise MalformedFrame(f"an answer to request {message.number}, which nobody made")
        elif not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(message)

    def lose(self, error: Callable[[], ConnectionLost]) -> None:
        """No answer will come."""
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(error())


def head_of(kind: str, meta: Any) -> bytes:
    """The head of a request or a notice: how long the kind is, the kind, its arguments."""
    begin = _begins.get(kind)
    if begin is None:
        name = kind.encode()
        begin = _begins[kind] = bytes((len(name),)) + name
    return begin + _encode(meta)


def reply_decoder(kind: Any) -> Callable[[bytes], Any]:
    """Reads answers of this type."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind).decode
    return decoder
