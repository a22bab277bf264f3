"""The policies that learn from data alone: a normal distribution around a mean within [-1, 1].

Actions of demonstrations often lie on a bound, where the log-prob of a squashed distribution has no
end. This one's is that of the normal distribution itself; what is drawn outside of the bounds is
clipped. Source: the policy of the authors' code of Kostrikov et al. 2021, "Offline Reinforcement
Learning with Implicit Q-Learning": a mean through tanh, a deviation that does not depend on the
state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from rlinf_async.algorithms.losses import normal_log_prob
from rlinf_async.backends.policies.base import Evaluation, ObservedT, Step, register_policy
from rlinf_async.backends.policies.config import PolicyConfig, box_misfit, cnn_misfit, mlp_misfit
from rlinf_async.backends.policies.images import ImageEncoder
from rlinf_async.backends.policies.off_policy import OffPolicyPolicy, count

LOG_STD_MIN: Final = -5.0
LOG_STD_MAX: Final = 2.0


class BoundedGaussianPolicy(OffPolicyPolicy[ObservedT]):
    """A mean within [-1, 1] of each number of an action, and one deviation for all observations."""

    def __init__(self, config: PolicyConfig, encoder: ImageEncoder | None = None) -> None:
        super().__init__(config, config.action_size, encoder)
        self._size = config.action_size
        self.log_std = nn.Parameter(torch.zeros(config.action_size))

    def draw(self, features: Tensor, noise: Tensor) -> Tensor:
        """Return the actions to which ``noise [N, A]`` leads: zeros to the most likely ones."""
        drawn = torch.addcmul(self._mean(features), noise, self._log_std().exp())
        return drawn.clamp(-1.0, 1.0)

    @torch.no_grad()
    def act(self, observation: ObservedT, generator: torch.Generator | None = None) -> Step:
        shape, device = (count(observation), self._size), self.uniform.device
        noise = torch.randn(shape, generator=generator, device=device)
        features = self.features(observation)
        action = self.draw(features, noise)
        log_prob = self.log_prob(features, action)
        self.require_finite(action=action, log_prob=log_prob)
        return Step(action, log_prob, torch.zeros(shape[0], device=device))

    @torch.no_grad()
    def mode(self, observation: ObservedT) -> Tensor:
        """Return the means."""
        mean = self._mean(self.features(observation))
        self.require_finite(mean=mean)
        return mean

    def forward(self, normalized: ObservedT, action: Tensor) -> Evaluation:
        """Log-probs of ``action``, and the entropy of the distribution that is not clipped."""
        log_prob = self.log_prob(self.features(normalized), action)
        entropy = normal_log_prob(torch.ones_like(action), self._log_std()).neg()
        return Evaluation(log_prob, entropy, log_prob.new_zeros(len(log_prob)))

    def log_prob(self, features: Tensor, action: Tensor) -> Tensor:
        """Return log-probs ``[N]`` of ``action [N, A]``, with gradients."""
        log_std = self._log_std()
        return normal_log_prob((action - self._mean(features)) * (-log_std).exp(), log_std)

    def _mean(self, features: Tensor) -> Tensor:
        return self.outputs(features).tanh()

    def _log_std(self) -> Tensor:
        return self.log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)


@register_policy("mlp_bounded_gaussian")
class MlpBoundedGaussianPolicy(BoundedGaussianPolicy[Tensor]):
    """A policy for observations of one vector."""

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return mlp_misfit(config) or box_misfit(config)


@register_policy("cnn_bounded_gaussian")
class CnnBoundedGaussianPolicy(BoundedGaussianPolicy[Mapping[str, Tensor]]):
    """A policy for images, and the state where there is one. The losses of values alone train its
    encoder."""

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return cnn_misfit(config) or box_misfit(config)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config, ImageEncoder(config.sees, config.channels))
