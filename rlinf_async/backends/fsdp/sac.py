"""Soft actor-critic on one rank: the arithmetic of `SacActor`.

::

    batch --+--> target critics --> target --+
            +--> critics ---------------------+--> critics' loss --+
            +--> policy --> critics, frozen -----> policy's loss --+--> one backward, one step
                       +-------------------> entropy coefficient --+        |
                                                                    targets follow the critics

All three losses are of the same weights, and change them in one step: the policy's gradient is that
of the critics before the step, where other implementations update the critics first.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlinf_async.algorithms.sac import (
    critic_loss,
    entropy_coefficient_loss,
    policy_loss,
    polyak_update,
    soft_target,
)
from rlinf_async.backends.base import GradientStep, TrainingDiverged
from rlinf_async.backends.building import building
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.sac_model import SacModel
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.tensors import to_tensors
from rlinf_async.backends.sac_config import SacTrainerConfig
from rlinf_async.messages.replay import ReplayBatch
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights import pack

SKIPPED_IN_A_ROW = 100
"""gradient steps whose gradients were not finite, after which the training has diverged"""


class SacTrainer:
    """An `OffPolicyTrainer` over `FSDPModelManager`, for one rank.

    Args:
        config: losses and optimizer.
        policy: the policy and its spaces.

    Raises `ValueError` for a policy that does not fit the spaces.
    """

    def __init__(self, config: SacTrainerConfig, policy: PolicyConfig) -> None:
        self.config = config
        sac = config.sac
        model = partial(SacModel, policy, sac.initial_entropy_coefficient)
        self.manager = FSDPModelManager(config.fsdp, 1, 0, model)
        with building(config.seed):
            self.manager.setup_model_and_optimizer()
        self._generator = torch.Generator(self.manager.device).manual_seed(config.seed)
        asked = sac.target_entropy
        self._target_entropy = -float(policy.action_size) if asked is None else asked
        self._version = 0
        self._skipped_in_a_row = 0
        critic, target = self._model.critic, self._model.target
        self._critics, self._targets = list(critic.parameters()), list(target.parameters())

    @property
    def version(self) -> int:
        """How many iterations were trained."""
        return self._version

    @property
    def _model(self) -> SacModel:
        model = self.manager.model
        if not isinstance(model, SacModel):
            raise TypeError(f"soft actor-critic on one rank trains a SacModel, not {type(model)}")
        return model

    def step(self, batch: ReplayBatch) -> GradientStep:
        """Take one gradient step. Raises `TrainingDiverged` where many in a row were skipped."""
        model, manager = self._model, self.manager
        model.policy.uniform.fill_(False)
        with manager.autocast():
            loss, error, metrics = self._losses(model, batch)
        manager.backward(loss)
        norm, _ = manager.optimizer_step()
        if math.isfinite(norm):
            self._skipped_in_a_row = 0
            polyak_update(self._targets, self._critics, self.config.sac.tau)
        else:
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row == SKIPPED_IN_A_ROW:
                raise TrainingDiverged(
                    f"{SKIPPED_IN_A_ROW} gradient steps in a row had gradients that are not finite "
                    f"(last norm: {norm}): lower the learning rate, or look for NaN in "
                    "observations and rewards; the last checkpoint is from before"
                )
        names = ("critic_loss", "policy_loss", "entropy", "entropy_coefficient", "value")
        numbers = dict(zip(names, torch.stack(metrics).tolist(), strict=True))
        return GradientStep({**numbers, "grad_norm": norm}, error.cpu().numpy())

    def _losses(self, model: SacModel, batch: ReplayBatch) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The sum of all losses, absolute errors ``[B]``, and metrics."""
        device, sac = self.manager.device, self.config.sac
        columns = (
            batch.observation,
            batch.next_observation,
            batch.action,
            batch.reward,
            batch.discount,
            batch.weight,
        )
        tensors = [to_tensors(column, device) for column in columns]
        seen, following, action, reward, discount, weight = (
            one if isinstance(one, Tensor) else one["state"] for one in tensors
        )
        coefficient = model.log_entropy_coefficient.detach().exp()
        if sac.entropy_coefficient is not None:
            coefficient = coefficient.new_full((1,), sac.entropy_coefficient)
        with torch.no_grad():
            next_action, next_log_prob = model.policy.sample(following, self._generator)
            next_values = model.target(following, next_action)
            target = soft_target(reward, discount, next_values, next_log_prob, coefficient)
        values = model.critic(seen, action)
        of_critics = critic_loss(values, target, weight)
        acted, log_prob = model.policy.sample(seen, self._generator)
        of_policy = policy_loss(log_prob, model.critic.frozen(seen, acted), coefficient)
        total = of_critics + of_policy
        if sac.entropy_coefficient is None:
            total = total + entropy_coefficient_loss(
                model.log_entropy_coefficient, log_prob, self._target_entropy
            )
        with torch.no_grad():
            error = (values - target).abs().mean(0).float()
            metrics = [of_critics, of_policy, -log_prob.mean(), coefficient.mean(), values.mean()]
            metrics = [one.detach().float() for one in metrics]
        return total.sum(), error, metrics

    def end_iteration(self) -> None:
        """Count the version up."""
        self._version += 1

    def publish(self) -> WeightUpdate:
        """Return the policy's weights of the present version."""
        prefix = "policy."
        state = self.manager.get_model_state_dict()
        policy = {
            name.removeprefix(prefix): tensor
            for name, tensor in state.items()
            if name.startswith(prefix)
        }
        return pack(policy, self._version, self.config.bucket_bytes)

    def begin_checkpoint(self, path: Path) -> Future[Path]:
        """Start writing a checkpoint folder, and return."""
        return self.manager.begin_checkpoint(path, self._extra())

    def save_checkpoint(self, path: Path) -> None:
        """Write a checkpoint folder, atomically."""
        self.manager.save_checkpoint(path, self._extra())

    def _extra(self) -> dict[str, object]:
        return {"version": self._version, "noise": self._generator.get_state()}

    def load_checkpoint(self, path: Path) -> None:
        """Continue where the checkpoint was written."""
        extra = self.manager.load_checkpoint(path)[0]
        self._version = extra["version"]
        self._generator.set_state(extra["noise"].clone())
