"""An MLP for actions of several factors: MultiDiscrete, MultiBinary, Dict, Tuple."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf_async.backends.policies.base import Evaluation, Step, register_policy
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.distribution import ActionDistribution
from rlinf_async.backends.policies.mlp import MlpPolicy, run_mlp, run_values


@register_policy("mlp_factored")
class MlpFactoredPolicy(MlpPolicy):
    """A normal or categorical distribution for each factor of `PolicyConfig.acts`."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._spec = config.acts
        continuous = sum(
            factor.size for factor in self._spec.factors if factor.kind == "continuous"
        )
        self.log_std = nn.Parameter(torch.full((continuous,), config.initial_log_std))

    @torch.no_grad()
    def act(self, observation: Tensor, generator: torch.Generator | None = None) -> Step:
        normalized = self.observation_normalizer.forward(observation)
        outputs = run_mlp(self.actor, normalized)
        value = run_values(self.critic, normalized)
        self.require_finite(outputs=outputs, value=value)
        action, log_prob = self._distribution(outputs).sample(generator)
        self.require_finite(log_prob=log_prob)
        return Step(action, log_prob, value)

    @torch.no_grad()
    def mode(self, observation: Tensor) -> Tensor:
        outputs = run_mlp(self.actor, self.observation_normalizer.forward(observation))
        self.require_finite(outputs=outputs)
        return self._distribution(outputs).mode()

    def forward(self, normalized: Tensor, action: Tensor) -> Evaluation:
        distribution = self._distribution(run_mlp(self.actor, normalized))
        value = run_values(self.critic, normalized)
        return Evaluation(distribution.log_prob(action), distribution.entropy(), value)

    def _distribution(self, outputs: Tensor) -> ActionDistribution:
        return ActionDistribution(self._spec, outputs, self.log_std)
