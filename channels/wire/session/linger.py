"""Closing a connection only once the peer has confirmed what was said last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from rlinf_async.channels.wire.session.hangup import GRACE_SECONDS
from rlinf_async.channels.wire.session.progress import PROGRESS_BYTES, ProgressTimer


class Closing(Protocol):
    """The connection that is to be closed."""

    @property
    def sent_bytes(self) -> int: ...

    def abort(self, reason: str) -> None: ...


class Linger:
    """Lets closing a connection wait until nothing is open; a peer that makes no progress with it
    for `GRACE_SECONDS` is given up. See `Connection.add_linger`.

    Args:
        open_count: how much is open. Once it is 0, `settled` is to be called.
        begin: called once when closing waits for it.
        lost: what the count is of, and what became of it, for the reason: "items were not taken".
    """

    def __init__(
        self,
        connection: Closing,
        open_count: Callable[[], int],
        begin: Callable[[], object],
        lost: str,
    ) -> None:
        self._connection = connection
        self._open_count = open_count
        self._begin = begin
        self._lost = lost
        self._then: Callable[[], None] | None = None
        self._timer: ProgressTimer | None = None

    def must_wait(self, then: Callable[[], None]) -> bool:
        """Whether closing must wait; if so, ``then`` is called as soon as it need not."""
        if not self._open_count():
            return False
        if self._then is None:
            self._then = then
            self._timer = ProgressTimer(GRACE_SECONDS, self._progress, self._give_up)
            self._begin()
        return True

    def settled(self) -> None:
        """Nothing is open any more."""
        then, self._then = self._then, None
        self.stop()
        if then is not None:
            asyncio.get_running_loop().call_soon(then)

    def stop(self) -> None:
        """The connection is lost."""
        if self._timer is not None:
            self._timer.cancel()

    def _progress(self) -> tuple[int, int]:
        return self._open_count(), self._connection.sent_bytes // PROGRESS_BYTES

    def _give_up(self, progress: tuple[int, int]) -> None:
        self._connection.abort(f"{progress[0]} {self._lost} when it was closed")
