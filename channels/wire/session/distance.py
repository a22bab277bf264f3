"""How far away the other side of a socket is, as the kernel's TCP measures it."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final

FAR_SECONDS: float = 0.002
"""Round trips from here on are worth larger windows, and copies: see `Connection.far`."""
_TCP_INFO: Final = getattr(socket, "TCP_INFO", None)
_RTT_OFFSET: Final = 68
"""Of the smoothed round trip, in microseconds, in Linux's ``struct tcp_info``."""


def round_trip(transport: asyncio.BaseTransport | None) -> float:
    """Seconds; 0 over a Unix socket, without a socket, and where the system does not say."""
    found: socket.socket | None = None if transport is None else transport.get_extra_info("socket")
    if found is None or _TCP_INFO is None or found.family == socket.AF_UNIX:
        return 0.0
    try:
        info = found.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _RTT_OFFSET + 4)
    except OSError:
        return 0.0
    if len(info) < _RTT_OFFSET + 4:
        return 0.0
    (microseconds,) = struct.unpack_from("I", info, _RTT_OFFSET)
    return float(microseconds) / 1e6
