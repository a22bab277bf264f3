"""Policies that learn from transitions: what they have in common, and that of one choice.

Source of the choices: Christodoulou 2019, "Soft Actor-Critic for Discrete Action Settings".
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_async.backends.policies.base import (
    ActionDistribution,
    Evaluation,
    ObservedT,
    Policy,
    Step,
    register_policy,
)
from rlinf_async.backends.policies.config import PolicyConfig, cnn_misfit, mlp_misfit
from rlinf_async.backends.policies.images import FeatureHead, ImageEncoder
from rlinf_async.messages.spaces import choices


class OffPolicyPolicy(Policy[ObservedT]):
    """One MLP with ReLU between its layers, whose outputs are those of a distribution.

    It has no value: where one is asked for, it is 0. Observations are not normalised. As long as
    ``uniform`` is set it draws actions that are all alike, whatever it sees.

    Features ``[N, F]`` of an observation are what the critics see, too: the vector itself, or what
    an encoder makes of images. A head makes of them the inputs of an MLP; policy and critics have
    one each.

    Args:
        config: sizes of the layers, and spaces.
        outputs: numbers that a distribution has.
        encoder: encoder of images; None: observations are one vector.
        beside: numbers that stand after the features of an observation.
    """

    off_policy = True
    normalizes = False
    uniform: Tensor

    def __init__(
        self,
        config: PolicyConfig,
        outputs: int,
        encoder: ImageEncoder | None = None,
        *,
        beside: int = 0,
    ) -> None:
        super().__init__(config)
        self._vector, self._beside = config.observation_size, beside
        self.encoder = encoder
        self.head, inputs = self.new_head()
        sizes = (inputs, *config.hidden_sizes, outputs)
        self.actor = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))
        self.register_buffer("uniform", torch.ones((), dtype=torch.bool))

    def new_head(self) -> tuple[nn.Module, int]:
        """Return a new head for features, and the number of its outputs."""
        if self.encoder is None:
            return nn.Identity(), self._vector + self._beside
        head = FeatureHead(self.encoder)
        return head, head.size + self._beside

    def features(self, observation: ObservedT) -> Tensor:
        """Return what the critics see too, ``[N, F]``, with gradients."""
        if self.encoder is not None:
            encoded: Tensor = self.encoder(observation)
            return encoded
        if not isinstance(observation, Tensor):
            raise TypeError("a policy without an encoder takes one vector")
        return observation

    @torch.no_grad()
    def value(self, observation: ObservedT) -> Tensor:
        return torch.zeros(count(observation), device=self.uniform.device)

    def normalized(self, observation: ObservedT) -> ObservedT:
        """Return observations as they are."""
        return observation

    def outputs(self, features: Tensor) -> Tensor:
        """Return what the MLP makes of features, ``[N, outputs]``."""
        hidden: Tensor = self.head(features)
        for index, layer in enumerate(self.actor):
            hidden = layer(hidden if index == 0 else functional.relu(hidden))
        return hidden


class SoftCategoricalPolicy(OffPolicyPolicy[ObservedT]):
    """Log-probs of the choices that there are."""

    def __init__(self, config: PolicyConfig, encoder: ImageEncoder | None = None) -> None:
        super().__init__(config, config.action_size, encoder)
        self.spec = choices(config.action_size)

    def log_probs(self, features: Tensor) -> Tensor:
        """Return log-probs ``[N, A]`` of all choices, with gradients."""
        return self.outputs(features).log_softmax(-1)

    def log_prob(self, features: Tensor, action: Tensor) -> Tensor:
        """Return log-probs ``[N]`` of the choices ``action [N]``, with gradients."""
        return self._distribution(features).log_prob(action)

    def cloned(self, features: Tensor, action: Tensor) -> Tensor:
        """Return what cloning maximises: `log_prob`."""
        return self.log_prob(features, action)

    def draw(self, features: Tensor, noise: Tensor) -> Tensor:
        """Return the choices to which ``noise [N, A]`` leads: see `ActionDistribution`."""
        return self._distribution(features).draw(noise)

    @torch.no_grad()
    def act(self, observation: ObservedT, generator: torch.Generator | None = None) -> Step:
        features, value = self.features(observation), self.value(observation)
        outputs = self.outputs(features)
        self.require_finite(outputs=outputs)
        if self.uniform.item():
            outputs = torch.zeros_like(outputs)
        action, log_prob = self._of(outputs).sample(generator)
        return Step(action, log_prob, value)

    @torch.no_grad()
    def mode(self, observation: ObservedT) -> Tensor:
        """Return the most likely choices."""
        outputs = self.outputs(self.features(observation))
        self.require_finite(outputs=outputs)
        return self._of(outputs).mode()

    def forward(self, normalized: ObservedT, action: Tensor) -> Evaluation:
        """Log-probs and entropies."""
        found = self._distribution(self.features(normalized))
        log_prob = found.log_prob(action)
        return Evaluation(log_prob, found.entropy(), log_prob.new_zeros(len(log_prob)))

    def _distribution(self, features: Tensor) -> ActionDistribution:
        return self._of(self.outputs(features))

    def _of(self, outputs: Tensor) -> ActionDistribution:
        return ActionDistribution(self.spec, outputs, outputs.new_zeros(0))


@register_policy("mlp_soft_categorical")
class MlpSoftCategoricalPolicy(SoftCategoricalPolicy[Tensor]):
    """A policy for observations of one vector."""

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return mlp_misfit(config) or _action_misfit(config)


@register_policy("cnn_soft_categorical")
class CnnSoftCategoricalPolicy(SoftCategoricalPolicy[Mapping[str, Tensor]]):
    """A policy for images, and the state where there is one. The critics' loss alone trains its
    encoder."""

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return cnn_misfit(config) or _action_misfit(config)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config, ImageEncoder(config.sees, config.channels))


def _action_misfit(config: PolicyConfig) -> str:
    if config.action.discrete or not config.action.factors:
        return ""
    return "it draws one choice; the environment's actions are others"


def count(observation: Tensor | Mapping[str, Tensor]) -> int:
    """Return ``N``, of observations of either form."""
    if isinstance(observation, Tensor):
        return len(observation)
    return len(next(iter(observation.values())))
