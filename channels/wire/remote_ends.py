"""What all ends of channels in other processes share, and the two ends of a `Latest`.

::

    get ---> Newer ---> [waits at the owner] ---> Version, the value
    get_nowait: the newest value that is here; each one that arrives asks for the next
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Self, TypeVar

from rlinf_async.channels.encoded import Encoded, check_key_and_weight
from rlinf_async.channels.ends import Key, LatestReceiver, LatestSender, Named, Sender
from rlinf_async.channels.errors import (
    ChannelClosed,
    ChannelError,
    MalformedFrame,
    WireError,
    WrongItemType,
)
from rlinf_async.channels.items import channel_rule
from rlinf_async.channels.statistics import KeyState, Statistics, current_party
from rlinf_async.channels.wire import protocol
from rlinf_async.channels.wire.codec import ItemCodec
from rlinf_async.channels.wire.direct import Direct
from rlinf_async.channels.wire.frames import Message
from rlinf_async.channels.wire.protocol import End, EndKind, EndRef
from rlinf_async.channels.wire.session.connection import Connection
from rlinf_async.channels.wire.session.requests import head_of, reply_decoder
from rlinf_async.channels.wire.session.streams import Linger

log = logging.getLogger(__name__)


class ConfirmedNotices:
    """What the owner of channels is told over one connection and has to confirm: an end is closed,
    a channel has failed. (The `ReplyTarget` of all of them; see `of`.)

    Only the closing of the connection waits for the confirmation: a sender's end that is lost where
    the connection is cut in that moment would leave the receivers waiting for ever.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._open = 0
        self._linger = Linger(
            connection, lambda: self._open, connection.outbox.flush, "notices were not confirmed"
        )
        connection.add_linger(self._linger)

    @classmethod
    def of(cls, connection: Connection) -> ConfirmedNotices:
        """Return the notices of a connection."""
        return connection.attached(cls) or connection.attach(cls(connection))

    def send(self, kind: str, meta: Any) -> None:
        """Say this, in the order of what was said before; to a lost owner there is nothing to
        say."""
        if not self._connection.closed:
            self._connection.post(self, kind, head_of(kind, meta))
            self._open += 1

    # ---- the answers

    def done(self) -> bool:
        return False

    def set_result(self, message: Message) -> None:
        self._confirmed()

    def set_exception(self, error: BaseException) -> None:
        if not isinstance(error, ChannelError | WireError):  # a channel that ended is not worth it
            log.error("%s: %s", self._connection.peer, error)
        self._confirmed()

    def _confirmed(self) -> None:
        self._open -= 1
        if not self._open:
            self._linger.settled()


class Wire:
    """A channel of another process, as this one sees it: how its items are sent and read."""

    def __init__(
        self, connection: Connection, ref: EndRef, item_type: Any, direct: Direct | None = None
    ) -> None:
        self.connection = connection
        self._loop = asyncio.get_running_loop()
        self.direct = direct
        self.queue = ref.queue
        self.form = ref.form
        self.home = ref.home
        self.channel_name = ref.channel
        self.item_type = item_type
        rule = channel_rule(item_type, ref.channel, ref.form)
        codec = ItemCodec(item_type, ref.form)
        self.decode, self.decode_list = codec.decode, codec.decode_list
        self.pack = codec.encode
        """An item that fits, as it travels."""
        self.fits = rule.fits
        """True for an item that certainly arrives as what it is."""
        self.check = rule.check
        """Refuses an item that would not; raises `WrongItemType`."""

    def later(self, call: Callable[[], object]) -> None:
        """Call this in the connection's loop, from whichever thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    def encode(self, item: object) -> Encoded:
        """The item as it travels.

        Raises:
            WrongItemType: it is not of the channel's type, or a part of it cannot travel.
        """
        if not self.fits(item):
            self.check(item)
        try:
            return self.pack(item)
        except WrongItemType as error:
            raise WrongItemType(f"channel {self.channel_name!r}: {error}") from error

    def decode_value(self, body: Encoded | None) -> Any:
        """The value of a `Latest`.

        Raises:
            MalformedFrame: it is not of the channel's type.
        """
        try:
            return self.decode(body or Encoded(b""))
        except MalformedFrame as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: MalformedFrame) -> MalformedFrame:
        """An item is not of the channel's type."""
        return MalformedFrame(
            f"channel {self.channel_name!r} of {self.connection.peer}: {error}; whoever puts it "
            "must declare the same type for this channel"
        )

    def elsewhere(self, what: str, instead: str) -> ChannelError:
        return ChannelError(
            f"channel {self.channel_name!r} lives in another process ({self.connection.peer}): "
            f"{what} cannot know its state; use {instead}"
        )


