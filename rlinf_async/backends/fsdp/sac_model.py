"""The model of soft actor-critic: a policy, two critics, their targets, the entropy coefficient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.squashed import MlpSquashedGaussianPolicy


class TwinCritics(nn.Module):
    """Two MLPs of an observation and an action, ReLU between the layers, in one multiplication.

    Weights begin as those of `torch.nn.Linear`.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for inputs, outputs in pairwise(sizes):
            bound = 1.0 / math.sqrt(inputs)
            for into, shape in (
                (self.weights, (2, inputs, outputs)),
                (self.biases, (2, 1, outputs)),
            ):
                into.append(nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return values ``[2, N]``."""
        return self._values(observation, action, [*self.weights], [*self.biases])

    def frozen(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return values ``[2, N]`` with gradients for ``action`` and none for the critics."""
        weights = [weight.detach() for weight in self.weights]
        return self._values(observation, action, weights, [bias.detach() for bias in self.biases])

    @staticmethod
    def _values(
        observation: Tensor, action: Tensor, weights: list[Tensor], biases: list[Tensor]
    ) -> Tensor:
        hidden = torch.cat([observation, action], -1).expand(2, -1, -1)
        for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden if index == 0 else functional.relu(hidden), weight)
        return hidden.squeeze(-1)


class SacModel(nn.Module):
    """Everything that soft actor-critic learns, and the targets that follow it."""

    def __init__(self, config: PolicyConfig, initial_entropy_coefficient: float) -> None:
        super().__init__()
        self.policy = MlpSquashedGaussianPolicy(config)
        sizes = (config.observation_size + config.action_size, *config.hidden_sizes, 1)
        self.critic, self.target = TwinCritics(sizes), TwinCritics(sizes)
        self.target.load_state_dict(self.critic.state_dict())
        self.target.requires_grad_(False)
        self.log_entropy_coefficient = nn.Parameter(
            torch.full((1,), math.log(initial_entropy_coefficient))
        )

    def value_parameter_names(self) -> set[str]:
        """Return the names of the critics' parameters, which have a learning rate of their own."""
        return {name for name, _ in self.named_parameters() if name.startswith("critic.")}
