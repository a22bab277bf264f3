"""Two streams of bytes between two processes, over one socket after another.

Invariant: each byte that one side sends is read by the other once, in order, whatever becomes of
the sockets; or else the connection is lost, on both sides. `outbox` says how.

::

    carried by a link <--cut, resumed--> reconnecting
              \\----------- lost -------------/

After a cut the side that connected connects again; the other waits for it. This ends when the
connection resumes on a new socket, when the patience has run out, or when the peer is known to be
gone: nothing listens at its address, another process does, or the system says that it has died.

A stopped process keeps its sockets open, so heartbeats tell whether the other side still answers.
Silence counts only while this process listens, see `deadlines`: not while it is stopped or blocked
itself.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, Self

import msgspec

from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.wire.frames import (
    FrameType,
    Message,
    MessageReader,
    movement,
    pack_small,
)
from rlinf_async.channels.wire.session import link as sockets
from rlinf_async.channels.wire.session.link import GRACE_SECONDS, Link
from rlinf_async.channels.wire.session.outbox import Outbox
from rlinf_async.deadlines import Patience, ProgressTimer, Timer

HEARTBEAT_LIMIT: Final = 15.0


class Heartbeat(msgspec.Struct, frozen=True):
    """Interval between heartbeats, and limit on silence. In seconds."""

    interval: float
    limit: float

    @classmethod
    def of(cls, limit: float, interval: float | None = None) -> Self:
        """Return a heartbeat with an eighth of the limit as interval, at most 1 s, if none is
        given."""
        return cls(min(1.0, limit / 8) if interval is None else interval, limit)

    def __post_init__(self) -> None:
        if not 0 < self.interval < self.limit:
            raise ValueError(
                f"a heartbeat needs 0 < interval < limit, got interval={self.interval}, "
                f"limit={self.limit}"
            )


class HeartbeatMonitor:
    """Sends heartbeats where nothing else is sent, and watches for the peer's.

    Args:
        beat: called once for each interval.
        silent: called when the peer was silent for so long, with the seconds; says whether to wait
            for it once more.
    """

    def __init__(
        self, heartbeat: Heartbeat, beat: Callable[[], None], silent: Callable[[float], bool]
    ) -> None:
        self._heartbeat = heartbeat
        self._beat = beat
        self._silent = silent
        self._loop = asyncio.get_running_loop()
        self._patience = Patience(heartbeat.limit, heartbeat.interval)
        self._timer: asyncio.TimerHandle | None = None
        self.heard = False
        """whether anything arrived since the last beat"""

    def start(self) -> None:
        """Beat from now on."""
        self.stop()
        self._patience.renew()
        self._timer = self._loop.call_at(self._patience.due, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        patience = self._patience
        if self.heard:
            self.heard = False
            patience.renew()
        elif patience.look():
            if not self._silent(self._heartbeat.limit):
                return
            patience.renew()
        self._beat()
        self._timer = self._loop.call_at(patience.due, self._tick)


def peer_pid(transport: asyncio.BaseTransport) -> int:
    """Return the process id at the other side of a Unix socket; 0 where that cannot be known. The
    peer need not say it: the kernel knows.

    Its word is not needed: the kernel knows.
    """
    found: socket.socket | None = transport.get_extra_info("socket")
    if found is None or not is_local(transport) or not hasattr(socket, "SO_PEERCRED"):
        return 0
    pid: int = struct.unpack("3i", found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


def is_local(transport: asyncio.BaseTransport) -> bool:
    """Whether this is a Unix socket: no network can cut it, only one of its two processes."""
    found: socket.socket | None = transport.get_extra_info("socket")
    return found is not None and found.family == socket.AF_UNIX


def is_stopped(pid: int) -> bool:
    """Whether this process was stopped, as by Ctrl-Z; False where that cannot be known."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def can_watch(pid: int) -> bool:
    """Whether the end of this process would be seen."""
    return pid > 0 and hasattr(os, "pidfd_open")


