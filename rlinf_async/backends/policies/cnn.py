"""A convolutional encoder of images, and an MLP each for the action and the value on top."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from rlinf_async.backends.policies.base import Evaluation, Policy, Step, register_policy
from rlinf_async.backends.policies.config import PolicyConfig, cnn_misfit
from rlinf_async.backends.policies.distribution import ActionDistribution
from rlinf_async.backends.policies.mlp import run_mlp, run_values, tanh_mlp
from rlinf_async.messages.spaces import STATE, Part

Observation = Mapping[str, Tensor]


@register_policy("cnn")
class CnnPolicy(Policy[Observation]):
    """Images, and the state where there is one; any action space.

    Every image has an encoder of its own: convolutions of 3 x 3 and stride 2, ReLU between them,
    with ``config.channels`` outputs. Actor and critic share the encoders.
    """

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return cnn_misfit(config)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        images = config.sees.of_kind("image")
        self._spec = config.acts
        self._images = [image.name for image in images]
        self.encoders = nn.ModuleList(_encoder(image, config.channels) for image in images)
        size = config.sees.state_size + sum(_features(image, config.channels) for image in images)
        inputs = (size, *config.hidden_sizes)
        self.actor = tanh_mlp((*inputs, self._spec.outputs), output_gain=0.01)
        self.critic = tanh_mlp((*inputs, 1), output_gain=1.0)
        continuous = sum(one.size for one in self._spec.factors if one.kind == "continuous")
        self.log_std = nn.Parameter(torch.full((continuous,), config.initial_log_std))

    @torch.no_grad()
    def act(self, observation: Observation, generator: torch.Generator | None = None) -> Step:
        features = self._encoded(self.normalized(observation))
        outputs, value = run_mlp(self.actor, features), run_values(self.critic, features)
        self.require_finite(outputs=outputs, value=value)
        action, log_prob = self._distribution(outputs).sample(generator)
        return Step(action, log_prob, value)

    @torch.no_grad()
    def mode(self, observation: Observation) -> Tensor:
        outputs = run_mlp(self.actor, self._encoded(self.normalized(observation)))
        self.require_finite(outputs=outputs)
        return self._distribution(outputs).mode()

    @torch.no_grad()
    def value(self, observation: Observation) -> Tensor:
        value = run_values(self.critic, self._encoded(self.normalized(observation)))
        self.require_finite(value=value)
        return value

    def forward(self, normalized: Observation, action: Tensor) -> Evaluation:
        features = self._encoded(normalized)
        distribution = self._distribution(run_mlp(self.actor, features))
        value = run_values(self.critic, features)
        return Evaluation(distribution.log_prob(action), distribution.entropy(), value)

    def _distribution(self, outputs: Tensor) -> ActionDistribution:
        return ActionDistribution(self._spec, outputs, self.log_std)

    def _encoded(self, normalized: Observation) -> Tensor:
        """Return features ``[N, F]``."""
        parts = [
            encoder(_pixels(normalized[name]))
            for name, encoder in zip(self._images, self.encoders, strict=True)
        ]
        if STATE in normalized:
            parts.append(normalized[STATE])
        return torch.cat(parts, 1)


def _pixels(image: Tensor) -> Tensor:
    """uint8 ``[N, height, width(, channels)]`` -> ``[N, channels, height, width]`` in [-1, 1]."""
    channels_first = image.movedim(-1, 1) if image.ndim == 4 else image.unsqueeze(1)
    return channels_first.to(torch.float32).div_(127.5).sub_(1.0)


def _encoder(image: Part, channels: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((_channels(image), *channels)):
        convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        nn.init.orthogonal_(convolution.weight, math.sqrt(2.0))
        nn.init.zeros_(convolution.bias if convolution.bias is not None else torch.empty(0))
        layers += [convolution, nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten())


def _channels(image: Part) -> int:
    return image.shape[2] if len(image.shape) == 3 else 1


def _features(image: Part, channels: tuple[int, ...]) -> int:
    height, width = image.shape[:2]
    for _ in channels:
        height, width = -(-height // 2), -(-width // 2)
    return height * width * (channels[-1] if channels else _channels(image))
