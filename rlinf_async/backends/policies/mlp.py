"""Multi-layer perceptrons: one for the action, one for the value, tanh between the layers.

The Gaussian MLP acts on arrays: what `MlpGaussianPolicy.act` computes, in a third of its time.

For the few rows of one step of environments, torch's calls cost several times the arithmetic. So
numpy does it, on the memory of the parameters: loading weights in place changes what acts here.
The noise is torch's, from the same generator. A test compares both.

An MLP for actions of several factors: MultiDiscrete, MultiBinary, Dict, Tuple.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_async.backends.base import PolicyAnswer
from rlinf_async.backends.policies.base import (
    HALF_LOG_TWO_PI,
    ActionDistribution,
    Evaluation,
    Policy,
    Step,
    register_policy,
)
from rlinf_async.backends.policies.config import PolicyConfig, mlp_misfit
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.spaces import Seen, all_finite


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


class ArrayMlp:
    """The layers of `policies.mlp.tanh_mlp`."""

    def __init__(self, network: nn.Sequential) -> None:
        linears = [layer for layer in network if isinstance(layer, nn.Linear)]
        self._layers: list[tuple[Floats, Floats]] = [
            (layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in linears
        ]

    def __call__(self, inputs: Floats) -> Floats:
        """Return the output ``[N, out]`` of ``[N, in]``."""
        (weight, bias), *after = self._layers
        hidden = inputs @ weight
        hidden += bias
        for weight, bias in after:
            np.tanh(hidden, out=hidden)
            hidden = hidden @ weight
            hidden += bias
        return hidden


class ArrayGaussian:
    """Acts as ``policy`` does, whose parameters stay in the CPU memory where they are now."""

    def __init__(self, policy: MlpGaussianPolicy) -> None:
        self._policy = policy
        self._actor, self._critic = ArrayMlp(policy.actor), ArrayMlp(policy.critic)
        self._log_std: Floats = policy.log_std.detach().numpy()

    @classmethod
    def of(cls, policy: nn.Module, device: torch.device) -> ArrayGaussian | None:
        """None where this is not right: a policy that is derived may act in another way."""
        if type(policy) is MlpGaussianPolicy and device.type == "cpu":
            return cls(policy)
        return None

    def act(self, observation: Seen, generator: torch.Generator) -> PolicyAnswer:
        """Sample actions for ``[N, D]``; raises `PolicyOutputError` for NaN or infinity."""
        seen = np.asarray(observation, np.float32)
        normalized = self._policy.observation_normalizer.of_array(seen)
        mean = self._actor(normalized)
        value = self._critic(normalized)[:, 0]
        noise: Floats = torch.randn(mean.shape, generator=generator).numpy()
        action = noise * np.exp(self._log_std)
        action += mean
        # (action - mean) / deviation is the noise again.
        log_prob: Floats = np.float32(-0.5) * np.square(noise, out=noise).sum(1)
        log_prob -= np.float32(self._log_std.sum() + HALF_LOG_TWO_PI * self._log_std.size)
        # A log-prob is finite where its action is.
        if not (all_finite(action) and all_finite(value)):
            self._policy.require_finite(
                action=torch.from_numpy(action), value=torch.from_numpy(value)
            )
        return PolicyAnswer(action, log_prob, value)


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
