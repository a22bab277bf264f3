"""Coroutines that act in an episode, by the name that a setting gives them."""

from __future__ import annotations

import inspect
from typing import Any

from rlinf_async.config.registry import ConfigError, Path, Registry
from rlinf_async.episodes.command import PREFIX, command
from rlinf_async.episodes.episode import RunEpisode

agents: Registry[RunEpisode] = Registry(
    "coroutine of an episode", group="rlinf_async.episodes", called_with=("episode",)
)


def load_agent(name: str, path: Path = ("run",)) -> RunEpisode:
    """Return the coroutine function of this name; ``path`` is the setting, for the error.
    ``"command: PROGRAM"`` is a program for each episode, see `command`.

    Raises:
        ConfigError: there is no such name, file or function, or it is no coroutine function of one
            argument, the `Episode`.
    """
    if name.startswith(PREFIX):
        return command(name.removeprefix(PREFIX).strip(), path=path)
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
