"""The policies of soft actor-critic: a normal distribution, squashed by tanh into [-1, 1].

Source: Haarnoja et al. 2018, appendix C. The environment stretches actions to its bounds
(``env.actions = "rescale"``). That of images: Yarats et al. 2019 and 2021, see
`rlinf_async.backends.policies.images`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from rlinf_async.algorithms.losses import squashed_log_prob
from rlinf_async.backends.policies.base import (
    Evaluation,
    ObservedT,
    Step,
    register_policy,
)
from rlinf_async.backends.policies.config import PolicyConfig, box_misfit, cnn_misfit, mlp_misfit
from rlinf_async.backends.policies.images import ImageEncoder
from rlinf_async.backends.policies.off_policy import OffPolicyPolicy, count

LOG_STD_MIN: Final = -20.0
LOG_STD_MAX: Final = 2.0
CLONED_STD: Final = 0.1
CLONED_MARGIN: Final = 1e-3


class SquashedGaussianPolicy(OffPolicyPolicy[ObservedT]):
    """Mean and deviation of each number of an action."""

    def __init__(
        self, config: PolicyConfig, encoder: ImageEncoder | None = None, *, beside: int = 0
    ) -> None:
        super().__init__(config, 2 * config.action_size, encoder, beside=beside)
        self._size = config.action_size

    def sample(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actions ``[N, A]`` of standard normal ``noise [N, A]``, with gradients, and
        their log-probs ``[N]``."""
        mean, log_std = self._outputs(features)
        unsquashed = torch.addcmul(mean, noise, log_std.exp())
        log_prob = squashed_log_prob(noise, log_std, unsquashed)
        return self.executed(features, unsquashed.tanh()), log_prob

    def draw(self, features: Tensor, noise: Tensor) -> Tensor:
        """Return the actions to which ``noise [N, A]`` leads: zeros to the most likely ones."""
        return self.sample(features, noise)[0]

    @torch.no_grad()
    def act(self, observation: ObservedT, generator: torch.Generator | None = None) -> Step:
        shape, device = (count(observation), self._size), self.uniform.device
        value = torch.zeros(shape[0], device=device)
        if self.uniform.item():
            drawn = torch.rand(shape, generator=generator, device=device)
            action = self.uniform_actions(observation, 2.0 * drawn - 1.0)
            return Step(action, value - self._size * math.log(2.0), value)
        noise = torch.randn(shape, generator=generator, device=device)
        action, log_prob = self.sample(self.features(observation), noise)
        self.require_finite(action=action, log_prob=log_prob)
        return Step(action, log_prob, value)

    @torch.no_grad()
    def mode(self, observation: ObservedT) -> Tensor:
        """Return the squashed means."""
        features = self.features(observation)
        mean, _ = self._outputs(features)
        self.require_finite(mean=mean)
        return self.executed(features, mean.tanh())

    def executed(self, features: Tensor, squashed: Tensor) -> Tensor:
        """Return what is executed of squashed numbers ``[N, A]``: these."""
        return squashed

    def squashed(self, features: Tensor, action: Tensor) -> Tensor:
        """Return the squashed numbers of what was executed."""
        return action

    def uniform_actions(self, observation: ObservedT, drawn: Tensor) -> Tensor:
        """Return what is executed of numbers ``[N, A]`` that are all alike in [-1, 1]."""
        return drawn

    def forward(self, normalized: ObservedT, action: Tensor) -> Evaluation:
        """Log-probs of ``action``, whose entropy has no closed form: a single-sample estimate."""
        log_prob = self.log_prob(self.features(normalized), action)
        return Evaluation(log_prob, -log_prob, log_prob.new_zeros(len(log_prob)))

    def log_prob(self, features: Tensor, action: Tensor) -> Tensor:
        """Return log-probs ``[N]`` of ``action [N, A]``, with gradients; those on the bounds count
        as just within."""
        return self._log_prob(features, action, margin=1e-6)

    def cloned(self, features: Tensor, action: Tensor) -> Tensor:
        """Return what cloning maximises: `log_prob`, but no deviation is less than `CLONED_STD`,
        and no action nearer to its bounds than `CLONED_MARGIN`. What is always done the same way,
        or as far as it goes, would outweigh all else without end."""
        return self._log_prob(features, action, margin=CLONED_MARGIN, least=math.log(CLONED_STD))

    def _log_prob(
        self, features: Tensor, action: Tensor, *, margin: float, least: float = LOG_STD_MIN
    ) -> Tensor:
        """Log-probs of actions no nearer to their bounds than ``margin``, with logs of deviations
        of at least ``least``."""
        mean, log_std = self._outputs(features)
        log_std, most = log_std.clamp(min=least), 1.0 - margin
        unsquashed = torch.atanh(self.squashed(features, action).clamp(-most, most))
        noise = (unsquashed - mean) * (-log_std).exp()
        return squashed_log_prob(noise, log_std, unsquashed)

    def _outputs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.outputs(features).chunk(2, -1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)


@register_policy("mlp_squashed_gaussian")
class MlpSquashedGaussianPolicy(SquashedGaussianPolicy[Tensor]):
    """A policy for observations of one vector."""

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return mlp_misfit(config) or box_misfit(config)


@register_policy("cnn_squashed_gaussian")
class CnnSquashedGaussianPolicy(SquashedGaussianPolicy[Mapping[str, Tensor]]):
    """A policy for images, and the state where there is one.

    Its encoder is trained by the critics' loss alone, which SAC+AE found to be stable: the policy's
    gradient ends at the features.
    """

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return cnn_misfit(config) or box_misfit(config)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config, ImageEncoder(config.sees, config.channels))
