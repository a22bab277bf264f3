"""Deliveries to, and puts of, tasks of the process that owns the channel."""

from __future__ import annotations

from itertools import islice
from typing import Final

from rlinf_async.channels.delivery import Delivery, Entry, Outcome, WaitingPut
from rlinf_async.channels.errors import ChannelError
from rlinf_async.channels.key_queue import KeyQueue
from rlinf_async.channels.remote_payload import PayloadLost, remote_payload_of
from rlinf_async.channels.waitfor import WaitFuture

LOAD_AHEAD: Final = 4
"""Items behind the one that is taken in this process, which are loaded meanwhile."""


class LocalDelivery(Delivery):
    """A delivery to a task of this process, which awaits ``future``."""

    __slots__ = ("future", "queue")

    def __init__(
        self, queue: KeyQueue, receiver: int, holder: str, owner: object,
        target: int = 1, at_least: int = 1, lease: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(receiver, holder, owner, target, at_least, lease)
        self.queue = queue
        self.future = WaitFuture(loop=self.loop)

    @property
    def cancelled(self) -> bool:
        return self.future.done()

    def served(self) -> None:
        self.future.set_result(None)

    def refused(self, error: ChannelError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class LocalPut(WaitingPut):
    """A put of a task of this process, which awaits ``future``."""

    __slots__ = ("future",)

    def __init__(self, queue: KeyQueue, entry: Entry, sender: int, holder: str) -> None:
        super().__init__(entry, sender, holder)
        self.future = WaitFuture(loop=self.loop)

    @property
    def cancelled(self) -> bool:
        return self.future.done()

    def admitted(self) -> None:
        self.future.set_result(None)

    def refused(self, error: ChannelError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


def load_ahead(queue: KeyQueue) -> None:
    """Load the payloads of the first items: a receiver in this process will take them."""
    for entry in islice(queue.entries, LOAD_AHEAD):
        if (payload := remote_payload_of(entry.item)) is not None and not payload.lost:
            payload.start_loading()


async def load_payloads(delivery: LocalDelivery) -> bool:
    """Wait until all of these items are here; False if some are lost, and the others returned."""
    load_ahead(delivery.queue)
    lost: list[int] = []
    payloads = [remote_payload_of(entry.item) for entry in delivery.held()]
    for payload in payloads:
        if payload is not None and not payload.lost:
            payload.start_loading()
    for index, payload in enumerate(payloads):
        try:
            if payload is not None:
                await payload.wait_loaded()
        except PayloadLost:
            lost.append(index)
    if lost:
        delivery.queue.return_except(delivery, lost, Outcome.LOST)
    return not lost
