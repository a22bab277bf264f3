"""The queue behind a channel, in the process that owns it: its ends, its leases, its end.

How items are kept and handed on, and which invariants hold, stands in `serving`.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import msgspec

from rlinf_async.channels import endings, seen
from rlinf_async.channels.away import Away, away_of, is_lost
from rlinf_async.channels.encoded import Encoded, copy_of
from rlinf_async.channels.ends import Key
from rlinf_async.channels.errors import (
    ChannelFailed,
    LeaseLost,
    MalformedFrame,
)
from rlinf_async.channels.itemtypes import check_item
from rlinf_async.channels.lanes import Entry, LeaseRecord, now
from rlinf_async.channels.reserving import Reserving
from rlinf_async.channels.saying import say
from rlinf_async.channels.statistics import DeadLetter, Statistics
from rlinf_async.channels.waitfor import Wait

log = logging.getLogger(__name__)


class Queue(Reserving):
    """The state of one channel."""

    __slots__ = ()

    # ---- ends

    def add_sender(self, holder: str) -> int:
        self._check_open()
        self.senders[number := self._new_end()] = holder
        self.had_sender = True
        return number

    def remove_sender(self, number: int) -> None:
        """Close a sender: its own waiting puts are refused, and the last one ends the channel."""
        if self.senders.pop(number, None) is not None:
            for lane in self.every_lane():
                self._refuse_putters(lane, endings.closed_while_waiting, number)
                self._serve(lane)

    def add_receiver(self, holder: str) -> int:
        self.receivers[number := self._new_end()] = holder
        self.deserted = False
        return number

    def remove_receiver(self, number: int) -> None:
        """Close a receiver: its own waiting gets are refused, and with the last one all puts."""
        if self.receivers.pop(number, None) is not None:
            self.close_readers(number)
            self.deserted = not self.receivers
            for lane in self.every_lane():
                self._refuse_getters(lane, endings.closed_while_waiting, number)
                if self.deserted:
                    self._refuse_putters(lane, endings.no_receivers)
                self._serve(lane)
            if self.deserted:
                self.recall_all()

    def _new_end(self) -> int:
        if self.born is None:
            self.born = now()
        return next(self._numbers)

    def close(self) -> None:
        """No more items; what is queued can still be taken."""
        if self.open:
            self.open = False
            for lane in self.every_lane():
                self._refuse_putters(lane, endings.closed)
                self._serve(lane)
            self.recall_all()

    def fail(self, error: BaseException | str) -> None:
        """Every waiting and later use raises. The first error stays."""
        if self.failure is not None:
            return
        self.failure = (say(error), error if isinstance(error, BaseException) else None)
        self.open = False
        for lane in self.every_lane():
            self._refuse_putters(lane, self._failed)
            self._refuse_getters(lane, self._failed)
        self.recall_all()

    def _failed(self, name: str) -> ChannelFailed:
        return endings.failed(name, self.failure or ("", None))

    # ---- items

    def check_item(self, item: Any) -> None:
        """Refuse an item that is not of the channel's type."""
        check_item(item, self.item_type, self.item_class, self.name)

    def value(self, entry: Entry) -> Any:
        """The item to hand out here. One from another process is decoded now.

        Raises:
            MalformedFrame: it is not of the channel's type.
        """
        item = entry.item
        return self.decode(item) if item.__class__ is Encoded and self.decode else item

    def lend_values(self, number: int, entries: list[Entry]) -> list[Any]:
        """The items of a lease, their arrays the holder's own: what it does to them before it
        fails must not be delivered again. One that cannot be decoded is buried.

        Raises:
            MalformedFrame: as `value`; the lease is over, the other items are back.
        """
        if self.decode is None:
            return [entry.item for entry in entries]
        found: list[Any] = []
        for entry in entries:
            try:
                found.append(self.value(msgspec.structs.replace(entry, item=copy_of(entry.item))))
            except MalformedFrame as error:
                self.leases[number].entries.remove(entry)
                self.bury(entry, error)
                self.ungrant(number)
                raise
        return found

    def value_of(self, key: Key | None, entry: Entry) -> Any:
        """As `values`, of one entry."""
        item = entry.item
        if item.__class__ is not Encoded or self.decode is None:
            return item
        try:
            return self.decode(item)
        except MalformedFrame as error:
            self.bury(entry, error)
            self.return_entries(key, [])
            raise

    def values(self, key: Key | None, entries: list[Entry]) -> list[Any]:
        """The items to hand out; one that cannot be decoded is buried, the others go back.

        Raises:
            MalformedFrame: as `value`.
        """
        found: list[Any] = []
        for index, entry in enumerate(entries):
            try:
                found.append(self.value(entry))
            except MalformedFrame as error:
                self.bury(entry, error)
                self.return_entries(key, entries[:index] + entries[index + 1 :])
                raise
        return found

    def bury(self, entry: Entry, error: BaseException | str) -> None:
        """Nobody can use this item: keep it with the dead letters."""
        item = entry.item
        if self.direct and (away := away_of(item)) is not None:
            away.start().add_done_callback(lambda _: self._bury_brought(entry, away, error))
            return
        with contextlib.suppress(MalformedFrame):  # then it is kept as it came
            item = self.value(entry)
        self.dead_letters.append(DeadLetter(item, entry.deliveries, say(error)))
        log.error(
            "channel %r: an item is given up after %d deliveries and kept in dead_letters: %s",
            self.name,
            entry.deliveries,
            say(error),
        )

    def _bury_brought(self, entry: Entry, away: Away, error: BaseException | str) -> None:
        if away.brought is None:
            self.lose([entry])
        else:
            self.bury(entry, error)

    def lose(self, entries: list[Entry]) -> None:
        """These were taken, but cannot be had: their producer died with their arrays."""
        self.gets -= len(entries)
        self._count_lost(entries)

    def drop_lost(self) -> None:
        """A producer died: what it had not given away yet is in the channel no more."""
        found: list[Entry] = []
        for lane in self.every_lane():
            if not any(is_lost(entry.item) for entry in lane.entries) and not lane.getters:
                continue
            for getter in lane.gets:
                lane.push_back(getter.give_back())
            lost = [entry for entry in lane.entries if is_lost(entry.item)]
            for entry in lost:
                lane.entries.remove(entry)
                lane.weight -= entry.weight
            found += lost
            self._serve(lane)
            self._forget(lane)
        self._count_lost(found)

    def _count_lost(self, entries: list[Entry]) -> None:
        self.lost += len(entries)
        holders = [entry.item.buffers.holder for entry in entries]
        for holder in dict.fromkeys(holders):
            log.error(
                "channel %r: %d items are lost, since %s was lost before anybody had fetched "
                "their arrays from it", self.name, holders.count(holder), holder,
            )  # fmt: skip

    # ---- leases

    def grant(
        self, key: Key | None, entries: list[Entry], holder: str, owner: object = None
    ) -> int:
        """Record who holds these entries; the lease's number."""
        number = next(self._numbers)
        for entry in entries:
            entry.deliveries += 1
        self.leases[number] = LeaseRecord(key, entries, holder, owner or holder)
        return number

    def ungrant(self, number: int) -> None:
        """Nobody took the lease: its items go back as if they had not been handed out."""
        lease = self.leases.pop(number, None)
        if lease is not None:
            for entry in lease.entries:
                entry.deliveries -= 1
            self.return_entries(lease.key, lease.entries)
            self._after_lease(lease)

    def acknowledge(self, number: int) -> None:
        """The leased items are consumed.

        Raises:
            LeaseLost: they went back to the channel before.
        """
        lease = self.leases.pop(number, None)
        if lease is None:
            raise LeaseLost(
                f"lease {number} on channel {self.name!r} was taken back before it was "
                "acknowledged: somebody else will get its items"
            )
        self._after_lease(lease)

    def put_back(self, number: int, error: BaseException | str) -> None:
        """Return leased items, or bury those that have failed too often."""
        lease = self.leases.pop(number, None)
        if lease is None:
            return
        again: list[Entry] = []
        for entry in lease.entries:
            if entry.deliveries >= self.max_deliveries:
                self.bury(entry, error)
            else:
                again.append(entry)
        self.redelivered += len(again)
        self.return_entries(lease.key, again)
        self._after_lease(lease)

    # ---- seen

    def waits(self) -> list[Wait]:
        """Everybody who waits on this channel, the longest first."""
        return seen.waits_of(self)

    def statistics(self) -> Statistics:
        """The channel's counts up to now."""
        return seen.statistics_of(self)
