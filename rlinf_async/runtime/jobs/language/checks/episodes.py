"""Whether episodes can be played: agents, environments, the endpoint."""

from __future__ import annotations

from typing import Any

from rlinf_async.config import ConfigError, UsageError
from rlinf_async.data import (
    DataConfig,
)
from rlinf_async.episodes.agents import load_agent
from rlinf_async.episodes.endpoint import EndpointConfig
from rlinf_async.episodes.endpoint.server import listener
from rlinf_async.episodes.environments import Asked, environments
from rlinf_async.episodes.episode import EpisodeError
from rlinf_async.episodes.parsing import parsers
from rlinf_async.runtime.apart import apart as run_apart
from rlinf_async.runtime.jobs.language.checks.named import Setting
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.placement import PlacementPlan
from rlinf_async.workers.actor.language import DEFAULT_MICRO_BATCH_TOKENS
from rlinf_async.workers.base import WorkerDied, WorkerError
from rlinf_async.workers.episode.config import EpisodeConfig


def check_episodes(config: LanguageConfig) -> None:
    """Refuse settings of episodes without episodes, and episodes that could not have a turn.

    Raises:
        ConfigError: with the setting, and what to do.
    """
    episode, workers = config.episode, config.cluster.episode_workers
    check_episode_data(config, config.data, ("data",))
    if not episode.run:
        given = [
            name
            for name in EpisodeConfig.__struct_fields__
            if getattr(episode, name) != getattr(EpisodeConfig(), name)
        ]
        if given:
            raise ConfigError(
                "each sample is one answer, so that this has no use: set episode.run to the "
                "coroutine of an episode, or leave it out",
                path=("episode", given[0]),
            )
        if workers:
            raise ConfigError(
                f"there are {workers} episode workers, but each sample is one answer: set "
                "episode.run to the coroutine of an episode, or this to 0",
                path=("cluster", "episode_workers"),
            )
        return
    if not workers:
        raise ConfigError(
            f"nobody would run {episode.run!r}: set it to at least 1",
            path=("cluster", "episode_workers"),
        )
    if episode.on_timeout == "score" and episode.run in environments:
        raise ConfigError(
            f"the environment {episode.run!r} scores its own episodes, and has none for one that "
            "took too long: leave it out, and the episode fails",
            path=("episode", "on_timeout"),
        )
    if episode.endpoint.port and workers > 1 and config.cluster.backend != "ray":
        raise ConfigError(
            f"{workers} episode workers of this host cannot listen on one port: leave it out, so "
            "that each takes one that is free, or set cluster.episode_workers to 1",
            path=("episode", "endpoint", "port"),
        )


def check_branches(config: LanguageConfig) -> None:
    """Refuse branches of episodes that are longer than a micro-batch."""
    episode, most = config.episode, config.actor.max_tokens or DEFAULT_MICRO_BATCH_TOKENS
    if not episode.run:
        return
    if config.actor.micro_batch_size is None and most < episode.max_tokens:
        raise ConfigError(
            f"a micro-batch has at most {most} tokens, but a branch of an episode may have "
            f"{episode.max_tokens} (episode.max_tokens): raise this, or lower that",
            path=("actor", "max_tokens"),
        )


def check_episode_data(config: LanguageConfig, data: DataConfig, where: Setting) -> None:
    """Refuse tasks of an environment that is not there, and prompts that are no conversation."""
    if data.environment_tasks and not config.has_episodes:
        raise ConfigError(
            "no environment makes these tasks: name one in episode.run",
            path=(*where, "environment_tasks"),
        )
    names = "chat_template", "chat_options"
    of_run = {one: getattr(config.data, one) for one in names}
    own = [one for one in names if getattr(data, one) and getattr(data, one) != of_run[one]]
    if config.has_episodes and own:
        raise ConfigError(
            f"episodes render their conversations themselves, with data.{own[0]}: leave it out",
            path=(*where, own[0]),
        )
    if config.has_episodes and not data.chat:
        raise ConfigError(
            "an episode is a conversation, whose messages go through a chat template: set it to "
            "true",
            path=(*where, "chat"),
        )


def check_endpoint(config: LanguageConfig) -> None:
    """Listen where the endpoint of episodes will; with Ray that is other hosts.

    Raises:
        ConfigError: it cannot: there is no such interface, or the port is taken.
    """
    if not config.has_episodes or config.cluster.backend == "ray":
        return
    endpoint = config.episode.endpoint
    tried = [("interface", EndpointConfig(interface=endpoint.interface)), ("port", endpoint)]
    for setting, one in tried:
        try:
            listener(one).close()
        except EpisodeError as error:
            raise ConfigError(str(error), path=("episode", "endpoint", setting)) from error


def check_agent(config: LanguageConfig, plan: PlacementPlan) -> None:
    """Load the coroutine of the episodes, and the format of their tool calls; with the Python of
    episode workers, where they have one of their own. With Ray that, and what else their runtime
    environment has, is on other hosts: it is asked when they start.

    Raises:
        ConfigError: one cannot be imported, or is none.
        MissingExtra: the environment's package is not installed.
    """
    if config.has_episodes:
        settings = plan.settings.get("episode")
        most = config.episode.concurrent * config.cluster.episode_workers
        asked = Asked(tasks=config.data.environment_tasks, at_once=most)
        if settings is not None and settings.environment:
            if config.cluster.backend != "ray":
                _check_agent_apart(config, settings.python, settings.env_vars, asked)
        else:
            _load_agent(config.episode.run, config.episode.environment, asked)
        parsers.check(config.episode.tools, ("episode", "tools"), apart=True)


def _check_agent_apart(
    config: LanguageConfig, python: str, env_vars: dict[str, str], asked: Asked
) -> None:
    where = ("episode", "run")
    try:
        run_apart(
            *(_load_agent, config.episode.run, config.episode.environment, asked),
            returns=type(None),
            name="Episode",
            quiet=True,
            python=python,
            env_vars=env_vars,
        )
    except (WorkerDied, WorkerError) as error:
        raise ConfigError(f"with {python!r}: {error}", path=where) from error
    except ConfigError:
        raise
    except UsageError as error:
        raise UsageError(f"with {python!r}: {error}") from error


def _load_agent(name: str, environment: dict[str, Any], asked: Asked) -> None:
    load_agent(name, ("episode", "run"), environment, asked)
