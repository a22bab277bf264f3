"""Where the wire limits what a peer may take: for `test_stalled_limits`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from rlinf_async.channels.wire import Connection, Router
from rlinf_async.channels.wire.retained_payloads import RetainedPayloads
from rlinf_async.channels.wire.sending import Transfers, _Frame
from rlinf_async.channels.wire.session.link import Handshake, HangUp, Link
from rlinf_async.channels.wire.session.streams import Heartbeat, HeartbeatMonitor, Reconnection
from tests.channels.wire.harness import SECRET

Blame = Callable[[object], None]
Heard = Callable[[], object]
UNCONFIRMED = 8


class Transport(asyncio.Transport):
    """A socket of which nothing gets through."""

    def __init__(self, blame: Blame, unsent: int = 100) -> None:
        super().__init__()
        self._blame = blame
        self.unsent = unsent

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def can_write_eof(self) -> bool:
        return False

    def write(self, data: Any) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None:
        self._blame("cut off")

    def take(self) -> None:
        """Some of it gets through."""
        self.unsent -= 1


def heartbeat(blame: Blame) -> Heard:
    def silent(seconds: float) -> bool:
        blame(seconds)
        return False

    monitor = HeartbeatMonitor(Heartbeat(0.5, 4.0), lambda: None, silent)
    monitor.start()
    return partial(setattr, monitor, "heard", True)


def cut_connection(blame: Blame) -> Heard:
    reach = Reconnection(4.0, None, blame)
    reach.was_cut("a test", 0)
    return reach.found


def hanging_up(blame: Blame) -> Heard:
    transport = Transport(blame)
    HangUp().start(transport, "a peer")
    return transport.take


def greeting(blame: Blame) -> Heard:
    def ended(opened: asyncio.Future[None]) -> None:
        if not opened.cancelled():
            blame(opened.exception())

    link = Link(Handshake("server", SECRET, "owner"), 4.0, lambda link: link)  # type: ignore[arg-type,return-value]
    link.connection_made(Transport(lambda _: None))
    link.opened.add_done_callback(ended)
    return link.drop


def connection(blame: Blame) -> Connection:
    made = Connection(Router(), Heartbeat.of(1000.0), peer="a", number=b"1", patience=1000.0)

    def closed(_: Connection, reason: str) -> None:
        if reason != "it was closed":
            blame(reason)

    made.on_close(closed)
    return made


def closing_while_cut(blame: Blame) -> Heard:
    made = connection(blame)
    made.reconnection.was_cut("a test", 0)
    made.notify("anything", None)
    made.close()
    return made._forget_when_resumed


def known_to_have_ended(blame: Blame) -> Heard:
    made = connection(blame)
    made.peer_ended()

    def read() -> None:
        made.received_bytes += 1

    return read


def unconfirmed_items(blame: Blame) -> Heard:
    made = connection(blame)
    transfers = Transfers.of(made)
    transfers._unconfirmed += [_Frame(1, 1, {})] * UNCONFIRMED
    made.close()
    return partial(transfers._confirm, 1)


def arrays_to_fetch(blame: Blame) -> Heard:
    direct: Any = SimpleNamespace(
        token=b"", host="here", addresses=[], answer=None, release=lambda number: None
    )
    payloads = RetainedPayloads(made := connection(blame), direct)
    payloads._numbers |= {1, 2}
    made.close()
    return partial(payloads._numbers.discard, 1)
