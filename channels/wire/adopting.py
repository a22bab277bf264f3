"""The user's side: ends of queues that live with other processes, or with this one.

The ends are open from the start: the owner counted them when it gave them away. A cancelled wait
leaves the channel as it was; an end whose connection is lost raises `ConnectionLost`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import msgspec

from rlinf_async.channels.errors import ChannelError, NoReceivers
from rlinf_async.channels.wire.direct import Direct
from rlinf_async.channels.wire.homes import HomedQueues, reach
from rlinf_async.channels.wire.protocol import Adopt, Adopted, EndRef, Home
from rlinf_async.channels.wire.receiving import RemoteReceiver
from rlinf_async.channels.wire.remote_ends import RemoteLatestReceiver, RemoteLatestSender, Wire
from rlinf_async.channels.wire.sending import RemoteSender, Transfers
from rlinf_async.channels.wire.session.connection import Connection
from rlinf_async.channels.wire.session.endpoint import Timeouts

AnyRemoteEnd = (
    RemoteSender[Any] | RemoteReceiver[Any] | RemoteLatestSender[Any] | RemoteLatestReceiver[Any]
)


class ChannelClient:
    """Makes ends of what the owner sent over this connection.

    Args:
        direct: by which large arrays go from producer to consumer, past the owner. Without it they
            go through the owner.
    """

    def __init__(self, connection: Connection, direct: Direct | None = None) -> None:
        self._connection = connection
        self._direct = direct
        if direct is not None:
            connection.attach(direct)
        self._senders: list[RemoteSender[Any]] = []

    @property
    def has_senders(self) -> bool:
        """Whether there may be anything to `flush`."""
        return bool(self._senders)

    async def flush(self) -> None:
        """Return once all that its senders have put is in its place.

        Items that nobody takes because every receiver has closed meanwhile are counted, and are no
        error: in a channel of one process they would be left over.

        Raises:
            ChannelError: what became of items of the first of them.
        """
        if self._senders:
            await Transfers.of(self._connection).confirmed()
        for sender in self._senders:
            with contextlib.suppress(NoReceivers):
                sender.raise_error()

    def end(self, ref: EndRef, item_type: Any) -> AnyRemoteEnd:
        """The end that this stands for, of a channel of ``item_type``.

        Raises:
            TypeError: items of this type cannot travel.
        """
        wire = Wire(self._connection, ref, item_type, self._direct)
        if ref.kind == "sender":
            self._senders.append(sender := RemoteSender[Any](wire, ref.number))
            return sender
        if ref.kind == "receiver":
            return RemoteReceiver(wire, ref.number)
        if ref.kind == "latest_sender":
            return RemoteLatestSender(wire, ref.number)
        return RemoteLatestReceiver(wire, ref.number, ref.version)


class AdoptedEnd(NamedTuple):
    """An end that this process may use."""

    make: Callable[[Any], Any]
    """makes it, of an item type"""
    client: ChannelClient | None
    """client through which the end is used; None where the queue lives here"""


class Homes:
    """The connections of this process to the homes of queues, one to each.

    Args:
        own: what lives here, under which name.
        times: as of `connect`.
    """

    def __init__(
        self,
        secret: bytes,
        name: str,
        own: Callable[[], tuple[Home, HomedQueues] | None] = lambda: None,
        **times: Unpack[Timeouts],
    ) -> None:
        self._secret = secret
        self._name = name
        self._own = own
        self._times = times
        self._connecting: dict[Home, asyncio.Task[Connection]] = {}

    async def adopt(self, ref: EndRef, direct: Direct | None = None) -> AdoptedEnd:
        """The end that a maker has opened for this process.

        Raises:
            HomeLost: its home is gone, or cannot be reached.
            ChannelError: it was closed meanwhile.
        """
        home = ref.home
        if home is None:
            raise ChannelError(f"channel {ref.channel!r} lives with the process that sent its end")
        own = self._own()
        if own is not None and own[0] == home:
            queues = own[1]
            await queues.adopt_here(ref.queue, ref.number)
            return AdoptedEnd(lambda kind: queues.take(ref.queue, ref.number, kind), None)
        connection = await self._reach(home)
        adopted, _ = await connection.request(
            "home.adopt", Adopt(ref.queue, ref.number), reply=Adopted
        )
        mine = msgspec.structs.replace(ref, number=adopted.end)
        client = ChannelClient(connection, direct)
        return AdoptedEnd(lambda kind: client.end(mine, kind), client)

    async def close(self) -> None:
        """Close them, once what was put is in its place."""
        tasks, self._connecting = list(self._connecting.values()), {}
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, Connection):
                found.close()
                await found.wait_closed()

    async def _reach(self, home: Home) -> Connection:
        task = self._connecting.get(home)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            made = reach(home, self._secret, self._name, **self._times)
            task = self._connecting[home] = asyncio.create_task(made, name=f"reach {home.name}")
        return await asyncio.shield(task)
