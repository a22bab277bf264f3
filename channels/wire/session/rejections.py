"""What is logged of sockets whose other side did not prove the secret: the first few of a while,
and how many more there were. So whoever can reach the address cannot fill the log."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from rlinf_async.channels.errors import HandshakeFailed, WireError

log = logging.getLogger(__name__)

LINES: Final = 5
"""So many are logged one by one,"""
SECONDS: Final = 60.0
"""and in this time only the number of the others."""


class Rejections:
    """Those of one server."""

    def __init__(self) -> None:
        self._count = 0
        self._address = ""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, address: str, error: WireError) -> None:
        """One more connection to this address was not made."""
        self._address = address
        self._count += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SECONDS, self.count)
        if self._count <= LINES:
            level = logging.WARNING if isinstance(error, HandshakeFailed) else logging.INFO
            log.log(level, "a connection to %s was not made: %s", address, error)

    def count(self) -> None:
        """Say how many were left out; those from now on are logged again."""
        more, self._count = self._count - LINES, 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if more > 0:
            log.warning(
                "%d more connections to %s were not made within %g s: their other sides did not "
                "prove the secret, or left before", more, self._address, SECONDS,
            )  # fmt: skip
