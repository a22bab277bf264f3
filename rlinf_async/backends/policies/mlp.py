"""Multi-layer perceptrons of one vector, and what every policy with two networks has in common.

`ArrayGaussian` computes what `MlpGaussianPolicy.act` does on arrays, in a third of its time: for
the few rows of one step of environments, torch's calls cost several times the arithmetic. numpy
works on the memory of the parameters, so loading weights in place changes what acts. The noise is
torch's, from the same generator. A test compares both.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from itertools import pairwise
from typing import ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_async.backends.base import PolicyAnswer
from rlinf_async.backends.policies.base import (
    HALF_LOG_TWO_PI,
    ActionDistribution,
    Evaluation,
    ObservedT,
    Policy,
    Step,
    register_policy,
)
from rlinf_async.backends.policies.config import PolicyConfig, mlp_misfit
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.spaces import ObservationArray, all_finite, choices


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


class ActorCriticPolicy(Policy[ObservedT]):
    """A network for the action and one for the value, both of the same features ``[N, F]``.

    A subclass says what the features are, and calls `add_networks` when it is made.
    """

    deviates: ClassVar[bool] = True
    """whether there are deviations of continuous numbers to learn, be it none"""
    log_std: Tensor

    def add_networks(self, config: PolicyConfig, features: int, hidden: tuple[int, ...]) -> None:
        """Make both networks, with layers of these sizes, and the deviations."""
        self.spec = config.acts
        self.actor = tanh_mlp((features, *hidden, self.spec.outputs), output_gain=0.01)
        self.critic = tanh_mlp((features, *hidden, 1), output_gain=1.0)
        log_std = torch.full((self.spec.numbers,), config.initial_log_std)
        self.log_std = nn.Parameter(log_std) if self.deviates else log_std

    def action_parameter_names(self) -> set[str]:
        """Return those of the action's last layer, and the deviations."""
        last = f"actor.{len(self.actor) - 1}."
        return {
            name
            for name, _ in self.named_parameters()
            if name == "log_std" or name.startswith(last)
        }

    @abstractmethod
    def features(self, normalized: ObservedT) -> Tensor:
        """Return what both networks see, ``[N, F]``, with gradients."""

    @torch.no_grad()
    def act(self, observation: ObservedT, generator: torch.Generator | None = None) -> Step:
        return self.step(self.features(self.normalized(observation)), generator)

    @torch.no_grad()
    def mode(self, observation: ObservedT) -> Tensor:
        return self.likeliest(self.features(self.normalized(observation)))

    @torch.no_grad()
    def value(self, observation: ObservedT) -> Tensor:
        value = run_values(self.critic, self.features(self.normalized(observation)))
        self.require_finite(value=value)
        return value

    def forward(self, normalized: ObservedT, action: Tensor) -> Evaluation:
        return self.evaluation(self.features(normalized), action)

    def step(self, features: Tensor, generator: torch.Generator | None) -> Step:
        """Sample actions; raises `PolicyOutputError` when an output is not finite."""
        outputs, value = run_mlp(self.actor, features), run_values(self.critic, features)
        self.require_finite(outputs=outputs, value=value)
        action, log_prob = self._distribution(outputs).sample(generator)
        self.require_finite(log_prob=log_prob)
        return Step(action, log_prob, value)

    def likeliest(self, features: Tensor) -> Tensor:
        """Return the most likely actions."""
        outputs = run_mlp(self.actor, features)
        self.require_finite(outputs=outputs)
        return self._distribution(outputs).mode()

    def draw(self, features: Tensor, noise: Tensor) -> Tensor:
        """Return the actions to which ``noise [N, spec.outputs]`` leads: see `ActionDistribution`.

        One graph of tensors, without a look at their values: what leaves the framework is this.
        """
        return self._distribution(run_mlp(self.actor, features)).draw(noise)

    def evaluation(self, features: Tensor, action: Tensor) -> Evaluation:
        """Evaluate ``action``, with gradients."""
        distribution = self._distribution(run_mlp(self.actor, features))
        value = run_values(self.critic, features)
        return Evaluation(distribution.log_prob(action), distribution.entropy(), value)

    def _distribution(self, outputs: Tensor) -> ActionDistribution:
        return ActionDistribution(self.spec, outputs, self.log_std)


class MlpPolicy(ActorCriticPolicy[Tensor]):
    """The common part of the MLPs: observations of one vector."""

    draws: ClassVar[str] = ""
    """name of the built-in policy whose kind of actions it draws; empty: of any kind"""

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return mlp_misfit(config, cls.draws)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self.add_networks(config, config.observation_size, config.hidden_sizes)

    def features(self, normalized: Tensor) -> Tensor:
        return normalized


@register_policy("mlp_gaussian")
class MlpGaussianPolicy(MlpPolicy):
    """Continuous actions: a normal distribution whose deviation does not depend on the state.

    Actions ``[N, A]`` are not squashed; the environment's wrapper clips them to its bounds.
    """

    draws = "mlp_gaussian"


@register_policy("mlp_categorical")
class MlpCategoricalPolicy(MlpPolicy):
    """Discrete actions, int64 ``[N]``."""

    draws = "mlp_categorical"
    deviates = False

    def __init__(self, config: PolicyConfig) -> None:
        if not config.action.factors:
            config = msgspec.structs.replace(config, action=choices(config.action_size))
        super().__init__(config)


@register_policy("mlp_factored")
class MlpFactoredPolicy(MlpPolicy):
    """Actions of several factors: MultiDiscrete, MultiBinary, Dict, Tuple."""


class ArrayMlp:
    """The layers of `tanh_mlp`, as arrays."""

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
        # Kept between steps: making a tensor takes as long as filling it.
        self._noise = torch.empty(0, self._log_std.size)
        self._drawn: Floats = self._noise.numpy()

    @classmethod
    def of(cls, policy: nn.Module, device: torch.device) -> ArrayGaussian | None:
        """None where this is not right: a policy that is derived may act in another way."""
        if type(policy) is MlpGaussianPolicy and device.type == "cpu":
            return cls(policy)
        return None

    def act(self, observation: ObservationArray, generator: torch.Generator) -> PolicyAnswer:
        """Sample actions for ``[N, D]``; raises `PolicyOutputError` for NaN or infinity."""
        seen = np.asarray(observation, np.float32)
        normalized = self._policy.observation_normalizer.of_array(seen)
        mean = self._actor(normalized)
        value = self._critic(normalized)[:, 0]
        if len(self._drawn) != len(mean):
            self._noise = torch.empty(mean.shape)
            self._drawn = self._noise.numpy()
        self._noise.normal_(generator=generator)
        noise = self._drawn
        action = noise * np.exp(self._log_std)
        action += mean
        # (action - mean) / deviation is the noise again.
        log_prob: Floats = np.float32(-0.5) * np.add.reduce(np.square(noise, out=noise), 1)
        log_scale = np.add.reduce(self._log_std) + HALF_LOG_TWO_PI * self._log_std.size
        log_prob -= np.float32(log_scale)
        # A log-prob is finite where its action is.
        if not (all_finite(action) and all_finite(value)):
            self._policy.require_finite(
                action=torch.from_numpy(action), value=torch.from_numpy(value)
            )
        return PolicyAnswer(action, log_prob, value)
