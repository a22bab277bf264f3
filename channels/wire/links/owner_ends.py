"""The ends of this process's channels that other processes use."""

from __future__ import annotations

from typing import Any

from rlinf_async.channels.errors import ChannelError
from rlinf_async.channels.latest import Latest
from rlinf_async.channels.local import LocalReceiver, LocalSender
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.wire.links.protocol import EndKind


class OpenEnd:
    """An end of a queue that another process uses."""

    __slots__ = ("kind", "lent_as", "number", "queue")

    def __init__(self, queue: Queue, kind: EndKind, holder: str) -> None:
        self.queue = queue
        self.kind: EndKind = kind
        add = queue.add_sender if kind == "sender" else queue.add_receiver
        self.number = add(holder)
        self.lent_as: tuple[int, ...] = ()
        """numbers under which others use it (see `homes`)"""

    @property
    def holder(self) -> str:
        """Who uses it, in reports."""
        ends = self.queue.senders if self.kind == "sender" else self.queue.receivers
        return ends.get(self.number, "")

    def close(self) -> None:
        if self.kind == "sender":
            self.queue.remove_sender(self.number)
        else:
            self.queue.remove_receiver(self.number)


class LentEnd(OpenEnd):
    """An end of this process that another process uses in its place."""

    __slots__ = ("end",)

    def __init__(self, end: LocalSender[Any] | LocalReceiver[Any]) -> None:
        self.end = end.open()
        self.queue = end.queue
        self.kind = "sender" if isinstance(end, LocalSender) else "receiver"
        self.number = end.number
        self.lent_as = ()

    def close(self) -> None:
        self.end.close()


class LatestEnd:
    """An end of a `Latest` that another process uses."""

    __slots__ = ("kind", "latest")

    def __init__(self, latest: Latest[Any], kind: EndKind) -> None:
        self.latest = latest
        self.kind: EndKind = kind

    def close(self) -> None:
        """A `Latest` does not count its ends."""


def channel_of(end: OpenEnd | LatestEnd | ChannelError) -> Queue | Latest[Any] | None:
    """The channel that an end belongs to; None for one that could not be opened."""
    if isinstance(end, OpenEnd):
        return end.queue
    return end.latest if isinstance(end, LatestEnd) else None
