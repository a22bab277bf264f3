"""Which handler answers which kind of request."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, cast

import msgspec

from rlinf_async.channels.encoded import Encoded

if TYPE_CHECKING:
    from rlinf_async.channels.wire.session.answers import PeerRequests
    from rlinf_async.channels.wire.session.connection import Connection

M = TypeVar("M")

Reply = tuple[Any, Encoded | None]
Handler = Callable[["Connection", M, Encoded | None], Coroutine[Any, Any, Reply]]


class Unsettled(Protocol):
    """An answer that was given, and that the asker has not settled yet."""

    def returned(self) -> None:
        """The asker gave its request up before it saw the answer: nothing of it was taken."""

    def losing(self) -> AbstractContextManager[None]:
        """The connection is lost: in this block `lost` follows, of this and of all others."""
        ...

    def lost(self, reason: str) -> None:
        """The connection is lost: whether the asker has taken it is unknown."""


class Request(msgspec.Struct, Generic[M], eq=False):
    """A request of the peer that a handler answers, now or later, once.

    A notice has no reply: replies to it are dropped, and failures are logged.
    """

    connection: Connection
    peer_requests: PeerRequests
    kind: str
    number: int
    lane: int
    body: Encoded | None
    meta: M = cast("Any", None)
    """its arguments"""
    open: bool = True
    """whether an answer is still wanted"""
    abandon: Callable[[], None] | None = None
    """called if the answer is wanted no more before it was given"""
    held: int = 0
    """bytes of its body that count as held here until it is answered"""

    def reply(
        self,
        meta: Any,
        body: Encoded | None = None,
        *,
        unsettled: Unsettled | None = None,
        receipt: bool = False,
    ) -> None:
        """Answer. ``unsettled`` is called if the answer turns out not to have been taken, until it
        is removed from `PeerRequests.unsettled`; with ``receipt`` that is done as soon as the asker
        has the answer.

        Raises:
            ItemTooLarge: the answer is over a limit; the request is still open.
        """
        if self.open:
            self.peer_requests.reply(self, meta, body, unsettled, receipt)

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        if self.open:
            self.peer_requests.fail(self, error)


class Route(NamedTuple):
    """How one kind of request is read and answered."""

    kind: str
    decode: Callable[[bytes], Any]
    answer: Callable[[Request[Any]], None] | None
    handle: Handler[Any] | None


class Router:
    """The kinds of requests that this process answers."""

    def __init__(self) -> None:
        self.routes: dict[bytes, Route] = {}
        """by how a request begins: the length of the kind, and the kind"""

    def add(self, kind: str, meta_type: type[M] | None, handler: Handler[M]) -> None:
        """Answer this kind with a coroutine, which is cancelled when the asker cancels or dies.

        Args:
            kind: what askers call it.
            meta_type: of its arguments, a small msgspec Struct; None if it has none.
        """
        self._add(Route(kind, msgspec.msgpack.Decoder(meta_type).decode, None, handler))

    def add_sync(
        self, kind: str, meta_type: type[M] | None, handler: Callable[[Request[M]], None]
    ) -> None:
        """Answer this kind with a function that calls ``request.reply``, at once or later."""
        self._add(Route(kind, msgspec.msgpack.Decoder(meta_type).decode, handler, None))

    def _add(self, route: Route) -> None:
        name = route.kind.encode()
        if not 1 <= len(name) <= 255:
            raise ValueError(f"the kind of a request has 1 to 255 bytes, {route.kind!r} does not")
        begin = bytes((len(name),)) + name
        if begin in self.routes:
            raise ValueError(f"requests of kind {route.kind!r} have a handler already")
        self.routes[begin] = route
