"""The ends of a channel that lives in another process.

They are open from the start: the owner counted them when it gave them away. A cancelled wait leaves
the channel as it was; an end whose connection is lost raises `ConnectionLost`.
"""

from __future__ import annotations

import contextlib
from typing import Any

from rlinf_async.channels.errors import NoReceivers
from rlinf_async.channels.wire.direct.direct import Direct
from rlinf_async.channels.wire.links.protocol import EndRef
from rlinf_async.channels.wire.links.remote_channel import Wire
from rlinf_async.channels.wire.links.remote_latest import RemoteLatestReceiver, RemoteLatestSender
from rlinf_async.channels.wire.links.remote_receiver import RemoteReceiver
from rlinf_async.channels.wire.links.remote_sender import RemoteSender
from rlinf_async.channels.wire.links.transfers import Transfers
from rlinf_async.channels.wire.session.connection import Connection

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
