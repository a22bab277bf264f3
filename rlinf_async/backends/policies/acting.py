"""The Gaussian MLP acts on arrays: what `MlpGaussianPolicy.act` computes, in a third of its time.

For the few rows of one step of environments, torch's calls cost several times the arithmetic. So
numpy does it, on the memory of the parameters: loading weights in place changes what acts here.
The noise is torch's, from the same generator. A test compares both.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from rlinf_async.backends.base import PolicyAnswer
from rlinf_async.backends.policies.distribution import HALF_LOG_TWO_PI
from rlinf_async.backends.policies.mlp import MlpGaussianPolicy
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.spaces import Seen, all_finite


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
