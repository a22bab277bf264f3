"""Channels of this process that others may use, and the ends that those have of them.

Who closes an end that another process uses:

* one that was opened for it (`end_ref`): that process, or `Published.release`. The loss of its
  connection does not close it, because a restarted worker goes on using it;
* one that it cloned itself: that process, or the loss of its connection.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.ends import LatestReceiver, LatestSender, Receiver, Sender
from rlinf_async.channels.errors import ChannelClosed, ChannelError, ConnectionLost
from rlinf_async.channels.latest import Latest, LocalLatestReceiver, LocalLatestSender
from rlinf_async.channels.local import Channel, LocalReceiver, LocalSender
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.wire.items.item_codec import ItemCodec
from rlinf_async.channels.wire.links.owner_credit import Credits
from rlinf_async.channels.wire.links.owner_deliveries import Deliveries
from rlinf_async.channels.wire.links.owner_ends import LatestEnd, LentEnd, OpenEnd, channel_of
from rlinf_async.channels.wire.links.protocol import EndKind, EndRef
from rlinf_async.channels.wire.session.answers import Request
from rlinf_async.channels.wire.session.connection import Connection

Local = Sender[Any] | Receiver[Any] | LatestSender[Any] | LatestReceiver[Any]


class Peer:
    """What one connected process holds."""

    def __init__(self, connection: Connection) -> None:
        self.credits = Credits(connection)
        self.deliveries = Deliveries(connection)
        self.clones: dict[int, OpenEnd | ChannelError] = {}
        self._last_clone = 0
        """numbers of clones are ever lower"""
        self._awaited: dict[int, asyncio.Future[None]] = {}

    def add_clone(self, number: int, end: OpenEnd | ChannelError) -> None:
        """Keep an end that it has cloned."""
        self.clones[number] = end
        self._last_clone = number
        if (waiting := self._awaited.pop(number, None)) is not None and not waiting.done():
            waiting.set_result(None)

    async def clone(self, number: int) -> OpenEnd:
        """The end that it cloned as this number; waits until that is told.

        Raises:
            ChannelError: it was closed since, or could not be opened.
        """
        if number < self._last_clone:
            waiting = self._awaited.get(number)
            if waiting is None:
                waiting = self._awaited[number] = asyncio.get_running_loop().create_future()
            await asyncio.shield(waiting)
        found = self.clones.get(number)
        if isinstance(found, ChannelError):
            raise type(found)(*found.args)
        if found is None:
            raise ChannelClosed(f"end {number} was closed before it was used")
        return found

    def lose(self, reason: str) -> None:
        """It is gone: what it has not told of will not come."""
        for waiting in self._awaited.values():
            if not waiting.done():
                waiting.set_exception(ConnectionLost(f"who opened this end is gone: {reason}"))
        self._awaited.clear()

    def close_clones(self, of: Queue | Latest[Any] | None = None) -> None:
        """Close the ends that it cloned itself, of one channel or of all."""
        for number, end in list(self.clones.items()):
            if of is None or channel_of(end) is of:
                del self.clones[number]
                if isinstance(end, OpenEnd):
                    end.close()


class Published:
    """The channels, by number and by end, and the processes that use them."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._ends: dict[int, OpenEnd | LatestEnd] = {}
        self._published: dict[int, tuple[int, Queue | Latest[Any]]] = {}
        self._peers: dict[Connection, Peer] = {}
        self._newest: dict[Latest[Any], tuple[int, Encoded]] = {}

    # ---- for the runtime

    def publish(self, channel: Channel[Any] | Latest[Any]) -> int:
        """Let other processes use this channel; its number. Doing it twice is harmless.

        Raises:
            TypeError: its type cannot travel between processes.
        """
        return self._publish(channel.queue if isinstance(channel, Channel) else channel)

    def end_ref(self, end: Local, holder: str) -> EndRef:
        """Open an end like this one for another process, named ``holder`` in reports.

        Raises:
            ChannelError: the channel does not live here, or is closed.
            TypeError: its type cannot travel between processes.
        """
        number = next(self._numbers)
        opened = self._open(end, holder)
        self._ends[number] = opened
        if isinstance(opened, LatestEnd):
            version = end.version if isinstance(end, LatestReceiver) else 0
            latest = opened.latest
            return EndRef(number, opened.kind, latest.name, version, form=latest.form)
        queue = opened.queue
        published = self._publish(queue)
        return EndRef(number, opened.kind, queue.name, queue=published, form=queue.form)

    def lend(self, end: Local) -> EndRef:
        """Let another process use this very end: closing it there closes it here.

        Take it back with `take_back` when its user is gone; it stays open here.

        Raises: as `end_ref`.
        """
        if not isinstance(end, LocalSender | LocalReceiver):
            return self.end_ref(end, "")
        queue = self._publish(end.queue)
        number = next(self._numbers)
        lent = self._ends[number] = LentEnd(end)
        return EndRef(number, lent.kind, end.channel_name, queue=queue, form=end.queue.form)

    def take_back(self, number: int) -> None:
        """The other process must not use this end any more."""
        self._ends.pop(number, None)

    def release(self, number: int) -> None:
        """Close an end that `end_ref` opened. Doing it twice is harmless."""
        end = self._ends.pop(number, None)
        if end is not None:
            end.close()

    def withdraw(self, channel: Channel[Any] | Latest[Any]) -> None:
        """Forget this channel: the ends that other processes have of it are closed."""
        inner = channel.queue if isinstance(channel, Channel) else channel
        withdrawn = self._published.pop(id(inner), None)
        if isinstance(inner, Latest):
            self._newest.pop(inner, None)
        for number in [at for at, end in self._ends.items() if channel_of(end) is inner]:
            self.release(number)
        for peer in self._peers.values():
            peer.close_clones(of=inner)
            if withdrawn is not None:
                peer.credits.withdraw(withdrawn[0])

    def disconnected(self, connection: Connection, reason: str) -> None:
        """This process is gone: its clones are closed, its credit is taken back, and what was
        delivered to it. Registered as close callback."""
        peer = self._peers.pop(connection, None)
        if peer is None:
            return
        peer.close_clones()
        peer.lose(reason)
        peer.credits.close()

    def lend_clone(self, end: OpenEnd) -> int:
        """Let another process use an end that was cloned by the one which made its channel; its
        number. Closed by either, it is closed."""
        number = next(self._numbers)
        self._ends[number] = end
        end.lent_as = (*end.lent_as, number)
        return number

    def open_clone(
        self, connection: Connection, number: int, queue: Queue, kind: EndKind, holder: str
    ) -> None:
        """Open an end for this process, which has given it this number.

        Raises:
            ChannelError: the number is not free. That the channel has ended is said when the end is
                used: nobody waits for this.
        """
        peer = self.peer(connection)
        if number >= 0 or number in peer.clones:
            raise ChannelError(f"a clone cannot have the number {number}: it is not free")
        try:
            peer.add_clone(number, OpenEnd(queue, kind, holder))
        except ChannelError as error:
            peer.add_clone(number, error)

    def close_clone(self, connection: Connection, number: int) -> None:
        """Close an end that this process cloned itself."""
        end = self.peer(connection).clones.pop(number, None)
        if isinstance(end, OpenEnd):
            for lent in end.lent_as:
                self._ends.pop(lent, None)
            end.close()

    # ---- inside

    def _publish(self, channel: Queue | Latest[Any]) -> int:
        found = self._published.get(id(channel))
        if found is not None:
            return found[0]
        if isinstance(channel, Queue):
            if channel.decode is None:
                codec = ItemCodec(channel.item_type)
                channel.encode, channel.encode_list = codec.encode, codec.encode_list
                channel.decode, channel.form = codec.decode, codec.form
        elif channel.decode is None:
            codec = ItemCodec(channel.item_type)
            channel.encode, channel.form = codec.encode, codec.form
            channel.decode = codec.decode_copy  # once for each receiver
        number = next(self._numbers)
        self._published[id(channel)] = number, channel
        return number

    def _open(self, end: Local, holder: str) -> OpenEnd | LatestEnd:
        if isinstance(end, LocalSender | LocalReceiver):
            self._publish(end.queue)
            return OpenEnd(
                end.queue, "sender" if isinstance(end, LocalSender) else "receiver", holder
            )
        if isinstance(end, LocalLatestSender | LocalLatestReceiver):
            self._publish(end.latest)
            sends = isinstance(end, LocalLatestSender)
            return LatestEnd(end.latest, "latest_sender" if sends else "latest_receiver")
        raise ChannelError(
            f"{end!r} cannot be given on to another process: its channel does not live in this one"
        )

    def peer(self, connection: Connection) -> Peer:
        """What this process holds."""
        peer = self._peers.get(connection)
        if peer is None:
            peer = self._peers[connection] = Peer(connection)
            connection.on_close(self.disconnected, first=True)
        return peer

    def _find(self, connection: Connection, number: int, *kinds: EndKind) -> OpenEnd | LatestEnd:
        """The end that a request is about, if it is of one of these kinds."""
        end: OpenEnd | LatestEnd | ChannelError | None = self._ends.get(number)
        if number < 0:
            end = self.peer(connection).clones.get(number)
        if isinstance(end, ChannelError):
            raise type(end)(*end.args)
        if end is None:
            raise ChannelClosed(f"end {number} of {connection.peer} was closed, or never opened")
        if end.kind not in kinds:
            raise ChannelError(f"end {number} is a {end.kind}: it cannot do this")
        return end

    def _open_end(self, connection: Connection, number: int, kind: EndKind) -> OpenEnd:
        """The end of a queue that a request is about."""
        end = self._ends.get(number)
        if isinstance(end, OpenEnd) and end.kind == kind:  # what most are, without a call
            return end
        end = self._find(connection, number, kind)
        assert isinstance(end, OpenEnd)
        return end

    def _queue_end(self, request: Request[Any], *kinds: EndKind) -> OpenEnd:
        end = self._find(request.connection, request.meta.end, *(kinds or ("sender", "receiver")))
        assert isinstance(end, OpenEnd)
        return end

    def _latest(self, connection: Connection, number: int, kind: EndKind) -> Latest[Any]:
        end = self._find(connection, number, kind)
        assert isinstance(end, LatestEnd)
        return end.latest
