"""What other processes hold of a channel: room to put into without asking, items sent ahead.

Lent room counts as taken, so a lane never holds more than it may. It is used up by `put_reserved`,
given back by `unreserve`, and asked back (`Borrower.recall`) as soon as somebody else waits for it,
or when nothing can be put any more.

Items that were sent ahead count as queued, until they are taken (`took_ahead`) or come back
(`restore_ahead`); they are asked back (`Reader.recall`) when somebody else waits for an item.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf_async.channels.ends import Key
from rlinf_async.channels.errors import ChannelError
from rlinf_async.channels.lanes import Borrower, Entry, Lane, Reader
from rlinf_async.channels.serving import Serving


class Reserving(Serving):
    """The room of a channel's lanes, and who has been lent how much of it."""

    __slots__ = ()

    def borrow(self, key: Key | None, borrower: Borrower) -> Lane:
        """The lane in which this borrower may be lent room. It is kept until `forget_borrower`."""
        lane = self._lane(key)
        lane.borrowers.append(borrower)
        return lane

    def forget_borrower(self, lane: Lane, borrower: Borrower) -> None:
        """It has nothing any more, and wants nothing."""
        if borrower in lane.borrowers:
            lane.borrowers.remove(borrower)
        if not lane.borrowers:
            lane.hunger = 0
        self._forget(lane)

    def spare(self, lane: Lane) -> tuple[int, int | None]:
        """Items, and weight where it is bounded, that could be lent: none while somebody waits."""
        if lane.putters or not self.open or self.deserted:
            return 0, None if self.max_weight is None else 0
        items = max(0, self.capacity - len(lane.entries) - lane.held)
        if self.max_weight is None:
            return items, None
        return items, max(0, self.max_weight - lane.weight - lane.held_weight)

    def reserve(self, lane: Lane, items: int, weight: int | None) -> None:
        """Lend so much of what `spare` told."""
        lane.held += items
        lane.held_weight += weight or 0
        self.lent += items

    def unreserve(self, lane: Lane, items: int, weight: int | None) -> None:
        """So much was not used."""
        self._use(lane, items, weight)
        self._serve(lane)

    def put_reserved(
        self, lane: Lane, items: Sequence[Any], each: int, refused: ChannelError | None = None
    ) -> None:
        """Put items that weigh so much each, into room that was lent for them.

        Raises:
            ChannelClosed, ChannelFailed, NoReceivers: nobody will take them; or what is given as
                ``refused``.
        """
        count = len(items)
        self.lent -= count
        lane.held -= count
        if self.max_weight is not None:
            lane.held_weight -= each * count
        if refused is not None:
            self._serve(lane)
            raise refused
        if not self.open or self.deserted or each != 1:
            self._check_put(lane.key, each)
        seq, push = self._seq, lane.entries.append
        for item in items:
            seq += 1
            push(Entry(item, each, seq))
        self._seq = seq
        lane.weight += each * count
        if lane.getters:
            self._serve(lane)

    def _use(self, lane: Lane, items: int, weight: int | None) -> None:
        lane.held -= items
        lane.held_weight -= weight or 0
        self.lent -= items

    def recall_all(self) -> None:
        """Nothing can be put any more: whoever may put without asking must ask, and be told. The
        same for gets, if the channel failed."""
        for lane in self.every_lane():
            self._recall(lane)
            if self.failure is not None:
                for reader in lane.readers:
                    reader.recall(0)

    # ---- items sent ahead

    @property
    def can_send_ahead(self) -> bool:
        """Whether items may leave without having been asked for."""
        return self.failure is None

    def lane_of(self, key: Key | None) -> Lane | None:
        """What waits under this key, if anything does."""
        return self.lane if key is None else self.lanes.get(key)

    def add_reader(self, key: Key | None, reader: Reader) -> None:
        """It has been sent something ahead."""
        self._lane(key).readers.append(reader)

    def remove_reader(self, key: Key | None, reader: Reader) -> None:
        """It has nothing more that was not asked for."""
        lane = self.lane_of(key)
        if lane is not None and reader in lane.readers:
            lane.readers.remove(reader)
            if lane.getters:
                self._serve(lane)  # they may see the end now
            self._forget(lane)

    def send_ahead(self, key: Key | None, entries: Sequence[Entry]) -> None:
        """These have left their lane, and count as if they had not."""
        self._count_ahead(self._lane(key), entries, 1)

    def took_ahead(self, key: Key | None, entries: Sequence[Entry]) -> None:
        """Somebody has these now."""
        lane = self._lane(key)
        self._count_ahead(lane, entries, -1)
        self.gets += len(entries)
        self._serve(lane)

    def restore_ahead(self, key: Key | None, entries: Sequence[Entry]) -> None:
        """These were not wanted: they are at the head again, before what is being collected."""
        lane = self._lane(key)
        self._count_ahead(lane, entries, -1)
        lane.push_back(entries)
        if lane.getters:
            lane.push_back(lane.getters[0].give_back())
        self._serve(lane)

    def _count_ahead(self, lane: Lane, entries: Sequence[Entry], sign: int) -> None:
        count, weight = sign * len(entries), sign * sum([entry.weight for entry in entries])
        lane.held += count
        lane.held_weight += weight
        self.ahead += count
        self.ahead_weight += weight

    def close_readers(self, end: int) -> None:
        """This end is closed: what was sent ahead to it goes back."""
        for lane in self.every_lane():
            for reader in [one for one in lane.readers if one.end == end]:
                reader.close()
