"""Starts a run, and follows it: ``python -m tests.jobs.starts_a_run FILE.toml RUN``."""

from __future__ import annotations

import asyncio
import sys

import rlinf_async as ra


async def main() -> None:
    """Print the step of every row."""
    endless = {"training.iterations": 10**6}
    run = await ra.train(sys.argv[1], out=sys.argv[2], overrides=endless)
    async for row in run:
        print(row["step"], flush=True)


if __name__ == "__main__":
    asyncio.run(main())
