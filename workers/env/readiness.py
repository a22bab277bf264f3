"""How long the environments that are ready wait for others, before the policy answers them.

A forward pass costs nearly the same for one environment and for many, so it pays to wait for those
that will be ready soon, and not for a slow one. Which it is, nobody knows beforehand. Two rules::

    count     wait until so many are ready; with all of a stage: lock-step
    adaptive  wait while those that are ready have waited, on average, less than an answer takes

Adaptive costs at most twice as much as the best there could be. Let an answer take ``f`` seconds,
however many environments it is for, and a step ``t``. Whatever the rule, a step and its answer
cost an environment ``t + f``. Adaptive adds the wait, whose mean over a batch is at most ``f``: so
it is when the batch is answered, and of those that got ready while another batch was answered,
none has waited longer than that answer took. So a step costs ``t + 2 f`` on average, at most twice
``t + f``. Lock-step has no such bound where one environment is slow. One alone waits at most
``f (1 + 1/2 + ... + 1/E)``: each that comes postpones the answer by less than the one before.

(For the cost of acknowledgments in TCP such a rule is known as 2-competitive: Dooly, Goldman and
Scott, "On-line analysis of the TCP acknowledgment delay problem", JACM 2001.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import Final, Literal

ANSWERS: Final = 15
"""answers over whose median time is taken: one that waited for weights does not count"""


class Readiness:
    """The rule of one stage."""

    def __init__(self, ready: int | Literal["adaptive"]) -> None:
        self._count = None if ready == "adaptive" else ready
        self._answers: deque[float] = deque(maxlen=ANSWERS)
        self._seconds = 0.0

    def answered(self, seconds: float) -> None:
        """Count the time from a batch of observations to its actions."""
        if self._count is None:
            self._answers.append(seconds)
            self._seconds = median(self._answers)

    def wait_until(self, ready_at: Sequence[float], in_flight: int) -> float:
        """When those that got ready at these times are answered, unless others come before.

        ``inf``: others have to come. A time that has passed: now. ``in_flight`` environments are
        not ready yet.
        """
        if not in_flight:
            return -math.inf
        if self._count is not None:
            return math.inf if len(ready_at) < self._count else -math.inf
        return fmean(ready_at) + self._seconds if ready_at else math.inf
