"""``multiprocessing.Queue`` between two processes.

python of_multiprocessing.py items | arrays
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.queues import Queue

from benchmarks.channels import kit


def put_items(queue: Queue[kit.Item]) -> None:
    while True:
        queue.put(kit.ITEM)


def put_blocks(queue: Queue[kit.Block], elements: int) -> None:
    for number, values in enumerate(kit.sources(elements)):
        queue.put(kit.Block(number, values))


def items() -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    queue: Queue[kit.Item] = context.Queue(kit.CAPACITY)
    other = context.Process(target=put_items, args=(queue,), daemon=True)
    other.start()
    rate = kit.blocking_rate(queue.get)
    other.kill()
    return {"items_per_s": rate}


def arrays(name: str, elements: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    queue: Queue[kit.Block] = context.Queue(kit.ARRAY_CAPACITY)
    other = context.Process(target=put_blocks, args=(queue, elements), daemon=True)
    other.start()
    rate = kit.blocking_rate(lambda: kit.touch(queue.get().values), every=1)
    other.kill()
    return {f"gb_per_s_{name}": kit.gb_per_s(rate, elements)}


if __name__ == "__main__":
    if sys.argv[1] == "items":
        kit.done(**items())
    else:
        found = [arrays(name, elements) for name, elements in kit.ARRAYS.items()]
        kit.done(**{metric: value for each in found for metric, value in each.items()})
