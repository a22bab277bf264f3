"""An environment of Gymnasium whose step hangs once somebody asks for it."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import gymnasium


class Hanging(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Of all that share a file, the one whose step finds it there takes it away, and never returns.

    Args:
        id: the environment.
        request: the file.
    """

    def __init__(self, id: str, request: str) -> None:
        super().__init__(gymnasium.make(id))
        self._request = request

    def step(self, action: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._request)
            while True:
                signal.pause()
        return super().step(action)
