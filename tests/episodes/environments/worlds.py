"""Environments of Gymnasium in text; importing this registers them."""

from __future__ import annotations

import queue
import random
import threading
from typing import Any, Final

import gymnasium
from gymnasium.spaces import Discrete, Text

OPEN: Final = threading.Event()
"""set: an environment goes on that hangs, or is made slowly"""
MADE: Final = threading.Semaphore(0)
"""counts the environments that have begun to be made slowly"""
RESETS: list[int] = []
"""seeds that environments were reset with"""
CLOSED: Final[queue.SimpleQueue[str]] = queue.SimpleQueue()
"""actions that each environment had seen when it was closed, if any"""


class Guess(gymnasium.Env[str, str]):
    """A number from 0 to 9, drawn at reset, is to be guessed in ten steps."""

    observation_space = Text(200)
    action_space = Text(200)

    def __init__(self, odd: str = "") -> None:
        self._odd = odd
        if odd == "made slowly":
            MADE.release()
            OPEN.wait()
        self._seen: list[str] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Draw the number."""
        super().reset(seed=seed)
        assert seed is not None
        RESETS.append(seed)
        self._number = random.Random(seed).randrange(10)
        if self._odd == "reset raises":
            raise RuntimeError("no luck")
        if self._odd == "reset returns text":
            return "guess"  # type: ignore[return-value]
        return "Guess my number, 0 to 9.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Say whether the number is larger or smaller."""
        self._seen.append(action)
        says: Any = "larger" if action < str(self._number) else "smaller"
        found = action == str(self._number)
        reward: Any = 1.0 if found else -0.25
        match self._odd:
            case "raises":
                raise KeyError("board")
            case "exits":
                raise SystemExit(3)
            case "stops":
                raise StopIteration
            case "hangs":
                OPEN.wait()
            case "reward is text":
                reward = "1"
            case "reward is true":
                reward = True
            case "reward is nan":
                reward = float("nan")
            case "observes a number":
                says = 7
            case "observes nothing":
                says = ""
            case "four values":
                return says, reward, found, False  # type: ignore[return-value]
        return says, reward, found, len(self._seen) >= 10, {}

    def close(self) -> None:
        """Note that it was closed."""
        if self._seen or self._odd == "made slowly":
            CLOSED.put("".join(self._seen))


class Numbers(Guess):
    """Observes a number."""

    observation_space = Discrete(10)  # type: ignore[assignment]


gymnasium.register("Guess-v0", f"{__name__}:Guess")
gymnasium.register("Numbers-v0", f"{__name__}:Numbers")
