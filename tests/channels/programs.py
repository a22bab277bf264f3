"""Random programs over one channel, and where each of their items is at any quiet moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Iterator
from random import Random
from typing import Any

from rlinf_async.channels import Channel, EndOfChannel, Key, current_party
from rlinf_async.channels.key_queue import KeyQueue
from rlinf_async.channels.queue import statistics_of
from rlinf_async.testing import InvariantBroken, VirtualLoop, wait_all_blocked

KEYS: tuple[Key | None, ...] = (None, "env", 7)


class Crash(Exception):
    """What a lease's holder raises when the program breaks it."""


class Program:
    """Puts, gets, batches and leases in a seeded order, with cancellations and broken leases.

    A ``gentle`` program never returns an item to the channel: no leases, no cancelled gets. Holders
    of leases of a channel that is ``stealing`` get more, under other keys.
    """

    def __init__(self, rng: Random, *, gentle: bool = False, stealing: bool = False) -> None:
        self.rng = rng
        self.gentle = gentle
        self.stealing = stealing
        self.channel = Channel(
            int,
            name="numbers",
            capacity=rng.randint(1, 4),
            max_weight=rng.choice([None, 3, 6]),
            max_deliveries=rng.randint(1, 4),
            stealing=stealing,
        )
        self.sender = self.channel.sender.open()
        self.receiver = self.channel.receiver.open()
        self.next_item = 0
        self.puts: dict[asyncio.Task[None], int] = {}
        self.takes: set[asyncio.Task[None]] = set()
        self.leases: list[asyncio.Future[None]] = []
        self.ending = False
        self.received: dict[Key | None, list[int]] = {key: [] for key in KEYS}

    async def run(self, steps: int) -> None:
        """Take random steps; look at every invariant whenever all is quiet."""
        for _ in range(steps):
            self.step()
            if self.rng.random() < 0.5:
                await asyncio.sleep(0)
            if self.rng.random() < 0.3:
                await wait_all_blocked()
                self.check()

    def end_leases(self) -> None:
        """Acknowledge every lease, also those that will be granted yet."""
        self.ending = True
        for lease in self.leases:
            if not lease.done():
                lease.set_result(None)

    async def finish(self) -> None:
        """Let everybody end: what was put and not taken is drained."""
        self.end_leases()
        await wait_all_blocked()
        for task in [*self.takes, *self.puts]:
            task.cancel()
        await asyncio.gather(*self.takes, *self.puts, return_exceptions=True)
        self.sender.close()
        for key in KEYS:
            await self._drain(key)
        self.check()

    def step(self) -> None:
        """One random step."""
        key = self.rng.choice(KEYS)
        choice = self.rng.randrange(4 if self.gentle else 8)
        if choice <= 1:
            self._spawn_put(key, self.rng.randint(1, 4))
        elif choice <= 3:
            at_least = 1 if self.stealing else self.rng.choice([None, 1])
            self._spawn_take(self._batch(key, self.rng.randint(1, 6), at_least))
        elif choice <= 5:
            self._spawn_take(self._lease(key, self.rng.randint(1, 4)))
        elif choice == 6:
            self._end_a_lease()
        else:
            self._cancel_somebody()
        if self.gentle and self.puts and self.rng.random() < 0.2:
            self.rng.choice(list(self.puts)).cancel()

    def lanes(self) -> Iterator[KeyQueue]:
        """Every key's queue."""
        return self.channel.queue.every_key()

    def places(self) -> Counter[int]:
        """In how many places each item is."""
        queue = self.channel.queue
        found: Counter[int] = Counter()
        for lane in self.lanes():
            found.update(entry.item for entry in lane.entries)
            found.update(wait.entry.item for wait in lane.putters)
            found.update(entry.item for wait in lane.getters for entry in wait.held())
        found.update(entry.item for one in queue.unsettled() for entry in one.held())
        found.update(letter.item for letter in queue.dead_letters)
        for items in self.received.values():
            found.update(items)
        return found

    def check(self) -> None:
        """Raise `InvariantBroken` if an invariant of the queue does not hold at a quiet moment."""
        self._check_places()
        for lane in self.lanes():
            self._check_order(lane)
            self._check_wakeups(lane)
            self._check_bounds(lane)

    def _check_places(self) -> None:
        places = self.places()
        for task, item in self.puts.items():
            wanted = (0, 1) if task.done() and task.cancelled() else (1,)
            if places[item] not in wanted:
                raise InvariantBroken(f"item {item} is in {places[item]} places, not {wanted}")
        seen, dead = statistics_of(self.channel.queue), len(self.channel.dead_letters)
        taken = sum(map(len, self.received.values())) + seen.leases_out + dead
        if (seen.puts, seen.gets) != (places.total(), taken):
            raise InvariantBroken(f"{seen} counts other than {places.total()} puts, {taken} gets")

    def _check_order(self, lane: KeyQueue) -> None:
        order = [entry.sequence for entry in (*lane.collected, *lane.entries)]
        if order != sorted(order):
            raise InvariantBroken(f"key {lane.key!r} holds its items in the order {order}")

    def _check_wakeups(self, lane: KeyQueue) -> None:
        if lane.entries and any(one.getters.first for one in self._takers(lane)):
            raise InvariantBroken(f"key {lane.key!r}: a get waits although items rest")
        if lane.putters and lane.has_room(lane.putters[0].entry.weight):
            raise InvariantBroken(f"key {lane.key!r}: a put waits although there is room")
        if lane.key is not None and lane.idle:
            raise InvariantBroken(f"key {lane.key!r} is idle and still in memory")

    def _takers(self, lane: KeyQueue) -> Iterator[KeyQueue]:
        return self.lanes() if self.stealing else iter([lane])

    def _check_bounds(self, lane: KeyQueue) -> None:
        if lane.weight != sum(entry.weight for entry in lane.entries):
            raise InvariantBroken(f"key {lane.key!r} weighs other than its items do")
        if not self.gentle:
            return  # what is returned goes back over and above
        limit = self.channel.queue.max_weight
        if len(lane.entries) > self.channel.queue.capacity:
            raise InvariantBroken(f"key {lane.key!r} holds {len(lane.entries)} items")
        if limit is not None and lane.weight > limit and len(lane.entries) > 1:
            raise InvariantBroken(f"key {lane.key!r} weighs {lane.weight}, over {limit}")

    def _spawn_put(self, key: Key | None, weight: int) -> None:
        item = self.next_item
        self.next_item += 1
        task = asyncio.create_task(self.sender.put(item, key=key, weight=weight))
        self.puts[task] = item

    def _spawn_take(self, take: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(take)
        self.takes.add(task)
        task.add_done_callback(self.takes.discard)

    async def _batch(self, key: Key | None, weight: int, at_least: int | None) -> None:
        batch = await self.receiver.get_batch(weight=weight, at_least=at_least, key=key)
        self.received[key] += batch

    async def _lease(self, key: Key | None, weight: int) -> None:
        current_party.set(f"holder {len(self.leases)}")
        ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            least = 1 if self.stealing else None
            async with self.receiver.lease(weight=weight, at_least=least, key=key) as batch:
                self.leases.append(ending)
                if self.stealing and self.rng.random() < 0.4:
                    await self._get_more(self.rng.choice(KEYS))
                if not self.ending:
                    await ending
                self.received[key] += batch
        except Crash:
            return

    async def _get_more(self, key: Key | None) -> None:
        with contextlib.suppress(EndOfChannel):
            self.received[key].append(await self.receiver.get(key=key))

    def _end_a_lease(self) -> None:
        held = [lease for lease in self.leases if not lease.done()]
        if held and self.rng.random() < 0.5:
            self.rng.choice(held).set_result(None)
        elif held:
            broken = self.rng.choice(held)
            broken.set_exception(Crash("the holder broke"))
            broken.exception()  # its holder may be cancelled before it sees this

    def _cancel_somebody(self) -> None:
        victims = sorted([*self.takes, *self.puts], key=lambda task: task.get_name())
        if victims:
            self.rng.choice(victims).cancel()

    async def _drain(self, key: Key | None) -> None:
        while True:
            try:
                self.received[key].append(await self.receiver.get(key=key))
            except EndOfChannel:
                return


def seeded() -> Random:
    """Random numbers from the seed of the loop that runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return Random(loop.seed)
