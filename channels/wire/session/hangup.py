"""Closing a socket in bounded time, also where the peer has stopped reading."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from rlinf_async.deadlines import Timer

log = logging.getLogger(__name__)
GRACE_SECONDS: Final = 2.0
"""Time without progress after which a peer is cut off."""


class HangUp:
    """Closes a transport when all was sent, or cuts it off when nothing more gets through."""

    def __init__(self) -> None:
        self._timer: Timer | None = None

    def start(self, transport: asyncio.WriteTransport, peer: str, *, first: bool = False) -> None:
        """Close it; what was written before is still sent.

        ``first``: the peer does not know yet. It may be writing, and would take an error there for
        the end before it has read all; so it is left to close the socket.
        """
        if first and transport.can_write_eof():
            try:
                transport.write_eof()
            except OSError:  # it has just reset the socket, which the loop has not seen yet
                transport.abort()
                return
        else:
            transport.close()
        self._watch(transport, peer, transport.get_write_buffer_size())

    def stop(self) -> None:
        """It is closed."""
        if self._timer is not None:
            self._timer.cancel()

    def _watch(self, transport: asyncio.WriteTransport, peer: str, unsent: int) -> None:
        self.stop()
        self._timer = Timer(GRACE_SECONDS, self._look, transport, peer, unsent)

    def _look(self, transport: asyncio.WriteTransport, peer: str, unsent: int) -> None:
        rest = transport.get_write_buffer_size()
        if rest < unsent:
            self._watch(transport, peer, rest)
        else:
            if rest:
                self._warn(peer)
            transport.abort()

    def _warn(self, peer: str) -> None:
        log.warning("%s took nothing for %g s: it is cut off", peer, GRACE_SECONDS)
