"""A network that is cut where a test says: after so many bytes of one direction of one socket.

What was let through arrives; the rest of that direction, and all that is under way in the other, is
lost, as when a cable is pulled and both sides are told.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, NamedTuple, cast

Way = Literal["to server", "to client"]


class Cut(NamedTuple):
    """Where a socket is cut."""

    way: Way
    after: int
    """bytes that are let through, the handshake's among them"""
    reset: bool = False
    """whether the side that would have got more is told by a reset, and may not get what it had
    not read"""


class Cutter:
    """Stands between clients and a server, and cuts each socket as planned. The last ones live."""

    def __init__(self, server: str, cuts: list[Cut]) -> None:
        self.server = server
        self.address = ""
        self.cuts = cuts
        self.sockets = 0
        """that clients have opened so far"""
        self.passed: list[dict[Way, int]] = []
        """for each of them: bytes that went through"""
        self.halves: set[_Half] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.refuse = False
        """whether to turn every new socket away"""
        self.listener: asyncio.AbstractServer

    def cut_all(self) -> None:
        """Cut what is open now."""
        for half in list(self.halves):
            half.abort()

    def cut_clients(self) -> None:
        """Cut what is open now; the server is not told."""
        for half in list(self.halves):
            if half.way == "to server":
                if half.other is not None:
                    half.other.other = None
                half.other = None
                half.abort()

    def accept(self) -> asyncio.Protocol:
        plan = self.cuts[self.sockets] if self.sockets < len(self.cuts) else None
        self.sockets += 1
        self.passed.append({"to server": 0, "to client": 0})
        return _Half(self, plan, self.passed[-1], "to server")

    def connect(self, half: _Half) -> None:
        """Reach the server for a client."""
        task = asyncio.get_running_loop().create_task(self._connect(half))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _connect(self, half: _Half) -> None:
        loop = asyncio.get_running_loop()
        if self.refuse:
            half.close()
            return

        def make() -> _Half:
            return _Half(self, half.plan, half.passed, "to client", other=half)

        try:
            if self.server.startswith("tcp://"):
                host, _, port = self.server.removeprefix("tcp://").rpartition(":")
                await loop.create_connection(make, host, int(port))
            else:
                await loop.create_unix_connection(make, self.server)
        except OSError:
            half.close()


class _Half(asyncio.Protocol):
    """The client's or the server's socket; ``way`` is where its bytes go."""

    def __init__(
        self,
        cutter: Cutter,
        plan: Cut | None,
        passed: dict[Way, int],
        way: Way,
        other: _Half | None = None,
    ) -> None:
        self.cutter = cutter
        self.plan = plan
        self.passed = passed
        self.way: Way = way
        self.other = other
        self.transport: asyncio.Transport | None = None
        self.waiting = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.cutter.halves.add(self)
        if self.other is None:
            self.cutter.connect(self)
        else:
            self.other.other = self
            waiting, self.other.waiting = self.other.waiting, b""
            self.other.forward(waiting)

    def data_received(self, data: bytes) -> None:
        self.forward(data)

    def forward(self, data: bytes) -> None:
        """Let through what the plan allows."""
        other = self.other
        if other is None or other.transport is None:
            self.waiting += data
            return
        plan = self.plan
        if plan is None or plan.way != self.way:
            self.passed[self.way] += len(data)
            other.transport.write(data)
            return
        left = plan.after - self.passed[self.way]
        self.passed[self.way] += min(left, len(data))
        other.transport.write(data[:left])
        if len(data) >= left:
            other.close(reset=plan.reset)
            self.abort()

    def abort(self) -> None:
        """End this socket at once."""
        if self.transport is not None:
            self.transport.abort()

    def close(self, *, reset: bool = False) -> None:
        """End this socket, after what was written to it."""
        transport = self.transport
        if transport is None:
            return
        if reset:
            found: socket.socket = transport.get_extra_info("socket")
            if found.family != socket.AF_UNIX:
                linger = struct.pack("ii", 1, 0)
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.cutter.halves.discard(self)
        self.transport = None
        if self.other is not None:
            self.other.close()


@asynccontextmanager
async def cutter(server: str, folder: Path | None, *cuts: Cut) -> AsyncIterator[Cutter]:
    """A cutter before this server: on a Unix socket in ``folder``, or on TCP where it is None."""
    loop = asyncio.get_running_loop()
    made = Cutter(server, list(cuts))
    if folder is None:
        made.listener = listener = await loop.create_server(made.accept, "127.0.0.1", 0)
        made.address = f"tcp://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    else:
        made.address = str(folder / "cutter.sock")
        made.listener = listener = await loop.create_unix_server(made.accept, made.address)
    try:
        yield made
    finally:
        listener.close()
        made.cut_all()
        for _ in range(10):
            await asyncio.sleep(0)
