"""A convolutional encoder of images, and an MLP each for the action and the value on top."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rlinf_async.backends.policies.base import Evaluation, Policy, Step, register_policy
from rlinf_async.backends.policies.config import PolicyConfig, cnn_misfit
from rlinf_async.backends.policies.distribution import ActionDistribution
from rlinf_async.backends.policies.encoder import ImageEncoder
from rlinf_async.backends.policies.mlp import run_mlp, run_values, tanh_mlp

Observation = Mapping[str, Tensor]


@register_policy("cnn")
class CnnPolicy(Policy[Observation]):
    """Images, and the state where there is one; any action space.

    Actor and critic share the encoder.
    """

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return cnn_misfit(config)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._spec = config.acts
        self.encoder = ImageEncoder(config.sees, config.channels)
        inputs = (self.encoder.size, *config.hidden_sizes)
        self.actor = tanh_mlp((*inputs, self._spec.outputs), output_gain=0.01)
        self.critic = tanh_mlp((*inputs, 1), output_gain=1.0)
        continuous = sum(one.size for one in self._spec.factors if one.kind == "continuous")
        self.log_std = nn.Parameter(torch.full((continuous,), config.initial_log_std))

    @torch.no_grad()
    def act(self, observation: Observation, generator: torch.Generator | None = None) -> Step:
        features = self.encoder(self.normalized(observation))
        outputs, value = run_mlp(self.actor, features), run_values(self.critic, features)
        self.require_finite(outputs=outputs, value=value)
        action, log_prob = self._distribution(outputs).sample(generator)
        return Step(action, log_prob, value)

    @torch.no_grad()
    def mode(self, observation: Observation) -> Tensor:
        outputs = run_mlp(self.actor, self.encoder(self.normalized(observation)))
        self.require_finite(outputs=outputs)
        return self._distribution(outputs).mode()

    @torch.no_grad()
    def value(self, observation: Observation) -> Tensor:
        value = run_values(self.critic, self.encoder(self.normalized(observation)))
        self.require_finite(value=value)
        return value

    def forward(self, normalized: Observation, action: Tensor) -> Evaluation:
        features = self.encoder(normalized)
        distribution = self._distribution(run_mlp(self.actor, features))
        value = run_values(self.critic, features)
        return Evaluation(distribution.log_prob(action), distribution.entropy(), value)

    def _distribution(self, outputs: Tensor) -> ActionDistribution:
        return ActionDistribution(self._spec, outputs, self.log_std)
