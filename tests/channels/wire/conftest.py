"""Asynchronous tests of the wire run on asyncio in debug mode, and on uvloop."""

from __future__ import annotations

import inspect

import pytest

from rlinf_async.channels.wire import receiving


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Ask for both loops where a test is a coroutine, and does not name one."""
    own = [one for one in metafunc.definition.iter_markers("parametrize") if one.args]
    if inspect.iscoroutinefunction(metafunc.function) and not any(
        one.args[0] == "loop_kind" for one in own
    ):
        if "loop_kind" not in metafunc.fixturenames:
            metafunc.fixturenames.append("loop_kind")
        metafunc.parametrize("loop_kind", ["asyncio", "uvloop"])


@pytest.fixture
def prefetch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items are prefetched from the second get on, however slow the machine is."""
    monkeypatch.setattr(receiving, "STREAK", 2)
    monkeypatch.setattr(receiving, "HORIZON", 3600.0)
