"""The model of soft actor-critic: a policy, two critics, their targets, the entropy coefficient.

::

    batch --+--> target critics --> target --+
            +--> critics ---------------------+--> critics' loss --+
            +--> policy --> critics, frozen -----> policy's loss --+--> total
                       +-------------------> entropy coefficient --+

Images have one encoder, which policy and critics share. It is part of the policy, which acts with
it, but only the critics' loss trains it; the targets see with it, too, as in Yarats et al. 2021,
"Mastering Visual Continuous Control: Improved Data-Augmented Reinforcement Learning" (DrQ-v2).

All losses are of one forward pass, because FSDP2 gathers weights around that. They are means over
the share of a rank, and linear in it: their gradients, averaged over ranks of equal shares, are
those of the whole batch. That holds for the entropy coefficient's, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_async.algorithms.sac import (
    critic_loss,
    entropy_coefficient_loss,
    policy_loss,
    soft_target,
)
from rlinf_async.backends.policies.base import find_policy
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.squashed import SquashedGaussianPolicy
from rlinf_async.backends.policies.tensors import Observed
from rlinf_async.backends.sac_config import SacLossConfig

METRICS = ("critic_loss", "policy_loss", "entropy", "entropy_coefficient", "value")


class SacBatch(NamedTuple):
    """A share of ``N`` transitions, and standard normal noise for the actions that are sampled."""

    observation: Observed
    """``[N, D]``, or fields ``[N, ...]``"""
    next_observation: Observed
    action: Tensor
    """``[N, A]``"""
    reward: Tensor
    """``[N]``"""
    discount: Tensor
    """``[N]``"""
    weight: Tensor
    """``[N]``"""
    noise: Tensor
    """``[N, A]``, for the action at the observation"""
    next_noise: Tensor
    """``[N, A]``, for the action at the next observation"""


class SacLosses(NamedTuple):
    """What a forward pass comes to."""

    total: Tensor
    """a scalar: the sum of all losses"""
    error: Tensor
    """``[N]``: absolute temporal-difference errors, mean over the two critics"""
    metrics: Tensor
    """``[5]``: means over the share, in the order of `METRICS`"""


class TwinCritics(nn.Module):
    """Two MLPs of features and an action, ReLU between the layers, in one multiplication.

    Weights begin as those of `torch.nn.Linear`. Both share the head of the features.

    Args:
        head: of the features ``[N, F]``, see `SquashedGaussianPolicy`.
        sizes: of the layers, from what the head makes and an action to the value.
    """

    def __init__(self, head: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.head = head
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for inputs, outputs in pairwise(sizes):
            bound = 1.0 / math.sqrt(inputs)
            for into, shape in (
                (self.weights, (2, inputs, outputs)),
                (self.biases, (2, 1, outputs)),
            ):
                into.append(nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))

    def forward(self, features: Tensor, action: Tensor) -> Tensor:
        """Return values ``[2, N]``."""
        return self._values(self.head(features), action, [*self.weights], [*self.biases])

    def frozen(self, features: Tensor, action: Tensor) -> Tensor:
        """Return values ``[2, N]`` with gradients for ``action`` and none for the critics."""
        with torch.no_grad():
            seen = self.head(features)
        weights = [weight.detach() for weight in self.weights]
        return self._values(seen, action, weights, [bias.detach() for bias in self.biases])

    @staticmethod
    def _values(
        seen: Tensor, action: Tensor, weights: list[Tensor], biases: list[Tensor]
    ) -> Tensor:
        hidden = torch.cat([seen, action], -1).expand(2, -1, -1)
        for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden if index == 0 else functional.relu(hidden), weight)
        return hidden.squeeze(-1)


class SacModel(nn.Module):
    """Everything that soft actor-critic learns, and the targets that follow it."""

    def __init__(self, policy: PolicyConfig, sac: SacLossConfig) -> None:
        super().__init__()
        found = find_policy(policy.name)(policy)
        if not isinstance(found, SquashedGaussianPolicy):
            raise ValueError(f"soft actor-critic cannot train the policy {policy.name!r}")
        self.policy: SquashedGaussianPolicy[Any] = found
        self.critic, self.target = self._critics(policy), self._critics(policy)
        self.target.load_state_dict(self.critic.state_dict())
        self.target.requires_grad_(False)
        self.log_entropy_coefficient = nn.Parameter(
            torch.full((1,), math.log(sac.initial_entropy_coefficient))
        )
        self._fixed_coefficient = sac.entropy_coefficient
        asked = sac.target_entropy
        self._target_entropy = -float(policy.action_size) if asked is None else asked

    def _critics(self, policy: PolicyConfig) -> TwinCritics:
        head, size = self.policy.new_head()
        return TwinCritics(head, (size + policy.action_size, *policy.hidden_sizes, 1))

    def value_parameter_names(self) -> set[str]:
        """Return the names of what the critics' loss trains, with a learning rate of its own: the
        critics, and the encoder of images."""
        of_critics = ("critic.", "policy.encoder.")
        return {name for name, _ in self.named_parameters() if name.startswith(of_critics)}

    def forward(self, batch: SacBatch) -> SacLosses:
        """Return the losses of a batch, with gradients for all but the targets."""
        fixed = self._fixed_coefficient
        coefficient = self.log_entropy_coefficient.detach().exp()
        if fixed is not None:
            coefficient = coefficient.new_full((1,), fixed)
        with torch.no_grad():
            following = self.policy.features(batch.next_observation)
            next_action, next_log_prob = self.policy.sample(following, batch.next_noise)
            next_values = self.target(following, next_action)
            target = soft_target(
                batch.reward, batch.discount, next_values, next_log_prob, coefficient
            )
        seen = self.policy.features(batch.observation)
        values = self.critic(seen, batch.action)
        of_critics = critic_loss(values, target, batch.weight)
        # The policy's loss does not train the encoder.
        seen = seen.detach()
        acted, log_prob = self.policy.sample(seen, batch.noise)
        of_policy = policy_loss(log_prob, self.critic.frozen(seen, acted), coefficient)
        total = of_critics + of_policy
        if fixed is None:
            total = total + entropy_coefficient_loss(
                self.log_entropy_coefficient, log_prob, self._target_entropy
            )
        with torch.no_grad():
            error = (values - target).abs().mean(0).float()
            metrics = [of_critics, of_policy, -log_prob.mean(), coefficient.mean(), values.mean()]
            stacked = torch.stack([one.detach().float() for one in metrics])
        # A sum and no view: FSDP2 loses its hooks on outputs that are views.
        return SacLosses(total.sum(), error, stacked)
