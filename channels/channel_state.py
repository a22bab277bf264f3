"""What all keys of one channel share: its type and limits, who has its ends, how it ended, and its
counts."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from rlinf_async.channels import errors
from rlinf_async.channels.delivery import Entry
from rlinf_async.channels.errors import MalformedFrame, error_text
from rlinf_async.channels.quick_check import round_trip_check
from rlinf_async.channels.remote_payload import RemotePayload, remote_payload_of
from rlinf_async.channels.statistics import DeadLetter, Edges
from rlinf_async.channels.untyped import (
    Encoded,
    EncodeList,
    Form,
    check_item,
    check_key_and_weight,
    item_class,
)

if TYPE_CHECKING:
    from rlinf_async.channels.ends import Key

log = logging.getLogger(__name__)
CHECKPOINT: Final = 128
"""One put and one get of so many gives others in this loop a turn: a loop over them can be
cancelled, and starves no other task."""


class ChannelState(abc.ABC):
    """The state of one channel that the queues of its keys read and count in."""

    __slots__ = (
        "accepts",
        "capacity",
        "channel",
        "copied",
        "credit",
        "credit_waits",
        "dead_letters",
        "decode",
        "direct",
        "edges",
        "encode",
        "encode_list",
        "failure",
        "fits",
        "form",
        "get_turn",
        "get_wait_seconds",
        "get_waits",
        "gets",
        "had_sender",
        "item_class",
        "item_type",
        "leases_ended",
        "leasing",
        "loaded",
        "lost",
        "max_deliveries",
        "max_weight",
        "name",
        "no_receivers_left",
        "open",
        "opened_at",
        "prefetched",
        "prefetched_weight",
        "put_turn",
        "put_wait_seconds",
        "put_waits",
        "receivers",
        "redelivered",
        "refused",
        "round_trip",
        "senders",
        "sequence",
        "shared",
        "stale",
        "touched",
        "unconfirmed",
        "withdrawn",
    )  # fmt: skip

    def __init__(
        self, item_type: Any, name: str, capacity: int, max_weight: int | None, max_deliveries: int
    ) -> None:
        self.item_type = item_type
        self.item_class = item_class(item_type)
        self.round_trip = round_trip_check(item_type, name)
        self.fits = self.round_trip.fits
        self.name = name
        self.capacity = capacity
        self.max_weight = max_weight
        self.max_deliveries = max_deliveries
        self.senders: dict[int, str] = {}
        """who holds each open end, by its number"""
        self.receivers: dict[int, str] = {}
        self.touched: dict[int, set[Any]] = {}
        """by number of an end: each `KeyQueue` in which it has waited, or was sent items in
        advance; under 0, those that have granted credit. Some of them are not in use any more."""
        self.leasing: dict[object, int] = {}
        """how many leases each owner of some holds"""
        self.leases_ended = 0
        self.had_sender = False
        self.open = True
        """not closed, not failed"""
        self.no_receivers_left = False
        """there were receivers, and all have closed"""
        self.accepts = True
        """open, with a receiver that is left or may still come"""
        self.failure: errors.Failure | None = None
        self.decode: Callable[[Encoded], Any] | None = None
        """set where other processes have ends, as are the next three"""
        self.encode: Callable[[Any], Encoded] | None = None
        self.encode_list: EncodeList | None = None
        self.form = Form()
        self.dead_letters: list[DeadLetter] = []
        self.edges = Edges()
        self.sequence = 0
        """of the item that came in last"""
        self.opened_at: float | None = None
        """when its first end was opened: it may be made before the loop that runs it"""
        self.channel: Callable[[], object] = lambda: None
        """the `Channel` that it belongs to, while that is used"""
        self.withdrawn = 0
        """items that came in and were taken out again, since their put was cancelled"""
        self.gets = self.put_waits = self.get_waits = 0
        self.put_turn = self.get_turn = CHECKPOINT - 1
        """the ``sequence`` and the ``gets`` with which others in the loop have a turn next"""
        self.put_wait_seconds = self.get_wait_seconds = 0.0
        self.redelivered = self.unconfirmed = self.stale = 0
        self.shared = self.copied = self.direct = self.loaded = self.lost = 0
        self.credit = self.credit_waits = self.refused = 0
        self.prefetched = self.prefetched_weight = 0

    @property
    def ended(self) -> bool:
        """No item can come any more."""
        return not self.open or (self.had_sender and not self.senders)

    @staticmethod
    def now() -> float:
        """The loop's clock where one runs; channels may be made before."""
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return time.monotonic()

    @abc.abstractmethod
    def forget(self, key: Key | None) -> None:
        """Remove this key if it is idle: keys come and go, and must not stay in memory."""

    @abc.abstractmethod
    def touch(self, end: int, queue: Any) -> None:
        """Find this `KeyQueue`, of a key, when something becomes of this end: see ``touched``."""

    @abc.abstractmethod
    def ended_error(self, key: Key | None) -> errors.ChannelError:
        """The error for a get under this key, of which nothing will come any more."""

    @abc.abstractmethod
    def stuck_holders(self) -> set[object]:
        """Of those who hold something and wait here, under whichever key, the ones that only wait
        for one another."""

    # ---- what may be asked for

    def check_put(self, key: object, weight: object) -> None:
        """Refuse a put that no receiver can take, or that weighs nothing.

        Raises:
            ChannelClosed, ChannelFailed, NoReceivers, TypeError, ValueError
        """
        self._check_open()
        if self.no_receivers_left:
            raise errors.no_receivers(self.name)
        check_key_and_weight(self.name, key, weight)

    def check_item(self, item: Any) -> None:
        """Refuse an item that is not of the channel's type."""
        if not self.fits(item):
            check_item(item, self.item_type, self.item_class, self.name)
            self.round_trip.check(item)

    def check_get(self) -> None:
        """Refuse a get of a failed channel.

        Raises:
            ChannelFailed
        """
        if self.failure is not None:
            raise errors.channel_failed(self.name, self.failure)

    def _check_open(self) -> None:
        if self.failure is not None:
            raise errors.channel_failed(self.name, self.failure)
        if not self.open:
            raise errors.channel_closed(self.name)

    # ---- items

    def value(self, item: Any) -> Any:
        """The item to hand out here. One from another process is decoded now.

        Raises:
            MalformedFrame: it is not of the channel's type.
        """
        return self.decode(item) if item.__class__ is Encoded and self.decode else item

    def dead_letter(self, entry: Entry, error: BaseException | str) -> None:
        """Move an item that cannot be used to the dead letters."""
        item = entry.item
        if self.direct and (payload := remote_payload_of(item)) is not None:
            payload.start_loading().add_done_callback(
                lambda _: self._dead_letter_loaded(entry, payload, error)
            )
            return
        with contextlib.suppress(MalformedFrame):  # then it stays encoded
            item = self.value(item)
        self.dead_letters.append(DeadLetter(item, entry.deliveries, error_text(error)))
        log.error(
            "channel %r: an item is given up after %d deliveries and kept in dead_letters: %s",
            self.name,
            entry.deliveries,
            error_text(error),
        )

    def _dead_letter_loaded(
        self, entry: Entry, payload: RemotePayload, error: BaseException | str
    ) -> None:
        if payload.loaded is None:
            self.gets -= 1
            self.count_lost([entry])
        else:
            self.dead_letter(entry, error)

    def count_lost(self, entries: list[Entry]) -> None:
        """These cannot be had: their producer died with their arrays."""
        self.lost += len(entries)
        holders = [entry.item.buffers.holder for entry in entries]
        for holder in dict.fromkeys(holders):
            log.error(
                "channel %r: %d items are lost, since %s was lost before anybody had fetched "
                "their arrays from it", self.name, holders.count(holder), holder,
            )  # fmt: skip
