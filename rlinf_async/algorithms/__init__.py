"""Advantages and losses, registered by name and shared by all training backends.

A new one is a function and a decorator::

    @register_advantage("mine")
    def mine(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages: ...
"""

from rlinf_async.algorithms.advantages import (
    AdvantageConfig,
    AdvantageInputs,
    Advantages,
    compute_advantages,
    normalize_advantages,
    register_advantage,
)
from rlinf_async.algorithms.gae import gae
from rlinf_async.algorithms.losses import (
    LossConfig,
    LossInputs,
    LossOutput,
    PolicyLoss,
    approximate_kl,
    clipped_policy_loss,
    loss_functions,
    ppo_loss,
    register_loss,
    value_loss,
)
from rlinf_async.algorithms.registry import Registry, UnknownName

__all__ = [
    "AdvantageConfig",
    "AdvantageInputs",
    "Advantages",
    "LossConfig",
    "LossInputs",
    "LossOutput",
    "PolicyLoss",
    "Registry",
    "UnknownName",
    "approximate_kl",
    "clipped_policy_loss",
    "compute_advantages",
    "gae",
    "loss_functions",
    "normalize_advantages",
    "ppo_loss",
    "register_advantage",
    "register_loss",
    "value_loss",
]
