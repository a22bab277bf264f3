"""The ends of a channel that lives in another process.

They are open from the start: the owner counted them when it gave them away. A cancelled wait leaves
the channel as it was; an end whose connection is lost raises `ConnectionLost`.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import count
from types import TracebackType
from typing import Any, Self, TypeVar

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.ends import Key, Lease, Receiver, Sender
from rlinf_async.channels.errors import (
    ChannelClosed,
    ChannelError,
    ConnectionLost,
    LeaseLost,
    MalformedFrame,
)
from rlinf_async.channels.itemtypes import check_key_and_weight
from rlinf_async.channels.latest import LatestReceiver, LatestSender
from rlinf_async.channels.saying import say
from rlinf_async.channels.statistics import Statistics
from rlinf_async.channels.waitfor import current_party
from rlinf_async.channels.wire import protocol
from rlinf_async.channels.wire.asking import Answer
from rlinf_async.channels.wire.connection import Connection
from rlinf_async.channels.wire.promises import Promises, Purse
from rlinf_async.channels.wire.protocol import EndRef
from rlinf_async.channels.wire.remote import Wire
from rlinf_async.channels.wire.window import TURN_ITEMS, Windows

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)

log = logging.getLogger(__name__)
_clone_numbers = count(1)


class ChannelClient:
    """Makes ends of what the owner sent over this connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._senders: list[RemoteSender[Any]] = []

    @property
    def has_senders(self) -> bool:
        """Whether there may be anything to `flush`."""
        return bool(self._senders)

    async def flush(self) -> None:
        """Return once all that its senders have put is in its place.

        Raises:
            ChannelError: what the first of them has to be told.
        """
        if self._senders:
            await Promises.of(self._connection).confirmed()
        for sender in self._senders:
            sender.raise_error()

    def end(self, ref: EndRef, item_type: Any) -> AnyRemoteEnd:
        """The end that this stands for, of a channel of ``item_type``.

        Raises:
            TypeError: items of this type cannot travel.
        """
        wire = Wire(self._connection, ref, item_type)
        if ref.kind == "sender":
            self._senders.append(sender := RemoteSender[Any](wire, ref.number))
            return sender
        if ref.kind == "receiver":
            return RemoteReceiver(wire, ref.number)
        if ref.kind == "latest_sender":
            return RemoteLatestSender(wire, ref.number)
        return RemoteLatestReceiver(wire, ref.number, ref.version)


class _RemoteEnd:
    """The life of an end over a connection."""

    __slots__ = ("_closed", "_number", "_wire")

    def __init__(self, wire: Wire, number: int) -> None:
        self._wire = wire
        self._number = number
        self._closed = False

    @property
    def channel_name(self) -> str:
        return self._wire.channel_name

    @property
    def item_type(self) -> Any:
        return self._wire.item_type

    def open(self) -> Self:
        if self._closed:
            raise ChannelClosed(
                f"this {type(self).__name__.removeprefix('Remote').lower()} of channel "
                f"{self.channel_name!r} was closed: clone an end before closing it to use it again"
            )
        return self

    def clone(self, holder: str | None = None) -> Self:
        self.open()
        number = -next(_clone_numbers)
        clone = protocol.Clone(self._number, number, holder or current_party.get())
        self._wire.connection.notify("channel.clone", clone, control=True)
        return type(self)(self._wire, number)

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

    def _tell(self, kind: str, meta: Any) -> None:
        """Say it in the order of what was said before; to a lost owner there is nothing to say."""
        if not self._wire.connection.closed:
            self._wire.connection.notify(kind, meta)


