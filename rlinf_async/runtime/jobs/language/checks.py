"""What of a language run's configuration can be held against what is installed and registered."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import msgspec

from rlinf_async.config import ConfigError, MissingExtra
from rlinf_async.runtime.jobs.checks import refuse_unknown
from rlinf_async.runtime.jobs.language.config import LanguageConfig


def check_backends(config: LanguageConfig) -> None:
    """Raise where a backend is not installed, or an advantage or a loss is not registered.

    Raises:
        MissingExtra: with what to install.
        ConfigError: an unknown name, with the nearest.
    """
    if (config.rollout.backend == "toy") != (config.actor.backend == "toy"):
        raise ConfigError(
            f"rollout.backend is {config.rollout.backend!r} and actor.backend is "
            f"{config.actor.backend!r}: toys have no weights, so both are 'toy' or none is",
            path=("actor", "backend"),
        )
    for module, extra in (("transformers", "llm"), ("vllm", "vllm")):
        wanted = module == "transformers" or config.rollout.backend == module
        if wanted and importlib.util.find_spec(module) is None:
            raise MissingExtra(module, extra=extra, needed_for="the language_rl job")
    _check_names(config)


def check_families(config: LanguageConfig) -> None:
    """Refuse models of the actor and the critic that cannot be trained, or served by the engine.

    Raises:
        ConfigError: names the family, the reason, and what is supported.
    """
    if config.actor.backend == "toy":
        return
    if config.model.path:
        _check_folder(config.model.path, config.rollout.backend, ("model", "path"))
    else:
        where = ("model", "config", "model_type")
        _check_family(config.model.config, config.rollout.backend, where)
    if config.critic.path:
        _check_folder(config.critic.path, None, ("critic", "path"))


def _check_folder(folder: str, engine: str | None, where: tuple[str, ...]) -> None:
    """A ``config.json`` that cannot be read is reported by whoever needs the whole folder."""
    try:
        content = (Path(folder).expanduser() / "config.json").read_bytes()
        described = msgspec.json.decode(content, type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return
    _check_family(described, engine, where)


def _check_family(described: dict[str, Any], engine: str | None, where: tuple[str, ...]) -> None:
    from rlinf_async.backends.families import UnsupportedModel, check_family

    try:
        check_family(described, engine)
    except UnsupportedModel as error:
        raise ConfigError(str(error), path=where) from error


def _check_names(config: LanguageConfig) -> None:
    """The tables import torch, so they are asked only for names that are not built in."""
    advantage, loss = config.actor.advantage.name, config.actor.loss.name
    if advantage not in ("grpo", "rloo", "reinforce++", "reinforce++_baseline", "gae"):
        from rlinf_async.algorithms.language.advantages import group_advantages

        refuse_unknown(group_advantages, advantage, ("actor", "advantage", "name"))
    if loss not in ("ppo", "gspo", "reinforce"):
        from rlinf_async.algorithms.language.losses import language_losses

        refuse_unknown(language_losses, loss, ("actor", "loss", "name"))
