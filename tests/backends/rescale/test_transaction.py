"""What one rank hears of another, whenever it looks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from rlinf_async.backends.rescale.transaction import RescaleError, StageResult, Transaction


class Store:
    """A store in this process; something may happen between two looks at it."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.after: dict[str, Callable[[], object]] = {}
        """what happens once a key has been looked for, by the key"""

    def set(self, key: str, value: Any) -> None:
        self.kept[key] = value

    def get(self, key: str) -> Any:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        found = all(key in self.kept for key in keys)
        for key in keys:
            self.after.pop(key, lambda: None)()
        return found

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found: bytes = self.kept.setdefault(key, desired.encode())
        return found


@pytest.mark.parametrize("looked_for", ["propose/0", "propose/1", "decision/0"])
def test_a_rank_that_fails_is_heard_with_its_stage_and_reason(looked_for: str) -> None:
    """It writes that it has failed, and then that it gives up: between any two looks of another."""
    store: Any = Store()
    failing, other = (Transaction(store, rank, 2, time.monotonic() + 60) for rank in range(2))

    def fail() -> None:
        failing.report("propose", StageResult("failed", "ValueError: no room"))
        failing.abort(ValueError("no room"))

    store.after[looked_for] = fail
    with pytest.raises(RescaleError, match="rank 0 failed at stage 'propose': ValueError: no room"):
        other.exchange("propose", StageResult())
