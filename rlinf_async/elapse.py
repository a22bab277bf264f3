"""`let_pass`: what blocking code calls to take time, so that the time comes from its loop.

::

    in a thread                 the thread sleeps
    inline, on a virtual loop   whoever waits for the result gets it so much later, by that loop's
                                clock, and nothing sleeps
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_here = threading.local()
"""of each thread: where seconds go instead of being slept"""


@contextmanager
def taking_time(take: Callable[[float], None]) -> Iterator[None]:
    """Have the seconds of the block, which is run inline by a loop, go there.

    Not by a context variable: whoever runs the code may do so in a context that was copied before.
    """
    _here.take = take
    try:
        yield
    finally:
        _here.take = None


def let_pass(seconds: float) -> None:
    """Take so many seconds; none where they are not above 0."""
    if seconds <= 0.0:
        return
    take: Callable[[float], None] | None = getattr(_here, "take", None)
    if take is None:
        time.sleep(seconds)
    else:
        take(seconds)
