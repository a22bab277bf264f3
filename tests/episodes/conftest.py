"""What the tests of episodes share."""

from __future__ import annotations

import pytest

from tests.episodes.kit import tokenizer_of


@pytest.fixture(scope="package", autouse=True)
def _imports() -> None:
    """Import transformers, which takes seconds and must not block the event loop of a test."""
    tokenizer_of("qwen2.5")
