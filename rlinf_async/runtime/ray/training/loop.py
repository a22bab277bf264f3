"""An event loop in a thread of its own, for a Ray actor whose methods block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from rlinf_async.runtime.loop import loop_factory

T = TypeVar("T")


class LoopThread:
    """Runs coroutines while the thread that asked for them waits, and goes on between them: what
    this process serves to others is answered at any time."""

    def __init__(self, name: str) -> None:
        make = loop_factory() or asyncio.new_event_loop
        self._loop: asyncio.AbstractEventLoop = make()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self.interrupt: Future[None] | None = None
        """its error ends the wait for a coroutine; what that does in another thread goes on"""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result, or raise its error, or that of `interrupt`."""
        result = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        if self.interrupt is not None:
            interrupt = self.interrupt
            either: tuple[Future[Any], Future[Any]] = (result, interrupt)
            wait(either, return_when=FIRST_COMPLETED)
            if not result.done():
                result.cancel()
                interrupt.result()
        return result.result()

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
