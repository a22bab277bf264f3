"""The life of an end of a channel in another process: opened there, cloned and closed from here."""

from __future__ import annotations

import warnings
from itertools import count
from typing import Any, Self

from rlinf_async.channels.ends import Key, Named, Sender
from rlinf_async.channels.errors import ChannelClosed, ChannelError
from rlinf_async.channels.itemtypes import check_key_and_weight
from rlinf_async.channels.statistics import KeyState, Statistics
from rlinf_async.channels.waitfor import current_party
from rlinf_async.channels.wire.links import protocol
from rlinf_async.channels.wire.links.confirmed_notices import ConfirmedNotices
from rlinf_async.channels.wire.links.protocol import EndKind, EndRef
from rlinf_async.channels.wire.links.remote_channel import Wire

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
    """The life of an end over a connection."""

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
        """This end for another process, where the queue lives with a third one; else None."""
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
                self._wire.close_later(self._number)

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
