"""Trajectories in, a better policy out: the arithmetic of `EmbodiedFSDPActor`.

::

    trajectories -> rewards scaled -> advantages -> one flat batch -> PPO -> normalisers updated
                    (older policy acted: log-probs, weights) --^          -> version + 1 -> weights

Invariant: everything of one iteration (observations, rewards) is normalised by the statistics of
the version that is being trained, and the statistics change together with the version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from rlinf_async.algorithms.advantages import advantage_functions
from rlinf_async.algorithms.losses import loss_functions
from rlinf_async.backends.base import FirstWeights, RescaleReport
from rlinf_async.backends.building import building
from rlinf_async.backends.checkpoint import collectives
from rlinf_async.backends.fsdp.config import CloningConfig, EmbodiedTrainerConfig, PPOConfig
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.off_policy import corrected
from rlinf_async.backends.fsdp.ppo import FlatBatch, ppo_epochs
from rlinf_async.backends.fsdp.rescale import check_strategy, rescale
from rlinf_async.backends.fsdp.rollout_batch import (
    behind,
    flat_batch,
    merged_moments,
    of_sequences,
    rows,
    side_by_side,
    valid_steps,
)
from rlinf_async.backends.fsdp.state import unwrapped
from rlinf_async.backends.policies.base import Evaluation, Policy, to_tensors
from rlinf_async.backends.policies.moments import batch_moments, discounted_returns
from rlinf_async.backends.policies.recurrent import RecurrentPolicy
from rlinf_async.data.demonstrations import Chunks, chunks_of, read_episodes
from rlinf_async.messages.embodied import Floats, Trajectory, stage_key
from rlinf_async.messages.spaces import ObservationSpec, numbers_of
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.parallel import Strategy, check_batch
from rlinf_async.weights.pack import pack


def clone(
    manager: FSDPModelManager,
    policy: Policy[Any],
    config: CloningConfig,
    *,
    seen: ObservationSpec,
    chunk: int,
    seed: int,
    normalize: bool,
    on_step: Callable[[int], None] | None = None,
) -> Mapping[str, float]:
    """Train ``config.steps`` optimizer steps on the demonstrations; return metrics. Collective.

    Behaviour cloning: the loss is the mean negative log-prob of the demonstrated actions, or of
    their tokens; of a flow policy, that of flow matching. All ranks draw the same samples and take
    a share each, so that the numbers do not depend on their number.

    The optimizer begins anew afterwards: its moments are of another loss. Raises `DataError` for
    demonstrations that cannot be read.
    """
    samples = chunks_of(list(read_episodes(Path(config.demonstrations), seen)), chunk)
    if normalize and (numbers := numbers_of(samples.observation)) is not None:
        states = torch.from_numpy(np.ascontiguousarray(numbers)).to(manager.device)
        policy.observation_normalizer.merge(batch_moments(states))
    _set_rate(manager, config.lr)
    generator = np.random.default_rng(seed)
    losses: list[float] = []
    for step in range(config.steps):
        losses.append(_step(manager, policy, samples, generator, config))
        if on_step is not None:
            on_step(step + 1)
    manager.restart_optimizer()
    last = losses[-max(1, len(losses) // 10) :]
    return {
        "cloning_steps": float(config.steps),
        "cloning_samples": float(len(samples.action)),
        "cloning_loss": float(np.mean(last)),
    }


def _step(
    manager: FSDPModelManager,
    policy: Policy[Any],
    samples: Chunks,
    generator: np.random.Generator,
    config: CloningConfig,
) -> float:
    """One optimizer step; returns this rank's share of the loss."""
    drawn = generator.integers(len(samples.action), size=config.batch_size)
    share = np.array_split(np.arange(len(drawn)), manager.world_size)[manager.rank]
    mine = drawn[share]
    action = torch.from_numpy(samples.action[drawn])
    action = action if action.ndim == 1 else action.flatten(1)
    shown = [one[share].to(manager.device) for one in policy.demonstrated(action, generator)]
    count = float(samples.there[drawn].sum()) / manager.world_size
    observation = policy.normalized(to_tensors(samples.observation[mine], manager.device))
    there = torch.from_numpy(samples.there[mine]).to(manager.device)
    with manager.autocast(), manager.before_micro_batch(manager.model, is_last_micro_batch=True):
        evaluation: Evaluation = manager.model(observation, *shown)
        loss = _loss(evaluation.log_prob.float(), there, count)
        manager.backward(loss)
    manager.optimizer_step()
    total = loss.detach().clone()
    collectives.all_reduce(manager, total)
    return float(total) / manager.world_size


