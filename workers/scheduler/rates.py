"""`MeasuredRates`: what work takes in this run, for policies that predict.

::

    decoding   each finished response: its tokens, and the seconds in which its engine made them
    training   the actor, at each boundary: tokens of its last mini-batch, and their seconds
    changes    from the orders until everyone has carried them out

A time is fitted as ``a + b x load``, with neither below 0, over the newest measurements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import Rates
from rlinf_async.workers.scheduler.messages import EndedCount

KEPT = 64
"""measurements of each kind"""
LEAST_TOKENS = 4
"""of a response: what a shorter one takes is mostly its beginning and its end"""


class MeasuredRates:
    """The newest measurements of a run, and the rates that follow from them.

    Args:
        known: rates from elsewhere, which are not measured again; those that are 0 are.
    """

    def __init__(self, known: Rates | None = None) -> None:
        self._known = known or Rates()
        self._steps: deque[tuple[float, float]] = deque(maxlen=KEPT)
        """requests decoded together, seconds of a decoding step"""
        self._batches: deque[tuple[float, float]] = deque(maxlen=KEPT)
        """tokens of a rank, times one over the ranks of its model; seconds of a mini-batch"""
        self._changes: deque[float] = deque(maxlen=KEPT)
        self._moves: deque[float] = deque(maxlen=KEPT)

    def decoded(self, responses: Iterable[EndedCount]) -> None:
        """Note responses that an instance has finished."""
        self._steps.extend(
            (one.running, one.seconds / one.made) for one in responses if one.made >= LEAST_TOKENS
        )

    def trained(self, tokens: int, seconds: float, strategy: Strategy) -> None:
        """Note a mini-batch: tokens of one data rank."""
        if tokens:
            together = strategy.world_size // strategy.dp
            self._batches.append((tokens / together, seconds))

    def changed(self, seconds: float) -> None:
        """Note how long a change of the actor's strategy took."""
        self._changes.append(seconds)

    def moved(self, seconds: float) -> None:
        """Note how long instances took to stop."""
        self._moves.append(seconds)

    def rates(self) -> Rates:
        """Return what is known by now."""
        known = self._known
        decode, sequence = _line(self._steps, alike_is_constant=True)
        batch, token = _line(self._batches, alike_is_constant=False)
        if known.decode_seconds:
            decode, sequence = known.decode_seconds, known.sequence_seconds
        if known.train_seconds:
            batch, token = known.mini_batch_seconds, known.train_seconds
        return msgspec.structs.replace(
            known,
            decode_seconds=decode,
            sequence_seconds=sequence,
            train_seconds=token,
            mini_batch_seconds=batch,
            rescale_seconds=known.rescale_seconds or _mean(self._changes),
            move_seconds=known.move_seconds or _mean(self._moves),
        )


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds) if seconds else 0.0


def _line(points: Sequence[tuple[float, float]], *, alike_is_constant: bool) -> tuple[float, float]:
    """Fit ``seconds = a + b x load`` by least squares, with neither below 0; zeros without points.

    Where the loads are too much alike to tell the two apart, all of it is ``a`` (a decoding step is
    mostly the reading of weights) or ``b`` (training is mostly arithmetic).
    """
    if not points:
        return 0.0, 0.0
    load, seconds = _mean([one for one, _ in points]), _mean([one for _, one in points])
    spread = sum((one - load) ** 2 for one, _ in points)
    through = sum(x * y for x, y in points) / max(sum(x * x for x, _ in points), 1e-12)
    if spread < 0.01 * len(points) * load**2:
        return (seconds, 0.0) if alike_is_constant else (0.0, through)
    slope = sum((x - load) * (y - seconds) for x, y in points) / spread
    if slope <= 0.0:
        return seconds, 0.0
    if seconds < slope * load:
        return 0.0, through
    return seconds - slope * load, slope
