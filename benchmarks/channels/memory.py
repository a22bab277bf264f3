"""Memory of a producer, a channel and a consumer that is 100 times slower, each in a process.

    python memory.py

First the consumer takes as fast as it can, which gives the free rate; then it takes a hundredth of
that. Meanwhile the resident memory of all three processes is added up (what they share counts for
each of them). It must be flat after the first seconds: ``growth`` is the most that was seen
later over what was there then. Once with 4 KiB messages, once with arrays of 1 MiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pathlib
import time

import numpy as np

import rlinf_async as ra
from benchmarks.channels import kit
from rlinf_async.channels import NoReceivers

SLOWER = 100
FIRST = 3
"""seconds after which nothing may grow any more"""
SECONDS = 8
SHOWN = (0, 1, FIRST, 5, SECONDS)
"""seconds whose figures are printed"""
SIZES = {"4kb": 1 << 10, "1mb": 1 << 18}
"""elements of float32"""


class Producer(ra.Worker):
    """Puts as fast as it may, until nobody takes any more."""

    async def run(self, blocks: ra.Sender[kit.Block], elements: int) -> None:
        with contextlib.suppress(NoReceivers):
            for number in itertools.count():
                await blocks.put(kit.Block(number, np.full(elements, number, np.float32)))


class Consumer(ra.Worker):
    """Takes as fast as it can, or so many a second."""

    async def freely(self, blocks: ra.Receiver[kit.Block]) -> float:
        return await kit.rate(blocks.get)

    async def slowly(self, blocks: ra.Receiver[kit.Block], per_s: float, seconds: float) -> float:
        start, count = time.monotonic(), 0
        while (elapsed := time.monotonic() - start) < seconds:
            await blocks.get()
            count += 1
            await asyncio.sleep(max(0.0, count / per_s - elapsed))
        return count / elapsed


async def measured(cluster: ra.Cluster, size: str) -> dict[str, float]:
    """The resident memory, second by second, and how much it grew."""
    [producer] = await cluster.launch(Producer, name=f"Producer {size}")
    [consumer] = await cluster.launch(Consumer, name=f"Consumer {size}")
    pids = [os.getpid(), *(cluster.pid(one.name) or 0 for one in (producer, consumer))]
    elements = SIZES[size]

    free = cluster.channel(kit.Block, name=f"free {size}")
    per_s, _ = await asyncio.gather(
        consumer.call(Consumer.freely, free.receiver),
        producer.call(Producer.run, free.sender, elements),
    )
    free.receiver.close()
    slow = cluster.channel(kit.Block, name=f"slow {size}")
    taken, _, resident = await asyncio.gather(
        consumer.call(Consumer.slowly, slow.receiver, per_s / SLOWER, SECONDS + 1.0),
        producer.call(Producer.run, slow.sender, elements),
        resident_mb(pids),
    )
    later = max(resident[FIRST:])
    return {
        f"growth_{size}": later / resident[FIRST],
        f"free_per_s_{size}": per_s,
        f"taken_per_s_{size}": taken,
        **{f"mb_at_{second}s_{size}": resident[second] for second in SHOWN},
    }


async def resident_mb(pids: list[int]) -> list[float]:
    """The sum over these processes, at the start and after each second."""
    found = [resident_mb_of(pids)]
    start = time.monotonic()
    for second in range(1, SECONDS + 1):
        await asyncio.sleep(start + second - time.monotonic())
        found.append(resident_mb_of(pids))
    return found


def resident_mb_of(pids: list[int]) -> float:
    """The sum over these processes, in megabytes (1e6)."""
    pages = sum(int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


async def main() -> None:
    found: dict[str, float] = {}
    for size in SIZES:
        async with ra.Cluster.process() as cluster:
            found |= await measured(cluster, size)
    kit.done(**found)


if __name__ == "__main__":
    ra.run(main())
