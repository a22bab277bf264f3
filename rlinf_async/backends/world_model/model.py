"""The networks of a world model.

::

    observation --encoder--> z_0 --(action)--> z_1 --(action)--> z_2 ...     H steps
                                                |
                                                +--> reward, end, state, images of step 1

The latent is deterministic; the transition adds to it, and a layer norm keeps it of one size over
many steps. Nothing is fed back from what is decoded: an observation is for whoever acts in the
model. (Of this kind: Oh et al. 2015, "Action-Conditional Video Prediction using Deep Networks in
Atari Games"; the deterministic path of Hafner et al. 2019, "Learning Latent Dynamics for Planning
from Pixels".) Texts are read, and stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from rlinf_async.backends.policies.images import ImageEncoder
from rlinf_async.backends.policies.moments import EPSILON
from rlinf_async.backends.world_model.config import WorldModelInfo
from rlinf_async.messages.spaces import STATE, ObservationPart

TEXT_SIZE: Final = 8
"""numbers that stand for a byte of a text"""


class Dreamt(NamedTuple):
    """Predictions for ``B`` windows of ``H`` steps, of which ``N`` are shown."""

    reward: Tensor
    """``[B, H]``, in units of the reward's deviation"""
    ended: Tensor
    """``[B, H]``: logits of the end for good"""
    state: Tensor | None
    """``[B, N, D]``, normalised; None where no numbers are shown"""
    images: dict[str, Tensor]
    """``[B, N, height, width(, channels)]`` in [0, 1] by name, not clipped"""
    latent: Tensor
    """``[B, H, L]``"""


