"""Multi-layer perceptrons: one for the action, one for the value, tanh between the layers."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_async.backends.policies.base import Evaluation, Policy, Step, register_policy
from rlinf_async.backends.policies.config import PolicyConfig, mlp_misfit
from rlinf_async.backends.policies.distribution import HALF_LOG_TWO_PI


def tanh_mlp(sizes: tuple[int, ...], output_gain: float) -> nn.Sequential:
    """Return linear layers of these sizes, tanh after all but the last.

    Weights are orthogonal with gain sqrt(2), and ``output_gain`` for the last; biases are 0
    (Andrychowicz et al. 2021, choice C57: a small gain for the action head).
    """
    linears = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(sizes)]
    for linear in linears:
        gain = output_gain if linear is linears[-1] else math.sqrt(2.0)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
    layers = [layer for linear in linears[:-1] for layer in (linear, nn.Tanh())]
    return nn.Sequential(*layers, linears[-1])


def run_mlp(network: nn.Sequential, inputs: Tensor) -> Tensor:
    """Run the layers of `tanh_mlp`, skipping the module calls: they cost as much as tiny layers."""
    hidden = inputs
    for layer in network:
        if isinstance(layer, nn.Linear):
            hidden = functional.linear(hidden, layer.weight, layer.bias)
        else:
            hidden = hidden.tanh()
    return hidden


def run_values(network: nn.Sequential, inputs: Tensor) -> Tensor:
    """Run a network of one output; return ``[N]``.

    The sum over that output is a new tensor: FSDP2 loses its hooks on outputs that are views.
    """
    return run_mlp(network, inputs).sum(-1)


class MlpPolicy(Policy[Tensor]):
    """The common part of the MLPs: observations of one vector, and ``outputs`` of the actor."""

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return mlp_misfit(config)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        inputs = (config.observation_size, *config.hidden_sizes)
        self.actor = tanh_mlp((*inputs, config.action_size), output_gain=0.01)
        self.critic = tanh_mlp((*inputs, 1), output_gain=1.0)

    @torch.no_grad()
    def value(self, observation: Tensor) -> Tensor:
        value = run_values(self.critic, self.observation_normalizer.forward(observation))
        self.require_finite(value=value)
        return value


@register_policy("mlp_gaussian")
class MlpGaussianPolicy(MlpPolicy):
    """Continuous actions: a normal distribution whose deviation does not depend on the state.

    Actions ``[N, A]`` are not squashed; the environment's wrapper clips them to its bounds.
    """

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return mlp_misfit(config, "mlp_gaussian")

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self.log_std = nn.Parameter(torch.full((config.action_size,), config.initial_log_std))

    @torch.no_grad()
    def act(self, observation: Tensor, generator: torch.Generator | None = None) -> Step:
        normalized = self.observation_normalizer.forward(observation)
        mean = run_mlp(self.actor, normalized)
        value = run_values(self.critic, normalized)
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        action = torch.addcmul(mean, noise, self.log_std.exp())
        # (action - mean) / deviation is the noise again.
        log_prob = noise.square_().sum(-1).mul_(-0.5).sub_(self._log_scale())
        self.require_finite(action=action, log_prob=log_prob, value=value)
        return Step(action, log_prob, value)

    @torch.no_grad()
    def mode(self, observation: Tensor) -> Tensor:
        mean = run_mlp(self.actor, self.observation_normalizer.forward(observation))
        self.require_finite(action=mean)
        return mean

    def forward(self, normalized: Tensor, action: Tensor) -> Evaluation:
        mean = run_mlp(self.actor, normalized)
        value = run_values(self.critic, normalized)
        standard = (action - mean) * (-self.log_std).exp()
        log_scale = self._log_scale()
        log_prob = -0.5 * standard.square().sum(-1) - log_scale
        entropy = (log_scale + 0.5 * self.log_std.numel()).repeat(len(value))
        return Evaluation(log_prob, entropy, value)

    def _log_scale(self) -> Tensor:
        # The logarithm of the density's normalising constant, a scalar.
        return self.log_std.sum() + HALF_LOG_TWO_PI * self.log_std.numel()


@register_policy("mlp_categorical")
class MlpCategoricalPolicy(MlpPolicy):
    """Discrete actions, int64 ``[N]``."""

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return mlp_misfit(config, "mlp_categorical")

    @torch.no_grad()
    def act(self, observation: Tensor, generator: torch.Generator | None = None) -> Step:
        normalized = self.observation_normalizer.forward(observation)
        log_probs = run_mlp(self.actor, normalized).log_softmax(-1)
        value = run_values(self.critic, normalized)
        self.require_finite(log_probs=log_probs, value=value)
        action = torch.multinomial(log_probs.exp(), 1, generator=generator)
        return Step(action.squeeze(-1), log_probs.gather(-1, action).squeeze(-1), value)

    @torch.no_grad()
    def mode(self, observation: Tensor) -> Tensor:
        logits = run_mlp(self.actor, self.observation_normalizer.forward(observation))
        self.require_finite(logits=logits)
        return logits.argmax(-1)

    def forward(self, normalized: Tensor, action: Tensor) -> Evaluation:
        log_probs = run_mlp(self.actor, normalized).log_softmax(-1)
        # As in `run_values`: a sum over one element, so that no view is returned.
        chosen = log_probs.gather(-1, action.unsqueeze(-1)).sum(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return Evaluation(chosen, entropy, run_values(self.critic, normalized))
