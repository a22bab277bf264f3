"""The network interfaces of this host, and their IPv4 addresses."""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import Final

from rlinf_async.workers.errors import BuildError

_SIOCGIFADDR: Final = 0x8915
"""Linux's request for the address of an interface (netdevice(7))"""


def address_of(interface: str) -> str:
    """The address of an interface.

    Raises:
        BuildError: this host has none of the name, or it has no IPv4 address.
    """
    found = _addresses()
    if interface not in found:
        there = ", ".join(f"{name} ({address})" for name, address in found.items())
        raise BuildError(
            f"{socket.gethostname()} has no interface {interface!r} with an IPv4 address: there "
            f"is {there}"
        )
    return found[interface]


def interface_of(address: str) -> str:
    """The interface that has this address; empty where none has."""
    return next((name for name, one in _addresses().items() if one == address), "")


def _addresses() -> dict[str, str]:
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
