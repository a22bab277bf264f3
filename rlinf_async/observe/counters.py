"""Numbers over time for the trace, and how fast counts grow."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Counter(msgspec.Struct, frozen=True, array_like=True):
    """The values of a track of the trace from a moment on. Nanoseconds, on the clock of spans."""

    track: str
    at: int
    values: dict[str, float]


class Rates:
    """How fast counts grow, between one look at them and the next."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, Mapping[str, float]]] = {}
        self._at = self._before = 0

    def per_second(self, name: str, at: int, counts: Mapping[str, float]) -> dict[str, float]:
        """Growth per second since the last look; 0 at the first. A new count began at 0.

        Args:
            at: now, in nanoseconds; the same for all that are looked at together.
        """
        if at != self._at:
            self._before, self._at = self._at or at, at
        before, old = self._last.get(name, (self._before, {}))
        self._last[name] = at, counts
        seconds = (at - before) / 1e9
        if seconds <= 0:
            return dict.fromkeys(counts, 0.0)
        return {key: (value - old.get(key, 0.0)) / seconds for key, value in counts.items()}
