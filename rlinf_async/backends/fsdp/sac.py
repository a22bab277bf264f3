"""Soft actor-critic: the arithmetic of one rank of `SacActor`.

::

    share of a batch --> losses of `SacModel` --> one backward, one step of all ranks together
                                                                |
                                                    targets follow the critics

All three losses are of the same weights, and change them in one step: the policy's gradient is that
of the critics before the step, where other implementations update the critics first.

Any number of ranks takes the same steps as one, as far as rounding goes: every rank draws the noise
of the whole batch (of actions, and of the shifts of images), and takes the part of its share.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from rlinf_async.algorithms.sac import polyak_update
from rlinf_async.backends.base import GradientStep, TrainingDiverged
from rlinf_async.backends.building import building
from rlinf_async.backends.fsdp import ranks
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.sac_model import METRICS, SacBatch, SacLosses, SacModel
from rlinf_async.backends.fsdp.sharding import local_shard
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.encoder import random_shift
from rlinf_async.backends.policies.tensors import Observed, to_tensors
from rlinf_async.backends.sac_config import SacTrainerConfig
from rlinf_async.messages.replay import ReplayBatch
from rlinf_async.messages.spaces import Seen
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights import pack

SKIPPED_IN_A_ROW = 100
"""gradient steps whose gradients were not finite, after which the training has diverged"""


class SacTrainer:
    """An `OffPolicyTrainer` over `FSDPModelManager`, for one rank of an actor group.

    torch.distributed must be up when ``world_size`` is above 1. All methods are collective.

    Args:
        config: losses and optimizer.
        policy: the policy and its spaces.
        world_size: ranks, which share each batch equally.
        rank: of this one.

    Raises `ValueError` for a policy that does not fit the spaces, and for FSDP1 over several ranks.
    """

    def __init__(
        self, config: SacTrainerConfig, policy: PolicyConfig, world_size: int = 1, rank: int = 0
    ) -> None:
        if world_size > 1 and config.fsdp.strategy != "fsdp2":
            raise ValueError(
                f"strategy is {config.fsdp.strategy!r}: its ranks hold other parts of the critics "
                "than of their targets, which follow them; over several ranks take 'fsdp2'"
            )
        self.config = config
        model = partial(SacModel, policy, config.sac)
        self.manager = FSDPModelManager(config.fsdp, world_size, rank, model)
        with building(config.seed):
            self.manager.setup_model_and_optimizer()
        self._generator = torch.Generator(self.manager.device).manual_seed(config.seed)
        self._action_size = policy.action_size
        self._images = [image.name for image in policy.sees.of_kind("image")]
        self._version = 0
        self._skipped_in_a_row = 0
        self._critics, self._targets = _local(self._model.critic), _local(self._model.target)

    @property
    def version(self) -> int:
        """How many iterations were trained."""
        return self._version

    @property
    def _model(self) -> SacModel:
        model = self.manager.model
        if not isinstance(model, SacModel):
            raise TypeError(f"soft actor-critic trains a SacModel, not {type(model)}")
        return model

    def step(self, batch: ReplayBatch) -> GradientStep:
        """Take one gradient step. Raises `TrainingDiverged` where many in a row were skipped."""
        manager = self.manager
        self._model.policy.uniform.fill_(False)
        share = self._share(batch)
        with manager.autocast():
            losses: SacLosses = manager.model(share)
        manager.backward(losses.total)
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
        gathered = torch.stack(ranks.all_gather(manager, torch.cat([losses.metrics, losses.error])))
        metrics, error = gathered[:, : len(METRICS)], gathered[:, len(METRICS) :]
        numbers = dict(zip(METRICS, metrics.mean(0).tolist(), strict=True))
        return GradientStep({**numbers, "grad_norm": norm}, error.flatten().cpu().numpy())

    def _share(self, batch: ReplayBatch) -> SacBatch:
        """This rank's share on its device."""

        def tensor(column: Observed) -> Tensor:
            if not isinstance(column, Tensor):
                raise TypeError("a column of numbers was expected")
            return column

        device = self.manager.device
        columns = (batch.action, batch.reward, batch.discount, batch.weight)
        action, reward, discount, weight = (tensor(to_tensors(one, device)) for one in columns)
        next_noise, noise = self._noise(len(reward)), self._noise(len(reward))
        return SacBatch(
            self._observed(batch.observation),
            self._observed(batch.next_observation),
            action,
            reward,
            discount,
            weight,
            noise,
            next_noise,
        )

    def _observed(self, seen: Seen) -> Observed:
        """Observations on the device; of images, each shifted by as much as it happens."""
        manager, limit = self.manager, self.config.sac.image_shift
        observed = to_tensors(seen, manager.device)
        if isinstance(observed, Tensor) or not limit:
            return observed
        for name in self._images:
            offsets = torch.randint(
                -limit,
                limit + 1,
                (manager.world_size, len(seen), 2),
                generator=self._generator,
                device=manager.device,
            )
            observed[name] = random_shift(observed[name], offsets[manager.rank])
        return observed

    def _noise(self, share: int) -> Tensor:
        """Standard normal noise ``[share, A]``: this rank's part of that of all."""
        manager = self.manager
        whole = torch.randn(
            (manager.world_size, share, self._action_size),
            generator=self._generator,
            device=manager.device,
        )
        return whole[manager.rank]

    def end_iteration(self) -> None:
        """Count the version up."""
        self._version += 1

    def publish(self) -> WeightUpdate:
        """Return the policy's weights of the present version; empty buckets but on rank 0."""
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
        """Continue where the checkpoint was written, under any world size."""
        extra = self.manager.load_checkpoint(path)[0]
        self._version = extra["version"]
        self._generator.set_state(extra["noise"].clone())


def _local(module: nn.Module) -> list[Tensor]:
    """This rank's shards of the parameters: the memory itself."""
    return [local_shard(one).detach() for one in module.parameters()]
