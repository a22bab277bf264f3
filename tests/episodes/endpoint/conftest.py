"""What the tests of the endpoint share."""

from __future__ import annotations

import importlib

import pytest

SLOW = (
    "anthropic.resources.messages",
    "openai.resources.chat",
    "openai.resources.responses",
    "starlette.applications",
    "uvicorn",
)


@pytest.fixture(scope="package", autouse=True)
def _clients() -> None:
    """Import what takes long and must not block the event loop of a test."""
    for name in SLOW:
        importlib.import_module(name)
