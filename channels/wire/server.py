"""The owner's side: channels of this process, for the ends of other processes.

Who closes an end that another process uses:

* one that was opened for it (`end_ref`): that process, or `ChannelServer.release`. The loss of its
  connection does not close it, because a restarted worker goes on using it;
* one that it cloned itself: that process, or the loss of its connection.
"""

from __future__ import annotations

import logging
from itertools import count
from typing import Any

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.ends import Receiver, Sender
from rlinf_async.channels.errors import ChannelClosed, ChannelError, LeaseLost, MalformedFrame
from rlinf_async.channels.latest import (
    Latest,
    LatestReceiver,
    LatestSender,
    LocalLatestReceiver,
    LocalLatestSender,
)
from rlinf_async.channels.local import Channel, LocalReceiver, LocalSender
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.statistics import Statistics
from rlinf_async.channels.wire import protocol
from rlinf_async.channels.wire.codec import Decoder, Encoder
from rlinf_async.channels.wire.connection import Connection
from rlinf_async.channels.wire.delivery import NOTHING, answer_get, answer_put, prepare
from rlinf_async.channels.wire.opened import LatestEnd, LentEnd, OpenEnd, Peer, channel_of
from rlinf_async.channels.wire.protocol import EndKind, EndRef
from rlinf_async.channels.wire.router import Reply, Request, Router

log = logging.getLogger(__name__)
Local = Sender[Any] | Receiver[Any] | LatestSender[Any] | LatestReceiver[Any]


