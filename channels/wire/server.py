"""The owner's side: what the ends of other processes ask, and how it is answered."""

from __future__ import annotations

import logging
from typing import Any

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import ChannelError, LeaseLost, MalformedFrame
from rlinf_async.channels.latest import Latest
from rlinf_async.channels.statistics import Statistics
from rlinf_async.channels.wire import protocol
from rlinf_async.channels.wire.connection import Connection
from rlinf_async.channels.wire.delivery import NOTHING, answer_get, answer_put
from rlinf_async.channels.wire.opened import OpenEnd
from rlinf_async.channels.wire.published import Published
from rlinf_async.channels.wire.router import Reply, Request, Router
from rlinf_async.channels.wire.sources import Sources

log = logging.getLogger(__name__)


class ChannelServer(Published):
    """Answers the ends of other processes over the connections of one router."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self._register(router)
        Sources(router)

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
        try:
            answer_put(request, end.queue, end.number)
        except MalformedFrame as error:
            _hang_up(request.connection, error)
            return
        if request.meta.want and (known := self._published.get(id(end.queue))) is not None:
            creditor = self._peer(request.connection).creditor
            creditor.want(known[0], end.queue, request.meta.key, end.holder)

    def _puts(self, request: Request[protocol.Puts]) -> None:
        connection = request.connection
        creditor, body = self._peer(connection).creditor, request.body or Encoded(b"")
        try:
            creditor.take(request.meta, body, lambda end: self._open_end(connection, end, "sender"))
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
        get, connection = request.meta, request.connection
        peer = self._peer(connection)
        if get.answers:
            request.answering.arrived(get.answers)
        try:
            end = self._open_end(connection, get.end, "receiver")
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
        request.answering.arrived(took.answers)
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
            assert latest.encode is not None  # it is published
            known = self._newest[latest] = version, latest.encode(value)
        return known[1]


def _hang_up(connection: Connection, error: MalformedFrame) -> None:
    """A process that breaks the rules is not listened to any more."""
    log.error("connection to %s is closed: %s", connection.peer, error)
    connection.close(str(error))
