"""Tests over cut, slow and lossy networks run on asyncio in debug mode, and on uvloop."""

from __future__ import annotations

import inspect

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Ask for both loops where a test is a coroutine."""
    if inspect.iscoroutinefunction(metafunc.function):
        if "loop_kind" not in metafunc.fixturenames:
            metafunc.fixturenames.append("loop_kind")
        metafunc.parametrize("loop_kind", ["asyncio", "uvloop"])
