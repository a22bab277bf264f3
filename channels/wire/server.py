"""Channels of this process that others may use, and the ends that those have of them.

Who closes an end that another process uses:

* one that was opened for it (`end_ref`): that process, or `Published.release`. The loss of its
  connection does not close it, because a restarted worker goes on using it;
* one that it cloned itself: that process, or the loss of its connection.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from itertools import count
from typing import Any

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.ends import LatestReceiver, LatestSender, Receiver, Sender
from rlinf_async.channels.errors import ChannelClosed, ChannelError, ConnectionLost, MalformedFrame
from rlinf_async.channels.latest import Latest, LocalLatestReceiver, LocalLatestSender
from rlinf_async.channels.local import Channel, LocalReceiver, LocalSender
from rlinf_async.channels.queue import Queue, state_of, statistics_of
from rlinf_async.channels.statistics import KeyState, Statistics
from rlinf_async.channels.wire import owner_deliveries, protocol
from rlinf_async.channels.wire.codec import ItemCodec
from rlinf_async.channels.wire.direct import Producers
from rlinf_async.channels.wire.owner_credit import Credits, answer_put
from rlinf_async.channels.wire.owner_deliveries import (
    NOTHING,
    LatestEnd,
    LentEnd,
    OpenEnd,
    Prefetches,
    channel_of,
)
from rlinf_async.channels.wire.protocol import EndKind, EndRef
from rlinf_async.channels.wire.session.connection import Closed, Connection, Reply, Request, Router

Local = Sender[Any] | Receiver[Any] | LatestSender[Any] | LatestReceiver[Any]


class Peer:
    """What one connected process holds."""

    def __init__(self, connection: Connection) -> None:
        self.credits = Credits(connection)
        self.prefetches: Prefetches = {}
        self.clones: dict[int, OpenEnd | ChannelError] = {}
        self._last_clone = 0
        """numbers of clones are ever lower"""
        self._awaited: dict[int, asyncio.Future[None]] = {}

    def add_clone(self, number: int, end: OpenEnd | ChannelError) -> None:
        """Keep an end that it has cloned."""
        self.clones[number] = end
        self._last_clone = number
        if (waiting := self._awaited.pop(number, None)) is not None and not waiting.done():
            waiting.set_result(None)

    async def clone(self, number: int) -> OpenEnd:
        """The end that it cloned as this number; waits until that is told.

        Raises:
            ChannelError: it was closed since, or could not be opened.
        """
        if number < self._last_clone:
            waiting = self._awaited.get(number)
            if waiting is None:
                waiting = self._awaited[number] = asyncio.get_running_loop().create_future()
            await asyncio.shield(waiting)
        found = self.clones.get(number)
        if isinstance(found, ChannelError):
            raise type(found)(*found.args)
        if found is None:
            raise ChannelClosed(f"end {number} was closed before it was used")
        return found

    def lose(self, reason: str) -> None:
        """Fail the waits for what the process has not told of: it is gone."""
        for waiting in self._awaited.values():
            if not waiting.done():
                waiting.set_exception(ConnectionLost(f"who opened this end is gone: {reason}"))
        self._awaited.clear()

    def close_clones(self, of: Queue | Latest[Any] | None = None) -> None:
        """Close the ends that it cloned itself, of one channel or of all."""
        for number, end in list(self.clones.items()):
            if of is None or channel_of(end) is of:
                del self.clones[number]
                if isinstance(end, OpenEnd):
                    end.close()


class Peers(dict[Connection, Peer]):
    """What each process holds; one that holds nothing yet is added when it is looked up.

    Args:
        lost: called when the connection of one is.
    """

    def __init__(self, lost: Closed) -> None:
        self._lost = lost

    def __missing__(self, connection: Connection) -> Peer:
        peer = self[connection] = Peer(connection)
        connection.on_close(self._lost, first=True)
        return peer


class Published:
    """The channels, by number and by end, and the processes that use them."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._ends: dict[int, OpenEnd | LatestEnd] = {}
        self._published: dict[int, tuple[int, Queue | Latest[Any]]] = {}
        self.peers = Peers(self.disconnected)
        self._newest: dict[Latest[Any], tuple[int, Encoded]] = {}

    # ---- for the runtime

    def publish(self, channel: Channel[Any] | Latest[Any]) -> int:
        """Let other processes use this channel; its number. Doing it twice is harmless.

        Raises:
            TypeError: its type cannot travel between processes.
        """
        return self._publish(channel.queue if isinstance(channel, Channel) else channel)

    def end_ref(self, end: Local, holder: str) -> EndRef:
        """Open an end like this one for another process, named ``holder`` in reports.

        Raises:
            ChannelError: the channel does not live here, or is closed.
            TypeError: its type cannot travel between processes.
        """
        number = next(self._numbers)
        opened = self._open(end, holder)
        self._ends[number] = opened
        if isinstance(opened, LatestEnd):
            version = end.version if isinstance(end, LatestReceiver) else 0
            latest = opened.latest
            return EndRef(number, opened.kind, latest.name, version, form=latest.form)
        queue = opened.queue
        published = self._publish(queue)
        return EndRef(number, opened.kind, queue.name, queue=published, form=queue.form)

    def lend(self, end: Local) -> EndRef:
        """Let another process use this very end: closing it there closes it here.

        Take it back with `take_back` when its user is gone; it stays open here.

        Raises: as `end_ref`.
        """
        if not isinstance(end, LocalSender | LocalReceiver):
            return self.end_ref(end, "")
        queue = self._publish(end.queue)
        number = next(self._numbers)
        lent = self._ends[number] = LentEnd(end)
        return EndRef(number, lent.kind, end.channel_name, queue=queue, form=end.queue.form)

    def take_back(self, number: int) -> None:
        """The other process must not use this end any more."""
        self._ends.pop(number, None)

    def release(self, number: int) -> None:
        """Close an end that `end_ref` opened. Doing it twice is harmless."""
        end = self._ends.pop(number, None)
        if end is not None:
            end.close()

    def withdraw(self, channel: Channel[Any] | Latest[Any]) -> None:
        """Forget this channel: the ends that other processes have of it are closed."""
        inner = channel.queue if isinstance(channel, Channel) else channel
        withdrawn = self._published.pop(id(inner), None)
        if isinstance(inner, Latest):
            self._newest.pop(inner, None)
        for number in [at for at, end in self._ends.items() if channel_of(end) is inner]:
            self.release(number)
        for peer in self.peers.values():
            peer.close_clones(of=inner)
            if withdrawn is not None:
                peer.credits.withdraw(withdrawn[0])

    def disconnected(self, connection: Connection, reason: str) -> None:
        """Close the clones of a process that is gone; take back its credit, and what was delivered
        to it. Registered as close callback."""
        peer = self.peers.pop(connection, None)
        if peer is None:
            return
        peer.close_clones()
        peer.lose(reason)
        peer.credits.close()

    def lend_clone(self, end: OpenEnd) -> int:
        """Let another process use an end that was cloned by the one which made its channel; its
        number. Closed by either, it is closed."""
        number = next(self._numbers)
        self._ends[number] = end
        end.lent_as = (*end.lent_as, number)
        return number

    def open_clone(
        self, connection: Connection, number: int, queue: Queue, kind: EndKind, holder: str
    ) -> None:
        """Open an end for this process, which has given it this number.

        Raises:
            ChannelError: the number is not free. That the channel has ended is said when the end is
                used: nobody waits for this.
        """
        peer = self.peers[connection]
        if number >= 0 or number in peer.clones:
            raise ChannelError(f"a clone cannot have the number {number}: it is not free")
        try:
            peer.add_clone(number, OpenEnd(queue, kind, holder))
        except ChannelError as error:
            peer.add_clone(number, error)

    def close_clone(self, connection: Connection, number: int) -> None:
        """Close an end that this process cloned itself."""
        end = self.peers[connection].clones.pop(number, None)
        if isinstance(end, OpenEnd):
            for lent in end.lent_as:
                self._ends.pop(lent, None)
            end.close()

    # ---- inside

    def _publish(self, channel: Queue | Latest[Any]) -> int:
        found = self._published.get(id(channel))
        if found is not None:
            return found[0]
        if isinstance(channel, Queue):
            if channel.decode is None:
                codec = ItemCodec(channel.item_type)
                channel.encode, channel.encode_list = codec.encode, codec.encode_list
                channel.decode, channel.form = codec.decode, codec.form
        elif channel._decode is None:
            codec = ItemCodec(channel.item_type)
            channel._encode, channel.form = codec.encode, codec.form
            channel._decode = codec.decode_copy  # once for each receiver
        number = next(self._numbers)
        self._published[id(channel)] = number, channel
        return number

    def _open(self, end: Local, holder: str) -> OpenEnd | LatestEnd:
        if isinstance(end, LocalSender | LocalReceiver):
            self._publish(end.queue)
            return OpenEnd(
                end.queue, "sender" if isinstance(end, LocalSender) else "receiver", holder
            )
        if isinstance(end, LocalLatestSender | LocalLatestReceiver):
            self._publish(end.latest)
            sends = isinstance(end, LocalLatestSender)
            return LatestEnd(end.latest, "latest_sender" if sends else "latest_receiver")
        raise ChannelError(
            f"{end!r} cannot be given on to another process: its channel does not live in this one"
        )

    def _find(self, connection: Connection, number: int, *kinds: EndKind) -> OpenEnd | LatestEnd:
        """The end that a request is about, if it is of one of these kinds."""
        end: OpenEnd | LatestEnd | ChannelError | None = self._ends.get(number)
        if number < 0:
            end = self.peers[connection].clones.get(number)
        if isinstance(end, ChannelError):
            raise type(end)(*end.args)
        if end is None:
            raise ChannelClosed(f"end {number} of {connection.peer} was closed, or never opened")
        if end.kind not in kinds:
            raise ChannelError(f"end {number} is a {end.kind}: it cannot do this")
        return end

    def _open_end(self, connection: Connection, kind: EndKind, number: int) -> OpenEnd:
        """The end of a queue that a request is about."""
        end = self._ends.get(number)
        if isinstance(end, OpenEnd) and end.kind == kind:  # what most are, without a call
            return end
        end = self._find(connection, number, kind)
        assert isinstance(end, OpenEnd)
        return end

    def _queue_end(self, request: Request[Any], *kinds: EndKind) -> OpenEnd:
        end = self._find(request.connection, request.meta.end, *(kinds or ("sender", "receiver")))
        assert isinstance(end, OpenEnd)
        return end

    def _latest(self, connection: Connection, number: int, kind: EndKind) -> Latest[Any]:
        end = self._find(connection, number, kind)
        assert isinstance(end, LatestEnd)
        return end.latest


