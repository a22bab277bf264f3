"""Reports what blocks an event loop.

A thread asks the loop to answer; when it does not for ``limit`` seconds, the stack that the loop's
thread is in is logged, with the worker's name. Blocking work belongs in `Worker.compute`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from types import FrameType

log = logging.getLogger("rlinf_async.watchdog")


class Watchdog:
    """Watches the running loop from a thread of its own."""

    def __init__(self, name: str, limit: float = 5.0) -> None:
        self._name = name
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._stop = threading.Event()
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"{name} watchdog", daemon=True)
        self.blocked = 0
        """number of times that the loop was found blocked"""

    def start(self) -> None:
        """Begin watching."""
        self._thread.start()

    def stop(self) -> None:
        """End watching; waits for the thread, which does not wait for the loop."""
        self._stop.set()
        self._answered.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._limit / 4):
            self._answered.clear()
            if self._stop.is_set():  # `stop` sets both: do not wait for what was just cleared
                return
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:  # the loop was closed
                return
            if not self._answered.wait(self._limit):
                self._report()
                self._answered.wait()

    def _report(self) -> None:
        self.blocked += 1
        frame = sys._current_frames().get(self._thread_id)
        log.warning(
            "the event loop of %s has not answered for %.1f s; run blocking work with "
            "'await self.compute(fn, ...)'. It is in:\n%s",
            self._name,
            self._limit,
            _stack(frame),
        )


def _stack(frame: FrameType | None) -> str:
    return "".join(traceback.format_stack(frame)[-12:]) if frame is not None else "(unknown)"
