"""The requests of this side, until they are answered or given up.

Errors travel back to the process that asked by `report` and `rebuild`.
"""

from __future__ import annotations

import asyncio
import struct
import traceback
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from rlinf_async.channels import errors
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import (
    ChannelError,
    ConnectionLost,
    MalformedFrame,
    fit_bytes,
    text_of,
)
from rlinf_async.channels.wire.frames import (
    DATA,
    MAX_HEAD_BYTES,
    Flag,
    FrameType,
    Message,
    pack_small,
)
from rlinf_async.channels.wire.session.outbox import Outbox

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what was expected."""
MAX_TEXT = 16 * 1024
"""Bytes, of a message and of a traceback: an answer that fails must fit where it goes."""


class RemoteError(Exception):
    """The other side's handler raised something that is not a channel's error.

    Args:
        type_name: the exception's class, as ``module.Name``.
        message: what it said.
        traceback_text: where it was raised, over there.
    """

    def __init__(self, type_name: str, message: str, traceback_text: str) -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name = type_name
        self.message = message
        self.traceback_text = traceback_text


class Report(msgspec.Struct, array_like=True, frozen=True):
    """An exception as plain data."""

    type_name: str
    message: str
    traceback_text: str


def _known() -> dict[str, type[Exception]]:
    """Return the classes that come back as themselves: all of them take one text."""
    ours = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, ChannelError)
    }
    return {**ours, "ValueError": ValueError}


KNOWN = _known()


def report(error: BaseException, most: int = MAX_TEXT) -> Report:
    """The exception as it travels: it always fits, and can always be encoded. Each of its texts has
    at most so many bytes."""
    kind = type(error)
    said = fit_bytes(text_of(error), most)
    if KNOWN.get(kind.__name__) is kind:
        return Report(kind.__name__, said, "")
    if isinstance(error, RemoteError):  # it comes from further away
        return Report(
            fit_bytes(error.type_name, most),
            fit_bytes(error.message, most),
            fit_bytes(error.traceback_text, most),
        )
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    trace = "".join(traceback.format_exception(error))
    return Report(fit_bytes(name, most), said, fit_bytes(trace, most))


def rebuild(found: Report) -> Exception:
    """The exception to raise here."""
    kind = KNOWN.get(found.type_name)
    if kind is not None:
        return kind(found.message)
    return RemoteError(found.type_name, found.message, found.traceback_text)


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
        """number of the request"""
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
        self._lost: Callable[[], ConnectionLost] | None = None

    def ask(
        self,
        waiting: ReplyTarget,
        kind: str,
        head: bytes,
        body: Encoded | None = None,
        lane: int = DATA,
    ) -> int:
        """Send a request whose answer this one gets; the request's number. ``head``: what `head_of`
        makes of its kind and its arguments.

        An answer that cannot be decoded is reported to the target, and ends the connection.

        Raises:
            ConnectionLost: no answer can come any more.
            ItemTooLarge: the message is over a limit; nothing was sent.
        """
        if self._lost is not None:
            raise self._lost()
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
            self._outbox.add(pack_small(FrameType.CANCEL, number))
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
            self._outbox.add(
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
        self._lost = error
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
