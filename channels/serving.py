"""Who is served next: items, those who have one to give, and those who want one.

Invariants, each with a test of that name:

* an item is in exactly one place: a lane, a waiting put, a batch being collected, a lease, the dead
  letters, or taken;
* the order is FIFO for each key, and whoever waits is served in arrival order; receivers with
  several gets that wait are served in turn;
* no wakeup is lost: an item never rests in a lane while somebody who could take it waits;
* a lane admits at most ``capacity`` items and ``max_weight`` weight, the room that it has lent
  included (a single heavier item is let in when it is empty; what a lease or a cancelled get
  returns goes back over and above).

Nothing here waits: ``start_...`` either finishes at once or returns a wait whose future the end
awaits. Items are handed directly to the waiter, so nobody can overtake it; a waiter that is
cancelled afterwards gives them back.
"""

from __future__ import annotations

from collections.abc import Callable

from rlinf_async.channels import endings
from rlinf_async.channels.admitting import Admitting
from rlinf_async.channels.ends import Key
from rlinf_async.channels.errors import ChannelEmpty, ChannelError
from rlinf_async.channels.itemtypes import check_key_and_weight
from rlinf_async.channels.lanes import Entry, GetWait, Lane, LeaseRecord, now
from rlinf_async.channels.waitfor import WaitFuture, current_party


class Serving(Admitting):
    """How those who want items are served. See the invariants."""

    __slots__ = ()

    # ---- get

    def take_one(self, key: Key | None) -> Entry | None:
        """The head of this key at once, or None if one would have to wait for it."""
        lane = self.lane if key is None else self.lanes.get(key)
        if (
            lane is None
            or not (entries := lane.entries)
            or lane.getters
            or lane.readers
            or self.failure is not None
        ):
            return None
        entry = entries.popleft()
        lane.weight -= entry.weight
        self.gets += 1
        if lane.putters:
            self._admit(lane)
        if lane.hunger:
            self._feed(lane)
        if key is not None:
            self._forget(lane)
        return entry

    def start_get(
        self,
        key: Key | None,
        target: int,
        at_least: int | None,
        party: str | None = None,
        end: int = 0,
        owner: object = None,
        future: WaitFuture | None = None,
    ) -> list[Entry] | GetWait:
        """Take a batch at once, or return the wait for it, which the receiver ``end`` owns.

        ``owner`` is who would hold its lease: the task, or by default the party. ``future`` is who
        is told; by default one that somebody awaits.

        Raises:
            EndOfChannel, ChannelFailed: nothing will come.
            ValueError: ``target`` or ``at_least`` is not positive.
        """
        if key is not None:
            check_key_and_weight(self.name, key, 1)
        least = target if at_least is None else at_least
        if not 1 <= least <= target:
            raise ValueError(
                f"channel {self.name!r}: a batch needs 1 <= at_least <= weight, "
                f"got weight={target}, at_least={at_least}"
            )
        if self.failure is not None:
            raise endings.failed(self.name, self.failure)
        lane = self.lane if key is None else self._lane(key)
        wait = GetWait(lane, target, least, party or current_party.get(), end, owner, future)
        if lane.getters:
            lane.wait_in_turn(wait)
        else:
            lane.getters.append(wait)
        if lane.entries or lane.putters or self.ended:  # else nobody could be served
            self._serve(lane)
            if wait.future.done():
                lane.handed.discard(wait)
                self._forget(lane)
                return wait.future.result()
        for reader in lane.readers:
            reader.recall(end)
        self.get_waits += 1
        return wait

    def abandon_get(self, wait: GetWait) -> None:
        """The getter was cancelled: what it was handed or had collected stays in the channel."""
        if wait.future.done() and not wait.future.cancelled():
            if wait.future.exception() is None:
                self.return_entries(wait.lane.key, wait.future.result())
        elif wait.lane.drop(wait):
            wait.lane.push_back(wait.taken)
            self._serve(wait.lane)

    def finish_get(self, wait: GetWait) -> None:
        """The get is over, in whichever way; account for its wait."""
        self.get_wait_seconds += now() - wait.since
        lane = wait.lane
        lane.handed.discard(wait)
        if lane.getters and self.ended:  # they can see the end now
            self._serve(lane)
        if lane.key is not None:
            self._forget(lane)

    def return_entries(self, key: Key | None, entries: list[Entry]) -> None:
        """Put entries that were taken back at the head, before what is being collected."""
        lane = self._lane(key)
        self.gets -= len(entries)
        lane.push_back(entries)
        if lane.getters:
            lane.push_back(lane.getters[0].give_back())
        self._serve(lane)

    # ---- inside

    def _serve(self, lane: Lane) -> None:
        """Hand items to those who wait, in order, and fill the room that this makes."""
        if lane.putters:
            self._admit(lane)
        while lane.getters:
            wait = lane.getters[0]
            if wait.future.done():  # cancelled; its task has not run yet
                lane.drop(wait)
                lane.push_back(wait.give_back())
                continue
            if lane.readers and any(reader.end != wait.end for reader in lane.readers):
                break  # what was sent ahead is older, and on its way back
            full = wait.collect()
            while not full and lane.putters and self._admit(lane):  # lent room is no room
                full = wait.collect()
            if not (full or wait.enough or self._nothing_can_come(lane, wait)):
                break
            lane.getters.popleft()
            if lane.further:
                lane.served(wait)
            if taken := wait.taken:
                self.gets += len(taken)
                lane.handed.add(wait)
                wait.future.set_result(taken)
            else:
                wait.future.set_exception(endings.ended(self.name))
            if lane.putters:
                self._admit(lane)
        if lane.hunger:
            self._feed(lane)

    def _nothing_can_come(self, lane: Lane, wait: GetWait) -> bool:
        """The channel has ended, and no lease of another party can still give its items back.

        Holders that wait here themselves count as done: each would wait for the others for ever.
        """
        if not self.ended or lane.handed or lane.readers:
            return False
        others = {lease.owner for lease in self.leases.values() if lease.key == lane.key}
        others.discard(wait.owner)
        return not others or others <= {getter.owner for getter in lane.gets}

    def _after_lease(self, lease: LeaseRecord) -> None:
        """Those who waited for the items of this last lease can see the end now."""
        lane = self._lane(lease.key)
        if self.ended:
            self._serve(lane)
        self._forget(lane)

    def _refuse_getters(
        self, lane: Lane, error: Callable[[str], ChannelError], end: int | None = None
    ) -> None:
        """Raise an error of their own in all waiting gets, or in those of one receiver."""
        for wait in lane.drop_all(end):
            lane.push_back(wait.give_back())
            if not wait.future.done():
                wait.future.set_exception(error(self.name))

    def empty_error(self, key: Key | None) -> ChannelError:
        """Why a get finds nothing: the channel failed, has ended, or is just empty."""
        if self.failure is not None:
            return endings.failed(self.name, self.failure)
        lane = self._lane(key)
        for reader in lane.readers:
            reader.recall(0)
        ended = self.ended and not (lane.entries or lane.readers or self.leases)
        self._forget(lane)
        return (
            endings.ended(self.name) if ended else ChannelEmpty(f"channel {self.name!r} is empty")
        )
