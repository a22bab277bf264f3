"""`let_pass`: what blocking code calls to take time, so that the time comes from its loop.

::

    in a thread                 the thread sleeps
    inline, on a virtual loop   whoever waits for the result gets it so much later, by that loop's
                                clock, and nothing sleeps
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

TAKES_TIME: Final[ContextVar[Callable[[float], None] | None]] = ContextVar("TAKES_TIME")
"""where seconds go instead of being slept: set by a loop that runs blocking code inline"""


def let_pass(seconds: float) -> None:
    """Take so many seconds; none where they are not above 0."""
    if seconds <= 0.0:
        return
    take = TAKES_TIME.get(None)
    if take is None:
        time.sleep(seconds)
    else:
        take(seconds)
