"""Several tasks inside one call of a worker."""

from __future__ import annotations

import asyncio
from types import TracebackType


class task_group:
    """An `asyncio.TaskGroup` that raises the first failure as it is, not in an `ExceptionGroup`.

    A class and not an async generator: the deadlock watch follows coroutines only, to see that a
    task waits for its children here.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> asyncio.TaskGroup:
        return await self._group.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._group.__aexit__(kind, error, traceback)
        except ExceptionGroup as failures:
            first = _first(failures)
            raise first from first.__cause__


def _first(error: BaseException) -> BaseException:
    """The first failure inside nested groups."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
