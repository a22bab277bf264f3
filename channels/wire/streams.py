"""Two streams of bytes between two processes, over one socket after another.

What is kept: each byte that one side sends is read by the other once, in order, whatever becomes of
the sockets; or else the connection is lost, on both sides. See `kept` for how, `reach` for when.

::

    carried by a link <--cut, found again--> reconnecting
              \\----------- lost -------------/
"""

from __future__ import annotations

import abc
import asyncio
import logging
from typing import Final

from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.wire.framing import FrameType, pack_small
from rlinf_async.channels.wire.heartbeat import Heartbeat, Pulse
from rlinf_async.channels.wire.life import can_watch, is_local, is_stopped, peer_pid
from rlinf_async.channels.wire.link import Link
from rlinf_async.channels.wire.outbox import Outbox
from rlinf_async.channels.wire.reach import Again, Reach

MAX_UNSENT_MESSAGES: Final = 65_536
"""A peer that asks but does not read the answers is not read any more from here on."""
SAY_ARRIVED_BYTES: Final = 256 * 1024
"""After so many bytes the peer is told how much arrived."""

log = logging.getLogger(__name__)


class Streams(abc.ABC):
    """The part of a connection that knows of sockets.

    Args:
        peer: the name that the other side proved.
        patience: seconds for which it is kept when it is cut; 0: a cut ends it.
        redial: connects again; None on the side that waits to be found.
    """

    def __init__(
        self, heartbeat: Heartbeat, *, peer: str, patience: float, redial: Again | None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.peer = peer
        """the name that the other side proved in the handshake"""
        self.reach = Reach(patience, redial, self._lose)
        """what is done about a cut"""
        self._link: Link | None = None
        self._pid = 0
        self._blind = False
        self._outbox = Outbox(self._loop, keep=patience > 0)
        self._pulse = Pulse(heartbeat, self._beat, self._silent)
        self._patient = redial is not None
        self._deaf = False
        self.closed = False
        self.received_bytes = 0
        self._said_arrived = 0

    @property
    def reconnecting(self) -> bool:
        """Whether it is cut now: what is asked waits until it goes on, or is lost."""
        return self.reach.cut

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Give it up at once, and tell the peer."""

    @abc.abstractmethod
    def _carried(self, transport: asyncio.Transport) -> None:
        """It goes on over this."""

    @abc.abstractmethod
    def _read(self, data: bytes) -> None:
        """These bytes came next."""

    @abc.abstractmethod
    def _malformed(self, what: str) -> MalformedFrame:
        """The peer does not follow the protocol."""

    @abc.abstractmethod
    def _lose(self, reason: str) -> None:
        """It is lost; nothing if it was already."""

    # ---- sockets

    def carry(self, link: Link, arrived: int) -> None:
        """Go on over this socket; so many bytes of ours have arrived at the other side."""
        if self.closed or link.transport is None:
            link.hang_up()
            return
        self._link = link
        self._pid = peer_pid(link.transport)
        self._blind = is_local(link.transport) and not can_watch(self._pid)
        self._carried(link.transport)
        self.reach.found()
        self._pulse.start()
        if self._deaf:
            link.transport.pause_reading()
        try:
            self._outbox.attach(link.transport, arrived)
        except MalformedFrame as error:
            self._malformed(str(error))

    def cut(self, link: Link, reason: str) -> None:
        """This socket is gone. Not the one in use: that was known."""
        if link is not self._link or self.closed:
            return
        self._link = None
        self._pulse.stop()
        self._outbox.cut()
        if not self.reach.patience or self._blind:  # it has died, most likely: others wait for that
            self._lose(reason)
            return
        log.info("the connection to %s was cut (%s): connecting again", self.peer, reason)
        self.reach.was_cut(reason, self._pid)

    def make_way(self) -> None:
        """The peer comes with another socket: the one in use is of no use to it any more."""
        link = self._link
        if link is not None:
            link.drop()
            self.cut(link, "the peer connected again")

    def data_received(self, data: bytes) -> None:
        self._pulse.heard()
        self.received_bytes += len(data)
        if not self.closed:
            self._read(data)
        if not self.closed:
            if self.received_bytes - self._said_arrived >= SAY_ARRIVED_BYTES:
                self._say_arrived()
            self._outbox.flush()

    def pause_writing(self) -> None:
        self._outbox.pause()

    def resume_writing(self) -> None:
        self._outbox.resume()
        few = self._outbox.waiting <= MAX_UNSENT_MESSAGES // 2
        if few and self._deaf and not self.closed:
            self._deaf = False
            if self._transport is not None:
                self._transport.resume_reading()

    def answered(self) -> None:
        """An answer was queued; a peer that does not take any must stop asking."""
        too_many = self._outbox.waiting > MAX_UNSENT_MESSAGES
        if too_many and not self._deaf and self._transport is not None:
            self._deaf = True
            self._transport.pause_reading()

    # ---- inside

    @property
    def _transport(self) -> asyncio.Transport | None:
        return None if self._link is None else self._link.transport

    def _say_arrived(self) -> None:
        self._said_arrived = self.received_bytes
        self._outbox.add_control(pack_small(FrameType.PING, self.received_bytes))

    def _beat(self) -> None:
        """Say that this side lives, if it said nothing lately or has something to confirm."""
        quiet = self._loop.time() - self._outbox.last_sent >= self._pulse.interval / 2
        if quiet or self.received_bytes != self._said_arrived:
            self._say_arrived()

    def _silent(self, seconds: float) -> bool:
        """Whether to go on waiting. An owner that was stopped is waited for: nobody can take over
        what it has, and the work goes on with it. A stopped worker's items go to others."""
        if self._patient and is_stopped(self._pid):
            return True
        self.abort(f"nothing was heard for {seconds:.1f} s: the process is stopped, or blocked")
        return False

    def _hang_up(self, *, first: bool = False) -> None:
        if self._link is not None:
            self._link.hang_up(first=first)

    def _stop(self) -> None:
        """It is lost: send and try nothing more."""
        self._pulse.stop()
        self.reach.stop()
        self._outbox.detach()
