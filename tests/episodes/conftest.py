"""What the tests of episodes share."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from tests.episodes.kit import tokenizer_of


@pytest.fixture(scope="package", autouse=True)
def _imports() -> None:
    """Import transformers, which takes seconds and must not block the event loop of a test."""
    tokenizer_of("qwen2.5")


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    """Runs a test on each loop: workers have uvloop, whose transports are classes of its own."""
    kind: str = request.param
    return kind


@pytest.fixture
def each_loop(loop_kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `asyncio.run` run on each loop in turn."""
    if loop_kind == "uvloop":
        monkeypatch.setattr(asyncio, "run", uvloop.run)
