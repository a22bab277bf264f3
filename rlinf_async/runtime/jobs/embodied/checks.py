"""What of an embodied run's configuration can be held against what is registered here."""

from __future__ import annotations

from rlinf_async.backends.fsdp.config import EmbodiedTrainerConfig
from rlinf_async.config import ConfigError
from rlinf_async.runtime.jobs.checks import refuse_unknown
from rlinf_async.runtime.jobs.embodied.config import EmbodiedConfig

FSDP = ("actor", "fsdp")


def check_names(config: EmbodiedConfig) -> None:
    """Raise `ConfigError` for a policy, an advantage or a loss that nobody has registered.

    The tables import torch, so they are asked only for names that are not built in.
    """
    actor = config.actor
    if actor.fsdp.pretrained is not None:
        raise ConfigError(
            "the embodied_ppo job trains a registered policy, not a language model: leave it out",
            path=(*FSDP, "pretrained"),
        )
    known = EmbodiedTrainerConfig()
    policy, advantage, loss = actor.fsdp.policy.name, actor.advantage.name, actor.ppo.loss.name
    if policy not in ("mlp_gaussian", "mlp_categorical"):
        from rlinf_async.backends.policies.base import policies

        refuse_unknown(policies, policy, (*FSDP, "policy", "name"))
    if advantage != known.advantage.name:
        from rlinf_async.algorithms.advantages import advantage_functions

        refuse_unknown(advantage_functions, advantage, ("actor", "advantage", "name"))
    if loss != known.ppo.loss.name:
        from rlinf_async.algorithms.losses import loss_functions

        refuse_unknown(loss_functions, loss, ("actor", "ppo", "loss", "name"))
