"""Ray: its queue, calls of an async actor, and arrays as arguments of calls.

    python of_ray.py

`ray.util.queue.Queue` lives in an actor of its own; a task puts and the driver gets. Arrays go by
the object store, several calls in flight: much faster than through the queue.
"""

from __future__ import annotations

import os
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.util.queue import Queue  # pyright: ignore[reportMissingImports]

from benchmarks.channels import kit

STORE = 2 << 30
"""bytes of the object store"""


class Side:
    """The other process."""

    async def same(self, item: kit.Item) -> kit.Item:
        return item

    async def take(self, values: Any) -> None:
        kit.touch(values)


def put_items(queue: Any) -> None:
    while True:
        queue.put(kit.ITEM)


def items() -> dict[str, float]:
    queue = Queue(maxsize=kit.CAPACITY)
    producer = ray.remote(put_items).remote(queue)
    rate = kit.blocking_rate(queue.get)
    ray.cancel(producer, force=True)
    queue.shutdown(force=True)
    return {"items_per_s": rate}


def calls(side: Any) -> dict[str, float]:
    measured = kit.blocking_latencies(lambda: ray.get(side.same.remote(kit.ITEM)))

    def together() -> None:
        ray.get([side.same.remote(kit.ITEM) for _ in range(kit.IN_FLIGHT)])

    waves = kit.blocking_rate(together, every=1)
    return {**measured, "in_flight_per_s": waves * kit.IN_FLIGHT}


def arrays(side: Any, name: str, elements: int) -> dict[str, float]:
    source = kit.sources(elements)

    def together() -> None:
        ray.get([side.take.remote(next(source)) for _ in range(kit.ARRAY_CAPACITY)])

    rate = kit.blocking_rate(together, every=1) * kit.ARRAY_CAPACITY
    return {f"gb_per_s_{name}": kit.gb_per_s(rate, elements)}


def main() -> None:
    ray.init(
        num_cpus=4,
        object_store_memory=STORE,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=os.getcwd(),
    )
    measured = items()
    side = ray.remote(Side).remote()
    measured |= calls(side)
    for name, elements in kit.ARRAYS.items():
        measured |= arrays(side, name, elements)
    ray.shutdown()
    kit.done(**measured)


if __name__ == "__main__":
    main()