class DeathWatch:
    """Calls back when a process has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._file = -1

    def start(self, pid: int, died: Callable[[], None]) -> None:
        """Watch it from now on; of one that is gone already this is said at the loop's next turn.

        Does nothing for a ``pid`` of 0, or where the system cannot tell.
        """
        self.stop()
        if not can_watch(pid):
            return
        try:
            self._file = os.pidfd_open(pid)
        except ProcessLookupError:
            self._loop.call_soon(died)
        except OSError:
            return
        else:
            self._loop.add_reader(self._file, died)

    def stop(self) -> None:
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1


PATIENCE: Final = 10.0
"""Seconds for which a cut connection is kept, unless said otherwise."""
ENDED: Final = "its process has ended"

Again = Callable[[], Coroutine[Any, Any, None]]


def check_patience(seconds: float) -> None:
    """Refuse an invalid time limit.

    Raises:
        ValueError: it is negative, infinite or not a number.
    """
    if not 0 <= seconds < float("inf"):
        raise ValueError(
            f"patience is a number of seconds, 0 or more, got {seconds}: 0 gives a cut connection "
            "up at once"
        )


class Reconnection:
    """Holds a cut connection until it resumes or is given up.

    Args:
        patience: seconds for which it may resume; 0: a cut ends it.
        redial: connects again, until it works; None on the side that waits.
        lose: called with the reason once the connection is to be given up.
    """

    def __init__(
        self,
        patience: float,
        redial: Again | None,
        lose: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._redial = redial
        self._lose = lose
        self._death = DeathWatch(self._loop)
        self._timer: Timer | None = None
        self._since = 0.0
        self._reason = ""
        self._task: asyncio.Task[None] | None = None
        self.patience = patience
        self.cut = False
        self.cuts = 0
        """how often it was cut so far"""

    @property
    def seconds(self) -> float:
        """Seconds for which the connection has been cut; 0 while it is not."""
        return self._loop.time() - self._since if self.cut else 0.0

    @property
    def left(self) -> float:
        """Seconds of patience that are left."""
        return self.patience if self._timer is None else self._timer.left

    def was_cut(self, reason: str, pid: int) -> None:
        """Try to reach the peer, whose process is ``pid`` if that is known."""
        self.cuts += 1
        self._reason = reason
        if not self.cut:  # else it was cut again while it resumed
            self.cut = True
            self._since = self._loop.time()
            self._timer = Timer(self.patience, self._over)
        self._death.start(pid, self._died)
        if self._redial is not None and (self._task is None or self._task.done()):
            self._task = self._loop.create_task(self._redial(), name="connecting again")

    def found(self) -> None:
        """The connection has resumed."""
        self.cut = False
        self._stop_watching()

    def stop(self) -> None:
        """The connection is closed or lost."""
        self.cut = False
        self._stop_watching()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def give_up(self, why: str) -> None:
        """The peer cannot be reached any more."""
        if self.cut:
            self._lose(f"{self._reason}; {why}")

    async def wait_stopped(self) -> None:
        """Wait until connecting again has stopped."""
        if self._task is not None and self._task is not asyncio.current_task():
            await asyncio.wait([self._task])

    # ---- inside

    def _over(self) -> None:
        self.give_up(f"it was not resumed within {self.patience:g} s")

    def _died(self) -> None:
        self._death.stop()
        self.give_up(ENDED)

    def _stop_watching(self) -> None:
        self._death.stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


PROGRESS_BYTES: Final = 64 * 1024
"""Bytes sent that count as progress; heartbeats, which are fewer, do not."""


class Linger:
    """Lets closing a connection wait until nothing is open; a peer that makes no progress with it
    for `GRACE_SECONDS` is given up. See `Connection.add_linger`.

    Args:
        open_count: how much is open. Once it is 0, `settled` is to be called.
        begin: called once when closing waits for it.
        lost: what the count is of, and what became of it, for the reason: "items were not taken".
    """

    def __init__(
        self,
        connection: Streams,
        open_count: Callable[[], int],
        begin: Callable[[], object],
        lost: str,
    ) -> None:
        self._connection = connection
        self._open_count = open_count
        self._begin = begin
        self._lost = lost
        self.then: Callable[[], None] | None = None
        """function that goes on with closing, while closing waits"""
        self._timer: ProgressTimer | None = None

    def must_wait(self, then: Callable[[], None]) -> bool:
        """Whether closing must wait; if so, ``then`` is called as soon as it need not."""
        if not self._open_count():
            return False
        if self.then is None:
            self.then = then
            self._timer = ProgressTimer(GRACE_SECONDS, self._progress, self._give_up)
            self._begin()
        return True

    def settled(self) -> None:
        """Go on with closing: nothing is open any more."""
        then, self.then = self.then, None
        if then is not None:
            self.stop()
            asyncio.get_running_loop().call_soon(then)

    def stop(self) -> None:
        """The connection is lost."""
        if self._timer is not None:
            self._timer.cancel()

    def _progress(self) -> tuple[int, int]:
        return self._open_count(), self._connection.outbox.sent_bytes // PROGRESS_BYTES

    def _give_up(self, progress: tuple[int, int]) -> None:
        self._connection.abort(f"{progress[0]} {self._lost} when it was closed")


MAX_UNSENT_MESSAGES: Final = 65_536
"""A peer that does not read its answers is not read any more from here on."""
SAY_ARRIVED_BYTES: Final = 256 * 1024
"""bytes after which the peer is sent an acknowledgement"""

log = logging.getLogger(__name__)


class Streams(abc.ABC):
    """The part of a connection that knows of sockets. (The `LinkUser` of its links.)

    Args:
        peer: the name that the other side proved.
        patience: seconds for which it is kept when it is cut; 0: a cut ends it.
        redial: connects again; None on the side that waits.
    """

    def __init__(
        self, heartbeat: Heartbeat, *, peer: str, patience: float, redial: Again | None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.peer = peer
        """the name that the other side proved in the handshake"""
        self.reconnection = Reconnection(patience, redial, self.lose)
        """what happens after a cut"""
        self.link: Link | None = None
        """the socket in use"""
        self._pid = 0
        self.local = False
        """whether it goes, or went last, over a Unix socket: the peer is on this host"""
        self._blind = False
        self.encrypted = False
        """whether it goes, or went last, over TLS"""
        self.local_host: str | None = None
        """address of this host on the connection, also when it is cut; None over a Unix socket"""
        self.round_trip = 0.0
        """seconds that a message and its answer took on the way, as the system measured it at the
        last heartbeat; 0 over a Unix socket, and where the system does not say"""
        self.far = False
        """whether a round trip takes so long that it is worth larger windows, and copies"""
        self.outbox = Outbox(self._loop, keep=patience > 0)
        """what waits to be sent, and where what is said together is collected"""
        self.reader = MessageReader()
        """finds the messages in what arrives"""
        self.monitor = HeartbeatMonitor(heartbeat, self._beat, self._silent)
        self._patient = redial is not None
        self.reading_paused = False
        """whether the peer is not read, because it does not read its answers"""
        self._peer_ended = False
        self._when_resumed: Callable[[], None] | None = None
        self._timer: Timer | None = None
        self._end_timer: ProgressTimer | None = None
        self.closed = False
        """whether it is closed or lost"""
        self.received_bytes = 0
        self.said_arrived = 0
        self._sent_by_beat = 0

    @property
    def reconnecting(self) -> bool:
        """Whether the connection is cut now: what is asked waits until it goes on, or is lost."""
        return self.reconnection.cut

    def peer_ended(self) -> None:
        """Note that the peer's process has ended, as whoever started it says: do not wait for it
        after a cut. What it sent before is read."""
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
        self.local = is_local(link.transport)
        self.encrypted = link.transport.get_extra_info("ssl_object") is not None
        name = link.transport.get_extra_info("sockname")
        self.local_host = name[0] if isinstance(name, tuple) else None
        self._blind = self.local and not can_watch(self._pid)
        self._measure()
        self._carried(link.transport)
        self.reconnection.found()
        movement.count += 1
        self.monitor.start()
        if self.reading_paused:
            link.transport.pause_reading()
        try:
            self.outbox.attach(link.transport, arrived)
        except MalformedFrame as error:
            self.malformed(str(error))
            return
        if not self.outbox.paused:
            self._resume_reading()
        if self._when_resumed is not None:
            self._loop.call_soon(self._when_resumed)
            self._forget_when_resumed()

    def cut(self, link: Link, reason: str) -> None:
        """Note that a socket is gone; a socket that is not in use was known to be."""
        if link is not self.link or self.closed:
            return
        self.link = None
        self.monitor.stop()
        self.outbox.cut()
        if (
            not self.reconnection.patience or self._blind
        ):  # it has died, most likely: others wait for that
            self.lose(reason)
            return
        if self._peer_ended:
            self.lose(f"{reason}; {ENDED}")
            return
        log.info("the connection to %s was cut (%s): connecting again", self.peer, reason)
        self.reconnection.was_cut(reason, self._pid)

    def drop_link(self) -> None:
        """The peer has connected again: drop the socket in use."""
        link = self.link
        if link is not None:
            link.drop()
            self.cut(link, "the peer connected again")

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
        """Return whether the connection is cut while the peer may miss something of what was said
        to it. Then call ``then`` when it goes on; a peer that does not come back for
        `GRACE_SECONDS` is given up."""
        if not self.reconnecting or self.outbox.all_arrived:
            return False
        if self._when_resumed is None:
            self._when_resumed = then
            self._timer = Timer(GRACE_SECONDS, self._not_resumed)
        return True

    # ---- for the connection

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Give the connection up at once, and tell the peer."""

    @abc.abstractmethod
    def lose(self, reason: str) -> None:
        """The connection is lost; nothing if it was already."""

    @abc.abstractmethod
    def malformed(self, what: str) -> MalformedFrame:
        """The peer does not follow the protocol."""

    @abc.abstractmethod
    def _carried(self, transport: asyncio.Transport) -> None:
        """The streams go on over this."""

    @abc.abstractmethod
    def received(self, count: int, messages: Iterator[Message]) -> None:
        """Count bytes that came; the messages that they complete are read while they are
        handled."""

    # ---- inside

    def _resume_reading(self) -> None:
        if self.reading_paused and not self.closed:
            self.reading_paused = False
            if self.transport is not None:
                self.transport.resume_reading()

    def _not_resumed(self) -> None:
        why = f"it was cut when it was closed, and not resumed within {GRACE_SECONDS:g} s"
        log.warning("what was said last to %s may be lost: %s", self.peer, why)
        self.abort(why)

    def _forget_when_resumed(self) -> None:
        self._when_resumed = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expect_the_end(self) -> None:
        """The system says by a cut that all was read; a network that is gone says nothing."""
        self._end_timer = ProgressTimer(
            GRACE_SECONDS, lambda: self.received_bytes, lambda _: self.abort(ENDED)
        )

    @property
    def transport(self) -> asyncio.Transport | None:
        """Transport of the socket in use."""
        return None if self.link is None else self.link.transport

    def say_arrived(self) -> None:
        """Acknowledge what has arrived."""
        self.said_arrived = self.received_bytes
        self.outbox.add(pack_small(FrameType.PING, self.received_bytes))

    def _measure(self) -> None:
        self.round_trip = sockets.round_trip(self.transport)
        self.far = self.round_trip >= sockets.FAR_SECONDS

    def _beat(self) -> None:
        """Send a heartbeat, if nothing was sent lately or something is to be acknowledged."""
        if not self.local:
            self._measure()
        quiet = self.outbox.sent_bytes == self._sent_by_beat
        if quiet or self.received_bytes != self.said_arrived:
            self.say_arrived()
        self._sent_by_beat = self.outbox.sent_bytes

    def _silent(self, seconds: float) -> bool:
        """Whether to go on waiting. An owner that was stopped is waited for: nobody can take over
        what it has, and the work goes on with it. A stopped worker's items go to others."""
        if self._patient and is_stopped(self._pid):
            return True
        self.abort(f"nothing was heard for {seconds:.1f} s: the process is stopped, or blocked")
        return False

    def hang_up(self, *, first: bool = False) -> None:
        """Close the socket in use, once what was said is sent."""
        if self.link is not None:
            self.link.hang_up(first=first)

    def _stop(self) -> None:
        """Send and try nothing more: the connection is lost."""
        self.monitor.stop()
        self._forget_when_resumed()
        if self._end_timer is not None:
            self._end_timer.cancel()
        self.reconnection.stop()
        self.outbox.detach()
