"""Launches 64 workers that ask for 1 % of a core, and calls each: ours, or bare actors of Ray.

    python launch.py ours | bare

Ray runs already, and both sides use the same connection.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import ray  # pyright: ignore[reportMissingImports]

import rlinf_async as ra

WORKERS = 64
CPU = 0.01
STORE_BYTES = 100 << 20


class Bare:
    """An actor of Ray and nothing else."""

    async def pid(self) -> int:
        return os.getpid()


class Ours(ra.Worker):
    """The same as a worker."""

    async def pid(self) -> int:
        return os.getpid()


def launch_bare() -> float:
    """Seconds until all have answered."""
    began = time.perf_counter()
    made: Any = ray.remote(Bare).options(num_cpus=CPU)
    actors = [made.remote() for _ in range(WORKERS)]
    pids = ray.get([actor.pid.remote() for actor in actors])
    seconds = time.perf_counter() - began
    check(pids)
    return seconds


async def launch_ours() -> float:
    """Seconds until all have answered."""
    async with ra.Cluster.ray() as cluster:
        began = time.perf_counter()
        workers = await cluster.launch(Ours, count=WORKERS, resources={"CPU": CPU})
        pids = await workers.call(Ours.pid)
        seconds = time.perf_counter() - began
        check(pids)
    return seconds


def check(pids: list[int]) -> None:
    if len(set(pids)) != WORKERS:
        sys.exit(f"{len(set(pids))} processes instead of {WORKERS}")


def main() -> None:
    ray.init(
        num_cpus=os.cpu_count(),
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
    )
    seconds = launch_bare() if sys.argv[1:] == ["bare"] else asyncio.run(launch_ours())
    ray.shutdown()
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
