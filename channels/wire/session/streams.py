"""Two streams of bytes between two processes, over one socket after another.

Invariant: each byte that one side sends is read by the other once, in order, whatever becomes of
the sockets; or else the connection is lost, on both sides. `unacknowledged` says how, `reconnect`
when.

::

    carried by a link <--cut, resumed--> reconnecting
              \\----------- lost -------------/
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.wire.frames.framing import FrameType, pack_small
from rlinf_async.channels.wire.movement import movement
from rlinf_async.channels.wire.session.hangup import GRACE_SECONDS
from rlinf_async.channels.wire.session.heartbeat import Heartbeat, HeartbeatMonitor
from rlinf_async.channels.wire.session.outbox import Outbox
from rlinf_async.channels.wire.session.peer_process import can_watch, is_local, is_stopped, peer_pid
from rlinf_async.channels.wire.session.progress import ProgressTimer
from rlinf_async.channels.wire.session.reconnect import ENDED, Again, Reconnection
from rlinf_async.channels.wire.session.socket_link import Link
from rlinf_async.deadlines import Timer

MAX_UNSENT_MESSAGES: Final = 65_536
"""A peer that does not read its answers is not read any more from here on."""
SAY_ARRIVED_BYTES: Final = 256 * 1024
"""After so many bytes the peer is sent an acknowledgement."""

log = logging.getLogger(__name__)


class StreamUser(Protocol):
    """The connection whose bytes they are."""

    def carried(self, transport: asyncio.Transport) -> None:
        """The streams go on over this."""

    def read(self, data: bytes) -> None:
        """These bytes came next."""

    def space(self) -> memoryview | None:
        """Where the next bytes are to be read to, before `filled`; None where `read` gets them."""

    def filled(self, count: int) -> None:
        """So many bytes came next, into the `space`."""

    def malformed(self, what: str) -> MalformedFrame:
        """The peer does not follow the protocol."""
        ...

    def abort(self, reason: str) -> None:
        """Give the connection up at once, and tell the peer."""

    def lose(self, reason: str) -> None:
        """The connection is lost; nothing if it was already."""


class Streams:
    """The part of a connection that knows of sockets. (The `User` of its links.)

    Args:
        user: whose they are.
        peer: the name that the other side proved.
        patience: seconds for which it is kept when it is cut; 0: a cut ends it.
        redial: connects again; None on the side that waits.
    """

    def __init__(
        self,
        user: StreamUser,
        heartbeat: Heartbeat,
        *,
        peer: str,
        patience: float,
        redial: Again | None,
    ) -> None:
        self._user = user
        self._loop = asyncio.get_running_loop()
        self.peer = peer
        """the name that the other side proved in the handshake"""
        self.reconnection = Reconnection(patience, redial, user.lose)
        """what happens after a cut"""
        self.link: Link | None = None
        """the socket in use"""
        self._pid = 0
        self._local = self._blind = False
        self.encrypted = False
        """whether it goes, or went last, over TLS"""
        self.local_host: str | None = None
        """this host's address, where it goes, or went last; None over a Unix socket"""
        self.outbox = Outbox(self._loop, keep=patience > 0)
        self.monitor = HeartbeatMonitor(heartbeat, self._beat, self._silent)
        self._patient = redial is not None
        self.reading_paused = False
        """whether the peer is not read, because it does not read its answers"""
        self._peer_ended = False
        self._when_resumed: Callable[[], None] | None = None
        self._timer: Timer | None = None
        self._end_timer: ProgressTimer | None = None
        self.closed = False
        self.received_bytes = 0
        self._said_arrived = 0
        self._sent_by_beat = 0

    @property
    def reconnecting(self) -> bool:
        """Whether it is cut now: what is asked waits until it goes on, or is lost."""
        return self.reconnection.cut

    @property
    def local(self) -> bool:
        """Whether it goes, or went last, over a Unix socket: the peer is on this host."""
        return self._local

    def peer_ended(self) -> None:
        """Whoever started the peer's process says that it has ended: do not wait for it after a
        cut. What it sent before is read."""
        if self.closed or self._peer_ended:
            return
        self._peer_ended = True
        if self.reconnecting:
            self.reconnection.give_up(ENDED)
        else:
            self._expect_the_end()

    # ---- sockets

    def carry(self, link: Link, arrived: int) -> None:
        """Go on over this socket; so many bytes of ours have arrived at the other side."""
        if self.closed or link.transport is None:
            link.hang_up()
            return
        self.link = link
        self._pid = peer_pid(link.transport)
        self._local = is_local(link.transport)
        self.encrypted = link.transport.get_extra_info("ssl_object") is not None
        name = link.transport.get_extra_info("sockname")
        self.local_host = name[0] if isinstance(name, tuple) else None
        self._blind = self._local and not can_watch(self._pid)
        self._user.carried(link.transport)
        self.reconnection.found()
        movement.count += 1
        self.monitor.start()
        if self.reading_paused:
            link.transport.pause_reading()
        try:
            self.outbox.attach(link.transport, arrived)
        except MalformedFrame as error:
            self._user.malformed(str(error))
            return
        if not self.outbox.paused:
            self._resume_reading()
        if self._when_resumed is not None:
            self._loop.call_soon(self._when_resumed)
            self._forget_when_resumed()

    def cut(self, link: Link, reason: str) -> None:
        """This socket is gone. Not the one in use: that was known."""
        if link is not self.link or self.closed:
            return
        self.link = None
        self.monitor.stop()
        self.outbox.cut()
        if (
            not self.reconnection.patience or self._blind
        ):  # it has died, most likely: others wait for that
            self._user.lose(reason)
            return
        if self._peer_ended:
            self._user.lose(f"{reason}; {ENDED}")
            return
        log.info("the connection to %s was cut (%s): connecting again", self.peer, reason)
        self.reconnection.was_cut(reason, self._pid)

    def drop_link(self) -> None:
        """The peer has connected again: drop the socket in use."""
        link = self.link
        if link is not None:
            link.drop()
            self.cut(link, "the peer connected again")

    def data_received(self, data: bytes) -> None:
        self._came(len(data), partial(self._user.read, data))

    def space(self) -> memoryview | None:
        return None if self.closed else self._user.space()

    def filled(self, count: int) -> None:
        self._came(count, partial(self._user.filled, count))

    def pause_writing(self) -> None:
        self.outbox.pause()

    def resume_writing(self) -> None:
        self.outbox.resume()
        few = self.outbox.waiting <= MAX_UNSENT_MESSAGES // 2
        if few or not self.outbox.paused:
            self._resume_reading()

    def answered(self) -> None:
        """An answer was queued. Nothing more is read of a peer that does not read its answers; one
        that reads them is read on: its acknowledgements release what is held back."""
        too_many = self.outbox.paused and self.outbox.waiting > MAX_UNSENT_MESSAGES
        if too_many and not self.reading_paused and self.transport is not None:
            self.reading_paused = True
            self.transport.pause_reading()

    def when_resumed(self, then: Callable[[], None]) -> bool:
        """Whether it is cut while the peer may miss something of what was said to it. Then this is
        called when it goes on; a peer that does not come back for `GRACE_SECONDS` is given up."""
        if not self.reconnecting or self.outbox.all_arrived:
            return False
        if self._when_resumed is None:
            self._when_resumed = then
            self._timer = Timer(GRACE_SECONDS, self._not_resumed)
        return True

    # ---- inside

    def _came(self, count: int, read: Callable[[], None]) -> None:
        """So many bytes came: ``read`` them."""
        self.monitor.heard = True
        self.received_bytes += count
        if self.closed:
            return
        self.outbox.held = True
        try:
            read()
            if self.received_bytes - self._said_arrived >= SAY_ARRIVED_BYTES and not self.closed:
                self._say_arrived()
        finally:
            self.outbox.release()

    def _resume_reading(self) -> None:
        if self.reading_paused and not self.closed:
            self.reading_paused = False
            if self.transport is not None:
                self.transport.resume_reading()

    def _not_resumed(self) -> None:
        why = f"it was cut when it was closed, and not resumed within {GRACE_SECONDS:g} s"
        log.warning("what was said last to %s may be lost: %s", self.peer, why)
        self._user.abort(why)

    def _forget_when_resumed(self) -> None:
        self._when_resumed = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expect_the_end(self) -> None:
        """The system says by a cut that all was read; a network that is gone says nothing."""
        self._end_timer = ProgressTimer(
            GRACE_SECONDS, lambda: self.received_bytes, lambda _: self._user.abort(ENDED)
        )

    @property
    def transport(self) -> asyncio.Transport | None:
        """Of the socket in use."""
        return None if self.link is None else self.link.transport

    def _say_arrived(self) -> None:
        self._said_arrived = self.received_bytes
        self.outbox.add_control(pack_small(FrameType.PING, self.received_bytes))

    def _beat(self) -> None:
        """Send a heartbeat, if nothing was sent lately or something is to be acknowledged."""
        quiet = self.outbox.sent_bytes == self._sent_by_beat
        if quiet or self.received_bytes != self._said_arrived:
            self._say_arrived()
        self._sent_by_beat = self.outbox.sent_bytes

    def _silent(self, seconds: float) -> bool:
        """Whether to go on waiting. An owner that was stopped is waited for: nobody can take over
        what it has, and the work goes on with it. A stopped worker's items go to others."""
        if self._patient and is_stopped(self._pid):
            return True
        self._user.abort(
            f"nothing was heard for {seconds:.1f} s: the process is stopped, or blocked"
        )
        return False

    def hang_up(self, *, first: bool = False) -> None:
        """Close the socket in use, once what was said is sent."""
        if self.link is not None:
            self.link.hang_up(first=first)

    def stop(self) -> None:
        """It is lost: send and try nothing more."""
        self.monitor.stop()
        self._forget_when_resumed()
        if self._end_timer is not None:
            self._end_timer.cancel()
        self.reconnection.stop()
        self.outbox.detach()
