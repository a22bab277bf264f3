"""One environment whose calls are noted, and whose errors name it, its seed and its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rlinf_async.config.errors import raised
from rlinf_async.workers.env.config import EnvConfig
from rlinf_async.workers.env.errors import EnvFailed, is_interrupt
from rlinf_async.workers.foreign_calls import (
    CLOSE,
    RENDER,
    RESET,
    STEP,
    in_words,
    making,
    place_for,
)

T = TypeVar("T")


class NamedEnv:
    """A Gymnasium environment for who plays and films it by hand: see `Slot` for training.

    Every call raises `EnvFailed` for what the environment raises.
    """

    def __init__(self, config: EnvConfig, *, render_mode: str | None = None) -> None:
        """Make it; raises as `make_env`."""
        from rlinf_async.workers.env.make import make_env

        self._label = f"env {config.name}"
        self._call = place_for(self._label, config.limits)
        with making(self._call):
            self.env = make_env(config, render_mode=render_mode)
        self._seed = self._steps = self._length = 0

    @property
    def metadata(self) -> Mapping[str, Any]:
        """As the environment has them."""
        return self.env.metadata

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._seed, self._length = self._seed if seed is None else seed, 0
        return self._noted(RESET, "reset", lambda: self.env.reset(seed=seed))

    def step(self, action: Any, /) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        self._steps += 1
        self._length += 1
        return self._noted(STEP, "step", lambda: self.env.step(action))

    def render(self) -> Any:
        """A picture."""
        return self._noted(RENDER, "render", self.env.render)

    def close(self) -> None:
        """Close it."""
        self._noted(CLOSE, "close", self.env.close)

    def _noted(self, what: int, doing: str, call: Callable[[], T]) -> T:
        self._call.begin(what, self._seed, self._steps, self._length)
        try:
            return call()
        except BaseException as error:
            if is_interrupt(error):
                raise
            where = in_words(self._label, doing, self._seed, self._steps, self._length)
            raise EnvFailed(f"{where}, raised {raised(error)}") from error
        finally:
            self._call.end()
