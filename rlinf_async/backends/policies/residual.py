"""Policies that correct a frozen one: what they draw is added to its most likely action.

::

    observation --+--> base, frozen --> its action --+-----------------------> +
                  |                                  v                         |
                  +------------------------> features: both --> residual x scale
                                                                               v
                                                        action, held in [-1, 1]

Sources: Silver et al. 2018, "Residual Policy Learning"; Johannink et al. 2019, "Residual
Reinforcement Learning for Robot Control". The last layer begins with zeros, so the most likely
action is the base's own.

What is executed, stored and valued is the sum; log-probs and entropies are those of the residual in
its own [-1, 1]. The base is part of the policy: its weights are published, saved and exported with
the others, and nothing trains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from rlinf_async.backends.policies.base import (
    Drawing,
    ObservedT,
    Policy,
    find_policy,
    register_policy,
)
from rlinf_async.backends.policies.config import (
    Corrected,
    PolicyConfig,
    box_misfit,
    cnn_misfit,
    mlp_misfit,
)
from rlinf_async.backends.policies.images import ImageEncoder
from rlinf_async.backends.policies.squashed import SquashedGaussianPolicy
from rlinf_async.messages.spaces import STATE


class ResidualPolicy(SquashedGaussianPolicy[ObservedT]):
    """Features are those of the observation, and the base's action ``[N, A]`` after them."""

    def __init__(self, config: PolicyConfig, encoder: ImageEncoder | None = None) -> None:
        super().__init__(config, encoder, beside=config.action_size)
        given = _corrected(config)
        self._scale = given.scale
        self.base: Policy[Any] = find_policy(given.base.name)(given.base)
        self.base.requires_grad_(False)
        self.base.eval()
        for name, numbers in (("middle", given.middle), ("half", given.half)):
            self.register_buffer(f"_{name}", torch.tensor(numbers), persistent=False)
        last = self.actor[-1]
        for one in last.parameters():
            nn.init.zeros_(one)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all but the base, which acts as it does without training."""
        super().train(mode)
        self.base.eval()
        return self

    def features(self, observation: ObservedT) -> Tensor:
        return torch.cat([super().features(observation), self.base_action(observation)], 1)

    @torch.no_grad()
    def base_action(self, observation: ObservedT) -> Tensor:
        """Return the base's most likely actions, stretched from the environment's bounds to
        [-1, 1] and held within them."""
        base = self.base
        if not isinstance(base, Drawing):
            action = base.mode(observation)
        else:  # tensors alone, as one graph needs it
            features = base.features(self._seen_by_base(observation))
            noise = features[:, :1].new_zeros(features.shape[0], self._size)
            action = base.draw(features, noise)
        stretched = (action - self.get_buffer("_middle")) / self.get_buffer("_half")
        return stretched.to(torch.float32).clamp(-1.0, 1.0)

    def _seen_by_base(self, observation: ObservedT) -> Any:
        """Observations as the base's features take them: what `Policy.normalized` does, without a
        look at values."""
        base = self.base
        state = observation if isinstance(observation, Tensor) else observation.get(STATE)
        if not base.normalizes or state is None:
            return observation
        statistics = base.observation_normalizer
        state = (state - statistics.mean.to(torch.float32)) * statistics.scale()
        state = state.clamp(-statistics.clip, statistics.clip)
        return state if isinstance(observation, Tensor) else {**observation, STATE: state}

    def executed(self, features: Tensor, squashed: Tensor) -> Tensor:
        return (self._base_of(features) + self._scale * squashed).clamp(-1.0, 1.0)

    def squashed(self, features: Tensor, action: Tensor) -> Tensor:
        return (action - self._base_of(features)) / self._scale

    def uniform_actions(self, observation: ObservedT, drawn: Tensor) -> Tensor:
        return self.executed(self.base_action(observation), drawn)

    def _base_of(self, features: Tensor) -> Tensor:
        return features[:, -self._size :]

    def graph_misfit(self) -> str:
        if not isinstance(self.base, Drawing):
            return "the policy that it corrects has no methods features() and draw()"
        problem = self.base.graph_misfit()
        return problem and f"of the policy that it corrects: {problem}"


def _corrected(config: PolicyConfig) -> Corrected:
    if config.corrected is None:
        raise ValueError(_NOTHING)
    return config.corrected


_NOTHING = "it corrects another policy: take job = 'embodied_sac', and name that in residual.path"


def _misfit(config: PolicyConfig) -> str:
    return box_misfit(config) or ("" if config.corrected else _NOTHING)


@register_policy("mlp_residual")
class MlpResidualPolicy(ResidualPolicy[Tensor]):
    """A policy for observations of one vector."""

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return mlp_misfit(config) or _misfit(config)


@register_policy("cnn_residual")
class CnnResidualPolicy(ResidualPolicy[Mapping[str, Tensor]]):
    """A policy for images, and the state where there is one, with an encoder of its own."""

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return cnn_misfit(config) or _misfit(config)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config, ImageEncoder(config.sees, config.channels))
