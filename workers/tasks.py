"""Several tasks inside one call of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """An `asyncio.TaskGroup` that raises the first failure as it is, not in an `ExceptionGroup`."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        first = _first(failures)
        raise first from first.__cause__


def _first(error: BaseException) -> BaseException:
    """The first failure inside nested groups."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
