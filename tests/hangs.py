"""A test that hangs says what it has printed and logged, and what its tasks wait for, before it is
ended.

pytest ends the process of a test after ``faulthandler_timeout``, with the stacks of its threads
alone: what was captured goes with the process, also the report on who waits for whom.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from rlinf_async.runtime.wakers import mark_internal

SHARE = 0.95
"""when it is said, as a share of the time after which the process is ended"""


class Hangs:
    """Watches the tests of this process, one after the other."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._limit = SHARE * float(config.getini("faulthandler_timeout") or 0.0)
        self._test = ""
        self._until = 0.0

    def pytest_sessionstart(self) -> None:
        if self._limit:
            thread = threading.Thread(target=self._watch, name="hangs", daemon=True)
            mark_internal(thread)
            thread.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test, self._until = nodeid, time.monotonic() + self._limit

    def pytest_runtest_logfinish(self) -> None:
        self._test = ""

    def _watch(self) -> None:
        said = ""
        while True:
            time.sleep(self._limit / 100)
            test = self._test
            if test and test != said and time.monotonic() > self._until:
                said = test
                self._say(f"\n{test} hangs\n{self._captured()}\n{_tasks()}\n")

    def _say(self, text: str) -> None:
        os.write(self._config.stash[fault_handler_stderr_fd_key], text.encode())

    def _captured(self) -> str:
        plugins: Any = self._config.pluginmanager
        logged: str = plugins.getplugin("logging-plugin").report_handler.stream.getvalue()
        capture = plugins.getplugin("capturemanager")
        printed: list[str] = []
        for fixture in (False, True):
            if fixture and capture._capture_fixture is not None:
                printed += capture._capture_fixture.readouterr()
            elif not fixture and capture.is_globally_capturing():
                printed += capture.read_global_capture()
        return "\n".join([*printed, logged])


def _tasks() -> str:
    tasks = (one for one in gc.get_objects() if isinstance(one, asyncio.Task))
    return "\n".join(line for one in tasks if not one.done() for line in _waits(one))


def _waits(task: asyncio.Task[Any]) -> Iterator[str]:
    """Where a task is, from its coroutine to the innermost that it awaits."""
    yield repr(task)
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            yield f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
