"""Hosts of a Ray cluster, and workers that say where they are."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
from typing import Any

import rlinf_async as ra
from rlinf_async.runtime.ray.session import LOCAL_STORE_BYTES


class Hosts:
    """A Ray cluster whose hosts are nodes on this machine. No accelerator is real."""

    def __init__(self) -> None:
        self._cluster: Any = importlib.import_module("ray.cluster_utils").Cluster()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, name: str, **options: Any) -> Any:
        """Add a host of two cores; returns Ray's node."""
        before = signal.getsignal(signal.SIGTERM)
        try:
            return self._cluster.add_node(
                node_name=name, num_cpus=2, object_store_memory=LOCAL_STORE_BYTES, **options
            )
        finally:
            signal.signal(signal.SIGTERM, before)  # Ray has set its own

    def kill(self, node: Any) -> None:
        """Kill a host."""
        self._cluster.remove_node(node, allow_graceful=False)

    def shutdown(self) -> None:
        self._cluster.shutdown()


class Teller(ra.Worker):
    """Says where it is, and what it sees."""

    async def sees(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    async def variable(self, name: str) -> str:
        return os.environ.get(name, "")

    async def pid(self) -> int:
        return os.getpid()

    async def say(self, text: str) -> None:
        print(text, flush=True)

    async def forever(self) -> None:
        await asyncio.Event().wait()

    async def end(self, code: int) -> None:
        print("last words", flush=True)
        os._exit(code)


class Adder(ra.Worker):
    """Adds with the other ranks of its group."""

    async def setup(self) -> None:
        await self.join_collective()

    async def total(self) -> float:
        import torch

        mine = torch.tensor(float(self.rank + 1))
        torch.distributed.all_reduce(mine)
        return float(mine)


class Broken(ra.Worker):
    """Cannot be set up."""

    async def setup(self) -> None:
        raise ValueError("not today")


class Doubler(ra.Worker):
    """Doubles numbers; leases each until its double is put."""

    async def run(self, numbers: ra.Receiver[int], doubles: ra.Sender[int]) -> None:
        with contextlib.suppress(ra.EndOfChannel):
            while True:
                async with numbers.lease() as (number,):
                    await doubles.put(2 * number)
