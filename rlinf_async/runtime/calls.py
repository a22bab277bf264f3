"""A call that runs on some ranks: its parts, one for each rank, and what becomes of it.

No task runs for a call here: every part is told how it ended, and the last one settles the call::

    begin --> rank 0 --value----.
          --> rank 1 --failure--+--> told to the cluster; the other parts are cancelled
          --> rank 2 --value----'
                                `--> all have ended: result, first cause, or cancelled --> awaiters
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from rlinf_async import patient
from rlinf_async.runtime.part import Part
from rlinf_async.runtime.stall import WorkFuture
from rlinf_async.workers.errors import is_secondary
from rlinf_async.workers.methods import Method

R = TypeVar("R")


class GroupCall(Generic[R]):
    """A call that runs on one or more ranks. Await it for its result; it runs whether or not you
    do.

    If nobody awaits it when it fails, the failure ends the cluster: it is never lost.
    """

    __slots__ = (
        "_cancelled", "_done", "_enders", "_error", "_group", "_method", "_on_end", "_on_failure",
        "_parts", "_running", "_single", "_value", "_waiters", "failures", "seen",
    )  # fmt: skip

    def __init__(
        self,
        group: str,
        method: Method,
        single: bool,
        on_failure: Callable[[BaseException, GroupCall[Any]], None],
        on_end: Callable[[GroupCall[Any]], None],
    ) -> None:
        self._group = group
        self._method = method
        self._single = single
        self._on_failure = on_failure
        self._on_end = on_end
        self._parts: Sequence[Part] = ()
        self._running = 0
        self._waiters: tuple[asyncio.Future[Any], ...] = ()
        self._enders: tuple[asyncio.Future[Any], ...] = ()
        self._done = False
        self._cancelled = False
        self._value: Any = None
        self._error: BaseException | None = None
        self.failures: tuple[BaseException, ...] = ()
        """of its ranks, in the order in which they happened"""
        self.seen = False
        """its failure was raised to whoever awaited it"""

    @property
    def label(self) -> str:
        """Group and method: ``"Rollout.generate"``."""
        return f"{self._group}.{self._method.name}"

    def done(self) -> bool:
        """Whether the result, or the failure, is there."""
        return self._done

    def cancel(self) -> None:
        """Stop the methods on all ranks; awaiting raises `asyncio.CancelledError`."""
        if not self._done:
            self._cancelled = True
            self._stop_parts()

    def __await__(self) -> Generator[Any, None, R]:
        if not self._done:
            mine = WorkFuture()  # one for each: being cancelled here must not end the others' wait
            self._waiters = (*self._waiters, mine) if self._waiters else (mine,)
            try:
                yield from mine
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                if not self._done:
                    self._waiters = tuple(one for one in self._waiters if one is not mine)
        return self._outcome()

    async def finished(self, within: float) -> None:
        """Wait until nothing of it runs any more, however it ended, but no longer than this."""
        if not self._done:
            mine = WorkFuture()
            self._enders = (*self._enders, mine)
            with suppress(TimeoutError):
                async with patient.timeout(within):
                    await mine

    @property
    def awaited(self) -> bool:
        """Whether somebody will see a failure."""
        return bool(self._waiters)

    def begin(self, parts: list[Part]) -> None:
        """Start a part for each rank."""
        self._parts = parts
        self._running = len(parts)
        if not parts:
            self._settle()
        for part in parts:
            part.start()

    # ---- for its parts

    def failed(self, error: BaseException) -> bool:
        """A part failed: told before its channels pass it on, so that the first is the cause.
        Whether it is a failure: not if it learned of its end by a channel, before it was cancelled
        itself."""
        if self._cancelled and is_secondary(error):
            return False
        self.failures = (*self.failures, error)
        self._on_failure(error, self)
        return True

    def ended(self, part: Part) -> None:
        """A part is over. If it failed, the others are of no use."""
        self._running -= 1
        if part.error is not None:
            self._stop_parts()
        if not self._running:
            self._settle()

    # ---- inside

    def _stop_parts(self) -> None:
        for part in self._parts:
            part.cancel()

    def _settle(self) -> None:
        self._done = True
        parts, self._parts = self._parts, ()
        if self.failures:
            self._error = _first_error(self.failures)
        elif self._single:
            self._cancelled = self._cancelled or parts[0].cancelled
            self._value = parts[0].value
        else:
            self._cancelled = self._cancelled or any(part.cancelled for part in parts)
            self._value = [part.value for part in parts]
        self._on_end(self)
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        for waiter in self._enders:
            if not waiter.done():
                waiter.set_result(None)

    def _outcome(self) -> R:
        if self._error is not None:
            self.seen = True
            raise self._error
        if self._cancelled:
            raise asyncio.CancelledError
        found: R = self._value
        return found

    def __repr__(self) -> str:
        return f"<GroupCall {self.label} {'done' if self.done() else 'running'}>"


def _first_error(failures: Sequence[BaseException]) -> BaseException | None:
    """The failure that explains the others: one that is not just a channel's news of it."""
    primary = [error for error in failures if not is_secondary(error)]
    return next(iter(primary or failures), None)
