"""Policies of images: convolutional encoders, and networks for action and value on top.

`ImageEncoder` belongs to every policy that sees images. `FeatureHead` is what soft actor-critic has
between it and each MLP: Yarats et al. 2019, "Improving Sample Efficiency in Model-Free
Reinforcement Learning from Images" (SAC+AE), appendix B, and Yarats et al. 2021, "Image
Augmentation Is All You Need" (DrQ). Of their convolutions only the first halves height and
width; ours all do, which takes less arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor, nn

from rlinf_async.backends.policies.base import register_policy
from rlinf_async.backends.policies.config import PolicyConfig, cnn_misfit
from rlinf_async.backends.policies.mlp import ActorCriticPolicy
from rlinf_async.messages.spaces import STATE, ObservationPart, ObservationSpec

HEAD_SIZE: Final = 50
"""numbers that a `FeatureHead` makes of all pixels: as in SAC+AE and DrQ"""


class ImageEncoder(nn.Module):
    """Features ``[N, F]`` of images, with the state behind them where there is one.

    Every image has convolutions of its own: 3 x 3, stride 2, ReLU after each.

    Args:
        sees: parts of an observation, of which at least one is an image.
        channels: outputs of the convolutions, each of which halves height and width.
    """

    def __init__(self, sees: ObservationSpec, channels: tuple[int, ...]) -> None:
        super().__init__()
        images = sees.of_kind("image")
        self._images = [image.name for image in images]
        self.encoders = nn.ModuleList(_convolutions(image, channels) for image in images)
        self.pixel_features = sum(_features(image, channels) for image in images)
        """features of all images"""
        self.state_size = sees.state_size

    @property
    def size(self) -> int:
        """``F``"""
        return self.pixel_features + self.state_size

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Return features ``[N, F]`` of uint8 images and a state that is as it shall be."""
        # Flattened here: FSDP2 loses its hooks on outputs that are views.
        parts = [
            encoder(_pixels(observation[name])).flatten(1)
            for name, encoder in zip(self._images, self.encoders, strict=True)
        ]
        if STATE in observation:
            parts.append(observation[STATE])
        return torch.cat(parts, 1)


class FeatureHead(nn.Module):
    """A linear layer, layer norm and tanh, of the features of pixels; the state, and what stands
    after it, stay as they are."""

    def __init__(self, encoder: ImageEncoder) -> None:
        super().__init__()
        self._pixels = encoder.pixel_features
        self.linear = nn.Linear(self._pixels, HEAD_SIZE)
        self.norm = nn.LayerNorm(HEAD_SIZE)
        self.size = HEAD_SIZE + encoder.state_size

    def forward(self, features: Tensor) -> Tensor:
        """Features ``[N, F]`` -> ``[N, size]``."""
        pixels, state = features[:, : self._pixels], features[:, self._pixels :]
        return torch.cat([self.norm(self.linear(pixels)).tanh(), state], 1)


def random_shift(image: Tensor, offsets: Tensor) -> Tensor:
    """Return images ``[N, height, width(, channels)]``, each shifted by its own offset.

    DrQ's augmentation: what moves in at an edge repeats it.

    Args:
        offsets: int64 ``[N, 2]``: pixels down and to the right of which each begins.
    """
    count, height, width = image.shape[:3]
    rows = torch.arange(height, device=image.device) + offsets[:, :1]
    columns = torch.arange(width, device=image.device) + offsets[:, 1:]
    rows, columns = rows.clamp_(0, height - 1), columns.clamp_(0, width - 1)
    which = torch.arange(count, device=image.device)
    return image[which[:, None, None], rows[:, :, None], columns[:, None, :]]


def _pixels(image: Tensor) -> Tensor:
    """uint8 ``[N, height, width(, channels)]`` -> ``[N, channels, height, width]`` in [-1, 1]."""
    channels_first = image.movedim(-1, 1) if image.ndim == 4 else image.unsqueeze(1)
    return channels_first.to(torch.float32).div_(127.5).sub_(1.0)


def _convolutions(image: ObservationPart, channels: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((_channels(image), *channels)):
        convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        nn.init.orthogonal_(convolution.weight, math.sqrt(2.0))
        nn.init.zeros_(convolution.bias if convolution.bias is not None else torch.empty(0))
        layers += [convolution, nn.ReLU()]
    return nn.Sequential(*layers)


def _channels(image: ObservationPart) -> int:
    return image.shape[2] if len(image.shape) == 3 else 1


def _features(image: ObservationPart, channels: tuple[int, ...]) -> int:
    height, width = image.shape[:2]
    for _ in channels:
        height, width = -(-height // 2), -(-width // 2)
    return height * width * (channels[-1] if channels else _channels(image))


Observation = Mapping[str, Tensor]


@register_policy("cnn")
class CnnPolicy(ActorCriticPolicy[Observation]):
    """Images, and the state where there is one; any action space.

    Actor and critic share the encoder.
    """

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return cnn_misfit(config)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self.encoder = ImageEncoder(config.sees, config.channels)
        self.add_networks(config, self.encoder.size, config.hidden_sizes)

    def features(self, normalized: Observation) -> Tensor:
        encoded: Tensor = self.encoder(normalized)
        return encoded
