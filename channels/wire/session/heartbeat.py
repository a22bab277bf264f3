"""Whether the other side still answers: a stopped process keeps its sockets open.

Silence counts only while this process listens, see `deadlines`: not while it is stopped or blocked
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Self

import msgspec

from rlinf_async.deadlines import Patience

HEARTBEAT_LIMIT: Final = 15.0


class Heartbeat(msgspec.Struct, frozen=True):
    """Interval between heartbeats, and limit on silence. In seconds."""

    interval: float
    limit: float

    @classmethod
    def of(cls, limit: float, interval: float | None = None) -> Self:
        """With an eighth of the limit as interval, at most 1 s, if none is given."""
        return cls(min(1.0, limit / 8) if interval is None else interval, limit)

    def __post_init__(self) -> None:
        if not 0 < self.interval < self.limit:
            raise ValueError(
                f"a heartbeat needs 0 < interval < limit, got interval={self.interval}, "
                f"limit={self.limit}"
            )


class HeartbeatMonitor:
    """Sends heartbeats where nothing else is sent, and watches for the peer's.

    Args:
        beat: called once for each interval.
        silent: called when the peer was silent for so long, with the seconds; says whether to wait
            for it once more.
    """

    def __init__(
        self, heartbeat: Heartbeat, beat: Callable[[], None], silent: Callable[[float], bool]
    ) -> None:
        self._heartbeat = heartbeat
        self._beat = beat
        self._silent = silent
        self._loop = asyncio.get_running_loop()
        self._patience = Patience(heartbeat.limit, heartbeat.interval)
        self._timer: asyncio.TimerHandle | None = None
        self.heard = False
        """whether anything arrived since the last beat"""

    @property
    def interval(self) -> float:
        return self._heartbeat.interval

    def start(self) -> None:
        """Beat from now on."""
        self.stop()
        self._patience.renew()
        self._timer = self._loop.call_at(self._patience.due, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        patience = self._patience
        if self.heard:
            self.heard = False
            patience.renew()
        elif patience.look():
            if not self._silent(self._heartbeat.limit):
                return
            patience.renew()
        self._beat()
        self._timer = self._loop.call_at(patience.due, self._tick)
