"""Find code that keeps a real event loop from answering."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from rlinf_async.testing.errors import LoopBlocked
from rlinf_async.testing.virtual_loop import VirtualLoop


class LoopWatch:
    """A thread that pings a running loop and records the stack of code that delays an answer.

    Works on asyncio and uvloop. ``limit`` is in seconds. Time in which the whole process was
    stopped (the watching thread too), or in which the loop's thread was ready but other processes
    had the cores, does not count.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, limit: float = 0.5) -> None:
        self.findings: list[str] = []
        self._loop = loop
        self._limit = limit
        self._loop_thread = threading.get_ident()
        self._folder = f"/proc/self/task/{threading.get_native_id()}"
        self._ran = self._ran_at = 0.0
        self._answered = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)

    def start(self) -> None:
        """Begin to ping; the calling thread must be the one that runs the loop."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopped.set()
        self._answered.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self._limit / 10):
            if self._loop.is_running() and not self._loop.is_closed():
                self._ping()

    def _ping(self) -> None:
        self._answered.clear()
        if self._stopped.is_set():  # `stop` sets both: do not wait for what was just cleared
            return
        try:
            self._loop.call_soon_threadsafe(self._answered.set)
        except RuntimeError:  # closed in the meantime
            return
        if not self._wait_for_answer() and self._loop.is_running():
            self.findings.append(self._stack())
            self._answered.wait()  # one finding for one block

    def _wait_for_answer(self) -> bool:
        """Wait in tenths of the limit, each of which counts once, however long it took."""
        tenth, before, waited = self._limit / 10, self._starved(), 0
        while not self._answered.wait(tenth):
            waited += 1
            if waited >= 10 and waited * tenth - (self._starved() - before) >= self._limit:
                return False
        return True

    def _starved(self) -> float:
        """Seconds for which the loop's thread was ready to run and got no core; 0 where the system
        does not report them."""
        try:
            with open(f"{self._folder}/schedstat", "rb") as file:
                ran, waited = (int(field) / 1e9 for field in file.read().split()[:2])
            with open(f"{self._folder}/stat", "rb") as file:
                ready = file.read().rpartition(b")")[2].split()[0] == b"R"
        except (OSError, IndexError, ValueError):
            return 0.0
        now = time.monotonic()
        if not ready or ran != self._ran:
            self._ran, self._ran_at = ran, now
        return waited + now - self._ran_at  # the system adds a wait once it is over

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        where = "".join(traceback.format_stack(frame)[-6:]) if frame else "  (its thread has ended)"
        return f"the event loop did not answer for {self._limit:.2f} s; it stood in\n{where}"


@contextmanager
def forbid_blocking(
    loop: asyncio.AbstractEventLoop, *, limit: float = 0.5
) -> Iterator[LoopWatch | None]:
    """Raise `LoopBlocked` on leaving if the loop was kept from answering for ``limit`` seconds.

    Enter it in the thread that runs the loop, before or while it runs. A `VirtualLoop` is not
    watched: compute runs inline there. An error of the block itself is raised as it is.
    """
    if isinstance(loop, VirtualLoop):
        yield None
        return
    watch = LoopWatch(loop, limit=limit)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
    if watch.findings:
        raise LoopBlocked("\n".join(watch.findings))
