"""A call to a worker in another process, until its reply arrives. No task waits for it.

A call that is cancelled has ended once its method has: until then its channel ends stay open, so
what the method had put by then is in its channels. A worker that does not report the end within
`CANCEL_SECONDS`, because it is blocked or cut off, is not waited for. The request to report the end
goes ahead of all data; its reply comes behind what the method has put.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec

from rlinf_async.channels import ConnectionLost, MalformedFrame
from rlinf_async.channels.wire import ChannelServer, Connection
from rlinf_async.channels.wire.frames.messages import Message
from rlinf_async.channels.wire.session.failures import UNREADABLE
from rlinf_async.channels.wire.session.requests import head_of
from rlinf_async.deadlines import Timer
from rlinf_async.runtime.protocol import (
    CALL,
    ENDED,
    ArgumentsCodec,
    CallNumber,
    Outcome,
    arguments_codec,
)
from rlinf_async.workers.errors import WorkerDied, WorkerError
from rlinf_async.workers.host import OnEnd
from rlinf_async.workers.methods import Method

Death: TypeAlias = "asyncio.Future[WorkerDied]"

CANCEL_SECONDS: Final = 2.0
log = logging.getLogger(__name__)
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode
_RETURNED = msgspec.msgpack.encode(Outcome())


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
        self._codec = codec = arguments_codec(self._method, tuple(arguments))
        try:
            try:
                body = codec.encode(arguments, self._server)
            finally:
                self._lent = codec.take_lent()
            self._number = self._connection.post(self, CALL, codec.take_head(), body)
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
            self._connection.post(cancelled, ENDED, head, control=True)
        except ConnectionLost as error:
            cancelled.set_exception(error)

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
        return outcome.failure is not None

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
