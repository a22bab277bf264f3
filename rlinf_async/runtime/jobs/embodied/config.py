"""The configuration of the ``embodied_ppo`` job: who does what, how often, for how long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from rlinf_async.backends.fsdp.config import EmbodiedTrainerConfig
from rlinf_async.backends.policies.config import (
    MLPS,
    VISION_LANGUAGE,
    PolicyConfig,
    mlp_for,
    mlp_misfit,
    policy_for,
)
from rlinf_async.config import ConfigError
from rlinf_async.messages.spaces import EnvSpec
from rlinf_async.runtime.jobs.config import HostConfig, check_counts
from rlinf_async.runtime.jobs.placement import SETTING, Plan, Preset, Role, RolePlacement, make_plan
from rlinf_async.workers.context import Device
from rlinf_async.workers.env.config import EnvConfig
from rlinf_async.workers.rollout.config import RolloutConfig

MAY_DIFFER = (
    "name",
    "training.total_steps",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.return_window",
    "training.metrics",
    "rollout.max_batch",
    "rollout.torch_threads",
    "actor.bucket_bytes",
    "evaluation",
    "cluster",
)
"""settings and sections that a resumed run may change"""


class TrainingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Length of the training, and sizes of its steps."""

    total_steps: int
    """environment steps, over all environments; rounded up to whole iterations"""
    steps_per_iteration: int
    """steps of each environment in one iteration"""
    max_staleness: int = 0
    """versions that the acting weights may be behind the trained ones; 0 is on-policy"""
    checkpoint_every: int = 10
    """iterations between two checkpoints; one is always written at the end"""
    keep_checkpoints: int = 2
    """newest checkpoints that are kept"""
    return_window: int = 100
    """episodes over which the return and the success rate are averaged while training"""
    metrics: tuple[str, ...] = ("tensorboard",)
    """sinks beside ``metrics.csv``; others by the entry point group ``rlinf_async.metrics``"""

    def __post_init__(self) -> None:
        positive = ("total_steps", "steps_per_iteration", "keep_checkpoints", "return_window")
        check_counts(self, least=1, names=positive)
        check_counts(self, least=0, names=("max_staleness", "checkpoint_every"))


class EvaluationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The evaluation at the end, with the deterministic policy."""

    episodes: int = 100
    seed: int = 10_000
    target_success_rate: float | None = None
    """the run succeeds if it is reached; None: there is no target"""
    target_return: float | None = None
    before: bool = False
    """whether the policy is evaluated before the first iteration too: untrained, or cloned"""
    video_episodes: int = 3
    """episodes in ``video.mp4``; 0: no video"""
    video_seconds: float = 120.0
    """seconds for rendering them, after which the video ends with the frames that it has"""

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.video_episodes < 0 or self.seed < 0:
            raise ValueError(
                f"episodes is {self.episodes}, video_episodes is {self.video_episodes}, seed is "
                f"{self.seed}; they must be at least 1, 0 and 0"
            )
        if not self.video_seconds > 0.0:
            raise ValueError(f"video_seconds is {self.video_seconds}; it must be above 0")
        rate, wanted = self.target_success_rate, self.target_return
        if rate is not None and not 0.0 <= rate <= 1.0:
            raise ValueError(
                f"target_success_rate is {rate}; it must lie between 0 and 1, or be left out"
            )
        if wanted is not None and not math.isfinite(wanted):
            raise ValueError(
                f"target_return is {wanted}; it must be a finite number, or be left out"
            )


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


class EmbodiedPlacement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which devices each role has: a text such as ``"0-3"``, or a table with more."""

    preset: Preset = "auto"
    """for roles that are left out; ``hybrid``: env and rollout workers share, actors have theirs"""
    actor: str | RolePlacement = ""
    rollout: str | RolePlacement = ""
    env: str | RolePlacement = ""
    """none when left out, unless the preset is ``hybrid``"""


