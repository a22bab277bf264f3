"""The policy of soft actor-critic: a normal distribution, squashed by tanh into [-1, 1].

Source: Haarnoja et al. 2018, appendix C. The environment stretches actions to its bounds
(``env.actions = "rescale"``).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_async.algorithms.sac import squashed_log_prob
from rlinf_async.backends.policies.base import Evaluation, Policy, Step, register_policy
from rlinf_async.backends.policies.config import PolicyConfig, mlp_misfit

LOG_STD_MIN: Final = -20.0
LOG_STD_MAX: Final = 2.0


@register_policy("mlp_squashed_gaussian")
class MlpSquashedGaussianPolicy(Policy[Tensor]):
    """Mean and deviation of each number of an action, from one MLP with ReLU between its layers.

    It has no value: where one is asked for, it is 0. Observations are not normalised. As long as
    ``uniform`` is set it samples uniformly in [-1, 1], whatever it sees.
    """

    uniform: Tensor

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        if config.sees.flat and not config.acts.continuous:
            return "it samples one Box of continuous actions; the environment's are others"
        return mlp_misfit(config)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._size = config.action_size
        sizes = (config.observation_size, *config.hidden_sizes, 2 * config.action_size)
        self.actor = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))
        self.register_buffer("uniform", torch.ones((), dtype=torch.bool))

    def sample(
        self, observation: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sample actions ``[N, A]`` with gradients; return them and their log-probs ``[N]``."""
        mean, log_std = self._outputs(observation)
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        unsquashed = torch.addcmul(mean, noise, log_std.exp())
        return unsquashed.tanh(), squashed_log_prob(noise, log_std, unsquashed)

    @torch.no_grad()
    def act(self, observation: Tensor, generator: torch.Generator | None = None) -> Step:
        value = observation.new_zeros(len(observation))
        if self.uniform.item():
            shape = (len(observation), self._size)
            drawn = torch.rand(shape, generator=generator, device=observation.device)
            return Step(2.0 * drawn - 1.0, value - self._size * math.log(2.0), value)
        action, log_prob = self.sample(observation, generator)
        self.require_finite(action=action, log_prob=log_prob)
        return Step(action, log_prob, value)

    @torch.no_grad()
    def mode(self, observation: Tensor) -> Tensor:
        """Return the squashed means."""
        mean, _ = self._outputs(observation)
        self.require_finite(mean=mean)
        return mean.tanh()

    @torch.no_grad()
    def value(self, observation: Tensor) -> Tensor:
        return observation.new_zeros(len(observation))

    def normalized(self, observation: Tensor) -> Tensor:
        """Return observations as they are."""
        return observation

    def forward(self, normalized: Tensor, action: Tensor) -> Evaluation:
        """Log-probs of ``action``, whose entropy has no closed form: a single-sample estimate."""
        mean, log_std = self._outputs(normalized)
        unsquashed = torch.atanh(action.clamp(-1.0 + 1e-6, 1.0 - 1e-6))
        noise = (unsquashed - mean) * (-log_std).exp()
        log_prob = squashed_log_prob(noise, log_std, unsquashed)
        return Evaluation(log_prob, -log_prob, log_prob.new_zeros(len(log_prob)))

    def _outputs(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        hidden = observation
        for index, layer in enumerate(self.actor):
            hidden = layer(hidden if index == 0 else functional.relu(hidden))
        mean, log_std = hidden.chunk(2, -1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)
