"""Which failure a cluster raises: the first that explains the others.

A failure spreads: whoever reads or writes a channel of a failed worker fails too, often before the
first failure has been told. Such a *secondary* failure never hides a primary one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rlinf_async.runtime.calls import GroupCall
from rlinf_async.workers.errors import is_secondary


class FirstCause:
    """Keeps the first failure that is a cause and that the body has not dealt with."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._call: GroupCall[Any] | None = None

    def blame(self, error: BaseException, call: GroupCall[Any] | None) -> None:
        """This happened, in this call if in any."""
        known = self.error
        if known is None or (not is_secondary(error) and (self._told or is_secondary(known))):
            self.error, self._call = error, call

    def outranks(self, body: BaseException | None, *, aborted: bool) -> bool:
        """Whether it is raised, rather than what the body ended with."""
        if self.error is None or self.error is body:
            return False
        if isinstance(body, asyncio.CancelledError):
            return aborted
        if body is None:
            return aborted or not (self._told or is_secondary(self.error))
        return is_secondary(body) or (aborted and isinstance(body, Exception))

    @property
    def _told(self) -> bool:
        """Whether it was raised in the body, by an ``await`` of its call."""
        return self._call is not None and self._call.seen
