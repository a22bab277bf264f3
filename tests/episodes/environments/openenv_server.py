"""A server of OpenEnv: a number is to be guessed. It prints its port, and serves."""

from __future__ import annotations

import random
import socket
import sys
import threading
from typing import Any

import uvicorn
from openenv.core.env_server import (  # type: ignore[import-not-found]
    Action,
    Environment,
    Observation,
    State,
    create_fastapi_app,
)

NEVER = threading.Event()


class Guess(Action):  # type: ignore[misc]
    text: str


class Hint(Observation):  # type: ignore[misc]
    says: Any = ""
    steps: int = 0


class Guessing(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        """Draw the number."""
        self._number = random.Random(seed).randrange(10)
        self._steps = 0
        return Hint(says="Guess my number, 0 to 9.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        """Say whether the number is larger or smaller; or go wrong, as asked."""
        self._steps += 1
        match action.text:
            case "raise":
                raise KeyError("board")
            case "hang":
                NEVER.wait()
            case "nothing":
                return Hint(says=None, steps=self._steps)
            case "true":
                return Hint(reward=True, done=True)
            case "flood":
                return Hint(says="x" * (2 << 20))
        if action.text == str(self._number):
            return Hint(says="yes", reward=1, done=True, steps=self._steps)
        says = "larger" if action.text < str(self._number) else "smaller"
        return Hint(says=says, reward=-0.25, steps=self._steps)

    @property
    def state(self) -> State:
        """Nothing to tell."""
        return State()


def main() -> None:
    """Serve."""
    listening = socket.create_server(("127.0.0.1", 0))
    most = int(sys.argv[1])
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=most)
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    main()
