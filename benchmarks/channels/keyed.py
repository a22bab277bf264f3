"""One channel, keyed: a producer and a consumer, then eight of each, every one a process.

    python keyed.py

Producer ``i`` puts under key ``i`` and consumer ``i`` takes that key alone. All consumers count in
the same window of the host's clock, so that they are counted while all of them run. Prints items
per second of both, and the most over the fewest that one of the eight consumers got.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import rlinf_async as ra
from benchmarks.channels import kit
from rlinf_async.channels import NoReceivers

MANY = 8
AHEAD = 1.0
"""seconds from the calls to the window: all are up to speed by then"""
WINDOW = 10.0
"""seconds: over fewer, the system's own scheduling of so many processes on few cores is not even"""


class Producer(ra.Worker):
    """Puts under its own key until nobody takes any more."""

    async def run(self, items: ra.Sender[kit.Item]) -> None:
        with contextlib.suppress(NoReceivers):
            while True:
                await items.put(kit.ITEM, key=self.rank)


class Consumer(ra.Worker):
    """Counts what it takes between two times."""

    async def run(self, items: ra.Receiver[kit.Item], start: float, stop: float) -> int:
        while time.monotonic() < start:
            await items.get(key=self.rank)
        count = 0
        while time.monotonic() < stop:
            await items.get(key=self.rank)
            count += 1
        return count


async def counts(cluster: ra.Cluster, pairs: int) -> list[int]:
    """What each of so many consumers got in the window."""
    producers = await cluster.launch(Producer, count=pairs, name=f"Producer of {pairs}")
    consumers = await cluster.launch(Consumer, count=pairs, name=f"Consumer of {pairs}")
    items = cluster.channel(kit.Item, name=f"{pairs} to {pairs}", capacity=kit.CAPACITY)
    start = time.monotonic() + AHEAD
    found, _ = await asyncio.gather(
        consumers.call(Consumer.run, items.receiver, start, start + WINDOW),
        producers.call(Producer.run, items.sender),
    )
    return found


async def main() -> None:
    async with ra.Cluster.process() as cluster:
        [one] = await counts(cluster, 1)
    async with ra.Cluster.process() as cluster:
        many = await counts(cluster, MANY)
    kit.done(
        one_to_one_per_s=one / WINDOW,
        total_per_s=sum(many) / WINDOW,
        most_over_fewest=max(many) / max(1, min(many)),
    )


if __name__ == "__main__":
    ra.run(main())