class ClusterConfig(HostConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers there are of each kind, and where they run."""

    placement: Preset | EmbodiedPlacement = "auto"
    env_workers: int = 1
    rollout_workers: int | Literal["auto"] = "auto"
    """0: each env worker runs the policy itself, for environments of short steps; ``auto``: 0 or 1,
    whichever is faster as measured at the start"""
    actors: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_roles(self.placement)
        check_counts(self, least=1, names=("env_workers", "actors"))
        if self.rollout_workers != "auto":
            check_counts(self, least=0, names=("rollout_workers",))

    @property
    def rollout_count(self) -> int:
        """Rollout workers; where it is left to the run and nobody has chosen yet, 1."""
        return 1 if self.rollout_workers == "auto" else self.rollout_workers


def plan_of(counts: ClusterConfig, devices: Sequence[Device]) -> Plan:
    """The devices of every worker of a job in environments.

    Raises: as `EmbodiedConfig.plan`.
    """
    asked = counts.placement
    if isinstance(asked, str):
        asked = EmbodiedPlacement(preset=asked)
    hybrid = asked.preset == "hybrid"
    roles = [
        Role(name="actor", count=counts.actors, asked=asked.actor, one_device=True),
        Role(name="rollout", count=counts.rollout_count, asked=asked.rollout),
        Role(name="env", count=counts.env_workers, asked=asked.env, accelerated=hybrid),
    ]
    plan = make_plan(
        roles,
        devices,
        preset=asked.preset,
        hybrid=(("actor",), ("rollout", "env")),
        node_groups=counts.node_groups,
    )
    if counts.rollout_count and plan.devices_per_worker("rollout") > 1:
        raise ConfigError(
            "a policy computes on one device: set devices_per_worker to 1, or to a fraction",
            path=(*SETTING, "rollout"),
        )
    return plan


class EmbodiedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PPO on a Gymnasium environment."""

    job: str = "embodied_ppo"
    name: str = "embodied"
    """name of the run, in reports and in the default run folder"""
    seed: int = 0
    """seed of everything; ``env.seed``, ``rollout.seed`` and ``actor.seed`` are added to it"""
    env: EnvConfig
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    training: TrainingConfig
    rollout: RolloutConfig = RolloutConfig()
    actor: EmbodiedTrainerConfig = EmbodiedTrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    cluster: ClusterConfig = ClusterConfig()

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"{self.seed} is below 0: seeds count from 0", path=("seed",))

    def plan(self, devices: Sequence[Device]) -> Plan:
        """The devices of every worker.

        Raises:
            ConfigError: a setting of the placement is wrong.
            MissingDevice: there are too few devices.
        """
        return plan_of(self.cluster, devices)

    @property
    def acting_policy(self) -> PolicyConfig:
        """The policy that acts in the environments."""
        return self.actor.fsdp.policy

    @property
    def trajectories(self) -> int:
        """Trajectories of one iteration: one for each stage of each env worker."""
        return self.cluster.env_workers * self.env.stages

    @property
    def iteration_steps(self) -> int:
        """Environment steps of one iteration, over all environments."""
        return self.cluster.env_workers * self.env.envs * self.training.steps_per_iteration

    @property
    def iterations(self) -> int:
        """Iterations of the whole run."""
        return -(-self.training.total_steps // self.iteration_steps)


def check_sizes(config: EmbodiedConfig) -> None:
    """Refuse sizes that do not divide, or do not fit: shares of the actors, minibatches.

    Raises:
        ConfigError: with the sizes, and the nearest valid ones.
    """
    cluster = config.cluster
    if config.trajectories % cluster.actors:
        raise ConfigError(
            f"{cluster.env_workers} env workers x {config.env.stages} stages = "
            f"{config.trajectories} trajectories cannot be divided among {cluster.actors} actors: "
            f"use a divisor of {config.trajectories}",
            path=("cluster", "actors"),
        )
    if cluster.backend == "local" and cluster.actors > 1:
        raise ConfigError(
            "several actors need a process each: use backend = 'process', or actors = 1",
            path=("cluster", "backend"),
        )
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
            f"{config.training.steps_per_iteration} steps / {cluster.actors} actors"
            f"{f' / {chunk} in a chunk' if chunk > 1 else ''} = {share}",
            path=("actor", "ppo", "minibatch_size"),
        )


def _check_levels(config: EmbodiedConfig) -> None:
    """Refuse levels and groups that do not go together."""
    actor, env = config.actor, config.env
    if actor.advantage.level == "action" and actor.ppo.log_prob_level == "chunk":
        raise ConfigError(
            "'chunk' is one ratio for all actions of a chunk, but actor.advantage.level = 'action' "
            "gives each its own advantage: set 'action' or 'token'",
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
    if name in MLPS:
        name = mlp_for(spec.action)
    for size in ("observation_size", "action_size"):
        given, found = getattr(policy, size), getattr(spec, size)
        if given not in (0, found):
            raise ConfigError(
                f"{given} was given, but {config.env.name} has {found}: leave it out",
                path=("actor", "fsdp", "policy", size),
            )
    replace = msgspec.structs.replace
    policy = replace(
        policy,
        name=name,
        observation_size=spec.observation_size,
        action_size=spec.action_size,
        observation=spec.observation,
        action=spec.action,
        action_chunk=config.env.action_chunk,
    )
    if name in MLPS and (problem := mlp_misfit(policy)):
        raise ConfigError(problem, path=("actor", "fsdp", "policy", "name"))
    if name == VISION_LANGUAGE and config.env.actions != "rescale":
        raise ConfigError(
            f"{config.env.actions!r}, but the action tokens of policy {name!r} stand for numbers "
            "in [-1, 1], which the environment stretches to its bounds: set actions = 'rescale'",
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


def reseeded(config: EmbodiedConfig, version: int) -> EmbodiedConfig:
    """The configuration for a start at this version: other seeds than at any other version.

    With the same seeds a resumed run would repeat the episodes, and the noise, of its first
    iterations. At version 0 nothing changes; evaluations keep their episodes.
    """
    env, rollout = reseeded_sections(config.env, config.rollout, version)
    return msgspec.structs.replace(config, env=env, rollout=rollout)


def reseeded_sections(
    env: EnvConfig, rollout: RolloutConfig, version: int
) -> tuple[EnvConfig, RolloutConfig]:
    """The sections with seeds for a start at this version; see `reseeded`."""
    if version == 0:
        return env, rollout

    def mixed(seed: int) -> int:
        return int(np.random.SeedSequence((seed, version)).generate_state(1)[0])

    replace = msgspec.structs.replace
    return replace(env, seed=mixed(env.seed)), replace(rollout, seed=mixed(rollout.seed))
