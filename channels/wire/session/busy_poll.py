"""Looking for messages a little while before the loop sleeps, where they come close together.

A process that sleeps until a message comes is woken tens of microseconds late, and computes slowly
until its caches are warm again. Where two processes talk in turns (an env and its policy, a call
and its answer) most of a round trip is that. So when a message came soon after the one before, the
loop goes on looking for the next one for `LOOK_SECONDS` instead of sleeping.

What it must not cost is the core that somebody else wants:

* a process to which messages come seldom never looks, and one on a host with one core never does;
* between looks in vain the core is offered to whoever waits for it;
* a look that came late, because another process or thread took the core or the interpreter, ends
  it for `REST_SECONDS`, and so does a message that did not come while it was looked for: what is
  looked for in vain is 2.5 % of the time at most.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Final
from weakref import WeakValueDictionary

BEGIN_SECONDS: Final = 500e-6
"""Between two messages, at most, for the loop to look for a third."""
LOOK_SECONDS: Final = 250e-6
"""After a message was dealt with."""
LATE_SECONDS: Final = 200e-6
"""Delay of a look, beyond this thread's own CPU time, that counts as pre-empted."""
REST_SECONDS: Final = 10e-3
"""After a look that was late, or in vain."""
VARIABLE: Final = "RLINF_ASYNC_BUSY_POLL"
"""in the environment: with "0" no loop looks"""


class BusyPoll:
    """Keeps one loop from sleeping."""

    __slots__ = (
        "__weakref__", "_call_soon", "_computed", "_heard", "_looked", "_looking", "_rest_until"
    )  # fmt: skip

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._call_soon = call_soon
        self._heard = self._looked = self._rest_until = float("-inf")
        self._looking = False
        self._computed: float | None = None
        """by this thread at the last look, in seconds; None if there was work then"""

    def heard(self) -> None:
        """A message came, and was dealt with."""
        now = perf_counter()
        before, self._heard = self._heard, now
        if not self._looking and now - before < BEGIN_SECONDS and now >= self._rest_until:
            self._looking = True
            self._call_soon(self._look)

    def _look(self) -> None:
        """Look once per turn of the loop, until a message is late or the core is wanted."""
        now = perf_counter()
        if self._heard > self._looked:  # in the turn that is over, which dealt with it until now
            self._heard = self._looked = now
            self._computed = None
        elif now - self._heard > LOOK_SECONDS or self._yield_core(now) > LATE_SECONDS:
            self._looking = False
            self._rest_until = now + REST_SECONDS
            return
        self._call_soon(self._look)

    def _yield_core(self, now: float) -> float:
        """Offer it to whoever waits for it; return the seconds that it was taken since the last
        look."""
        computed, before = thread_time(), self._computed
        late = 0.0 if before is None else (now - self._looked) - (computed - before)
        self._looked, self._computed = now, computed
        os.sched_yield()
        return late


_polls: WeakValueDictionary[asyncio.AbstractEventLoop, BusyPoll] = WeakValueDictionary()
"""Of loops that have sockets: these keep theirs."""


def busy_poll(loop: asyncio.AbstractEventLoop) -> BusyPoll | None:
    """The one of this loop; None where loops are to sleep."""
    alone = (os.cpu_count() or 1) < 2 or not hasattr(os, "sched_yield")
    if alone or os.environ.get(VARIABLE) == "0":
        return None
    found = _polls.get(loop)
    if found is None:
        found = _polls[loop] = BusyPoll(loop.call_soon)
    return found
