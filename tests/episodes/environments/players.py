"""Opponents in games of the tests."""

from __future__ import annotations

import random
import re
from typing import Any

TOLD: list[str] = []
"""what opponents were told"""


def first_free(observation: str) -> str:
    """The first cell that is free on the last board."""
    TOLD.append(observation)
    board = observation[observation.rfind("Current Board") :]
    return f"[{min(map(int, re.findall(r'[0-8]', board)))}]"


def at_random(observation: str) -> str:
    """Any free cell of the last board."""
    board = observation[observation.rfind("Current Board") :]
    return f"[{random.choice(re.findall(r'[0-8]', board))}]"


def silent(observation: str) -> Any:
    """No move."""
    return None


def nothing() -> str:
    """Called with nothing."""
    return ""