def _loss(log_prob: Tensor, there: Tensor, count: float) -> Tensor:
    """Minus the log-prob of an action, mean over ``count`` actions of this rank."""
    if log_prob.ndim == 1:  # of a whole chunk: one that an episode's end cut is left out
        return -torch.where(there.all(1), log_prob, 0.0).sum() * there.shape[1] / count
    action = log_prob.view(len(log_prob), there.shape[1], -1).mean(-1)
    return -torch.where(there, action, 0.0).sum() / count


def _set_rate(manager: FSDPModelManager, rate: float) -> None:
    for group in manager.optimizer.param_groups:
        group["lr"] = rate
        group["frozen"] = False


class _RunningReturns(msgspec.Struct, frozen=True):
    """Discounted returns of the episodes that continue in a stage's next trajectory."""

    incarnation: int
    """incarnation of the env worker; another one begins new episodes"""
    returns: list[float]
    """``[E]``, float32"""
    version: int
    """trained with the trajectory before; of several of a stage, the newest is valid"""


class _RescaleExtra(msgspec.Struct, frozen=True):
    """State beside the manager's that moves when the number of ranks changes."""

    version: int
    running_returns: dict[str, _RunningReturns]
    """returns of the continuing episodes, by stage"""


class EmbodiedTrainer:
    """A `TrainerBackend`: PPO over `FSDPModelManager`, for one rank of an actor group.

    torch.distributed must be up when ``world_size`` is above 1. All methods are collective.
    """

    def __init__(self, config: EmbodiedTrainerConfig, world_size: int, rank: int) -> None:
        self.config = config
        self.manager = FSDPModelManager(config.fsdp, world_size, rank)
        # Other workers may live in this process: their random numbers stay as they were.
        with building(config.seed):
            self.manager.setup_model_and_optimizer()
        self._generator = torch.Generator().manual_seed(config.seed + rank)
        self._running_returns: dict[str, _RunningReturns] = {}
        """returns of the continuing episodes, by stage"""
        self.version = 0
        """number of iterations that were trained"""
        self.ppo = self._share(world_size)
        """how a batch is used at the present number of ranks: the minibatches of all ranks together
        are as large as those of all launched ones"""
        advantage_functions.named(config.advantage.name)  # an unknown one is told now
        loss_functions.named(config.ppo.loss.name)

    @property
    def _policy(self) -> Policy[Any]:
        return _policy_of(self.manager.model)

    def train(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Train on one iteration, update the normalisers, count the version up; return metrics.

        The order in which trajectories arrived does not matter. Raises `ValueError` when there are
        none or their lengths differ, and `TrainingDiverged` when nothing could be learnt.
        """
        ordered = sorted(trajectories, key=lambda one: (one.env_rank, one.stage, one.epoch))
        if len({len(one.reward) for one in ordered}) != 1:
            raise ValueError(
                f"trajectories of {[len(one.reward) for one in ordered]} steps were given; one "
                "iteration needs at least one, and all of the same length"
            )
        batch = flat_batch(self.manager, self._policy, ordered, self.config)
        sizes = self.ppo
        if isinstance(self._policy, RecurrentPolicy):
            sizes = of_sequences(sizes, len(ordered[0].reward))
        of_older: Mapping[str, float] = {}
        if sizes.loss.proximal == "step" and behind(self.manager, ordered, self.version):
            batch, of_older = corrected(self.manager, batch, sizes)
        metrics = ppo_epochs(self.manager, batch, sizes, self._generator)
        metrics |= {**of_older, **_value_fit(batch)}
        self._update_normalizers(ordered)
        self.version += 1
        return metrics

    def clone(self) -> Mapping[str, float]:
        """Learn from the configured demonstrations, before the first iteration; return metrics."""
        config = self.config
        policy = config.fsdp.policy
        return clone(
            self.manager,
            self._policy,
            config.cloning,
            seen=policy.sees,
            chunk=self._policy.chunk,
            seed=config.seed,
            normalize=config.normalize_observation and self._policy.normalizes,
        )

    def _share(self, ranks: int) -> PPOConfig:
        return rank_share_of(self.config.ppo, self.manager.groups.launched, ranks)

    @property
    def strategy(self) -> Strategy:
        """The strategy that is in force."""
        return self.manager.strategy

    def check_strategy(self, strategy: Strategy) -> None:
        """Raise `StrategyError` for sizes other than dp, or where dp ranks cannot share a
        minibatch."""
        check_strategy(strategy, self.manager.groups.launched)
        self._share(strategy.dp)

    def skip_iteration(self) -> None:
        """Count an iteration that the active ranks train, on an idle one."""
        self.version += 1

    def rescale(
        self, strategy: Strategy, *, timeout: float, bucket_bytes: int, objection: str = ""
    ) -> RescaleReport:
        """Let the first ``strategy.dp`` ranks train from now on; see `fsdp.rescale`.

        Raises `StrategyError` for a size that does not divide the minibatches.
        """
        self.check_strategy(strategy)
        extra = _RescaleExtra(self.version, self._running_returns)
        report = rescale(
            self.manager,
            strategy,
            timeout=timeout,
            bucket_bytes=bucket_bytes,
            extra=msgspec.msgpack.encode(extra),
            objection=objection,
        )
        extras = [msgspec.msgpack.decode(one, type=_RescaleExtra) for one in report.extras]
        self.version = extras[0].version
        self.ppo = self._share(strategy.dp)
        oldest_first = sorted(
            (running.version, key, running)
            for one in extras
            for key, running in one.running_returns.items()
        )
        self._running_returns = (
            {key: running for _, key, running in oldest_first} if report.active else {}
        )
        return report

    def publish(self) -> WeightUpdate:
        """Return weights and normalisers of the present version; empty buckets but on rank 0."""
        state = self.manager.get_model_state_dict()
        return pack(state, self.version, self.config.bucket_bytes)

    def save_checkpoint(self, path: Path) -> None:
        """Write a checkpoint folder, atomically."""
        self.manager.save_checkpoint(path, self._extra())

    def begin_checkpoint(self, path: Path) -> Future[Path]:
        """Start writing what `save_checkpoint` writes, and return."""
        return self.manager.begin_checkpoint(path, self._extra())

    def _extra(self) -> dict[str, object]:
        return {"version": self.version, "shuffle": self._generator.get_state()}

    def take_weights(self, first: FirstWeights) -> None:
        """Begin with weights of another run; optimizer and version stay as they are."""
        self.manager.take_weights(first)

    def load_checkpoint(self, path: Path) -> None:
        """Continue where the checkpoint was written, under any world size.

        Environments begin new episodes then, so running returns begin at 0 too.
        """
        extras = self.manager.load_checkpoint(path)
        self.version = extras[0]["version"]
        self._generator.set_state(extras[self.manager.rank % len(extras)]["shuffle"].clone())
        self._running_returns.clear()

    def _update_normalizers(self, ordered: Sequence[Trajectory]) -> None:
        if self.config.normalize_observation and self._policy.normalizes:
            numbers = numbers_of(side_by_side(ordered, "observation"))
            if numbers is not None:
                seen, valid = rows(numbers), valid_steps(ordered)
                seen = seen if valid is None else seen[valid.reshape(-1)]
                moments = merged_moments(
                    self.manager, batch_moments(torch.from_numpy(seen).to(self.manager.device))
                )
                self._policy.observation_normalizer.merge(moments)
        if self.config.normalize_reward:
            returns = np.concatenate([self._discounted_returns(one).ravel() for one in ordered])
            scales = batch_moments(torch.from_numpy(returns).to(self.manager.device))
            moments = merged_moments(self.manager, scales)
            self._policy.return_normalizer.merge(moments)

    def _discounted_returns(self, one: Trajectory) -> Floats:
        key = stage_key(one.env_rank, one.stage)
        before = np.zeros(one.reward.shape[1], np.float32)
        found = self._running_returns.get(key)
        if found is not None and found.incarnation == one.incarnation:
            before = np.array(found.returns, np.float32)
        ended = one.terminated | one.truncated
        gamma = self.config.advantage.gamma
        returns, running = discounted_returns(one.reward, ended, before, gamma)
        self._running_returns[key] = _RunningReturns(
            one.incarnation, running.tolist(), self.version
        )
        return returns if one.valid is None else returns[one.valid]


def rank_share_of(config: PPOConfig, configured: int, ranks: int) -> PPOConfig:
    """Return how each of ``ranks`` ranks uses its batch, given the sizes for ``configured`` ranks.

    Raises `StrategyError` where they do not divide, with the nearest numbers that do.
    """
    whole = config.minibatch_size * configured
    # A rank's minibatch is whole micro-batches.
    check_batch(whole // (config.micro_batch_size or 1), ranks)
    return msgspec.structs.replace(config, minibatch_size=whole // ranks)


def _policy_of(model: nn.Module) -> Policy[Any]:
    policy = unwrapped(model)
    if not isinstance(policy, Policy):
        raise ValueError(
            f"an embodied trainer needs a registered policy, not a {type(policy).__name__}: "
            "leave `pretrained` out of its configuration"
        )
    return policy


def _value_fit(batch: FlatBatch) -> dict[str, float]:
    returns, value = batch.returns, batch.value
    if batch.value_weight is not None:
        counted = batch.value_weight > 0
        returns, value = returns[counted], value[counted]
    variance = returns.var(correction=0)
    residual = (returns - value).var(correction=0)
    return {"explained_variance": float(1.0 - residual / (variance + 1e-8))}