class RemoteSender(_RemoteEnd, Sender[T_contra]):
    """A sender of a channel in another process. It puts without asking where that has lent room."""

    __slots__ = ("__weakref__", "_error", "_promises", "_purse", "_told")

    def __init__(self, wire: Wire, number: int) -> None:
        super().__init__(wire, number)
        self._error: Exception | None = None
        self._told: type[Exception] | None = None
        self._promises = Promises.of(wire.connection)
        self._promises.join(number, self)
        self._purse = self._promises.purse(wire.queue, None)

    async def put(self, item: T_contra, *, key: Key | None = None, weight: int = 1) -> None:
        promises, purse = self._promises, self._purse
        if self._closed or self._error is not None:
            self._check()
        if key is not None or weight != 1:
            check_key_and_weight(self.channel_name, key, weight)
            purse = promises.purse(self._wire.queue, key)
        body = self._wire.encode(item)
        if promises.fits(purse, body, weight):
            if promises.turn_due:
                await asyncio.sleep(0)  # it is sent, and room that was lent meanwhile is seen
                self._check()
                if not promises.fits(purse, body, weight):
                    await self._ask(purse, body, weight)
                    return
            promises.add(purse, self._number, weight, body.data)
            if self._told is not None:  # room was lent since, so somebody takes it again
                self._told = None
        else:
            await self._ask(purse, body, weight)

    async def _ask(self, purse: Purse, body: Encoded, weight: int) -> None:
        """Put, and wait until it is done."""
        self._check()
        if not purse.kept:
            purse = self._promises.purse(purse.queue, purse.key)
            if purse.key is None:
                self._purse = purse
        put = protocol.Put(self._number, purse.key, weight, current_party.get(), purse.wants)
        purse.waiting += 1
        try:
            await self._wire.connection.request(
                "channel.put", put, body, reply=protocol.Nothing, on_channel=True
            )
            self._told = None
        except ChannelError as error:
            late, self._error, self._told = self._error, None, type(error)
            if late is not None:
                error.add_note(f"beside, of what was put before: {say(late)}")
            raise
        finally:
            purse.waiting -= 1
            purse.used = True
        purse.puts += 1

    async def flush(self) -> None:
        self._check()
        await self._promises.confirmed()
        self._check()

    def close(self) -> None:
        if not self._closed:
            super().close()
            self.raise_error()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as also:  # the block's own error is the first cause
            if error is None:
                raise
            error.add_note(f"beside, of what was put before: {say(also)}")

    def tell(self, error: Exception) -> bool:
        """Raise this at the next use; whether there will be one. It is told once why nothing is
        taken any more, not for each of the items that were under way then."""
        if self._told is type(error):
            return True
        if self._error is None:
            self._error = error
        return not self._closed

    def _check(self) -> None:
        self.raise_error()
        self.open()

    def raise_error(self) -> None:
        """What became of items that were put without asking, if that is an error."""
        error, self._error = self._error, None
        if error is not None:
            self._told = type(error)
            raise error

    def __del__(self) -> None:
        error = getattr(self, "_error", None)
        if error is not None:
            log.error("a sender of channel %r was dropped: %s", self.channel_name, say(error))

    def put_nowait(self, item: T_contra, *, key: Key | None = None, weight: int = 1) -> None:
        raise self._wire.elsewhere("put_nowait", "await put(...)")

    def fail(self, error: BaseException | str) -> None:
        self.open()
        self._tell("channel.fail", protocol.Fail(self._number, say(error)))
        self.close()


