"""Trunks: what a velocity field sees of an observation, features ``[N, F]`` with gradients.

Numbers are seen as they are; images through the convolutions of the policy ``cnn``; images with a
text through the vision-language model of ``vision_language_action``, whose hidden state at a
learned slot behind everything they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor, nn

from rlinf_async.backends.policies.config import PolicyConfig, reads_text
from rlinf_async.backends.policies.images import ImageEncoder
from rlinf_async.backends.policies.vision_language.policy import Backbone, add_adapters, read


class Numbers(nn.Module):
    """One vector, as it is."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, normalized: Tensor) -> Tensor:
        """Return features ``[N, F]``."""
        return normalized


class VisionLanguage(nn.Module):
    """Images, instruction and state, read by a vision-language model."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        own = msgspec.structs.replace(config.vision_language, bins=2)  # no actions as tokens
        images = config.sees.of_kind("image")
        self._images = [one.name for one in images]
        self._texts = [one.name for one in config.sees.of_kind("text")]
        self.backbone = Backbone(own, images[0].shape[0])
        self.size = self.backbone.hidden_size
        state = config.sees.state_size
        self.state = nn.Linear(state, self.size) if state else None
        self.slot = nn.Parameter(torch.randn(1, self.size) * self.size**-0.5)
        if own.lora.rank:
            add_adapters(self.backbone.model, own.lora)

    def forward(self, normalized: Mapping[str, Tensor]) -> Tensor:
        """Return features ``[N, F]``."""
        seen = read(self.backbone, normalized, self._images, self._texts, self.state)
        slot = self.slot.expand(len(seen.mask), -1, -1)
        mask = torch.cat([seen.mask, seen.mask.new_ones(slot.shape[:2])], 1)
        hidden, _ = self.backbone(torch.cat([seen.embedded, slot], 1), mask)
        features: Tensor = hidden[:, -1]
        return features


def trunk_of(config: PolicyConfig) -> Numbers | ImageEncoder | VisionLanguage:
    """Return a new trunk for the spaces."""
    if reads_text(config):
        return VisionLanguage(config)
    if config.sees.of_kind("image"):
        return ImageEncoder(config.sees, config.channels)
    return Numbers(config.observation_size)
