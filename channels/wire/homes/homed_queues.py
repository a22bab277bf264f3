"""The home's side: queues that others have made here, and the ends that are adopted of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import ChannelError, MalformedFrame, WrongItemType
from rlinf_async.channels.inspection import statistics_of, waits_of
from rlinf_async.channels.itemtypes import item_class, type_name
from rlinf_async.channels.local import Channel, LocalReceiver, LocalSender
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.round_trip import round_trip_check
from rlinf_async.channels.wire.homes.home_protocol import (
    Adopt,
    Adopted,
    ChannelSeen,
    Create,
    Created,
    End,
    Look,
    Open,
    Seen,
)
from rlinf_async.channels.wire.items.item_codec import ItemCodec
from rlinf_async.channels.wire.links.owner_deliveries import NOTHING
from rlinf_async.channels.wire.links.owner_ends import LentEnd, OpenEnd
from rlinf_async.channels.wire.server import ChannelServer
from rlinf_async.channels.wire.session.answers import Reply, Request, Router
from rlinf_async.channels.wire.session.connection import Connection


class HomedQueue(NamedTuple):
    """A queue of this process that another has made."""

    channel: Channel[Any]
    maker: Connection


class HomedQueues:
    """All of them. ``router`` is that of the connections of makers and users."""

    def __init__(self, router: Router) -> None:
        self._server = ChannelServer(router)
        self._queues: dict[int, HomedQueue] = {}
        router.add_sync("home.create", Create, self._create)
        router.add_sync("home.open", Open, self._open)
        router.add("home.adopt", Adopt, self._adopt)
        router.add_sync("home.end", End, self._end)
        router.add_sync("home.look", Look, self._look)

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
        return await self._server.peer(self._homed(queue).maker).clone(number)

    def take(
        self, queue: int, number: int, item_type: Any
    ) -> LocalSender[Any] | LocalReceiver[Any]:
        """Use an end that was adopted, in this process: items are handed over by reference.

        Raises:
            ChannelError: it was closed.
            WrongItemType: another end of this process is of another type.
        """
        homed = self._homed(queue)
        clones = self._server.peer(homed.maker).clones
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

    def _end(self, request: Request[End]) -> None:
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
        queue.round_trip = round_trip_check(item_type, queue.name, queue.form)
        queue.fits = queue.round_trip.fits
        queue.item_class = item_class(item_type)
        queue.encode, queue.decode = codec.encode, codec.decode
        queue.encode_list = codec.encode_list
    elif queue.item_type != item_type:
        raise WrongItemType(
            f"channel {queue.name!r} lives in this process, whose ends are of "
            f"{type_name(queue.item_type)} and {type_name(item_type)}: declare the same type"
        )


def _undeclared(item: Any) -> Any:
    raise MalformedFrame("the type of these items is known to those who take them, not here")
