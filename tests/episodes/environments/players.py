"""Opponents in games of the tests."""

from __future__ import annotations

import random
import re
import threading
from typing import Any

TOLD: list[str] = []
"""what opponents were told"""
ASKED = threading.Semaphore(0)
"""counts the moves that `waits` was asked for"""
OPEN = threading.Event()
"""set: `waits` goes on"""


def first_free(observation: str, draws: random.Random) -> str:
    """The first cell that is free on the last board."""
    TOLD.append(observation)
    board = observation[observation.rfind("Current Board") :]
    return f"[{min(map(int, re.findall(r'[0-8]', board)))}]"


def at_random(observation: str, draws: random.Random) -> str:
    """Any free cell of the last board."""
    board = observation[observation.rfind("Current Board") :]
    return f"[{draws.choice(re.findall(r'[0-8]', board))}]"


def silent(observation: str, draws: random.Random) -> Any:
    """No move."""
    return None


def waits(observation: str, draws: random.Random) -> str:
    """The first free cell, once it may."""
    ASKED.release()
    OPEN.wait()
    return first_free(observation, draws)


def nothing() -> str:
    """Called with nothing."""
    return ""
