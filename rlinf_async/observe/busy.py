"""How a worker's time was spent, from spans that may nest and overlap.

At every moment one span is in the foreground: of those that are open the one that started last, and
a wait only while nothing else is open. So the pieces below never overlap, and their times add up.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rlinf_async.observe.trace import Span


class Piece(NamedTuple):
    """A stretch of time in which one span was in the foreground. Nanoseconds."""

    start: int
    end: int
    name: str
    waiting: bool


class Busy(msgspec.Struct, frozen=True):
    """Where a worker's time went, over a window that is the same for all workers."""

    worker: str
    window: int
    """Nanoseconds."""
    seconds_by_name: dict[str, float]
    """Foreground seconds of each span name, waits left out."""

    @property
    def idle_share(self) -> float:
        """Share of the window in which the worker waited or recorded nothing, 0 to 1."""
        if self.window <= 0:
            return 0.0
        return max(0.0, 1.0 - sum(self.seconds_by_name.values()) * 1e9 / self.window)


def foreground(spans: Sequence[Span]) -> list[Piece]:
    """The pieces of one worker's spans, in order of time. O(n log n)."""
    spans = sorted(spans, key=lambda span: span.start)
    moments = sorted({moment for span in spans for moment in (span.start, span.end)})
    pieces: list[Piece] = []
    open_spans: list[tuple[bool, int, int]] = []  # (waiting, -order of start, end)
    coming = 0
    for moment, until in itertools.pairwise(moments):
        while coming < len(spans) and spans[coming].start <= moment:
            span = spans[coming]
            heapq.heappush(open_spans, (span.waiting, -coming, span.end))
            coming += 1
        while open_spans and open_spans[0][2] <= moment:
            heapq.heappop(open_spans)
        if open_spans:
            waiting, order, _ = open_spans[0]
            _extend(pieces, Piece(moment, until, spans[-order].name, waiting))
    return pieces


def busy(worker: str, pieces: Sequence[Piece], window: int) -> Busy:
    """Sum up a worker's pieces over a window of so many nanoseconds."""
    seconds: dict[str, float] = {}
    for piece in pieces:
        if not piece.waiting:
            seconds[piece.name] = seconds.get(piece.name, 0.0) + (piece.end - piece.start) / 1e9
    return Busy(worker, window, seconds)


def _extend(pieces: list[Piece], piece: Piece) -> None:
    """Append, joined to the piece before where that one goes on."""
    if pieces and pieces[-1].end == piece.start and pieces[-1].name == piece.name:
        piece = piece._replace(start=pieces.pop().start)
    pieces.append(piece)
