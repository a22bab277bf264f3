"""Environments of Gymnasium whose observations and actions are text::

    [episode]
    run = "gymnasium"

    [episode.environment]
    id = "my_package:Riddles-v0"       # the module is imported, and registers the environment
    options = { level = 2 }            # further arguments of gymnasium.make

Each episode has an environment of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from rlinf_async.config.registry import ConfigError, Path, needed
from rlinf_async.episodes.environments import (
    Asked,
    Calls,
    EnvironmentFailed,
    Going,
    PlayedConfig,
    PlayedPart,
    Step,
    at_fault,
    number,
    text_of,
)


class GymnasiumConfig(PlayedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which environment."""

    id: str
    """``"Name-v0"``, or ``"module:Name-v0"``: the module registers it"""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """further arguments of ``gymnasium.make``"""

    @property
    def name(self) -> str:
        """Its name in errors."""
        return f"environment {self.id!r}"


class GymnasiumPart(PlayedPart):
    Config = GymnasiumConfig
    library, extra = "gymnasium", "gymnasium"

    def check(self, settings: GymnasiumConfig, path: Path, asked: Asked) -> None:
        """Make an environment, and look at its spaces."""
        with at_fault(f"{settings.name} cannot be made", (*path, "id")):
            env = _made(settings)
        try:
            text = needed("gymnasium", extra="gymnasium", needed_for=settings.name).spaces.Text
            for what in ("observation", "action"):
                space = getattr(env, f"{what}_space", None)
                if not isinstance(space, text):
                    raise ConfigError(
                        f"{settings.name} has the {what}_space {space}: a model reads and writes "
                        "text. Wrap it in an environment whose spaces are gymnasium.spaces.Text",
                        path=(*path, "id"),
                    )
        finally:
            env.close()

    def worlds(self, settings: GymnasiumConfig, /) -> Callable[[], _World]:
        """Return what makes the environment of one episode."""
        return partial(_World, settings, Going())


def _made(settings: GymnasiumConfig) -> Any:
    library = needed("gymnasium", extra="gymnasium", needed_for=settings.name)
    # Its own checker holds what a model writes against the characters of the space, and warns.
    return library.make(settings.id, **{"disable_env_checker": True, **settings.options})


class _World:
    def __init__(self, settings: GymnasiumConfig, going: Going) -> None:
        self._settings = settings
        self._call = Calls(settings.name, going)
        self._env: Any = None

    async def reset(self, seed: int) -> Step:
        """Make and reset the environment."""
        return await self._call(self._reset, seed)

    async def step(self, action: str) -> Step:
        """Take a step; the episode is over when it is terminated or truncated."""
        return await self._call(self._step, action)

    async def aclose(self) -> None:
        """Close the environment, also one that is still being made."""
        self._call.last(self._close)

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _reset(self, seed: int) -> Step:
        self._env = _made(self._settings)
        observation, _ = _parts(self._settings.name, self._env.reset(seed=seed), 2)
        return Step(text_of(self._settings.name, observation))

    def _step(self, action: str) -> Step:
        name = self._settings.name
        observation, reward, terminated, truncated, _ = _parts(name, self._env.step(action), 5)
        done = bool(terminated) or bool(truncated)
        said = "" if done else text_of(name, observation)
        return Step(said, number(name, "reward", reward), done)


def _parts(name: str, found: object, count: int) -> tuple[Any, ...]:
    if not isinstance(found, tuple) or len(found) != count:
        what = "reset" if count == 2 else "step"
        raise EnvironmentFailed(f"{name}: {what} returned {found!r:.200}, not {count} values")
    return found
