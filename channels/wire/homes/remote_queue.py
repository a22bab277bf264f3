"""The maker's side: channels whose queue lives with another process."""

from __future__ import annotations

import abc
from types import UnionType
from typing import Any, Final, Generic, Self, TypeVar, Unpack

from rlinf_async.channels.ends import Receiver, Sender
from rlinf_async.channels.errors import ChannelError, HomeLost, WireError, error_text
from rlinf_async.channels.statistics import Statistics
from rlinf_async.channels.waitfor import current_party
from rlinf_async.channels.wire.direct.direct import host_id
from rlinf_async.channels.wire.homes.home_protocol import (
    ChannelSeen,
    Create,
    Created,
    End,
    Look,
    Open,
    Seen,
)
from rlinf_async.channels.wire.items.item_codec import ItemCodec
from rlinf_async.channels.wire.links.confirmed_notices import ConfirmedNotices
from rlinf_async.channels.wire.links.protocol import EndRef, Home
from rlinf_async.channels.wire.links.remote_channel import Wire
from rlinf_async.channels.wire.links.remote_end import RemoteEnd, next_clone_number
from rlinf_async.channels.wire.links.remote_receiver import RemoteReceiver
from rlinf_async.channels.wire.links.remote_sender import RemoteSender
from rlinf_async.channels.wire.session.answers import Router
from rlinf_async.channels.wire.session.connection import Connection
from rlinf_async.channels.wire.session.endpoint import connect
from rlinf_async.channels.wire.session.endpoint_options import Timeouts

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)

REACH_SECONDS: Final = 10.0
"""time limit of the handshake with a home"""


async def reach(home: Home, secret: bytes, name: str, **times: Unpack[Timeouts]) -> Connection:
    """Connect to a home: through its Unix socket on its own host, else by TCP.

    Raises:
        HomeLost: it cannot be reached.
    """
    times.setdefault("handshake_timeout", REACH_SECONDS)
    tried: list[str] = []
    for address in home.addresses:
        if "://" in address or home.host == host_id():
            try:
                made = await connect(address, secret, name=name, router=Router(), **times)
            except WireError as error:
                tried.append(str(error))
                continue
            made.lost_as = lambda said: HomeLost(
                f"the channel's queue was lost with its home, {home.name}: {said}"
            )
            return made
    why = "; ".join(tried) or "it listens at no address that leads there from this host"
    raise HomeLost(f"{home.name}, with which the channel's queue lives, cannot be reached: {why}")


class HomeMaker:
    """Makes channels whose queues live with one other process. See `open`."""

    def __init__(self, home: Home, connection: Connection) -> None:
        self.home = home
        self.connection = connection

    @classmethod
    async def open(cls, home: Home, secret: bytes, name: str, **times: Unpack[Timeouts]) -> Self:
        """Connect to it. Raises `HomeLost`."""
        return cls(home, await reach(home, secret, name, **times))

    async def create(
        self,
        item_type: type[T] | UnionType,
        *,
        name: str,
        capacity: int = 64,
        max_weight: int | None = None,
        max_deliveries: int = 5,
    ) -> RemoteChannel[T]:
        """Make a channel there; the arguments are those of `Channel`.

        Raises:
            HomeLost: the process is gone.
            TypeError: items of this type cannot travel.
            ValueError: as of `Channel`.
        """
        form = ItemCodec(item_type).form
        create = Create(name, capacity, max_weight, max_deliveries, form)
        made, _ = await self.connection.request("home.create", create, reply=Created, control=True)
        ref = EndRef(0, "sender", name, queue=made.queue, form=form, home=self.home)
        return RemoteChannel(Wire(self.connection, ref, item_type), item_type)

    async def look(self) -> list[ChannelSeen]:
        """What is seen of the channels that were made there; nothing of a lost home."""
        try:
            found, _ = await self.connection.request("home.look", Look(), reply=Seen, control=True)
        except ChannelError:
            return []
        return found.channels

    async def close(self) -> None:
        """Close the connection."""
        self.connection.close()
        await self.connection.wait_closed()


class RemoteChannel(Generic[T]):
    """A channel whose queue lives with another process; as `Channel`, but that what is asked of the
    queue has to be awaited. Made by `HomeMaker.create`."""

    def __init__(self, wire: Wire, item_type: Any) -> None:
        self._wire = wire
        self.item_type: Any = item_type
        self.sender: Sender[T] = OwnRemoteSender(wire)
        self.receiver: Receiver[T] = OwnRemoteReceiver(wire)

    @property
    def name(self) -> str:
        return self._wire.channel_name

    @property
    def queue(self) -> int:
        """The home's number for it."""
        return self._wire.queue

    def new_sender(self) -> Sender[T]:
        """A sender of its own, for where ``sender`` was closed already."""
        return OwnRemoteSender(self._wire)

    def new_receiver(self) -> Receiver[T]:
        """A receiver of its own, for where ``receiver`` was closed already."""
        return OwnRemoteReceiver(self._wire)

    async def statistics(self) -> Statistics:
        """What the channel has seen so far. Raises `HomeLost`."""
        found, _ = await self._wire.connection.request(
            "home.look", Look(), reply=Seen, control=True
        )
        return next(one.statistics for one in found.channels if one.queue == self.queue)

    def close(self) -> None:
        """End the channel: nothing can be put any more; what is queued can still be taken."""
        self._end(None)

    def fail(self, error: BaseException | str) -> None:
        """End the channel with an error: every waiting and later use of any end raises it."""
        self._end(error_text(error))

    def _end(self, error: str | None) -> None:
        ConfirmedNotices.of(self._wire.connection).send("home.end", End(self.queue, error))

    def __repr__(self) -> str:
        return f"<RemoteChannel {self.name!r} of {self._wire.connection.peer}>"


class _OpenFromFirstUse(RemoteEnd):
    """An end that its channel has made, and that counts as open from its first use."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire, 0)
        self._unopened = self._closed = True

    def open(self) -> Self:
        if self._unopened:
            self._unopened = self._closed = False
            self._number = self._open_there(None)
            self._join()
        return super().open()

    def clone(self, holder: str | None = None) -> Any:
        if not self._unopened:
            super().open()
        return self._plain(self._open_there(holder))

    def close(self) -> None:
        self._unopened = False
        super().close()

    @abc.abstractmethod
    def _plain(self, number: int) -> RemoteEnd:
        """An end of this kind, which is open already."""

    def _open_there(self, holder: str | None) -> int:
        """Open an end of the maker's; its number."""
        number = next_clone_number()
        asked = Open(self._wire.queue, self.kind, number, holder or current_party.get())
        self._wire.connection.notify("home.open", asked, control=True)
        return number

    def __del__(self) -> None:
        """It lives as long as its channel."""


class OwnRemoteSender(_OpenFromFirstUse, RemoteSender[T_contra]):
    """The sender of a `RemoteChannel`."""

    def _plain(self, number: int) -> RemoteSender[T_contra]:
        return RemoteSender(self._wire, number)


class OwnRemoteReceiver(_OpenFromFirstUse, RemoteReceiver[T_co]):
    """The receiver of a `RemoteChannel`."""

    def _plain(self, number: int) -> RemoteReceiver[T_co]:
        return RemoteReceiver(self._wire, number)
