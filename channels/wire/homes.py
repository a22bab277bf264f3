"""Channels whose queue lives with another process than the one that makes them.

`HomeMaker` and `RemoteChannel` are the maker's side; `HomedQueues` is the home's: the queues that
others have made here, and the ends that are adopted of them.
"""

from __future__ import annotations

import abc
from types import UnionType
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar, Unpack

from rlinf_async.channels.encoded import Encoded, check_key_and_weight, type_name
from rlinf_async.channels.ends import Key, Receiver, Sender
from rlinf_async.channels.errors import (
    ChannelError,
    HomeLost,
    MalformedFrame,
    WireError,
    WrongItemType,
    error_text,
)
from rlinf_async.channels.items import channel_rule
from rlinf_async.channels.local import Channel, LocalReceiver, LocalSender
from rlinf_async.channels.queue import Queue, state_of, statistics_of, waits_of
from rlinf_async.channels.statistics import KeyState, Statistics, current_party
from rlinf_async.channels.wire.codec import ItemCodec
from rlinf_async.channels.wire.direct import host_id
from rlinf_async.channels.wire.owner_deliveries import NOTHING, LentEnd, OpenEnd
from rlinf_async.channels.wire.protocol import (
    Adopt,
    Adopted,
    ChannelEnded,
    ChannelSeen,
    Create,
    Created,
    EndRef,
    Home,
    HomedKey,
    Look,
    Open,
    Seen,
)
from rlinf_async.channels.wire.receiving import RemoteReceiver
from rlinf_async.channels.wire.remote_ends import (
    ConfirmedNotices,
    RemoteEnd,
    Wire,
    next_clone_number,
)
from rlinf_async.channels.wire.sending import RemoteSender
from rlinf_async.channels.wire.server import ChannelServer
from rlinf_async.channels.wire.session.connection import Connection, Reply, Request, Router
from rlinf_async.channels.wire.session.endpoint import Timeouts, connect

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
        channel_rule(item_type, name)  # refused before anything is made there
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
    """A channel whose queue lives with another process. Made by `HomeMaker.create`."""

    def __init__(self, wire: Wire, item_type: Any) -> None:
        self._wire = wire
        self.name = wire.channel_name
        self.queue = wire.queue
        """the home's number for it"""
        self.item_type: Any = item_type
        self.sender: Sender[T] = OwnRemoteSender(wire)
        self.receiver: Receiver[T] = OwnRemoteReceiver(wire)

    async def statistics(self) -> Statistics:
        """What the channel has seen so far. Raises `HomeLost`."""
        found, _ = await self._wire.connection.request(
            "home.look", Look(), reply=Seen, control=True
        )
        return next(one.statistics for one in found.channels if one.queue == self.queue)

    async def state(self, *, key: Key | None = None) -> KeyState:
        """How full this key is now: depth, room, weight. Raises `HomeLost`."""
        check_key_and_weight(self.name, key, 1)
        found, _ = await self._wire.connection.request(
            "home.state", HomedKey(self.queue, key), reply=KeyState, control=True
        )
        return found

    def close(self) -> None:
        """End the channel: nothing can be put any more; what is queued can still be taken."""
        self._end(None)

    def fail(self, error: BaseException | str) -> None:
        """End the channel with an error: every waiting and later use of any end raises it."""
        self._end(error_text(error))

    def _end(self, error: str | None) -> None:
        ConfirmedNotices.of(self._wire.connection).send("home.end", ChannelEnded(self.queue, error))

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
        """Do not warn: the end lives as long as its channel."""


class OwnRemoteSender(_OpenFromFirstUse, RemoteSender[T_contra]):
    """The sender of a `RemoteChannel`."""

    def _plain(self, number: int) -> RemoteSender[T_contra]:
        return RemoteSender(self._wire, number)


class OwnRemoteReceiver(_OpenFromFirstUse, RemoteReceiver[T_co]):
    """The receiver of a `RemoteChannel`."""

    def _plain(self, number: int) -> RemoteReceiver[T_co]:
        return RemoteReceiver(self._wire, number)


class HomedQueue(NamedTuple):
    """A queue of this process that another has made."""

    channel: Channel[Any]
    maker: Connection


