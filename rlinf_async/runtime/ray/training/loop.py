"""An event loop in a thread of its own, for a Ray actor whose methods block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
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

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result, or raise its error."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
