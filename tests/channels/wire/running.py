"""Real processes at the other end of a wire."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import ModuleType
from typing import Any


@asynccontextmanager
async def running(module: ModuleType, *arguments: str, **options: Any) -> AsyncIterator[Process]:
    """A process that runs this module; dead when the block ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module.__name__, *arguments, **options
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