log = logging.getLogger(__name__)


class ChannelServer(Published):
    """Answers the ends of other processes over the connections of one router."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self._register(router)
        Producers(router)

    # ---- requests

    def _register(self, router: Router) -> None:
        router.add_sync("channel.put", protocol.Put, self._put)
        router.add_sync("channel.transfer", protocol.Transfer, self._transfer)
        router.add_sync("credit.return", protocol.Credit, self._return)
        router.add_sync("channel.flush", protocol.Flush, self._flush)
        router.add_sync("channel.get", protocol.Get, self._get)
        router.add_sync("delivery.taken", protocol.Taken, owner_deliveries.taken)
        router.add_sync("delivery.settle", protocol.Settle, self._settle)
        router.add_sync("channel.clone", protocol.Clone, self._clone)
        router.add_sync("channel.close", protocol.End, self._close)
        router.add_sync("channel.fail", protocol.Fail, self._fail)
        router.add_sync("channel.stale", protocol.End, self._stale)
        router.add_sync("channel.statistics", protocol.End, self._statistics)
        router.add_sync("channel.state", protocol.State, self._state)
        router.add_sync("latest.publish", protocol.Publish, self._publish_value)
        router.add_sync("latest.close", protocol.End, self._close_latest)
        router.add("latest.newer", protocol.Newer, self._newer)

    def _put(self, request: Request[protocol.Put]) -> None:
        end = self._open_end(request.connection, "sender", request.meta.end)
        try:
            answer_put(request, end)
        except MalformedFrame as error:
            _hang_up(request.connection, error)
            return
        if request.meta.want and (known := self._published.get(id(end.queue))) is not None:
            credits = self.peers[request.connection].credits
            credits.request(known[0], end.queue, request.meta.key, end.holder)

    def _transfer(self, request: Request[protocol.Transfer]) -> None:
        connection = request.connection
        credits, body = self.peers[connection].credits, request.body or Encoded(b"")
        try:
            credits.take(request.meta, body, partial(self._open_end, connection, "sender"))
        except MalformedFrame as error:
            _hang_up(connection, error)

    def _return(self, request: Request[protocol.Credit]) -> None:
        try:
            self.peers[request.connection].credits.returned(request.meta)
        except MalformedFrame as error:
            _hang_up(request.connection, error)

    def _flush(self, request: Request[protocol.Flush]) -> None:
        self.peers[request.connection].credits.send_grants()
        request.reply(NOTHING)

    def _get(self, request: Request[protocol.Get]) -> None:
        asked, connection = request.meta, request.connection
        if asked.taken:
            owner_deliveries.taken(request)
        end = self._open_end(connection, "receiver", asked.end)
        owner_deliveries.get(request, end, self.peers[connection].prefetches)

    def _settle(self, request: Request[protocol.Settle]) -> None:
        try:
            owner_deliveries.settle(request)
        except MalformedFrame as error:
            _hang_up(request.connection, error)

    def _clone(self, request: Request[protocol.Clone]) -> None:
        clone = request.meta
        end = self._queue_end(request)
        self.open_clone(request.connection, clone.number, end.queue, end.kind, clone.holder)

    def _close(self, request: Request[protocol.End]) -> None:
        number = request.meta.end
        if number > 0:
            self.release(number)
        else:
            self.close_clone(request.connection, number)
        request.reply(NOTHING)

    def _fail(self, request: Request[protocol.Fail]) -> None:
        self._queue_end(request).queue.fail(request.meta.error)
        request.reply(NOTHING)

    def _stale(self, request: Request[protocol.End]) -> None:
        self._queue_end(request).queue.stale += 1

    def _statistics(self, request: Request[protocol.End]) -> None:
        found: Statistics = statistics_of(self._queue_end(request).queue)
        request.reply(found)

    def _state(self, request: Request[protocol.State]) -> None:
        found: KeyState = state_of(self._queue_end(request).queue, request.meta.key)
        request.reply(found)

    def _publish_value(self, request: Request[protocol.Publish]) -> None:
        latest = self._latest(request.connection, request.meta.end, "latest_sender")
        version = latest._publish(request.body or Encoded(b""), request.meta.party)
        request.reply(protocol.Version(version))

    def _close_latest(self, request: Request[protocol.End]) -> None:
        self._latest(request.connection, request.meta.end, "latest_sender").close()
        request.reply(NOTHING)

    async def _newer(
        self, connection: Connection, newer: protocol.Newer, body: Encoded | None
    ) -> Reply:
        latest = self._latest(connection, newer.end, "latest_receiver")
        version, value = await latest.wait_newer(newer.than, newer.party, connection.peer)
        return protocol.Version(version), self._encoded(latest, version, value)

    def _encoded(self, latest: Latest[Any], version: int, value: Any) -> Encoded:
        """The value as it travels; encoded once for all who read it."""
        if isinstance(value, Encoded):
            return value
        known = self._newest.get(latest)
        if known is None or known[0] != version:
            assert latest._encode is not None  # it is published
            known = self._newest[latest] = version, latest._encode(value)
        return known[1]


def _hang_up(connection: Connection, error: MalformedFrame) -> None:
    """A process that breaks the rules is not listened to any more."""
    log.error("connection to %s is closed: %s", connection.peer, error)
    connection.close(str(error))
