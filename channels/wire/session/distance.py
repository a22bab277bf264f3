"""What the kernel's TCP knows of a socket."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final

FAR_SECONDS: float = 0.002
"""Round trips from here on are worth larger windows, and copies: see `Connection.far`."""
_TCP_INFO: Final = getattr(socket, "TCP_INFO", None)
_ROUND_TRIP: Final = struct.Struct("68xI")
"""the smoothed round trip in Linux's ``struct tcp_info``, in microseconds"""
_ACKNOWLEDGED: Final = struct.Struct("120xQ")
"""the bytes there that the other side has acknowledged"""


def round_trip(transport: asyncio.BaseTransport | None) -> float:
    """Seconds; 0 over a Unix socket, without a socket, and where the system does not say."""
    return _ask(transport, _ROUND_TRIP) / 1e6


def acknowledged_bytes(transport: asyncio.BaseTransport | None) -> int:
    """Bytes that the other side's system has taken; 0 where `round_trip` is."""
    return _ask(transport, _ACKNOWLEDGED)


def _ask(transport: asyncio.BaseTransport | None, field: struct.Struct) -> int:
    found: socket.socket | None = None if transport is None else transport.get_extra_info("socket")
    if found is None or _TCP_INFO is None or found.family == socket.AF_UNIX:
        return 0
    try:
        info = found.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, field.size)
    except OSError:
        return 0
    value: int = field.unpack(info)[0] if len(info) == field.size else 0
    return value
