"""The owner's side: what the ends of other processes ask, and how it is answered."""

from __future__ import annotations

import logging
from typing import Any

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.inspection import state_of, statistics_of
from rlinf_async.channels.latest import Latest
from rlinf_async.channels.statistics import KeyState, Statistics
from rlinf_async.channels.wire.direct.producers import Producers
from rlinf_async.channels.wire.links import protocol
from rlinf_async.channels.wire.links.owner_credit import answer_put
from rlinf_async.channels.wire.links.owner_deliveries import NOTHING
from rlinf_async.channels.wire.links.published import Published
from rlinf_async.channels.wire.session.answers import Reply, Request, Router
from rlinf_async.channels.wire.session.connection import Connection

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
        router.add_sync("delivery.taken", protocol.Taken, self._taken)
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
        end = self._open_end(request.connection, request.meta.end, "sender")
        try:
            answer_put(request, end)
        except MalformedFrame as error:
            _hang_up(request.connection, error)
            return
        if request.meta.want and (known := self._published.get(id(end.queue))) is not None:
            credits = self.peer(request.connection).credits
            credits.request(known[0], end.queue, request.meta.key, end.holder)

    def _transfer(self, request: Request[protocol.Transfer]) -> None:
        connection = request.connection
        credits, body = self.peer(connection).credits, request.body or Encoded(b"")
        try:
            credits.take(request.meta, body, lambda end: self._open_end(connection, end, "sender"))
        except MalformedFrame as error:
            _hang_up(connection, error)

    def _return(self, request: Request[protocol.Credit]) -> None:
        try:
            self.peer(request.connection).credits.returned(request.meta)
        except MalformedFrame as error:
            _hang_up(request.connection, error)

    def _flush(self, request: Request[protocol.Flush]) -> None:
        self.peer(request.connection).credits.send_grants()
        request.reply(NOTHING)

    def _get(self, request: Request[protocol.Get]) -> None:
        get, connection = request.meta, request.connection
        deliveries = self.peer(connection).deliveries
        if get.taken:
            deliveries.taken(request, get.taken)
        deliveries.get(request, self._open_end(connection, get.end, "receiver"))

    def _taken(self, request: Request[protocol.Taken]) -> None:
        self.peer(request.connection).deliveries.taken(request, request.meta.ranges)

    def _settle(self, request: Request[protocol.Settle]) -> None:
        try:
            self.peer(request.connection).deliveries.settle(request)
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
