"""Episodes in an environment, of a model that answers by a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rlinf_async.episodes import Episode
from rlinf_async.episodes.agents import load_agent
from rlinf_async.episodes.environments import Asked
from rlinf_async.episodes.episode import RunEpisode
from rlinf_async.workers.episode.clock import AgentClock
from rlinf_async.workers.episode.ending import Ending, run_to_end
from tests.episodes.endpoint.kit import Scripted, assert_exact, episode_of

Script = Sequence[str] | Callable[[str], str]


def agent(name: str, **settings: Any) -> RunEpisode:
    """The coroutine function of an environment, which is checked."""
    return load_agent(name, ("episode", "run"), settings, Asked())


def attempt(script: Script, number: object = 3, **limits: Any) -> tuple[Episode, Scripted]:
    """An episode at the task of this number."""
    model = Scripted(script)
    episode = episode_of(model, **limits)
    episode.task = msgspec.structs.replace(episode.task, reference=str(number))
    return episode, model


async def ended(run: RunEpisode, episode: Episode, seconds: float = 60.0) -> Ending:
    """Run an episode to its end, as a worker does."""
    return await run_to_end("environment", run, episode, AgentClock(seconds), "fail")


async def played(
    run: RunEpisode, script: Script, number: object = 3, **limits: Any
) -> tuple[Ending, Episode]:
    """Play an episode; what is trained of it is exact."""
    episode, model = attempt(script, number, **limits)
    ending = await ended(run, episode)
    assert_exact(episode, model)
    return ending, episode


def said(episode: Episode) -> list[str]:
    """What was said in an episode, the model's answers among it."""
    return [str(one["content"]) for one in episode.chats[0].messages]


def rewards(episode: Episode) -> list[float | None]:
    """The rewards of the turns."""
    return [turn.reward for chat in episode.chats for turn in chat.turns]


def numbers(found: Mapping[str, float], *names: str) -> list[float]:
    """Metrics of these names."""
    return [found[name] for name in names]
