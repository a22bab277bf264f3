"""The body of ``async with Cluster``: what cancels it, and with which error it is left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from rlinf_async.runtime.calls import FirstCause, GroupCall
from rlinf_async.runtime.signals import run_signals
from rlinf_async.runtime.stall import internal
from rlinf_async.workers.errors import is_secondary

log = logging.getLogger(__name__)


class ClusterBody:
    """Ends with everything that it started: the first failure cancels it, and is raised once."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        """that entered the cluster"""
        self._cause = FirstCause()
        self._aborted = False
        self._leaving = False
        self._hurry = asyncio.Event()
        """set once the task is cancelled while the cluster is closed"""

    @property
    def entered(self) -> bool:
        """Whether it was, at any time."""
        return self._task is not None

    def enter(self) -> None:
        """Note that this task runs the body.

        Raises:
            RuntimeError: it was entered before.
        """
        if self.entered:
            raise RuntimeError("a Cluster can be entered once: make another one")
        self._task = asyncio.current_task()

    def abort(self, cause: BaseException) -> None:
        """Cancel it, and raise ``cause`` when it is left; of several the first."""
        self._cause.note(cause, None)
        if self._aborted or self._leaving or self._task is None:
            return
        if self._task.done():  # entered by a cell of a notebook: nobody is there to be cancelled
            log.error("the cluster failed: leave it, and make another one\n%s", cause)
        else:
            self._aborted = True
            run_signals().note_failure()
            self._task.cancel()

    def call_failed(self, error: BaseException, call: GroupCall[Any]) -> None:
        """Note the failure of a call; where nobody awaits it, it ends the cluster."""
        self._cause.note(error, call)
        if not call.awaited:
            self.abort(error)

    async def leave(
        self,
        error: BaseException | None,
        close: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
    ) -> None:
        """Close, and raise what the cluster ends with.

        Args:
            error: that the body ended with, which is raised anyway unless this raises another.
            close: ends what the body started; without grace once its argument is set.
        """
        body_failed = isinstance(error, Exception) and not is_secondary(error)
        if isinstance(error, Exception):
            run_signals().note_failure()
        interrupted = await self._close_shielded(close)
        if self._aborted and self._task is not None:
            self._task.uncancel()
        cause = self._cause.error
        if cause is None or not self._cause.outranks(error, aborted=self._aborted):
            if error is None and interrupted is not None:
                raise interrupted
            return
        if body_failed:
            cause.add_note(f"the body of the cluster then raised {error!r}")
        raise cause from cause.__cause__  # not from the errors that it led to

    async def _close_shielded(
        self, close: Callable[[asyncio.Event], Coroutine[Any, Any, None]]
    ) -> asyncio.CancelledError | None:
        """Close; without grace once the task is cancelled, and return that cancellation."""
        self._leaving = True
        interrupted = None
        closing = internal(asyncio.create_task(close(self._hurry), name="close cluster"))
        own = int(self._aborted)  # our own cancellation may arrive only now
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                if self._task is not None and self._task.cancelling() > own:
                    interrupted = error
                    self._hurry.set()
        closing.result()
        return interrupted
