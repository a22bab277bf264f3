"""Learning from data alone: the arithmetic of one rank of a `SacActor` whose batches are
demonstrations.

::

    share of a batch --> losses of `OfflineModel` --> one backward, one step of all ranks together

The policy learns the data's actions, each weighed by how much better it is than the state that it
was taken in: no action is asked for that the data has not, except by ``awac``.

Sources: Kostrikov et al. 2021, "Offline Reinforcement Learning with Implicit Q-Learning" (arXiv
2110.06169), equations 5 to 7; Nair et al. 2020, "AWAC: Accelerating Online Reinforcement Learning
with Offline Datasets" (arXiv 2006.09359), equations 5 and 8. All losses are of the same weights,
and change them in one step, where other implementations update the value first.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rlinf_async.algorithms.losses import (
    advantage_weight,
    critic_loss,
    expectile_loss,
)
from rlinf_async.backends.fsdp.sac import (
    CriticModel,
    Critics,
    CriticTrainer,
    SacBatch,
    SacLosses,
)
from rlinf_async.backends.policies.bounded import BoundedGaussianPolicy
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.off_policy import SoftCategoricalPolicy
from rlinf_async.backends.sac_config import OfflineLossConfig, OfflineTrainerConfig


class OfflineModel(CriticModel):
    """Implicit Q-learning.

    ::

        batch --+--> target critics ------------------------> value's loss --+
                +--> value -+-------------------------------------^          |
                |           +--> of the next observation --> critics' loss --+--> total
                |           +--> advantage --> weight --+                    |
                +--> policy --> log-prob of the action --+-> policy's loss --+
    """

    trains = (BoundedGaussianPolicy, SoftCategoricalPolicy)
    metrics: ClassVar[tuple[str, ...]] = (
        *("critic_loss", "value_loss", "policy_loss", "advantage", "weight", "value"),
    )

    def __init__(self, policy: PolicyConfig, offline: OfflineLossConfig) -> None:
        super().__init__(policy, offline)
        self._offline = offline
        self.value = self.new_value(policy)

    def new_value(self, policy: PolicyConfig) -> Critics | None:
        """Return the network of the value of a state, if there is one."""
        head, size = self.policy.new_head()
        norm = self._offline.critic_layer_norm
        return Critics(head, (size, *policy.hidden_sizes, 1), 1, layer_norm=norm)

    def forward(self, batch: SacBatch) -> SacLosses:
        """Return the losses of a batch, with gradients for all but the targets."""
        offline = self._offline
        seen = self.policy.features(batch.observation)
        with torch.no_grad():
            following = self.policy.features(batch.next_observation)
            target = batch.reward + batch.discount * self.state_value(following, batch.next_noise)
        values = self.values_of(self.critic, seen, batch.action)
        of_critics = critic_loss(values, target, batch.weight)
        of_value, advantage = self._advantage(seen, batch)
        weight = advantage_weight(advantage, offline.inverse_temperature, offline.largest_weight)
        # The policy's loss does not train the encoder.
        of_policy = -(weight * self.policy.log_prob(seen.detach(), batch.action)).mean()
        with torch.no_grad():
            error = (values - target).abs().mean(0).float()
            value = values.mean(0).float()
            numbers = {
                "critic_loss": of_critics,
                "value_loss": of_value,
                "policy_loss": of_policy,
                "advantage": advantage.mean(),
                "weight": weight.mean(),
                "value": values.mean(),
            }
            stacked = torch.stack([numbers[name].detach().float() for name in self.metrics])
        total = of_critics + of_value + of_policy
        # A sum and no view: FSDP2 loses its hooks on outputs that are views.
        return SacLosses(total.sum(), error, value, stacked)

    def state_value(self, seen: Tensor, noise: Tensor) -> Tensor:
        """Return the values of states, ``[N]``."""
        if self.value is None:
            raise TypeError("there is no value of a state")
        values: Tensor = self.value(seen, None)
        return values.sum((0, -1))

    def _advantage(self, seen: Tensor, batch: SacBatch) -> tuple[Tensor, Tensor]:
        """The value's loss, and without gradients how much better than their states the actions of
        the batch are, ``[N]``."""
        with torch.no_grad():
            taken = self.values_of(self.target, seen, batch.action).amin(0)
        value = self.state_value(seen, batch.noise)
        loss = expectile_loss(value, taken, self._offline.expectile)
        return loss, taken - value.detach()


class AdvantageWeightedModel(OfflineModel):
    """AWAC: values are those of the policy's own actions, and no network says them.

    Of choices they are an expectation; else those of one action that is drawn.
    """

    metrics = tuple(name for name in OfflineModel.metrics if name != "value_loss")

    def new_value(self, policy: PolicyConfig) -> None:
        return None

    def state_value(self, seen: Tensor, noise: Tensor) -> Tensor:
        return self._of_policy(self.target, seen, noise)

    def _advantage(self, seen: Tensor, batch: SacBatch) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            taken = self.values_of(self.critic, seen, batch.action).amin(0)
            value = self._of_policy(self.critic, seen, batch.noise)
        return torch.zeros_like(taken).mean(), taken - value

    def _of_policy(self, critics: Critics, seen: Tensor, noise: Tensor) -> Tensor:
        if self.discrete:
            probs = self.policy.log_probs(seen).exp()
            expected: Tensor = (probs * critics(seen, None).amin(0)).sum(-1)
            return expected
        least: Tensor = critics(seen, self.policy.draw(seen, noise)).amin(0)
        return least


MODELS = {"iql": OfflineModel, "awac": AdvantageWeightedModel}


class OfflineTrainer(CriticTrainer[OfflineLossConfig]):
    """Learning from data alone: see `CriticTrainer`."""

    def __init__(
        self, config: OfflineTrainerConfig, policy: PolicyConfig, world_size: int = 1, rank: int = 0
    ) -> None:
        super().__init__(config, config.offline, policy, world_size, rank)

    def make_model(self, policy: PolicyConfig) -> OfflineModel:
        return MODELS[self.losses.algorithm](policy, self.losses)
