"""A receiver of a channel in another process: single items by its windows, batches by asking."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from rlinf_async.channels.away import Away
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.ends import Key, Lease, Receiver
from rlinf_async.channels.errors import ConnectionLost, LeaseLost, MalformedFrame
from rlinf_async.channels.itemtypes import check_key_and_weight
from rlinf_async.channels.saying import say
from rlinf_async.channels.waitfor import current_party
from rlinf_async.channels.wire import protocol
from rlinf_async.channels.wire.asking import Answer
from rlinf_async.channels.wire.fetching import fetch_all
from rlinf_async.channels.wire.remote import Wire
from rlinf_async.channels.wire.remote_end import RemoteEnd
from rlinf_async.channels.wire.window import TURN_ITEMS, Window
from rlinf_async.channels.wire.windows import Windows

T_co = TypeVar("T_co", covariant=True)


class RemoteReceiver(RemoteEnd, Receiver[T_co]):
    """A receiver of a channel in another process."""

    __slots__ = ("_window", "_windows")

    def __init__(self, wire: Wire, number: int) -> None:
        super().__init__(wire, number)
        self._windows = Windows.of(wire.connection)
        self._window = self._windows.find(number, None)

    async def get(self, *, key: Key | None = None) -> T_co:
        if self._closed:
            self.open()
        if key is not None:
            check_key_and_weight(self.channel_name, key, 1)
        window = self._window if key is None else self._windows.find(self._number, key)
        if window.run >= TURN_ITEMS:
            window.run = 0
            await asyncio.sleep(0)  # what was taken is said, and what was asked for is heard
            self.open()
        if not window.kept:
            window = self._find(key)
        index, part = window.items.popleft() if window.items else await window.next()
        while part.buffers.__class__ is Away:
            if await self._here(window, index, part):
                break
            index, part = window.items.popleft() if window.items else await window.next()
        try:
            item: T_co = self._wire.decode(part)
        except MalformedFrame as error:
            window.refuse(index, error)
            raise self._wire.unreadable(error) from error
        window.took(index)
        return item

    async def _here(self, window: Window, index: int, part: Encoded) -> bool:
        """Fetch the arrays of an item; False if they are lost. Cancelled, it goes back."""
        wire = self._wire
        try:
            lost = await fetch_all(wire.connection, wire.direct, [part])
        except BaseException:
            window.return_one((index, part))
            raise
        if lost is not None:
            window.lose(index)
        return lost is None

    def _find(self, key: Key | None) -> Window:
        """The window as it is known now: one that was forgotten is empty, and what it asked for
        would be out of reach of whoever wants it back."""
        window = self._windows.find(self._number, key)
        if key is None:
            self._window = window
        return window

    def close(self) -> None:
        if not self._closed:
            self._windows.close(self._number)
            super().close()

    def get_nowait(self, *, key: Key | None = None) -> T_co:
        raise self._wire.elsewhere("get_nowait", "await get(), or a task that gets ahead")

    async def get_batch(
        self, *, weight: int, at_least: int | None = None, key: Key | None = None
    ) -> list[T_co]:
        answer, parts = await self._ask(weight, at_least, key)
        return self._wire.decode_each(answer, parts)

    async def _ask(
        self, weight: int, at_least: int | None, key: Key | None, lease: bool = False
    ) -> tuple[Answer[protocol.Taken], list[Encoded]]:
        self.open()
        check_key_and_weight(self.channel_name, key, 1)
        self._check_batch(weight, at_least)
        self._windows.give_back(self._number, key)
        get = protocol.Get(self._number, key, weight, at_least, current_party.get(), lease)
        while True:
            answer = await self._wire.connection.ask(
                "channel.get", get, reply=protocol.Taken, on_channel=True
            )
            parts = await self._wire.here(answer)
            if parts is not None:
                return answer, parts

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
        answer, parts = await self._ask(weight, at_least, key, lease=True)
        items: list[T_co] = self._wire.decode_each(answer, parts)
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
