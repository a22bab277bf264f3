"""Clocks of other hosts: measured offsets, so that a trace of several hosts has one time.

::

    this host   sent ----------------------- received        the true offset is between
    other host            its time                           its time - received and its time - sent

``CLOCK_MONOTONIC`` begins when a host starts and is the same for all of its processes, so nothing
has to be aligned there: where zero is possible, the offset is zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from rlinf_async.observe.trace import Span

MEASUREMENTS_KEPT: Final = 16
"""The best of so many counts: clocks drift apart by up to 0.1 ms a second."""


class PeerClock:
    """The monotonic clock of another process, in nanoseconds of this one's."""

    def __init__(self) -> None:
        self._bounds: deque[tuple[int, int]] = deque(maxlen=MEASUREMENTS_KEPT)
        """least and greatest offset that each measurement allows"""

    def measure(self, sent: int, there: int, received: int) -> None:
        """Note that the peer's clock showed ``there`` between these two times of this clock."""
        self._bounds.append((there - received, there - sent))

    @property
    def offset(self) -> int:
        """The peer's time minus this one's, off by at most `uncertainty`; 0 where not measured."""
        least, greatest = self._best
        return 0 if least <= 0 <= greatest else (least + greatest) // 2

    @property
    def uncertainty(self) -> int:
        """Half of the shortest round trip."""
        least, greatest = self._best
        return (greatest - least) // 2

    def aligned(self, spans: Iterable[Span]) -> list[Span]:
        """The peer's spans, in the time of this process."""
        offset = self.offset
        if offset == 0:
            return list(spans)
        return [msgspec.structs.replace(span, start=span.start - offset) for span in spans]

    @property
    def _best(self) -> tuple[int, int]:
        return min(self._bounds, key=lambda bounds: bounds[1] - bounds[0], default=(0, 0))
