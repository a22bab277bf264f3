"""`run`: an event loop for the main coroutine of a script, and the signals that end it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rlinf_async.runtime import signals
from rlinf_async.runtime.signals import RunSignals, Terminated

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run a coroutine in a new event loop: uvloop's where it is installed, else asyncio's.

    Ctrl-C and SIGTERM cancel the coroutine, so that everything it started is taken down; then
    Ctrl-C raises `KeyboardInterrupt`, and SIGTERM `Terminated`, with which the process exits with
    code 143: see `rlinf_async.runtime.signals`. An error that the coroutine raises on its way out
    is its ``__cause__``; but where a cluster had failed before, the error of that is raised.
    Outside the main thread, and where a signal has a handler already, the signal is left alone.
    """
    if _loop_runs():
        main.close()
        raise RuntimeError(
            "run() starts an event loop, and one runs already in this thread (as in a notebook): "
            "write `await main()` instead of `run(main())`"
        )
    with _signals() as seen:
        try:
            with (
                seen.interrupts_handled(),
                asyncio.Runner(debug=debug, loop_factory=loop_factory()) as runner,
            ):
                result = runner.run(seen.cancelling(main))
        except asyncio.CancelledError as error:
            if seen.terminating:
                raise Terminated from error  # says where the coroutine was
            if seen.interrupts:
                raise KeyboardInterrupt from error
            raise
        except Exception as error:
            # A worker whose channel's other end is closed on the way out fails: not the cause.
            if seen.cancelled_by_sigterm and not seen.failed:
                raise Terminated from error
            if seen.interrupts and not seen.failed:
                raise KeyboardInterrupt from error
            raise
        if seen.terminating:
            raise Terminated
        return result


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def _signals() -> Iterator[RunSignals]:
    """Those of the run that this is a part of, else new ones."""
    if signals.is_handled():
        yield signals.run_signals()
        return
    with RunSignals().handled() as new:
        yield new


def loop_factory() -> Any:
    """Makes a uvloop event loop where that is installed; None means asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
