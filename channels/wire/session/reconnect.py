"""What happens between a cut and the next socket.

The side that connected connects again; the other waits for it. This ends when the connection
resumes on a new socket, when the patience has run out, or when the peer is known to be gone:
nothing listens at its address, another process does, or the system says that it has died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from rlinf_async.channels.wire.session.peer_process import DeathWatch
from rlinf_async.deadlines import Timer

PATIENCE: Final = 10.0
"""Seconds for which a cut connection is kept, unless said otherwise."""
ENDED: Final = "its process has ended"

Again = Callable[[], Coroutine[Any, Any, None]]


def check_patience(seconds: float) -> None:
    """Refuse an invalid time limit.

    Raises:
        ValueError: it is negative, infinite or not a number.
    """
    if not 0 <= seconds < float("inf"):
        raise ValueError(
            f"patience is a number of seconds, 0 or more, got {seconds}: 0 gives a cut connection "
            "up at once"
        )


class Reconnection:
    """Holds a cut connection until it resumes or is given up.

    Args:
        patience: seconds for which it may resume; 0: a cut ends it.
        redial: connects again, until it works; None on the side that waits.
        lose: called with the reason once the connection is to be given up.
    """

    def __init__(
        self,
        patience: float,
        redial: Again | None,
        lose: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._redial = redial
        self._lose = lose
        self._death = DeathWatch(self._loop)
        self._timer: Timer | None = None
        self._since = 0.0
        self._reason = ""
        self._task: asyncio.Task[None] | None = None
        self.patience = patience
        self.cut = False
        self.cuts = 0
        """how often it was cut so far"""

    @property
    def seconds(self) -> float:
        """For how long the connection has been cut; 0 while it is not."""
        return self._loop.time() - self._since if self.cut else 0.0

    @property
    def left(self) -> float:
        """Seconds of patience that are left."""
        return self.patience if self._timer is None else self._timer.left

    def was_cut(self, reason: str, pid: int) -> None:
        """Try to reach the peer, whose process is ``pid`` if that is known."""
        self.cuts += 1
        self._reason = reason
        if not self.cut:  # else it was cut again while it resumed
            self.cut = True
            self._since = self._loop.time()
            self._timer = Timer(self.patience, self._over)
        self._death.start(pid, self._died)
        if self._redial is not None and (self._task is None or self._task.done()):
            self._task = self._loop.create_task(self._redial(), name="connecting again")

    def found(self) -> None:
        """The connection has resumed."""
        self.cut = False
        self._stop_watching()

    def stop(self) -> None:
        """The connection is closed or lost."""
        self.cut = False
        self._stop_watching()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def give_up(self, why: str) -> None:
        """The peer cannot be reached any more."""
        if self.cut:
            self._lose(f"{self._reason}; {why}")

    async def wait_stopped(self) -> None:
        """Wait until connecting again has stopped."""
        if self._task is not None and self._task is not asyncio.current_task():
            await asyncio.wait([self._task])

    # ---- inside

    def _over(self) -> None:
        self.give_up(f"it was not resumed within {self.patience:g} s")

    def _died(self) -> None:
        self._death.stop()
        self.give_up(ENDED)

    def _stop_watching(self) -> None:
        self._death.stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
