"""RLinf's Channel: a worker puts, another gets, and the channel is an actor between them.

    python of_rlinf.py

``put`` and ``get`` in their default form: with ``async_op=True`` and 32 under way they were no
faster here. Arrays go as tensors, for which RLinf has a way of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import ray  # pyright: ignore[reportMissingImports]
import torch
from rlinf.scheduler import (  # pyright: ignore[reportMissingImports]
    Channel,
    Cluster,
    NodePlacementStrategy,
    Worker,
)

from benchmarks.channels import kit

ITEMS = 300
BLOCKS = {"4mb": 80, "64mb": 10}
WARM_UP = 0.2
"""of what is sent, before the clock starts"""


class Producer(Worker):  # type: ignore[misc]
    """Puts so many."""

    def put_items(self, channel: Channel, count: int) -> None:
        for _ in range(count):
            channel.put(kit.ITEM)

    def put_blocks(self, channel: Channel, count: int, elements: int) -> None:
        source = kit.sources(elements)
        for _ in range(count):
            channel.put(torch.from_numpy(next(source)))


class Consumer(Worker):  # type: ignore[misc]
    """Gets so many; says how many a second."""

    def get_items(self, channel: Channel, count: int) -> float:
        return self._rate(count, channel.get)

    def get_blocks(self, channel: Channel, count: int) -> float:
        return self._rate(count, lambda: kit.touch(channel.get()))

    def _rate(self, count: int, take: Callable[[], object]) -> float:
        before = int(count * WARM_UP)
        for _ in range(before):
            take()
        start = time.perf_counter()
        for _ in range(count - before):
            take()
        return (count - before) / (time.perf_counter() - start)


def main() -> None:
    os.environ["RAY_TMPDIR"] = os.getcwd()
    cluster = Cluster(num_nodes=1)
    here = NodePlacementStrategy(node_ranks=[0])
    producer = Producer.create_group().launch(cluster, name="producer", placement_strategy=here)
    consumer = Consumer.create_group().launch(cluster, name="consumer", placement_strategy=here)
    items = Channel.create(name="items", maxsize=kit.CAPACITY)
    blocks = Channel.create(name="blocks", maxsize=kit.ARRAY_CAPACITY)

    putting = producer.put_items(items, ITEMS)
    [rate] = consumer.get_items(items, ITEMS).wait()
    putting.wait()
    measured = {"items_per_s": rate}
    for name, count in BLOCKS.items():
        elements = kit.ARRAYS[name]
        putting = producer.put_blocks(blocks, count, elements)
        [rate] = consumer.get_blocks(blocks, count).wait()
        putting.wait()
        measured[f"gb_per_s_{name}"] = kit.gb_per_s(rate, elements)
    ray.shutdown()
    kit.done(**measured)


if __name__ == "__main__":
    main()
