"""The two ends of a `Latest` in another process. They are not counted, and need no closing.

::

    get ---> Newer ---> [waits at the owner] ---> Version, the value
    get_nowait: the newest value that is here; each one that arrives asks for the next
"""

from __future__ import annotations

from typing import Self, TypeVar

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.ends import LatestReceiver, LatestSender
from rlinf_async.channels.waitfor import current_party
from rlinf_async.channels.wire.frames.messages import Message
from rlinf_async.channels.wire.links import protocol
from rlinf_async.channels.wire.links.remote_channel import Wire
from rlinf_async.channels.wire.links.remote_end import WireEnd
from rlinf_async.channels.wire.session.requests import head_of, reply_decoder

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class RemoteLatestSender(WireEnd, LatestSender[T_contra]):
    """Publishes to a `Latest` in another process."""

    __slots__ = ()

    async def publish(self, value: T_contra) -> int:
        body = self._wire.encode(value)
        publish = protocol.Publish(self._number, current_party.get())
        found, _ = await self._wire.connection.request(
            "latest.publish", publish, body, reply=protocol.Version
        )
        return found.version

    async def close(self) -> None:
        await self._wire.connection.request(
            "latest.close", protocol.End(self._number), reply=protocol.Nothing
        )


class RemoteLatestReceiver(WireEnd, LatestReceiver[T_co]):
    """Reads a `Latest` in another process."""

    __slots__ = ("__weakref__", "_ahead", "version")

    def __init__(self, wire: Wire, number: int, version: int = 0) -> None:
        super().__init__(wire, number)
        self.version = version
        self._ahead: _ReadAhead | None = None
        """there while this receiver polls"""

    def clone(self) -> Self:
        return type(self)(self._wire, self._number, self.version)

    async def get(self, *, newer_than: int | None = None) -> T_co:
        self._stop_ahead()
        than = self.version if newer_than is None else newer_than
        newer = protocol.Newer(self._number, than, current_party.get())
        found, body = await self._wire.connection.request(
            "latest.newer", newer, reply=protocol.Version, on_channel=True
        )
        value: T_co = self._wire.decode_value(body)
        self.version = found.version
        return value

    def get_nowait(self) -> T_co | None:
        ahead = self._ahead
        if ahead is None:
            ahead = self._ahead = _ReadAhead(self._wire, self._number, self.version)
        body, ahead.body = ahead.body, None
        if body is not None:
            value: T_co = self._wire.decode_value(body)
            self.version = ahead.version
            return value
        if ahead.error is not None:
            raise ahead.error.with_traceback(None)
        return None

    def _stop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop()

    def __del__(self) -> None:
        ahead = getattr(self, "_ahead", None)
        if ahead is not None:
            self._wire.later(ahead.stop)


class _ReadAhead:
    """The newest value that has arrived for a receiver that polls. It asks for the next one as soon
    as one has arrived, and goes on when values come faster than they are looked at."""

    def __init__(self, wire: Wire, number: int, version: int) -> None:
        self._wire = wire
        self._number = number
        self._request = 0
        self.version = version
        self.body: Encoded | None = None
        self.error: BaseException | None = None
        self._ask()

    def stop(self) -> None:
        """No value is wanted any more."""
        if self._request:
            self._wire.connection.give_up(self._request)
            self._request = 0

    def _ask(self) -> None:
        newer = protocol.Newer(self._number, self.version, "")
        head = head_of("latest.newer", newer)
        self._request = self._wire.connection.post(self, "latest.newer", head)

    # ---- for the connection

    def done(self) -> bool:
        return not self._request

    def set_result(self, message: Message) -> None:
        self.version = reply_decoder(protocol.Version)(message.head).version
        self.body = message.body or Encoded(b"")
        self._ask()

    def set_exception(self, error: BaseException) -> None:
        self._request = 0
        self.error = error