class ChannelServer:
    """Answers the ends of other processes over the connections of one router."""

    def __init__(self, router: Router) -> None:
        self._numbers = count(1)
        self._ends: dict[int, OpenEnd | LatestEnd] = {}
        self._published: dict[int, tuple[int, Queue | Latest[Any]]] = {}
        self._peers: dict[Connection, Peer] = {}
        self._newest: dict[Latest[Any], tuple[int, Encoded]] = {}
        self._encode = Encoder().encode
        self._register(router)

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
            return EndRef(number, opened.kind, opened.latest.name, version)
        return EndRef(number, opened.kind, opened.queue.name, queue=self._publish(opened.queue))

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
        return EndRef(number, lent.kind, end.channel_name, queue=queue)

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
        for peer in self._peers.values():
            peer.close_clones(of=inner)
            if withdrawn is not None:
                peer.creditor.withdraw(withdrawn[0])

    def disconnected(self, connection: Connection, reason: str) -> None:
        """This process is gone: its leases go back, its clones are closed. Called by itself."""
        peer = self._peers.pop(connection, None)
        if peer is None:
            return
        peer.leases.put_back(f"{connection.peer} is gone: {reason}")
        peer.aheads.close()
        peer.close_clones()
        peer.creditor.close()

    # ---- inside

    def _publish(self, channel: Queue | Latest[Any]) -> int:
        found = self._published.get(id(channel))
        if found is not None:
            return found[0]
        if isinstance(channel, Queue):
            prepare(channel)
        elif channel.decode is None:
            channel.decode = Decoder(channel.item_type).decode_copy  # once for each receiver
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

    def _peer(self, connection: Connection) -> Peer:
        peer = self._peers.get(connection)
        if peer is None:
            peer = self._peers[connection] = Peer(connection)
            connection.on_close(self.disconnected, first=True)
        return peer

    def _find(self, connection: Connection, number: int, *kinds: EndKind) -> OpenEnd | LatestEnd:
        """The end that a request is about, if it is of one of these kinds."""
        end: OpenEnd | LatestEnd | ChannelError | None = self._ends.get(number)
        if number < 0:
            end = self._peer(connection).clones.get(number)
        if isinstance(end, ChannelError):
            raise type(end)(*end.args)
        if end is None:
            raise ChannelClosed(f"end {number} of {connection.peer} was closed, or never opened")
        if end.kind not in kinds:
            raise ChannelError(f"end {number} is a {end.kind}: it cannot do this")
        return end

    def _queue_end(self, request: Request[Any], *kinds: EndKind) -> OpenEnd:
        end = self._find(request.connection, request.meta.end, *(kinds or ("sender", "receiver")))
        assert isinstance(end, OpenEnd)
        return end

    def _latest(self, connection: Connection, number: int, kind: EndKind) -> Latest[Any]:
        end = self._find(connection, number, kind)
        assert isinstance(end, LatestEnd)
        return end.latest

    # ---- requests

    def _register(self, router: Router) -> None:
        router.add_sync("channel.put", protocol.Put, self._put)
        router.add_sync("channel.puts", protocol.Puts, self._puts)
        router.add_sync("channel.return", protocol.Room, self._return)
        router.add_sync("channel.flush", protocol.Flush, self._flush)
        router.add_sync("channel.confirm", protocol.Flush, self._confirm)
        router.add_sync("channel.get", protocol.Get, self._get)
        router.add_sync("channel.more", protocol.More, self._more)
        router.add_sync("channel.took", protocol.Took, self._took)
        router.add_sync("channel.back", protocol.Back, self._back)
        router.add_sync("channel.settle", protocol.Settle, self._settle)
        router.add_sync("channel.clone", protocol.Clone, self._clone)
        router.add_sync("channel.close", protocol.End, self._close)
        router.add_sync("channel.fail", protocol.Fail, self._fail)
        router.add_sync("channel.stale", protocol.End, self._stale)
        router.add_sync("channel.statistics", protocol.End, self._statistics)
        router.add_sync("latest.publish", protocol.Publish, self._publish_value)
        router.add_sync("latest.close", protocol.End, self._close_latest)
        router.add("latest.newer", protocol.Newer, self._newer)

    def _put(self, request: Request[protocol.Put]) -> None:
        end = self._queue_end(request, "sender")
        answer_put(request, end.queue, end.number)
        if request.meta.want and (known := self._published.get(id(end.queue))) is not None:
            creditor = self._peer(request.connection).creditor
            creditor.want(known[0], end.queue, request.meta.key, end.holder)

    def _puts(self, request: Request[protocol.Puts]) -> None:
        connection = request.connection
        refused, holders = dict[int, ChannelError](), dict[int, str]()
        for run in request.meta.runs:
            try:
                end = self._find(connection, run.end, "sender")
                holders[run.end] = end.holder if isinstance(end, OpenEnd) else ""
            except ChannelError as error:
                refused[run.end] = error
        body = request.body or Encoded(b"")
        try:
            self._peer(connection).creditor.take(request.meta, body, refused, holders)
        except MalformedFrame as error:
            _hang_up(connection, error)

    def _return(self, request: Request[protocol.Room]) -> None:
        try:
            self._peer(request.connection).creditor.returned(request.meta)
        except MalformedFrame as error:
            _hang_up(request.connection, error)

    def _flush(self, request: Request[protocol.Flush]) -> None:
        self._confirm(request)
        request.reply(NOTHING)

    def _confirm(self, request: Request[protocol.Flush]) -> None:
        self._peer(request.connection).creditor.say()

    def _get(self, request: Request[protocol.Get]) -> None:
        get, peer = request.meta, self._peer(request.connection)
        request.connection.arrived(get.answers)
        try:
            end = self._queue_end(request, "receiver")
        except ChannelError:
            peer.aheads.took(get.end, get.key, get.ranges)
            raise
        if get.ahead is not None:
            peer.aheads.get(request, end.queue, end.number)
            return
        answer_get(request, end.queue, peer.leases, end.number)

    def _more(self, request: Request[protocol.More]) -> None:
        end = self._queue_end(request, "receiver")
        self._peer(request.connection).aheads.more(request, end.queue, end.number)

    def _took(self, request: Request[protocol.Took]) -> None:
        took = request.meta
        request.connection.arrived(took.answers)
        self._peer(request.connection).aheads.took(took.end, took.key, took.ranges)

    def _back(self, request: Request[protocol.Back]) -> None:
        self._peer(request.connection).aheads.back(request.meta)

    def _settle(self, request: Request[protocol.Settle]) -> None:
        settle = request.meta
        known = self._peer(request.connection).leases.settle(settle.lease, settle.error)
        if not known and request.number:
            raise LeaseLost(f"lease {settle.lease} is not held by {request.connection.peer}")
        request.reply(NOTHING)

    def _clone(self, request: Request[protocol.Clone]) -> None:
        clone = request.meta
        end = self._queue_end(request)
        clones = self._peer(request.connection).clones
        if clone.number >= 0 or clone.number in clones:
            raise ChannelError(f"a clone cannot have the number {clone.number}: it is not free")
        try:
            clones[clone.number] = OpenEnd(end.queue, end.kind, clone.holder)
        except ChannelError as error:  # said when the clone is used: nobody waits for this notice
            clones[clone.number] = error

    def _close(self, request: Request[protocol.End]) -> None:
        number = request.meta.end
        if number > 0:
            self.release(number)
            return
        end = self._peer(request.connection).clones.pop(number, None)
        if isinstance(end, OpenEnd):
            end.close()

    def _fail(self, request: Request[protocol.Fail]) -> None:
        self._queue_end(request).queue.fail(request.meta.error)

    def _stale(self, request: Request[protocol.End]) -> None:
        self._queue_end(request).queue.stale += 1

    def _statistics(self, request: Request[protocol.End]) -> None:
        found: Statistics = self._queue_end(request).queue.statistics()
        request.reply(found)

    def _publish_value(self, request: Request[protocol.Publish]) -> None:
        latest = self._latest(request.connection, request.meta.end, "latest_sender")
        version = latest.publish_nowait(request.body or Encoded(b""), request.meta.party)
        request.reply(protocol.Version(version))

    def _close_latest(self, request: Request[protocol.End]) -> None:
        self._latest(request.connection, request.meta.end, "latest_sender").close()
        request.reply(NOTHING)

    async def _newer(
        self, connection: Connection, newer: protocol.Newer, body: Encoded | None
    ) -> Reply:
        latest = self._latest(connection, newer.end, "latest_receiver")
        version, value = await latest.wait_newer(newer.than, newer.party)
        return protocol.Version(version), self._encoded(latest, version, value)

    def _encoded(self, latest: Latest[Any], version: int, value: Any) -> Encoded:
        """The value as it travels; encoded once for all who read it."""
        if isinstance(value, Encoded):
            return value
        known = self._newest.get(latest)
        if known is None or known[0] != version:
            known = self._newest[latest] = version, self._encode(value)
        return known[1]


def _hang_up(connection: Connection, error: MalformedFrame) -> None:
    """A process that breaks the rules is not listened to any more."""
    log.error("connection to %s is closed: %s", connection.peer, error)
    connection.close(str(error))
