"""The configuration of the ``embodied_ppo`` job: who does what, how often, for how long."""

from __future__ import annotations

import math

import msgspec

from rlinf_async.backends.fsdp.config import EmbodiedTrainerConfig
from rlinf_async.backends.policies.config import (
    MLPS,
    PolicyConfig,
    mlp_misfit,
    policy_for,
)
from rlinf_async.config import ConfigError
from rlinf_async.config.counts import check_counts
from rlinf_async.messages.spaces import EnvSpec
from rlinf_async.runtime.jobs.embodied.settings import MAY_DIFFER as ALWAYS_MAY_DIFFER
from rlinf_async.runtime.jobs.embodied.settings import (
    EnvironmentSettings,
    LengthConfig,
    check_processes,
)

MAY_DIFFER = (*ALWAYS_MAY_DIFFER, "training.checkpoint_every")
"""settings and sections that a resumed run may change"""

LEVELS = ("token", "action", "chunk")
"""of log-probs and advantages, from fine to coarse"""


class TrainingConfig(LengthConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Length of the training, and sizes of its steps."""

    rollout_epochs: int = 1
    """times ``steps_per_iteration`` that an iteration collects, each as further trajectories"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, least=1, names=("rollout_epochs",))


class DemonstrationsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Demonstrations that a run records for itself, into its run folder, and clones."""

    policy: str = ""
    """scripted policy: ``"module:function"`` or ``"file.py:function"``; nothing is recorded when
    left out"""
    episodes: int = 100
    seed: int = 0
    """of the episodes, added to the run's"""

    def __post_init__(self) -> None:
        check_counts(self, least=1, names=("episodes",))
        check_counts(self, least=0, names=("seed",))


class EmbodiedConfig(EnvironmentSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PPO on a Gymnasium environment."""

    job: str = "embodied_ppo"
    name: str = "embodied"
    training: TrainingConfig
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    actor: EmbodiedTrainerConfig = EmbodiedTrainerConfig()

    @property
    def acting_policy(self) -> PolicyConfig:
        """The policy that acts in the environments."""
        return self.actor.fsdp.policy

    @property
    def trajectories(self) -> int:
        """Trajectories of one iteration: for each stage of each env worker one in each epoch."""
        return super().trajectories * self.training.rollout_epochs

    @property
    def iteration_steps(self) -> int:
        """Environment steps of one iteration, over all environments and epochs."""
        return super().iteration_steps * self.training.rollout_epochs


def check_sizes(config: EmbodiedConfig) -> None:
    """Refuse sizes that do not divide, or do not fit: shares of the actors, minibatches.

    Raises:
        ConfigError: with the sizes, and the nearest valid ones.
    """
    cluster, epochs = config.cluster, config.training.rollout_epochs
    stages = config.trajectories // epochs
    if stages % cluster.actors:
        raise ConfigError(
            f"{cluster.env_workers} env workers x {config.env.stages} stages = "
            f"{stages} trajectories cannot be divided among {cluster.actors} actors: "
            f"use a divisor of {stages}",
            path=("cluster", "actors"),
        )
    check_processes(cluster)
    chunk = config.env.action_chunk
    if config.training.steps_per_iteration % chunk:
        raise ConfigError(
            f"{config.training.steps_per_iteration} steps are no whole chunks of "
            f"env.action_chunk = {chunk} actions: take a multiple of {chunk}",
            path=("training", "steps_per_iteration"),
        )
    _check_levels(config)
    share = config.iteration_steps // chunk // cluster.actors
    minibatch = config.actor.ppo.minibatch_size
    if minibatch > share:
        raise ConfigError(
            f"{minibatch} samples are more than an actor gets in one iteration: "
            f"{cluster.env_workers} env workers x {config.env.envs} envs x "
            f"{config.training.steps_per_iteration} steps"
            f"{f' x {epochs} rollout epochs' if epochs > 1 else ''} / {cluster.actors} actors"
            f"{f' / {chunk} in a chunk' if chunk > 1 else ''} = {share}",
            path=("actor", "ppo", "minibatch_size"),
        )


def _check_levels(config: EmbodiedConfig) -> None:
    """Refuse levels and groups that do not go together."""
    actor, env = config.actor, config.env
    level, ratio = actor.advantage.level, actor.ppo.log_prob_level
    finer = LEVELS[: LEVELS.index(level) + 1]
    if ratio not in finer:
        raise ConfigError(
            f"{ratio!r} is one ratio for all {level}s of {'an' if ratio == 'action' else 'a'} "
            f"{ratio}, but actor.advantage.level = {level!r} gives each its own advantage: set "
            f"{' or '.join(repr(one) for one in reversed(finer))}",
            path=("actor", "ppo", "log_prob_level"),
        )
    if actor.advantage.group_size not in (1, env.group_size):
        raise ConfigError(
            f"{actor.advantage.group_size} was given, but env.group_size is {env.group_size}: "
            "leave it out",
            path=("actor", "advantage", "group_size"),
        )
    if (actor.advantage.name == "grpo") != (env.group_size > 1):
        raise ConfigError(
            f"{actor.advantage.name!r} and env.group_size = {env.group_size}: 'grpo' compares the "
            "episodes of groups, which need a group_size of at least 2; others have none",
            path=("actor", "advantage", "name"),
        )


def _unnormalized(config: EmbodiedConfig) -> PolicyConfig:
    """The policy, without a bound of observations where they are not normalised."""
    policy, default = config.actor.fsdp.policy, PolicyConfig().observation_clip
    if config.actor.normalize_observation:
        return policy
    if policy.observation_clip not in (default, math.inf):
        raise ConfigError(
            f"{policy.observation_clip} is the bound of normalised observations, and "
            "actor.normalize_observation = false: leave it out",
            path=("actor", "fsdp", "policy", "observation_clip"),
        )
    return msgspec.structs.replace(policy, observation_clip=math.inf)


def fitted(config: EmbodiedConfig, spec: EnvSpec) -> EmbodiedConfig:
    """The configuration with the environment's sizes filled in, and one seed spread over all.

    Raises:
        ConfigError: sizes that were given differ from the environment's.
    """
    policy = config.actor.fsdp.policy
    name = policy.name
    if name == "auto":
        seen = msgspec.structs.replace(policy, observation=spec.observation, action=spec.action)
        name = policy_for(seen)
    for size, found in (
        ("observation_size", spec.observation_size),
        ("action_size", spec.action_size),
        ("action_chunk", config.env.action_chunk),
        ("token_values", config.actor.advantage.level == "token"),
    ):
        given = getattr(policy, size)
        if given not in (0, found):
            raise ConfigError(
                f"{given} was given, but {config.env.name} has {found}: leave it out",
                path=("actor", "fsdp", "policy", size),
            )
    replace = msgspec.structs.replace
    policy = replace(
        _unnormalized(config),
        name=name,
        observation_size=spec.observation_size,
        action_size=spec.action_size,
        observation=spec.observation,
        action=spec.action,
        action_chunk=config.env.action_chunk,
        token_values=config.actor.advantage.level == "token",
    )
    if name in MLPS and (problem := mlp_misfit(policy, name)):
        raise ConfigError(problem, path=("actor", "fsdp", "policy", "name"))
    if config.env.actions == "rescale" and not spec.action.numbers:
        raise ConfigError(
            f"'rescale' stretches numbers to the bounds of a Box, but {config.env.name} takes "
            f"{spec.action}: leave it out",
            path=("env", "actions"),
        )
    fsdp = replace(config.actor.fsdp, policy=policy)
    advantage = replace(config.actor.advantage, group_size=config.env.group_size)
    return replace(
        config,
        env=replace(config.env, seed=config.env.seed + config.seed),
        rollout=replace(config.rollout, seed=config.rollout.seed + config.seed),
        demonstrations=replace(
            config.demonstrations, seed=config.demonstrations.seed + config.seed
        ),
        actor=replace(
            config.actor, fsdp=fsdp, advantage=advantage, seed=config.actor.seed + config.seed
        ),
    )
