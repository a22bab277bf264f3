"""The policies of soft actor-critic: a normal distribution, squashed by tanh into [-1, 1].

Source: Haarnoja et al. 2018, appendix C. The environment stretches actions to its bounds
(``env.actions = "rescale"``). That of images: Yarats et al. 2019 and 2021, see
`rlinf_async.backends.policies.images`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_async.algorithms.losses import squashed_log_prob
from rlinf_async.backends.policies.base import (
    Evaluation,
    ObservedT,
    Policy,
    Step,
    register_policy,
)
from rlinf_async.backends.policies.config import PolicyConfig, cnn_misfit, mlp_misfit
from rlinf_async.backends.policies.images import FeatureHead, ImageEncoder

LOG_STD_MIN: Final = -20.0
LOG_STD_MAX: Final = 2.0


class SquashedGaussianPolicy(Policy[ObservedT]):
    """Mean and deviation of each number of an action, from one MLP with ReLU between its layers.

    It has no value: where one is asked for, it is 0. Observations are not normalised. As long as
    ``uniform`` is set it samples uniformly in [-1, 1], whatever it sees.

    Features ``[N, F]`` of an observation are what the critics see, too: the vector itself, or what
    an encoder makes of images. A head makes of them the inputs of an MLP; policy and critics have
    one each.

    Args:
        config: sizes of the layers, and spaces.
        encoder: encoder of images; None: observations are one vector.
    """

    off_policy = True
    normalizes = False
    uniform: Tensor

    def __init__(self, config: PolicyConfig, encoder: ImageEncoder | None = None) -> None:
        super().__init__(config)
        self._size, self._vector = config.action_size, config.observation_size
        self.encoder = encoder
        self.head, inputs = self.new_head()
        sizes = (inputs, *config.hidden_sizes, 2 * config.action_size)
        self.actor = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))
        self.register_buffer("uniform", torch.ones((), dtype=torch.bool))

    def new_head(self) -> tuple[nn.Module, int]:
        """Return a new head for features, and the number of its outputs."""
        if self.encoder is None:
            return nn.Identity(), self._vector
        head = FeatureHead(self.encoder)
        return head, head.size

    def features(self, observation: ObservedT) -> Tensor:
        """Return what the critics see too, ``[N, F]``, with gradients."""
        if self.encoder is not None:
            encoded: Tensor = self.encoder(observation)
            return encoded
        if not isinstance(observation, Tensor):
            raise TypeError("a policy without an encoder takes one vector")
        return observation

    def sample(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actions ``[N, A]`` of standard normal ``noise [N, A]``, with gradients, and
        their log-probs ``[N]``."""
        mean, log_std = self._outputs(features)
        unsquashed = torch.addcmul(mean, noise, log_std.exp())
        return unsquashed.tanh(), squashed_log_prob(noise, log_std, unsquashed)

    def draw(self, features: Tensor, noise: Tensor) -> Tensor:
        """Return the actions to which ``noise [N, A]`` leads: zeros to the most likely ones."""
        return self.sample(features, noise)[0]

    @torch.no_grad()
    def act(self, observation: ObservedT, generator: torch.Generator | None = None) -> Step:
        shape, device = (_count(observation), self._size), self.uniform.device
        value = torch.zeros(shape[0], device=device)
        if self.uniform.item():
            drawn = torch.rand(shape, generator=generator, device=device)
            return Step(2.0 * drawn - 1.0, value - self._size * math.log(2.0), value)
        noise = torch.randn(shape, generator=generator, device=device)
        action, log_prob = self.sample(self.features(observation), noise)
        self.require_finite(action=action, log_prob=log_prob)
        return Step(action, log_prob, value)

    @torch.no_grad()
    def mode(self, observation: ObservedT) -> Tensor:
        """Return the squashed means."""
        mean, _ = self._outputs(self.features(observation))
        self.require_finite(mean=mean)
        return mean.tanh()

    @torch.no_grad()
    def value(self, observation: ObservedT) -> Tensor:
        return torch.zeros(_count(observation), device=self.uniform.device)

    def normalized(self, observation: ObservedT) -> ObservedT:
        """Return observations as they are."""
        return observation

    def forward(self, normalized: ObservedT, action: Tensor) -> Evaluation:
        """Log-probs of ``action``, whose entropy has no closed form: a single-sample estimate."""
        mean, log_std = self._outputs(self.features(normalized))
        unsquashed = torch.atanh(action.clamp(-1.0 + 1e-6, 1.0 - 1e-6))
        noise = (unsquashed - mean) * (-log_std).exp()
        log_prob = squashed_log_prob(noise, log_std, unsquashed)
        return Evaluation(log_prob, -log_prob, log_prob.new_zeros(len(log_prob)))

    def _outputs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.head(features)
        for index, layer in enumerate(self.actor):
            hidden = layer(hidden if index == 0 else functional.relu(hidden))
        mean, log_std = hidden.chunk(2, -1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)


@register_policy("mlp_squashed_gaussian")
class MlpSquashedGaussianPolicy(SquashedGaussianPolicy[Tensor]):
    """A policy for observations of one vector."""

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return mlp_misfit(config) or _action_misfit(config)


@register_policy("cnn_squashed_gaussian")
class CnnSquashedGaussianPolicy(SquashedGaussianPolicy[Mapping[str, Tensor]]):
    """A policy for images, and the state where there is one.

    Its encoder is trained by the critics' loss alone, which SAC+AE found to be stable: the policy's
    gradient ends at the features.
    """

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return cnn_misfit(config) or _action_misfit(config)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config, ImageEncoder(config.sees, config.channels))


def _action_misfit(config: PolicyConfig) -> str:
    if config.acts.continuous:
        return ""
    return "it samples one Box of continuous actions; the environment's are others"


def _count(observation: Tensor | Mapping[str, Tensor]) -> int:
    """``N``, of observations of either form."""
    if isinstance(observation, Tensor):
        return len(observation)
    return len(next(iter(observation.values())))
