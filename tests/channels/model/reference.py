"""A channel as a sequential model: lists, no tasks, no time, no wires.

What the docs say of a channel in words stands here as the shortest program that does it. An
operation is started and either finishes at once or waits; whatever happens later may finish it. It
can be cancelled as long as it waits. After each step everything is settled: whoever could be served
has been.

* Items of a key are a list in the order in which they were let in (``Entry.seq``); what is given
  back takes the place again that its number says.
* Whoever waits for room stands in one line for each key. Whoever waits for items stands in the line
  of its receiver; receivers are served in turn.
* The first in turn collects what fits; what it has collected takes up no room any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from rlinf_async.channels import Key


class Entry(msgspec.Struct, eq=False):
    """An item that was let in."""

    item: int
    weight: int
    seq: int
    deliveries: int = 0
    replaced: int = 0


class Put(msgspec.Struct, eq=False):
    """A put that waits or has finished."""

    end: int
    key: Key | None
    entry: Entry
    outcome: str = ""


class Take(msgspec.Struct, eq=False):
    """A get, a batch or a lease that waits, or has finished; one that has a lease holds it."""

    end: int
    key: Key | None
    target: int
    least: int
    lease: bool = False
    entries: list[Entry] = []
    outcome: str = ""

    @property
    def weight(self) -> int:
        return sum(entry.weight for entry in self.entries)

    @property
    def items(self) -> list[int]:
        return [entry.item for entry in self.entries]

    @property
    def replaced(self) -> list[int]:
        return [entry.replaced for entry in self.entries]

    @property
    def deliveries(self) -> list[int]:
        return [entry.deliveries for entry in self.entries]


class Lane(msgspec.Struct):
    """What there is under one key."""

    entries: list[Entry] = []
    puts: list[Put] = []
    turns: list[list[Take]] = []
    """of each receiver that waits, in the order in which they are served"""

    @property
    def weight(self) -> int:
        return sum(entry.weight for entry in self.entries)

    @property
    def collected(self) -> list[Entry]:
        """What those that wait have collected."""
        return [entry for takes in self.turns for take in takes for entry in take.entries]

    @property
    def idle(self) -> bool:
        return not (self.entries or self.puts or self.turns)


Which = Callable[[Take], bool]


class Reference:
    """A channel. ``over`` is empty, or why nothing can be put any more."""

    def __init__(self, capacity: int, max_weight: int | None, max_deliveries: int) -> None:
        self.capacity = capacity
        self.max_weight = max_weight
        self.max_deliveries = max_deliveries
        self.lanes: dict[Key | None, Lane] = {}
        self.senders: set[int] = set()
        self.receivers: set[int] = set()
        self.leases: list[Take] = []
        self.dead: list[tuple[int, int]] = []
        self.puts = self.gets = self.redelivered = self.stale = 0
        self.failed = self.had_sender = self.had_receiver = False
        self.failers: set[int] = set()
        self._ends = self._seq = 0

    @property
    def ended(self) -> bool:
        """Nothing can be put any more, now."""
        return self.had_sender and not self.senders

    # ---- ends

    def open_sender(self) -> int | str:
        if self.failed:
            return "ChannelFailed"
        self.had_sender = True
        self._ends += 1
        self.senders.add(self._ends)
        return self._ends

    def open_receiver(self) -> int:
        self.had_receiver = True
        self._ends += 1
        self.receivers.add(self._ends)
        return self._ends

    def close(self, end: int) -> None:
        """Its own waits are refused; the last sender ends the channel, the last receiver all
        puts."""
        self.senders.discard(end)
        was_receiver = end in self.receivers
        self.receivers.discard(end)
        for lane in self.lanes.values():
            self._refuse_puts(lane, [put for put in lane.puts if put.end == end], "ChannelClosed")
            if was_receiver and not self.receivers:
                self._refuse_puts(lane, lane.puts, "NoReceivers")
            self._refuse_takes(lane, lambda take: take.end == end, "ChannelClosed")
        self._settle()

    def fail(self, end: int) -> None:
        """Every wait is refused; what is queued stays where it is. The end that failed it is
        closed, and is told what all others are."""
        self.failed = True
        for lane in self.lanes.values():
            self._refuse_puts(lane, lane.puts, "ChannelFailed")
            self._refuse_takes(lane, lambda _: True, "ChannelFailed")
        self.failers.add(end)
        self.close(end)

    # ---- items

    def put(self, end: int, item: int, key: Key | None, weight: int, *, wait: bool = True) -> Put:
        put = Put(end, key, Entry(item, weight, 0))
        if end not in self.senders:
            put.outcome = "ChannelFailed" if end in self.failers else "ChannelClosed"
        elif self.failed:
            put.outcome = "ChannelFailed"
        elif self.had_receiver and not self.receivers:
            put.outcome = "NoReceivers"
        elif not wait and ((lane := self._seen(key)).puts or not self._fits(lane, weight)):
            put.outcome = "ChannelFull"
        else:
            self._seq += 1
            put.entry.seq = self._seq
            self.puts += 1
            self._lane(key).puts.append(put)
            self._settle()
        return put

    def take(
        self, end: int, key: Key | None, target: int = 1, least: int | None = None, *,
        lease: bool = False, wait: bool = True,
    ) -> Take:  # fmt: skip
        take = Take(end, key, target, target if least is None else least, lease)
        if end not in self.receivers:
            take.outcome = "ChannelClosed"
        elif self.failed:
            take.outcome = "ChannelFailed"
        elif not wait and ((lane := self._seen(key)).turns or not lane.entries):
            over = self.ended and not lane.entries and not self.leases
            take.outcome = "EndOfChannel" if over else "ChannelEmpty"
        else:
            turns = self._lane(key).turns
            own = next((takes for takes in turns if takes[0].end == end), None)
            if own is None:
                turns.append([take])
            else:
                own.append(take)
            self._settle()
        return take

    def cancel(self, operation: Put | Take) -> None:
        """It waits no more, and what it had collected is where it was."""
        lane = self._lane(operation.key)
        if operation.outcome:
            return
        if isinstance(operation, Put):
            self._refuse_puts(lane, [operation], "cancelled")
        else:
            self._refuse_takes(lane, lambda take: take is operation, "cancelled")
        self._settle()

    def acknowledge(self, lease: Take) -> None:
        self.leases.remove(lease)
        self._settle()

    def replace(self, lease: Take, indices: Collection[int]) -> None:
        """Others take the place of these items, as if they had not been handed out; the rest is
        consumed."""
        self.leases.remove(lease)
        for index in indices:
            entry = lease.entries[index]
            entry.replaced += 1
            entry.deliveries -= 1
            self.gets -= 1
            self._return(self._lane(lease.key), [entry])
        self._settle()

    def give_back(self, lease: Take) -> None:
        """The lease failed: its items go back, or are given up."""
        self.leases.remove(lease)
        for entry in lease.entries:
            if entry.deliveries >= self.max_deliveries:
                self.dead.append((entry.item, entry.deliveries))
            else:
                self.redelivered += 1
                self.gets -= 1
                self._return(self._lane(lease.key), [entry])
        self._settle()

    # ---- inside

    def _lane(self, key: Key | None) -> Lane:
        return self.lanes.setdefault(key, Lane())

    def _seen(self, key: Key | None) -> Lane:
        """To look at: a key under which there is nothing is not kept."""
        return self.lanes.get(key) or Lane()

    def _fits(self, lane: Lane, weight: int) -> bool:
        if not lane.entries:
            return True
        light = self.max_weight is None or lane.weight + weight <= self.max_weight
        return len(lane.entries) < self.capacity and light

    def _return(self, lane: Lane, entries: list[Entry]) -> None:
        """Back to the head, in order, before what is being collected."""
        lane.entries = sorted([*entries, *lane.entries], key=lambda entry: entry.seq)
        if lane.turns and (first := lane.turns[0][0]).entries:
            again, first.entries = first.entries, []
            self._return(lane, again)

    def _refuse_puts(self, lane: Lane, refused: list[Put], why: str) -> None:
        for put in list(refused):
            lane.puts.remove(put)
            put.outcome = why
            self.puts -= 1

    def _refuse_takes(self, lane: Lane, which: Which, why: str) -> None:
        refused = [take for takes in lane.turns for take in takes if which(take)]
        for take in refused:
            take.outcome = why
            again, take.entries = take.entries, []
            lane.entries = sorted([*again, *lane.entries], key=lambda entry: entry.seq)
        kept = [[take for take in takes if take not in refused] for takes in lane.turns]
        lane.turns = [takes for takes in kept if takes]

    def _settle(self) -> None:
        """Let in what fits and serve who can be served, until nothing changes."""
        for key, lane in list(self.lanes.items()):
            while self._let_in(lane) or self._serve(key, lane):
                pass
            if lane.idle:
                del self.lanes[key]

    def _let_in(self, lane: Lane) -> bool:
        if not lane.puts or not self._fits(lane, lane.puts[0].entry.weight):
            return False
        put = lane.puts.pop(0)
        put.outcome = "ok"
        lane.entries.append(put.entry)
        return True

    def _serve(self, key: Key | None, lane: Lane) -> bool:
        """The first in turn collects an item, or is done."""
        if not lane.turns or self.failed:
            return False
        first = lane.turns[0][0]
        full = first.weight >= first.target
        if lane.entries and not full:
            entry = lane.entries[0]
            if not first.entries or first.weight + entry.weight <= first.target:
                first.entries.append(lane.entries.pop(0))
                return True
            full = True  # whole items only
        others = any(lease.key == key for lease in self.leases)
        if not (full or first.weight >= first.least or (self.ended and not others)):
            return False
        takes = lane.turns.pop(0)
        takes.pop(0)
        if takes:
            lane.turns.append(takes)
        self._hand(first)
        return True

    def _hand(self, take: Take) -> None:
        take.outcome = "ok" if take.entries else "EndOfChannel"
        self.gets += len(take.entries)
        if take.lease and take.entries:
            self.leases.append(take)
            for entry in take.entries:
                entry.deliveries += 1
