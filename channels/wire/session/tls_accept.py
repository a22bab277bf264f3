"""A socket that was accepted for TLS.

The loop's own servers with TLS say nothing of a socket before its handshake is over, so that nobody
could count them, or close one. Here the plain socket is known first.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import cast

from rlinf_async.channels.wire.session.socket_link import Link


class TlsAccept(asyncio.Protocol):
    """Answers the handshake of TLS; then the socket is its link's.

    Args:
        link: what the socket is accepted for.
        seconds: time limit of that handshake.
    """

    def __init__(self, link: Link, context: ssl.SSLContext, seconds: float) -> None:
        self._link = link
        self._context = context
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The plain transport has read nothing yet, and shall not: the first bytes are TLS's.
        plain: socket.socket = transport.get_extra_info("socket").dup()
        plain.setblocking(False)
        self._link.accepted(transport, plain)
        cast("asyncio.Transport", transport).abort()  # uvloop's are not of that class
        self._task = asyncio.get_running_loop().create_task(self._begin(plain))

    async def _begin(self, plain: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._link, plain, ssl=self._context, ssl_handshake_timeout=self._seconds
            )
        except OSError as error:  # ssl.SSLError and TimeoutError are, too
            with contextlib.suppress(OSError):
                plain.close()
            self._link.connection_lost(error)