class WorldModel(nn.Module):
    """Predicts what follows an observation under given actions.

    Statistics of the data are buffers: numbers, rewards and pixels are predicted in their units.
    """

    state_mean: Tensor
    state_scale: Tensor
    reward_mean: Tensor
    reward_scale: Tensor

    def __init__(self, info: WorldModelInfo) -> None:
        super().__init__()
        sizes, sees = info.sizes, info.observation
        self.register_buffer("state_mean", torch.zeros(sees.state_size))
        self.register_buffer("state_scale", torch.ones(sees.state_size))
        self.register_buffer("reward_mean", torch.zeros(()))
        self.register_buffer("reward_scale", torch.ones(()))
        self._texts = [one.name for one in sees.of_kind("text")]
        self._images = [one.name for one in sees.of_kind("image")]
        self.image_encoder = ImageEncoder(sees, sizes.channels) if self._images else None
        numbers = sees.state_size if self.image_encoder is None else self.image_encoder.size
        letters = sum(one.shape[0] for one in sees.of_kind("text"))
        self.letters = nn.Embedding(256, TEXT_SIZE) if letters else None
        latent, hidden = sizes.latent_size, sizes.hidden_sizes
        self.encoder = _network(numbers + letters * TEXT_SIZE, hidden, latent)
        self.transition = _network(latent + info.action_size, hidden, latent)
        # Nothing changes at first: what is far ahead is then as near as what is shown.
        for parameter in self.transition[-1].parameters():
            nn.init.zeros_(parameter)
        self.norm = nn.LayerNorm(latent)
        self.reward = _network(2 * latent, hidden, 1)
        self.ended = _network(latent, hidden, 1)
        self.state = _network(latent, hidden, sees.state_size) if sees.state_size else None
        self.pictures = nn.ModuleDict(
            {
                f"of_{one.name}": _Picture(one, latent, sizes.channels)
                for one in sees.of_kind("image")
            }
        )

    def forward(
        self,
        observation: Tensor | Mapping[str, Tensor] | None,
        action: Tensor,
        shown: Tensor,
        latent: Tensor | None = None,
    ) -> Dreamt:
        """Predict.

        Args:
            observation: what is shown before the first action, ``[B, ...]`` each part.
            action: ``[B, H, A]``.
            shown: int64 ``[N]``: after which steps, from 1 to H, state and images are decoded; 0 is
                the observation itself.
            latent: ``[B, L]`` of where the actions begin, in the place of an observation.
        """
        z = self.encode(observation) if latent is None and observation is not None else latent
        if z is None:
            raise ValueError("neither an observation nor a latent is given")
        steps = [z]
        for now in action.unbind(1):
            steps.append(self.norm(steps[-1] + self.transition(torch.cat([steps[-1], now], -1))))
        every = torch.stack(steps, 1)
        before, after = every[:, :-1], every[:, 1:]
        seen = every[:, shown]
        images = {name: self.pictures[f"of_{name}"](seen) for name in self._images}
        return Dreamt(
            self.reward(torch.cat([before, after], -1)).squeeze(-1),
            self.ended(after).squeeze(-1),
            None if self.state is None else self.state(seen),
            images,
            after,
        )

    def encode(self, observation: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Return latents ``[B, L]`` of observations ``[B, ...]``."""
        parts = observation if isinstance(observation, Mapping) else {STATE: observation}
        found: dict[str, Tensor] = dict(parts)
        if STATE in found:
            found[STATE] = (found[STATE] - self.state_mean) * self.state_scale
        features: list[Tensor] = []
        if self.image_encoder is not None:
            features.append(self.image_encoder(found))
        elif STATE in found:
            features.append(found[STATE])
        if self.letters is not None:
            features += [self.letters(found[name].long()).flatten(1) for name in self._texts]
        z: Tensor = self.norm(self.encoder(torch.cat(features, -1)))
        return z

    def take_statistics(
        self, state: Tensor | None, reward: Tensor, pixels: Mapping[str, Tensor]
    ) -> None:
        """Take the units of predictions from data: ``[N, D]``, ``[N]``, and images ``[N, ...]``."""
        if state is not None:
            variance, mean = torch.var_mean(state, 0, correction=0)
            self.state_mean.copy_(mean)
            self.state_scale.copy_((variance + EPSILON).rsqrt())
        variance, mean = torch.var_mean(reward, correction=0)
        self.reward_mean.copy_(mean)
        # Of rewards that are always the same there is nothing to be predicted but their mean.
        self.reward_scale.fill_(float(variance.rsqrt()) if variance > EPSILON else 1.0)
        for name, images in pixels.items():
            self._picture(name).take(images)

    def rewards_of(self, predicted: Tensor) -> Tensor:
        """Return rewards as the environment pays them."""
        return predicted.float() / self.reward_scale + self.reward_mean

    def unexplained(self, name: str) -> Tensor:
        """Return what an error of the image of this name is divided by: the variance of pixels."""
        return self._picture(name).variance

    def _picture(self, name: str) -> _Picture:
        found = self.pictures[f"of_{name}"]
        assert isinstance(found, _Picture)
        return found


class _Picture(nn.Module):
    """Latents -> images: what differs from the mean image, by transposed convolutions."""

    mean: Tensor
    variance: Tensor

    def __init__(self, image: ObservationPart, latent: int, channels: Sequence[int]) -> None:
        super().__init__()
        self._shape = image.shape
        height, width = image.shape[:2]
        self._depth = image.shape[2] if len(image.shape) == 3 else 1
        for _ in channels:
            height, width = -(-height // 2), -(-width // 2)
        widths = [*reversed(channels)] or [self._depth]
        self._first = (widths[0], height, width)
        self.linear = nn.Linear(latent, widths[0] * height * width)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise([*widths, self._depth]):
            layers += [nn.ReLU(), nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1)]
        self.layers = nn.Sequential(*(layers if channels else []))
        self.register_buffer("mean", torch.zeros(image.shape))
        self.register_buffer("variance", torch.ones(()))

    def take(self, images: Tensor) -> None:
        """Take mean and variance of uint8 images ``[N, ...]``."""
        scaled = images.float() / 255.0
        self.mean.copy_(scaled.mean(0))
        self.variance.copy_((scaled - self.mean).square().mean().clamp(min=EPSILON))

    def forward(self, latent: Tensor) -> Tensor:
        """``[B, N, L]`` -> ``[B, N, ...]``"""
        flat = latent.flatten(0, 1)
        drawn: Tensor = self.layers(self.linear(flat).view(-1, *self._first))
        height, width = self._shape[:2]
        drawn = drawn[:, :, :height, :width].movedim(1, -1)
        found = drawn.reshape(*latent.shape[:2], *self._shape)
        return found * self.variance.sqrt() + self.mean


def _network(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in pairwise((inputs, *hidden)):
        layers += [nn.Linear(one, other), nn.LayerNorm(other), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], outputs))