class RemoteReceiver(_RemoteEnd, Receiver[T_co]):
    """A receiver of a channel in another process."""

    __slots__ = ("_window", "_windows")

    def __init__(self, wire: Wire, number: int) -> None:
        super().__init__(wire, number)
        self._windows = Windows.of(wire.connection)
        self._window = self._windows.find(number, None)

    async def get(self, *, key: Key | None = None) -> T_co:
        window = self._window
        if self._closed:
            self.open()
        if key is not None:
            check_key_and_weight(self.channel_name, key, 1)
            window = self._windows.find(self._number, key)
        if window.run >= TURN_ITEMS:
            window.run = 0
            await asyncio.sleep(0)  # what was taken is said, and what was asked for is heard
        index, part = window.items.popleft() if window.items else await window.next()
        try:
            item: T_co = self._wire.decode(part)
        except MalformedFrame as error:
            window.refuse(index, error)
            raise self._wire.unreadable(error) from error
        window.took(index)
        return item

    def close(self) -> None:
        if not self._closed:
            self._windows.close(self._number)
            super().close()

    def get_nowait(self, *, key: Key | None = None) -> T_co:
        raise self._wire.elsewhere("get_nowait", "await get(), or a task that gets ahead")

    async def get_batch(
        self, *, weight: int, at_least: int | None = None, key: Key | None = None
    ) -> list[T_co]:
        return self._wire.decode_each(await self._ask(weight, at_least, key))

    async def _ask(
        self, weight: int, at_least: int | None, key: Key | None, lease: bool = False
    ) -> Answer[protocol.Taken]:
        self.open()
        check_key_and_weight(self.channel_name, key, 1)
        self._check_batch(weight, at_least)
        self._windows.give_back(self._number, key)
        get = protocol.Get(self._number, key, weight, at_least, current_party.get(), lease)
        return await self._wire.connection.ask(
            "channel.get", get, reply=protocol.Taken, on_channel=True
        )

    def _check_batch(self, weight: object, at_least: object) -> None:
        """Refuse what could not be asked for; its owner refuses a batch that cannot be."""
        least = weight if at_least is None else at_least
        if not (isinstance(weight, int) and isinstance(least, int)):
            raise TypeError(
                f"channel {self.channel_name!r}: the weights of a batch are ints, got "
                f"weight={weight!r}, at_least={at_least!r}"
            )

    async def _take(
        self, weight: int, at_least: int | None, key: Key | None
    ) -> tuple[int, Lease[T_co]]:
        answer = await self._ask(weight, at_least, key, lease=True)
        items: list[T_co] = self._wire.decode_each(answer)
        return answer.meta.lease, Lease(items, answer.meta.deliveries)

    async def _acknowledge(self, lease: int) -> None:
        connection, settle = self._wire.connection, protocol.Settle(lease, None)
        try:
            await connection.request("channel.settle", settle, reply=protocol.Nothing, control=True)
        except (asyncio.CancelledError, GeneratorExit):
            if not connection.closed:  # the block has ended: it may have been heard, or not
                connection.notify("channel.settle", settle, control=True)
            raise
        except ConnectionLost as error:
            raise LeaseLost(
                f"lease {lease} on channel {self.channel_name!r} was taken back before it was "
                f"acknowledged, or nobody knows: the connection to {connection.peer} was lost"
            ) from error

    def _put_back(self, lease: int, error: BaseException) -> None:
        if not self._wire.connection.closed:
            settle = protocol.Settle(lease, say(error))
            self._wire.connection.notify("channel.settle", settle, control=True)

    def _count_stale(self) -> None:
        self._tell("channel.stale", protocol.End(self._number))


class RemoteLatestSender(LatestSender[T_contra]):
    """Publishes to a `Latest` in another process."""

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


class RemoteLatestReceiver(LatestReceiver[T_co]):
    """Reads a `Latest` in another process."""

    __slots__ = ("_number", "_wire")

    def __init__(self, wire: Wire, number: int, version: int = 0) -> None:
        self._wire = wire
        self._number = number
        self.version = version

    @property
    def channel_name(self) -> str:
        return self._wire.channel_name

    @property
    def item_type(self) -> Any:
        return self._wire.item_type

    def clone(self) -> Self:
        return type(self)(self._wire, self._number, self.version)

    async def get(self, *, newer_than: int | None = None) -> T_co:
        than = self.version if newer_than is None else newer_than
        newer = protocol.Newer(self._number, than, current_party.get())
        found, body = await self._wire.connection.request(
            "latest.newer", newer, reply=protocol.Version, on_channel=True
        )
        value: T_co = self._wire.decode_value(body)
        self.version = found.version
        return value

    def get_nowait(self) -> T_co | None:
        raise self._wire.elsewhere("get_nowait", "await get(), or a task that reads ahead")


AnyRemoteEnd = (
    RemoteSender[Any] | RemoteReceiver[Any] | RemoteLatestSender[Any] | RemoteLatestReceiver[Any]
)
