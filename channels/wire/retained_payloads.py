"""The producer's side of payloads that stay with it until they are fetched. See `direct`."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Self

from rlinf_async.channels.encoded import PIECE_BYTES, Encoded
from rlinf_async.channels.wire.pool import copy_in_turns
from rlinf_async.channels.wire.protocol import (
    Fetch,
    Offer,
    PutAbandoned,
    Release,
    RetainedPayload,
    TakeOver,
)
from rlinf_async.channels.wire.session.connection import Request
from rlinf_async.channels.wire.session.streams import Linger

if TYPE_CHECKING:
    from rlinf_async.channels.wire.direct import Direct
    from rlinf_async.channels.wire.session.connection import Connection


TURN_BYTES: Final = 32 * 1024**2
log = logging.getLogger(__name__)


class RetainedPayloads:
    """The payloads that this process retains for the channels of one owner."""

    def __init__(self, connection: Connection, direct: Direct) -> None:
        self._connection = connection
        self._direct = direct
        self._numbers: set[int] = set()
        self._copied = 0
        self._linger = Linger(
            connection,
            lambda: len(self._numbers),
            lambda: connection.notify("payload.leave", TakeOver()),
            "items were not taken over",
        )
        connection.add_linger(self._linger)
        connection.peer_requests.own.add_sync("payload.fetch", Fetch, direct.answer)
        connection.peer_requests.own.add_sync("payload.release", Release, self._released)
        connection.on_close(self._lost)
        offer = Offer(direct.token, direct.host, direct.addresses)
        connection.notify("payload.offer", offer, control=True)

    @classmethod
    def over(cls, connection: Connection, direct: Direct | None) -> Self | None:
        """Return the payloads of a connection; None where arrays go through the owner: it is on
        this host, or this process listens nowhere."""
        found = connection.attached(cls)
        if found is not None or direct is None or not direct.addresses:
            return found
        if not connection.closed and (direct.for_local_owners or not connection.local):
            found = connection.attach(cls(connection, direct))
        return found

    # ---- for senders

    async def copy(self, body: Encoded) -> bool:
        """Replace large arrays by a copy that is made in pieces, between which others in this loop
        have turns; whether that was done."""
        if body.nbytes <= PIECE_BYTES or not self._direct.may_retain(body.buffers):
            return False
        body.buffers = await copy_in_turns(body.buffers)
        return True

    def retain(
        self, body: Encoded, *, copied: bool = False
    ) -> tuple[Encoded, RetainedPayload | None]:
        """The item as it travels, and its payload that stays here; None if none does. ``copied``:
        as of `Direct.retain`."""
        closed = self._connection.closed  # nobody would release it
        number = None if closed else self._direct.retain(body.buffers, copied=copied)
        if number is None:
            return body, None
        self._numbers.add(number)
        if not self._copied:
            asyncio.get_running_loop().call_soon(self._turn)
        self._copied += 0 if copied else body.nbytes
        return Encoded(body.data), RetainedPayload(0, number, [*map(len, body.buffers)])

    @property
    def turn_due(self) -> bool:
        """Whether so much was copied that others in this loop should have a turn."""
        return self._copied >= TURN_BYTES

    def _turn(self) -> None:
        self._copied = 0

    def give_up(self, retained: RetainedPayload) -> None:
        """The put failed, or was cancelled: its item may have reached the owner, or not."""
        if retained.number in self._numbers and not self._connection.closed:
            self._connection.notify("payload.unsure", PutAbandoned(retained.number))

    # ---- what becomes of it

    def _released(self, request: Request[Release]) -> None:
        for number in request.meta.numbers:
            if number in self._numbers:
                self._numbers.discard(number)
                self._direct.release(number)
        if not self._numbers:
            self._linger.settled()

    def _lost(self, connection: Connection, reason: str) -> None:
        self._linger.stop()
        if self._numbers:
            log.error(
                "the arrays of %d items that nobody had fetched are lost with the connection to "
                "%s: %s", len(self._numbers), connection.peer, reason,
            )  # fmt: skip
        for number in self._numbers:
            self._direct.release(number)
        self._numbers.clear()
