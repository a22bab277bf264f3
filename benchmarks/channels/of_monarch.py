"""Monarch: calls of an actor's endpoint in another process.

    python of_monarch.py

Its messages are calls, so arrays go as arguments (numpy: it was faster than torch here), several
in flight together.
"""

from __future__ import annotations

import asyncio
from typing import Any

from monarch.actor import (  # pyright: ignore[reportMissingImports]
    Actor,
    endpoint,
    this_host,
)

from benchmarks.channels import kit


class Side(Actor):  # type: ignore[misc]
    """The other process."""

    @endpoint  # type: ignore[untyped-decorator]
    async def same(self, item: kit.Item) -> kit.Item:
        return item

    @endpoint  # type: ignore[untyped-decorator]
    async def take(self, block: kit.Block) -> None:
        kit.touch(block.values)


async def calls(side: Any) -> dict[str, float]:
    measured = await kit.latencies(lambda: side.same.call_one(kit.ITEM))

    async def together() -> None:
        await asyncio.gather(*(side.same.call_one(kit.ITEM) for _ in range(kit.IN_FLIGHT)))

    waves = await kit.rate(together, every=1)
    return {**measured, "in_flight_per_s": waves * kit.IN_FLIGHT}


async def arrays(side: Any, name: str, elements: int) -> dict[str, float]:
    source = kit.sources(elements)

    async def together() -> None:
        blocks = [kit.Block(number, next(source)) for number in range(kit.ARRAY_CAPACITY)]
        await asyncio.gather(*(side.take.call_one(block) for block in blocks))

    rate = await kit.rate(together, every=1) * kit.ARRAY_CAPACITY
    return {f"gb_per_s_{name}": kit.gb_per_s(rate, elements)}


async def main() -> None:
    processes = this_host().spawn_procs(per_host={"cpus": 1})
    side = processes.spawn("side", Side)
    measured = await calls(side)
    for name, elements in kit.ARRAYS.items():
        measured |= await arrays(side, name, elements)
    await processes.stop()
    kit.done(**measured)


if __name__ == "__main__":
    asyncio.run(main())
