"""A pytest plugin, for a process in the worker's namespace: owners listen in the other one.

So the channel suite, whose both sides run in one loop, runs between two hosts.
"""

from __future__ import annotations

import os
import socket
import threading

from rlinf_async.channels.wire.session import endpoint
from rlinf_async.channels.wire.session.endpoint import TcpAddress, bind_tcp
from tests.channels import transport
from tests.net.hosts import OWNER, enter


class BetweenHosts(transport.Unix):
    """Ends on one host, their channel on another."""

    address = f"tcp://{OWNER}:0"


def bind_there(address: TcpAddress) -> socket.socket:
    """As `bind_tcp`, on the owner's host."""
    found: list[socket.socket | BaseException] = []

    def bind() -> None:
        try:
            enter(os.environ["OWNER_NAMESPACE"])
            found.append(bind_tcp(address))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


endpoint.__dict__["bind_tcp"] = bind_there
transport.TRANSPORTS["hosts"] = BetweenHosts
transport.SETTINGS.append(("hosts", "uvloop"))
