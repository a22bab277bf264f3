"""Waiting for a peer as long as it makes progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rlinf_async.deadlines import Timer

PROGRESS_BYTES: Final = 64 * 1024
"""Bytes sent that count as progress; heartbeats, which are fewer, do not."""


class ProgressTimer:
    """Calls back once a measure has not changed for so many seconds.

    Args:
        measure: what changes while there is progress. It is compared with its last value.
        stalled: called once, with that value.
    """

    def __init__(
        self, seconds: float, measure: Callable[[], Any], stalled: Callable[[Any], object]
    ) -> None:
        self._seconds = seconds
        self._measure = measure
        self._stalled = stalled
        self._start()

    def cancel(self) -> None:
        """Do not call."""
        self._timer.cancel()

    def _start(self) -> None:
        self._timer = Timer(self._seconds, self._look, self._measure())

    def _look(self, before: Any) -> None:
        if self._measure() == before:
            self._stalled(before)
        else:
            self._start()
