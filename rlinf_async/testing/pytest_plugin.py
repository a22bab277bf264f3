"""Fixtures for tests of workers and channels on real event loops.

Enable them with ``pytest_plugins = ["rlinf_async.testing.pytest_plugin"]`` in your conftest.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import pytest

from rlinf_async.testing.explore import SEED_VARIABLE, run_on
from rlinf_async.testing.sequencer import forbid_blocking

T = TypeVar("T")
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


class RunOnLoop(Protocol):
    """Runs a coroutine to its end on a fresh loop of the kind that the test was given."""

    def __call__(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main``; raises its error, `LoopBlocked` or `Unhandled`."""
        ...


def pytest_report_header() -> str | None:
    """Say that `explore` is restricted to one seed."""
    seed = os.environ.get(SEED_VARIABLE)
    return f"{SEED_VARIABLE}={seed}: explore runs this seed only" if seed else None


def _asyncio_in_debug_mode() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_debug(True)
    return loop


def _asyncio_with_eager_tasks() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(getattr(asyncio, "eager_task_factory"))  # noqa: B009  # Python 3.12
    return loop


def _uvloop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


def _factories() -> dict[str, LoopFactory]:
    factories: dict[str, LoopFactory] = {"asyncio": _asyncio_in_debug_mode}
    if hasattr(asyncio, "eager_task_factory"):
        factories["eager"] = _asyncio_with_eager_tasks
    if importlib.util.find_spec("uvloop") is not None:
        factories["uvloop"] = _uvloop
    return factories


_FACTORIES = _factories()


@pytest.fixture(params=list(_FACTORIES))
def run_on_loop(request: pytest.FixtureRequest) -> RunOnLoop:
    """Run a coroutine on asyncio in debug mode, on eager tasks (Python 3.12) and on uvloop in turn.

    A test fails if its loop was blocked for half a second or if an error reached nobody.
    """
    factory: LoopFactory = _FACTORIES[request.param]

    def run(main: Coroutine[Any, Any, T]) -> T:
        loop = factory()
        with forbid_blocking(loop):
            return run_on(loop, main)

    return run