_clone_numbers = count(1)


def next_clone_number() -> int:
    """A number for an end that this process opens: ever lower."""
    return -next(_clone_numbers)


class WireEnd(Named):
    """An end of a channel or a `Latest` in another process."""

    __slots__ = ("_number", "_wire")

    def __init__(self, wire: Wire, number: int) -> None:
        self._wire = wire
        self._number = number

    @property
    def channel_name(self) -> str:
        return self._wire.channel_name

    @property
    def item_type(self) -> Any:
        return self._wire.item_type


class RemoteEnd(WireEnd):
    """An end of a channel in another process: opened there, cloned and closed from here."""

    __slots__ = ("_closed",)

    def __init__(self, wire: Wire, number: int) -> None:
        super().__init__(wire, number)
        self._closed = False
        self._join()

    def _join(self) -> None:
        """Be known by its number to what goes over the connection."""

    @property
    def kind(self) -> EndKind:
        return "sender" if isinstance(self, Sender) else "receiver"

    def open(self) -> Self:
        if self._closed:
            raise self._closed_error()
        return self

    def _closed_error(self) -> ChannelError:
        return ChannelClosed(
            f"this {type(self).__name__.removeprefix('Remote').lower()} of channel "
            f"{self.channel_name!r} was closed: clone an end before closing it to use it again"
        )

    def clone(self, holder: str | None = None) -> Self:
        self.open()
        number = next_clone_number()
        clone = protocol.Clone(self._number, number, holder or current_party.get())
        self._wire.connection.notify("channel.clone", clone, control=True)
        return type(self)(self._wire, number)

    def on_loan(self) -> EndRef | None:
        """Return this end for another process, where the queue lives with a third one; else
        None."""
        wire = self._wire
        if wire.home is None:
            return None
        self.open()
        return EndRef(
            self._number,
            self.kind,
            wire.channel_name,
            queue=wire.queue,
            form=wire.form,
            home=wire.home,
        )

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._tell("channel.close", protocol.End(self._number))

    async def statistics(self) -> Statistics:
        self.open()
        found, _ = await self._wire.connection.request(
            "channel.statistics", protocol.End(self._number), reply=Statistics
        )
        return found

    async def state(self, *, key: Key | None = None) -> KeyState:
        self.open()
        check_key_and_weight(self.channel_name, key, 1)
        found, _ = await self._wire.connection.request(
            "channel.state", protocol.State(self._number, key), reply=KeyState
        )
        return found

    def __del__(self) -> None:
        if self._number < 0 and not self._closed and not self._wire.connection.closed:
            try:
                self._warn()
            finally:
                self._wire.later(partial(self._dropped, self._wire, self._number))

    @staticmethod
    def _dropped(wire: Wire, number: int) -> None:
        """Close an end that is not there any more, in the loop of its connection."""
        ConfirmedNotices.of(wire.connection).send("channel.close", End(number))

    def _warn(self) -> None:
        warnings.warn(
            f"a {type(self).__name__.removeprefix('Remote').lower()} of channel "
            f"{self.channel_name!r} was dropped while it was open, and is closed now: close() it, "
            "or use it in a with block",
            ResourceWarning,
            stacklevel=3,
            source=self,
        )

    def _tell(self, kind: str, meta: Any) -> None:
        ConfirmedNotices.of(self._wire.connection).send(kind, meta)


T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class RemoteLatestSender(WireEnd, LatestSender[T_contra]):
    """Publishes to a `Latest` in another process. It is not counted, and needs no closing."""

    __slots__ = ()

    async def publish(self, value: T_contra) -> int:
        body = self._wire.encode(value)
        publish = protocol.Publish(self._number, current_party.get())
        found, _ = await self._wire.connection.request(
            "latest.publish", publish, body, reply=protocol.Version
        )
        return found.version

    def close(self) -> None:
        ConfirmedNotices.of(self._wire.connection).send("latest.close", protocol.End(self._number))


class RemoteLatestReceiver(WireEnd, LatestReceiver[T_co]):
    """Reads a `Latest` in another process."""

    __slots__ = ("__weakref__", "_ahead", "version")

    def __init__(self, wire: Wire, number: int, version: int = 0) -> None:
        super().__init__(wire, number)
        self.version = version
        self._ahead: _ReadAhead | None = None
        """values that are read ahead; there while this receiver polls"""

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
