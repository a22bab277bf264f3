"""Room that is lent: whoever has it may put so many items without asking, and they will fit.

Lent room counts as taken, so a lane never holds more than it may. It is used up by `put_reserved`,
given back by `unreserve`, and asked back (`Borrower.recall`) as soon as somebody else waits for it,
or when nothing can be put any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf_async.channels.ends import Key
from rlinf_async.channels.errors import ChannelError
from rlinf_async.channels.lanes import Borrower, Entry, Lane
from rlinf_async.channels.serving import Serving


class Reserving(Serving):
    """The room of a channel's lanes, and who has been lent how much of it."""

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
        self._use(lane, len(items), each * len(items) if self.max_weight is not None else None)
        if refused is not None:
            self._serve(lane)
            raise refused
        self._check_put(lane.key, each)
        seq, push = self._seq, lane.entries.append
        for item in items:
            seq += 1
            push(Entry(item, each, seq))
        self._seq = seq
        lane.weight += each * len(items)
        if lane.getters:
            self._serve(lane)

    def _use(self, lane: Lane, items: int, weight: int | None) -> None:
        lane.held -= items
        lane.held_weight -= weight or 0
        self.lent -= items

    def recall_all(self) -> None:
        """Nothing can be put any more: whoever may put without asking must ask, and be told."""
        for lane in self.every_lane():
            self._recall(lane)
