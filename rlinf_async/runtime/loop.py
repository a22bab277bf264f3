"""`run`: an event loop for a script's main coroutine, and what Ctrl-C does to it.

=======  ==========================================================================
Ctrl-C   then
=======  ==========================================================================
first    the coroutine is cancelled: what it started is taken down in peace
second   it is cancelled again: a cluster that is being left waits for nobody more
third    the process ends at once, as if it had no handler; its workers see it and go
=======  ==========================================================================
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE = 2
"""So many times Ctrl-C only cancels."""


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run a coroutine in a new event loop: uvloop's where it is installed, else asyncio's.

    Ctrl-C cancels the coroutine, so that everything it started is taken down, and then raises
    `KeyboardInterrupt`; see the module's table. Outside the main thread, and where SIGINT has a
    handler already, signals are left alone.
    """
    interrupts = _Interrupts()
    try:
        with interrupts.handled(), asyncio.Runner(debug=debug, loop_factory=loop_factory()) as own:
            return own.run(interrupts.cancelling(main))
    except asyncio.CancelledError as error:
        if interrupts.count:
            raise KeyboardInterrupt from error  # says where the coroutine was
        raise


class _Interrupts:
    """Counts Ctrl-C and passes it on to a task."""

    def __init__(self) -> None:
        self.count = 0
        self._task: asyncio.Task[Any] | None = None

    async def cancelling(self, main: Coroutine[Any, Any, T]) -> T:
        """Run this as what Ctrl-C cancels."""
        self._task = asyncio.current_task()
        if self.count and self._task is not None:
            self._task.cancel()  # it came while the loop was made
        return await main

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Take SIGINT from Python's own handler meanwhile, where that has it."""
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > PATIENCE:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if self._task is not None and not self._task.done():
            self._task.cancel()
            self._task.get_loop().call_soon_threadsafe(_wake)


def _wake() -> None:
    """Nothing: a loop that waits for files looks at its tasks only once something happens."""


def loop_factory() -> Any:
    """Makes a uvloop event loop where that is installed; None means asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
