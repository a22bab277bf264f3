"""What of a language run's configuration can be held against what is installed and registered."""

from __future__ import annotations

import importlib.util

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


def _check_names(config: LanguageConfig) -> None:
    """The tables import torch, so they are asked only for names that are not built in."""
    advantage, loss = config.actor.advantage.name, config.actor.loss.name
    if advantage not in ("grpo", "rloo", "reinforce++", "reinforce++_baseline", "gae"):
        from rlinf_async.algorithms.language.advantages import group_advantages

        refuse_unknown(group_advantages, advantage, ("actor", "advantage", "name"))
    if loss not in ("ppo", "gspo", "reinforce"):
        from rlinf_async.algorithms.language.losses import language_losses

        refuse_unknown(language_losses, loss, ("actor", "loss", "name"))
