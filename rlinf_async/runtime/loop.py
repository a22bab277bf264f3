"""`run`: an event loop for a script's main coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run a coroutine in a new event loop: uvloop's where it is installed, else asyncio's.

    Ctrl-C cancels the coroutine, so that everything it started is taken down, and then raises
    `KeyboardInterrupt`.
    """
    with asyncio.Runner(debug=debug, loop_factory=loop_factory()) as runner:
        return runner.run(main)


def loop_factory() -> Any:
    """Makes a uvloop event loop where that is installed; None means asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
