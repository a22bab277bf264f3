"""Trainers whose numbers do not depend on how many ranks there are."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import msgspec
import numpy as np

from rlinf_async.algorithms.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.base import OptimizerConfig, SchedulerConfig
from rlinf_async.backends.fsdp.config import EmbodiedTrainerConfig, FSDPConfig, PPOConfig
from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from rlinf_async.backends.fsdp.language.config import LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.trainer import CriticTrainer, PolicyTrainer
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.reshard import reserved
from rlinf_async.messages.embodied import Floats, Trajectory
from tests.backends.language.kit import micro_batches, samples, trainer_config

RING = (1, 2, 4, 3, 1)
"""how many ranks train, one after the other"""
EACH = 4
"""optimizer steps on each of them: 20 in all"""
LIMIT = 60.0
"""seconds; a busy machine is slow"""
BUCKET = 1 << 13
TRAJECTORIES, STEPS, ENVS, OBSERVATION, ACTION = 12, 6, 2, 5, 2
EPOCHS = 2

Numbers = list[float]


def small_shards_too() -> None:
    """Let this process treat small shards as large ones: each in its place of the whole tensor.

    What they leave is gone at once, as if the system were always short of memory.
    """
    reserved.MAPPED_BYTES = 1
    reserved.MARK_FREE = mmap.MADV_DONTNEED


def language_config() -> LanguageTrainerConfig:
    return trainer_config(
        loss=LanguageLossConfig(kl_coefficient=0.05, entropy_coefficient=0.01),
        advantage=LanguageAdvantageConfig(name="reinforce++"),
        fsdp={
            "optimizer": OptimizerConfig(lr=1e-3, eps=1e-8, max_grad_norm=0.5, weight_decay=0.01),
            "scheduler": SchedulerConfig(kind="cosine", warmup_steps=3, total_steps=25),
        },
        reference=True,
    )


def language_trainer(world_size: int, rank: int) -> PolicyTrainer:
    return PolicyTrainer(language_config(), world_size, rank)


def language_step(trainer: PolicyTrainer, step: int) -> Numbers:
    """Loss, gradient norm and learning rate of one optimizer step, on new samples."""
    ranks, rank = trainer.manager.world_size, trainer.manager.rank
    batch = [one for one in samples(12, seed=step) if one.group % ranks == rank]
    reference = trainer.log_probs(batch, reference=True)
    for one, log_prob in zip(batch, reference, strict=True):
        one.ref_log_prob, one.advantage = log_prob, None
    ready = trainer.normalize_advantages(trainer.compute_advantages(batch))
    found = trainer.training_step(micro_batches(ready, len(batch) // 2))
    trainer.end_iteration()
    return [found["loss"], found["grad_norm"], found["lr"]]


def critic_config() -> LanguageTrainerConfig:
    advantage = LanguageAdvantageConfig(name="gae")
    return msgspec.structs.replace(language_config(), advantage=advantage, reference=False)


def critic_trainer(world_size: int, rank: int) -> CriticTrainer:
    return CriticTrainer(critic_config(), world_size, rank)


def critic_step(trainer: CriticTrainer, step: int) -> Numbers:
    """Loss, gradient norm and learning rate of one optimizer step, on new samples and their values
    by the critic."""
    ranks, rank = trainer.manager.world_size, trainer.manager.rank
    batch = [one for one in samples(12, seed=step) if one.group % ranks == rank]
    for one, value in zip(batch, trainer.values(batch), strict=True):
        one.value = value
    found = trainer.training_step(micro_batches(trainer.compute_advantages(batch), len(batch) // 2))
    trainer.end_iteration()
    return [found["loss"], found["grad_norm"], found["lr"]]


def embodied_config(world_size: int, warmup: int = 0) -> EmbodiedTrainerConfig:
    """Whole-batch updates: the shuffle, which is each rank's own, then changes nothing.

    ``warmup``: optimizer steps of the critic alone; only its parameters have moments then.
    """
    policy = PolicyConfig(observation_size=OBSERVATION, action_size=ACTION, hidden_sizes=(7,))
    return EmbodiedTrainerConfig(
        fsdp=FSDPConfig(
            policy=policy, optimizer=OptimizerConfig(lr=1e-3), critic_warmup_steps=warmup
        ),
        ppo=PPOConfig(
            epochs=EPOCHS,
            minibatch_size=STEPS * ENVS * TRAJECTORIES // world_size,
            normalize_advantage="batch",
        ),
    )


def embodied_trainer(world_size: int, rank: int, warmup: int = 0) -> EmbodiedTrainer:
    return EmbodiedTrainer(embodied_config(world_size, warmup), world_size, rank)


def embodied_step(trainer: EmbodiedTrainer, iteration: int) -> Numbers:
    """Losses (this rank's) and gradient norm of one iteration: `EPOCHS` optimizer steps."""
    ranks, rank = trainer.manager.world_size, trainer.manager.rank
    mine = [trajectory(iteration, stage) for stage in range(rank, TRAJECTORIES, ranks)]
    found = trainer.train(mine)
    return [found["policy_loss"], found["value_loss"], found["grad_norm"]]


def trajectory(iteration: int, stage: int) -> Trajectory:
    """Random, as a policy near the standard normal would have acted; few episodes end in it."""
    random = np.random.default_rng([iteration, stage])

    def draw(*shape: int) -> Floats:
        return random.standard_normal(shape).astype(np.float32)

    action = draw(STEPS, ENVS, ACTION)
    log_prob = (-0.5 * action**2 - 0.5 * np.log(2 * np.pi)).sum(-1).astype(np.float32)
    return Trajectory(
        iteration=iteration,
        env_rank=0,
        stage=stage,
        observation=draw(STEPS, ENVS, OBSERVATION),
        action=action,
        log_prob=log_prob,
        value=draw(STEPS + 1, ENVS),
        reward=draw(STEPS, ENVS),
        terminated=random.random((STEPS, ENVS)) < 0.1,
        truncated=np.zeros((STEPS, ENVS), np.bool_),
        final_value=np.zeros((STEPS, ENVS), np.float32),
        version=np.full(STEPS, iteration, np.int64),
    )


def mean_over_ranks(rows: Sequence[Numbers]) -> Numbers:
    """The numbers of equally large parts, of the whole."""
    return [float(one) for one in np.mean(np.array(rows, np.float64), axis=0)]
