"""Coroutines that act in an episode, by the name that a setting gives them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from rlinf_async.config.registry import ConfigError, Path, Registry, UnknownName
from rlinf_async.episodes.command import PREFIX, command
from rlinf_async.episodes.environments import Asked, environments, load_environment
from rlinf_async.episodes.episode import RunEpisode

agents: Registry[RunEpisode] = Registry(
    "coroutine of an episode", group="rlinf_async.episodes", called_with=("episode",)
)


def load_agent(
    name: str,
    path: Path = ("run",),
    environment: Mapping[str, Any] | None = None,
    asked: Asked | None = None,
) -> RunEpisode:
    """Return the coroutine function of this name; ``path`` is the setting, for the error.
    ``"command: PROGRAM"`` is a program for each episode, see `command`; ``environment`` are the
    settings of an environment, which is checked with ``asked``, see `load_environment`.

    Raises:
        ConfigError: there is no such name, file or function, or it is no coroutine function of one
            argument, the `Episode`; or the environment's settings are wrong.
        MissingExtra: the environment's package is not installed.
    """
    where = (*path[:-1], "environment")
    if name in environments:
        return load_environment(name, environment or {}, path, asked)
    if environment:
        known = ", ".join(map(repr, environments.names()))
        raise ConfigError(
            f"{name!r} is no environment, so that this has no use (environments are: {known})",
            path=where,
        )
    if name.startswith(PREFIX):
        return command(name.removeprefix(PREFIX).strip(), path=path)
    if ":" not in name and name not in agents:
        names = sorted({*agents.names(), *environments.names()})
        error = UnknownName("coroutine or environment of an episode", name, names)
        raise ConfigError(str(error), path=path)
    found: Any = agents.check(name, path, apart=True)
    if inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__):
        agent: RunEpisode = found
        return agent
    kind = "an async generator" if inspect.isasyncgenfunction(found) else "no coroutine function"
    raise ConfigError(
        f"{name!r} is {kind}: an episode is `async def {_last(name)}(episode)`, which awaits the "
        "turns of the model and returns a reward, or None",
        path=path,
    )


def _last(name: str) -> str:
    return name.rpartition(":")[2].rpartition(".")[2]