class HomedQueues:
    """All queues that live with this process. ``router`` is that of the connections of makers and
    users."""

    def __init__(self, router: Router) -> None:
        self._server = ChannelServer(router)
        self._queues: dict[int, HomedQueue] = {}
        router.add_sync("home.create", Create, self._create)
        router.add_sync("home.open", Open, self._open)
        router.add("home.adopt", Adopt, self._adopt)
        router.add_sync("home.end", ChannelEnded, self._end)
        router.add_sync("home.look", Look, self._look)
        router.add_sync("home.state", HomedKey, self._state)

    def add(self, channel: Channel[Any], maker: Connection) -> int:
        """Let this process be the maker of a channel that lives here; the number of its queue."""
        number = self._server.publish(channel)
        self._queues[number] = HomedQueue(channel, maker)
        maker.on_close(self._maker_lost)
        return number

    async def adopt_here(self, queue: int, number: int) -> OpenEnd:
        """The end that its maker calls ``number``, for this process: `take` it.

        Raises:
            ChannelError: there is no such queue, or the end was closed.
        """
        return await self._server.peers[self._homed(queue).maker].clone(number)

    def take(
        self, queue: int, number: int, item_type: Any
    ) -> LocalSender[Any] | LocalReceiver[Any]:
        """Use an end that was adopted, in this process: items are handed over by reference.

        Raises:
            ChannelError: it was closed.
            WrongItemType: another end of this process is of another type.
        """
        homed = self._homed(queue)
        clones = self._server.peers[homed.maker].clones
        end = clones.get(number)
        if not isinstance(end, OpenEnd):
            raise ChannelError(f"an end of channel {homed.channel.name!r} was closed meanwhile")
        _declare(end.queue, item_type)
        kind: Any = LocalSender if end.kind == "sender" else LocalReceiver
        own: LocalSender[Any] | LocalReceiver[Any] = kind(end.queue, end.holder).open()
        clones[number] = LentEnd(own)  # the maker closes this one now
        end.close()
        return own

    # ---- requests

    def _create(self, request: Request[Create]) -> None:
        asked = request.meta
        try:
            channel = Channel[Any](
                object,
                name=asked.name,
                capacity=asked.capacity,
                max_weight=asked.max_weight,
                max_deliveries=asked.max_deliveries,
            )
        except ValueError as error:
            request.fail(error)
            return
        queue = channel.queue
        queue.encode, queue.decode, queue.form = _undeclared, _undeclared, asked.form
        request.reply(Created(self.add(channel, request.connection)))

    def _open(self, request: Request[Open]) -> None:
        asked = request.meta
        queue = self._made_by(request.connection, asked.queue).queue
        self._server.open_clone(request.connection, asked.number, queue, asked.kind, asked.holder)

    async def _adopt(self, connection: Connection, asked: Adopt, body: Encoded | None) -> Reply:
        end = await self.adopt_here(asked.queue, asked.number)
        return Adopted(self._server.lend_clone(end)), None

    def _end(self, request: Request[ChannelEnded]) -> None:
        channel = self._made_by(request.connection, request.meta.queue)
        if request.meta.error is None:
            channel.close()
        else:
            channel.fail(request.meta.error)
        request.reply(NOTHING)

    def _look(self, request: Request[Look]) -> None:
        request.reply(
            Seen(
                [
                    _seen(number, homed.channel)
                    for number, homed in self._queues.items()
                    if homed.maker is request.connection
                ]
            )
        )

    def _state(self, request: Request[HomedKey]) -> None:
        channel = self._made_by(request.connection, request.meta.queue)
        request.reply(state_of(channel.queue, request.meta.key))

    # ---- inside

    def _homed(self, queue: int) -> HomedQueue:
        found = self._queues.get(queue)
        if found is None:
            raise ChannelError(f"there is no queue {queue} here")
        return found

    def _made_by(self, connection: Connection, queue: int) -> Channel[Any]:
        homed = self._homed(queue)
        if homed.maker is not connection:
            raise ChannelError(f"channel {homed.channel.name!r} was made by another process")
        return homed.channel

    def _maker_lost(self, connection: Connection, reason: str) -> None:
        for number, homed in list(self._queues.items()):
            if homed.maker is connection:
                del self._queues[number]
                homed.channel.fail(f"{connection.peer}, which has made it, is gone: {reason}")


def _seen(number: int, channel: Channel[Any]) -> ChannelSeen:
    dead = channel.dead_letters
    return ChannelSeen(
        number,
        statistics_of(channel.queue),
        waits_of(channel.queue),
        f"{dead[-1].deliveries} deliveries: {dead[-1].error}" if dead else "",
    )


def _declare(queue: Queue, item_type: Any) -> None:
    """Let this process put and take items of this type."""
    if queue.item_type is object:
        codec = ItemCodec(item_type, queue.form)
        queue.item_type = item_type
        queue.rule = channel_rule(item_type, queue.name, queue.form)
        queue.fits = queue.rule.fits
        queue.encode, queue.decode = codec.encode, codec.decode
        queue.encode_list = codec.encode_list
    elif queue.item_type != item_type:
        raise WrongItemType(
            f"channel {queue.name!r} lives in this process, whose ends are of "
            f"{type_name(queue.item_type)} and {type_name(item_type)}: declare the same type"
        )


def _undeclared(item: Any) -> Any:
    raise MalformedFrame("the type of these items is known to those who take them, not here")
