"""Closing a socket in bounded time, also where the peer has stopped reading."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from rlinf_async.channels.wire.session.distance import acknowledged_bytes
from rlinf_async.channels.wire.session.progress import ProgressTimer

log = logging.getLogger(__name__)
GRACE_SECONDS: Final = 2.0
"""Time without progress after which a peer is cut off."""


class HangUp:
    """Closes a transport when all was sent, or cuts it off when nothing more gets through."""

    def __init__(self) -> None:
        self._timer: ProgressTimer | None = None

    def start(self, transport: asyncio.WriteTransport, peer: str, *, first: bool = False) -> None:
        """Close it; what was written before is still sent.

        ``first``: the peer does not know yet. It may be writing, and would take an error there for
        the end before it has read all; so it is left to close the socket, once it has read that it
        should. (A socket with TLS that is closed here drops what is queued as soon as the peer
        writes anything.)
        """
        if not first:
            transport.close()
        elif transport.can_write_eof():
            try:
                transport.write_eof()
            except OSError:  # it has just reset the socket, which the loop has not seen yet
                transport.abort()
                return
        self.stop()
        self._timer = ProgressTimer(
            GRACE_SECONDS,
            lambda: (transport.get_write_buffer_size(), acknowledged_bytes(transport)),
            lambda _: self._cut_off(transport, peer),
        )

    def stop(self) -> None:
        """It is closed."""
        if self._timer is not None:
            self._timer.cancel()

    def _cut_off(self, transport: asyncio.WriteTransport, peer: str) -> None:
        if transport.get_write_buffer_size():
            log.warning("%s took nothing for %g s: it is cut off", peer, GRACE_SECONDS)
        transport.abort()
