"""Connecting to an address, and connecting again after a cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from rlinf_async import patient
from rlinf_async.channels.errors import ConnectionLost, HandshakeFailed
from rlinf_async.channels.wire.address import Address, UnixAddress
from rlinf_async.channels.wire.auth import Handshake, Terms
from rlinf_async.channels.wire.connection import Connection
from rlinf_async.channels.wire.link import HandshakeLate, Link
from rlinf_async.channels.wire.side import Side

FIRST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 1.0
"""Seconds between two tries to connect again."""


class NobodyThere(ConnectionLost):
    """Nobody listens at this address (any more): there is no use in trying again."""


class Dialer:
    """Makes a connection to one address, and finds it again after a cut."""

    def __init__(self, address: Address, side: Side) -> None:
        self._address = address
        self._side = side

    async def connect(self) -> Connection:
        """A new connection.

        Raises:
            ConnectionLost: nobody serves it, or it was cut.
            HandshakeFailed: the secret, or the protocol's version, differs.
        """
        side, made = self._side, list[Connection]()

        def greeted(link: Link) -> Connection:
            terms = link.handshake.terms
            made.append(side.connection(link.peer, terms.number, terms.patience, self._redial))
            return made[0]

        await self._dial(Terms(patience=side.patience), greeted, side.handshake_timeout)
        return made[0]

    async def _redial(self, connection: Connection) -> None:
        pause = FIRST_PAUSE
        while connection.reconnecting:
            terms = Terms(connection.number, connection.received_bytes, connection.reach.patience)
            timeout = max(min(self._side.handshake_timeout, connection.reach.left), FIRST_PAUSE)
            try:
                await self._dial(terms, partial(_as_before, connection), timeout)
            except HandshakeLate:
                continue
            except (NobodyThere, HandshakeFailed) as error:
                connection.reach.give_up(str(error))
            except ConnectionLost:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _dial(
        self, terms: Terms, greeted: Callable[[Link], Connection], timeout: float
    ) -> None:
        handshake = Handshake("client", self._side.secret, self._side.name, terms=terms)
        link = Link(handshake, timeout, greeted)
        try:
            async with patient.timeout(timeout):
                await self._open(link)
            await link.opened
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise NobodyThere(self._say(error)) from error
        except OSError as error:
            raise ConnectionLost(self._say(error)) from error
        finally:
            if link.user is None:
                link.drop()

    async def _open(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(self._address, UnixAddress):
            await loop.create_unix_connection(lambda: link, str(self._address.path))
        else:
            await loop.create_connection(lambda: link, *self._address)

    def _say(self, error: OSError) -> str:
        why = error.strerror or str(error) or "no answer in time"
        return (
            f"cannot connect to {str(self._address)!r}: {why}: is the process that serves it "
            "running?"
        )


def _as_before(connection: Connection, link: Link) -> Connection:
    return connection
