"""The configuration of the ``embodied_sac`` job, and the channels that only it has.

::

    env worker --Trajectory, leased--> replay worker
    actor --BatchRequest, leased--> replay worker --ReplayBatch, by key of the DP rank--> actor

The others are those of `EmbodiedChannels`.
"""

from __future__ import annotations

from math import floor, log
from typing import Any, TypeVar

import msgspec

from rlinf_async.backends.policies.config import PolicyConfig, cnn_misfit
from rlinf_async.backends.sac_config import CriticTrainerConfig, SacTrainerConfig
from rlinf_async.channels import Channel
from rlinf_async.config import ConfigError
from rlinf_async.config.counts import check_bounds
from rlinf_async.messages.embodied import BatchRequest, ReplayBatch
from rlinf_async.messages.spaces import EnvSpec
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.checkpoints import max_deliveries
from rlinf_async.runtime.jobs.embodied.collectors import EmbodiedChannels
from rlinf_async.runtime.jobs.embodied.settings import (
    ALWAYS_MAY_DIFFER,
    DemonstrationsConfig,
    EnvironmentSettings,
    LengthConfig,
    check_processes,
    check_rescaled,
)
from rlinf_async.workers.env.config import EnvConfig
from rlinf_async.workers.env.goals import Goals
from rlinf_async.workers.intervention import PAGE, InterventionConfig
from rlinf_async.workers.replay.worker import BatchesConfig, ReplayConfig
from rlinf_async.workers.rollout.policy import RolloutConfig

SectionT = TypeVar(
    "SectionT",
    bound=EnvConfig | RolloutConfig | DemonstrationsConfig | BatchesConfig | CriticTrainerConfig,
)

MAY_DIFFER = (
    *ALWAYS_MAY_DIFFER,
    "residual.path",
    "replay.prefetch",
    "intervention.person",
    "intervention.deadline",
)
"""settings and sections that a resumed run may change"""

MLP, CNN = "mlp_squashed_gaussian", "cnn_squashed_gaussian"
MLP_OF_CHOICES, CNN_OF_CHOICES = "mlp_soft_categorical", "cnn_soft_categorical"
"""policies for one vector, and for images: of numbers, and of choices"""


class SacTrainingConfig(LengthConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Length of the training, and sizes of its steps."""

    max_staleness: int = 1
    learning_starts: int = 100
    """environment steps before the first gradient step, in which actions are uniform"""
    updates_per_step: float = 1.0
    """gradient steps for each environment step after those"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "learning_starts", least=0)
        if not 0.0 < self.updates_per_step <= 1000.0:
            raise ValueError(
                f"updates_per_step is {self.updates_per_step}; it must be above 0 and at most 1000"
            )
        if self.learning_starts >= self.total_steps:
            raise ValueError(
                f"learning_starts is {self.learning_starts}, but the run has total_steps = "
                f"{self.total_steps}: nothing would be learnt"
            )


class ReplaySettings(EnvironmentSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of every job that learns from batches of a replay worker."""

    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    replay: BatchesConfig
    actor: CriticTrainerConfig

    @property
    def store(self) -> ReplayConfig:
        """What the replay worker is to keep, and to draw."""
        raise NotImplementedError(f"{type(self).__name__} does not say what is replayed")

    @property
    def trajectory_ranks(self) -> int:
        """Ranks that share the trajectories: all go to the replay worker."""
        return 1

    @property
    def spare(self) -> int:
        """Slots of a store on disk beyond its capacity."""
        return 0

    def updates(self, iteration: int) -> int:
        """Gradient steps of an iteration."""
        raise NotImplementedError(f"{type(self).__name__} does not say how much is learnt")


class ResidualConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen policy, whose actions the trained one corrects."""

    path: str = ""
    """folder of a run, of a checkpoint of one, or of a policy that ``export`` wrote; empty: the
    policy acts by itself"""
    checkpoint: str = ""
    """checkpoint of that run: its name, or the number of its version, or ``best``; empty: the
    newest"""
    scale: float = 0.2
    """largest correction of each number of an action, which lie in [-1, 1]"""

    def __post_init__(self) -> None:
        check_bounds(self, "scale", above=0, most=2)
        for setting, default in (("checkpoint", ""), ("scale", 0.2)):
            if getattr(self, setting) != default and not self.path:
                raise ConfigError(
                    f"{getattr(self, setting)!r} was given, but no path of a policy that is to be "
                    "corrected: set residual.path, or leave it out",
                    path=(setting,),
                )


class SacConfig(ReplaySettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Soft actor-critic on a Gymnasium environment."""

    job: str = "embodied_sac"
    name: str = "embodied-sac"
    training: SacTrainingConfig
    residual: ResidualConfig = ResidualConfig()
    intervention: InterventionConfig = InterventionConfig()
    replay: ReplayConfig = ReplayConfig()
    actor: SacTrainerConfig = SacTrainerConfig()

    @property
    def store(self) -> ReplayConfig:
        """What the replay worker is to keep, and to draw."""
        return self.replay

    @property
    def asked(self) -> InterventionConfig:
        """The person who is asked at each step."""
        return self.intervention

    @property
    def unjudged(self) -> str:
        """Why a person cannot end episodes, as a sentence; empty: they can."""
        if self.replay.hindsight == "none":
            return super().unjudged
        return (
            f"with replay.hindsight = {self.replay.hindsight!r} the goals say what is paid, and no "
            "person"
        )

    @property
    def shows(self) -> bool:
        """Whether batches have demonstrations, as soon as there are some."""
        asked = self.intervention
        recorded = self.replay.demonstrations or self.demonstrations.policy
        return bool(recorded or (asked.person and asked.demonstrates))

    def updates(self, iteration: int) -> int:
        """Gradient steps of an iteration: their sum keeps to ``updates_per_step``."""
        return self._updates_until(iteration + 1) - self._updates_until(iteration)

    @property
    def total_updates(self) -> int:
        """Gradient steps of the whole run."""
        return self._updates_until(self.iterations)

    def _updates_until(self, iteration: int) -> int:
        trained = iteration * self.iteration_steps - self.training.learning_starts
        return floor(max(0, trained) * self.training.updates_per_step)

    @property
    def spare(self) -> int:
        """Slots of a store on disk beyond its capacity, for two spans between checkpoints: one may
        still be written when the next begins."""
        return self.iteration_steps * (2 * self.training.checkpoint_every + 1)


class FittedSac(SacConfig, frozen=True, kw_only=True):
    """A configuration, with the policy that its environment asks for."""

    policy: PolicyConfig
    goals: Goals | None = None
    """where the environment shows goals, with ``replay.hindsight``"""

    @property
    def acting_policy(self) -> PolicyConfig:
        """The policy that acts in the environments, with their spaces."""
        return self.policy


def check_sizes(config: SacConfig) -> None:
    """Refuse sizes that do not fit together, and what soft actor-critic cannot have.

    Raises:
        ConfigError: with the sizes, and what to do.
    """
    steps, n_step = config.training.steps_per_iteration, config.replay.n_step
    if n_step > steps:
        raise ConfigError(
            f"returns of {n_step} steps were asked for, but a trajectory has "
            f"training.steps_per_iteration = {steps} steps: take at most that",
            path=("replay", "n_step"),
        )
    if config.iteration_steps > config.replay.capacity:
        raise ConfigError(
            f"{config.replay.capacity} transitions are less than one iteration collects: "
            f"{config.cluster.env_workers} env workers x {config.env.envs} envs x {steps} steps = "
            f"{config.iteration_steps}",
            path=("replay", "capacity"),
        )
    if not config.total_updates:
        training = config.training
        raise ConfigError(
            f"{training.updates_per_step} gradient steps for each of {training.total_steps} steps "
            f"after the first {training.learning_starts} are none: nothing would be learnt",
            path=("training", "updates_per_step"),
        )
    if config.replay.prioritized and not config.actor.sac.critics:
        raise ConfigError(
            "'prioritized', but with actor.sac.critics = 0 there are no errors of critics to draw "
            "by: take 'uniform'",
            path=("replay", "sampling"),
        )
    if n_step > 1 and not config.actor.sac.critics:
        raise ConfigError(
            f"{n_step}, but with actor.sac.critics = 0 nothing learns from returns: leave it out",
            path=("replay", "n_step"),
        )
    check_ranks(config)
    _check_said(config)
    _check_share(config)
    _check_hindsight(config)
    for setting in ("action_chunk", "group_size"):
        if getattr(config.env, setting) != 1:
            raise ConfigError(
                f"{getattr(config.env, setting)} was given; soft actor-critic learns from single "
                "actions: leave it out",
                path=("env", setting),
            )
    if config.residual.path and config.model.path:
        raise ConfigError(
            f"{config.residual.path!r} is to be corrected by a new policy, and the run would begin "
            f"with the weights of model.path = {config.model.path!r}: leave one of the two out",
            path=("residual", "path"),
        )
    check_warmup(config, "soft actor-critic has training.learning_starts instead")


def check_warmup(config: ReplaySettings, instead: str) -> None:
    """Refuse steps of the critic alone."""
    if config.actor.fsdp.critic_warmup_steps:
        raise ConfigError(
            f"{config.actor.fsdp.critic_warmup_steps} was given; {instead}: leave it out",
            path=("actor", "fsdp", "critic_warmup_steps"),
        )


def _check_said(config: SacConfig) -> None:
    """Refuse a person whose words nobody learns from."""
    asked, path = config.intervention, ("intervention", "acts")
    if asked.acts:
        return
    if not (config.actor.sac.cloning and asked.demonstrates):
        raise ConfigError(
            "false: the person says what they would do, which only a policy learns from that "
            "clones demonstrations: set actor.sac.cloning, and leave demonstrates as it is",
            path=path,
        )
    if asked.person == PAGE:
        raise ConfigError(
            "false, but hands on a page act: leave it out, or name a function", path=path
        )


def _check_share(config: SacConfig) -> None:
    """Refuse a share of demonstrations that there are not, or that is no share of a batch."""
    replay, path = config.replay, ("replay", "demonstrated_share")
    check_one_source(config)
    if not config.shows:
        if replay.demonstrated_share != ReplayConfig().demonstrated_share:
            raise ConfigError(
                f"{replay.demonstrated_share} was given, but there are no demonstrations: name "
                "their folder in replay.demonstrations, a scripted policy in "
                "demonstrations.policy, or a person in intervention.person",
                path=path,
            )
        if config.actor.sac.cloning:
            raise ConfigError(
                f"{config.actor.sac.cloning} was given, but there are no demonstrations to clone: "
                "name their folder in replay.demonstrations, a scripted policy in "
                "demonstrations.policy, or a person in intervention.person",
                path=("actor", "sac", "cloning"),
            )
        return
    if not 0 < replay.demonstrated < replay.batch_size:
        raise ConfigError(
            f"{replay.demonstrated_share} of a batch of {replay.batch_size} are "
            f"{replay.demonstrated} demonstrations; there have to be some, and some of own "
            "experience: take a larger batch, or another share",
            path=path,
        )


def _check_hindsight(config: SacConfig) -> None:
    """Refuse goals in hindsight where nobody could say what they pay, or where none is exchanged.

    Whether the environment has goals is asked in `job`.
    """
    replay, env, path = config.replay, config.env, ("replay", "hindsight")
    if replay.hindsight == "none":
        if replay.hindsight_share != ReplayConfig().hindsight_share:
            raise ConfigError(
                f"{replay.hindsight_share} was given, but no goals are exchanged: set "
                "replay.hindsight = 'future', or leave it out",
                path=("replay", "hindsight_share"),
            )
        return
    if config.curriculum.levels:
        raise ConfigError(
            f"{replay.hindsight!r}, but with curriculum.levels nobody knows under which level's "
            "options another goal would be paid: leave one of the two out",
            path=path,
        )
    if replay.prioritized:
        raise ConfigError(
            f"{replay.hindsight!r}, but with replay.sampling = 'prioritized' a transition would "
            "have the priority of its error under another goal than it is drawn with: leave one of "
            "the two out",
            path=path,
        )
    if env.reward.labels:
        raise ConfigError(
            f"{replay.hindsight!r}, but what a step pays is said by env.reward."
            f"{env.reward.setting}, not by compute_reward, which is asked what another goal would "
            "have paid: leave one of the two out",
            path=path,
        )
    if env.many_in_a_call or env.control.hz:
        where = f"simulator = {env.simulator!r}" if env.many_in_a_call else "control.hz"
        raise ConfigError(
            f"{replay.hindsight!r}, but with env.{where} what a step pays is not what "
            "compute_reward of one environment says: leave one of the two out",
            path=path,
        )
    placement = config.cluster.placement
    of_env = "" if isinstance(placement, str) else placement.env
    if not isinstance(of_env, str) and of_env.python:
        raise ConfigError(
            f"{replay.hindsight!r}, but the environments have a Python of their own "
            "(cluster.placement.env.python), and the replay worker asks one what goals pay: leave "
            "one of the two out",
            path=path,
        )
    own = replay.batch_size - (replay.demonstrated if config.shows else 0)
    if not replay.exchanged(own):
        raise ConfigError(
            f"{replay.hindsight_share} of {own} transitions are none: take a larger batch, "
            "or a larger share",
            path=("replay", "hindsight_share"),
        )


def check_one_source(config: ReplaySettings) -> None:
    """Refuse demonstrations that are given, and others that would be recorded."""
    given, scripted = config.replay.demonstrations, config.demonstrations.policy
    if given and scripted:
        raise ConfigError(
            f"{given!r} are given, and demonstrations.policy = {scripted!r} would record others: "
            "leave one of the two out",
            path=("replay", "demonstrations"),
        )


def check_ranks(config: ReplaySettings) -> None:
    """Refuse several actors that cannot share a batch."""
    actors, size = config.cluster.actors, config.replay.batch_size
    if actors == 1:
        return
    if size % actors:
        raise ConfigError(
            f"{size} transitions cannot be divided among cluster.actors = {actors} ranks: take a "
            f"multiple of {actors}, such as {max(round(size / actors), 1) * actors}",
            path=("replay", "batch_size"),
        )
    check_processes(config.cluster)
    if config.actor.fsdp.strategy != "fsdp2":
        raise ConfigError(
            f"{config.actor.fsdp.strategy!r}: its ranks hold other parts of the critics than of "
            "their targets, which follow them; over several ranks take 'fsdp2'",
            path=("actor", "fsdp", "strategy"),
        )


def _check_images(config: ReplaySettings, section: str, spec: EnvSpec) -> None:
    """Refuse images that a CNN cannot have, that would be shifted out of the picture, or that are
    to be compressed, but are not there."""
    if config.replay.images == "compressed" and not spec.observation.of_kind("image"):
        raise ConfigError(
            f"'compressed', but {config.env.name} shows no images ({spec.observation}): leave it "
            "out",
            path=("replay", "images"),
        )
    if spec.observation.flat:
        return
    if problem := cnn_misfit(PolicyConfig(observation=spec.observation, action=spec.action)):
        raise ConfigError(problem, path=("env",))
    shift = config.actor.losses.image_shift
    for image in spec.observation.of_kind("image"):
        if shift >= min(image.shape[:2]):
            raise ConfigError(
                f"images would be shifted by up to {shift} pixels, but {image.name!r} has "
                f"{image.shape[0]} x {image.shape[1]}: take fewer, or 0",
                path=("actor", section, "image_shift"),
            )


def check_spaces(config: ReplaySettings, spec: EnvSpec, section: str, learner: str) -> None:
    """Refuse spaces of an environment that the policy cannot have; ``section`` of ``actor`` has the
    numbers of the losses, and ``learner`` is what learns, for the user.

    Raises:
        ConfigError: with what to do.
    """
    if not (spec.action.numeric or spec.action.discrete):
        raise ConfigError(
            f"{config.env.name} takes actions that are neither numbers alone nor one choice "
            f"({spec.action}); {learner} takes a Box, or a Dict or Tuple of Boxes alone, or one "
            "Discrete: wrap the environment, or use job = 'embodied_ppo'",
            path=("env",),
        )
    given, scripted = config.replay.demonstrations, config.demonstrations.policy
    if len(spec.action.factors) > 1 and (given or scripted):
        raise ConfigError(
            f"{given or scripted!r}, but demonstrations have actions of one Box or one Discrete, "
            f"and {config.env.name} takes {spec.action}: leave them out, or wrap the environment",
            path=("replay", "demonstrations") if given else ("demonstrations", "policy"),
        )
    if spec.action.numeric and config.env.actions != "rescale":
        raise ConfigError(
            f"{config.env.actions!r}, but the policy's actions lie in [-1, 1], which the "
            "environment stretches to its bounds: set actions = 'rescale'",
            path=("env", "actions"),
        )
    check_rescaled(config.env, spec)
    if spec.observation.of_kind("text"):
        raise ConfigError(
            f"{config.env.name} shows {spec.observation}; the networks of {learner} read no text: "
            "leave it out (gymnasium.wrappers.FilterObservation), or use job = 'embodied_ppo'",
            path=("env",),
        )
    _check_images(config, section, spec)


def with_seed(config: ReplaySettings) -> dict[str, Any]:
    """The settings of a configuration, by name, with one seed spread over all sections."""
    replace = msgspec.structs.replace

    def seeded(section: SectionT) -> SectionT:
        return replace(section, seed=section.seed + config.seed)

    sections = ("env", "rollout", "demonstrations", "replay", "actor")
    return (
        {name: getattr(config, name) for name in config.__struct_fields__}
        | {name: seeded(getattr(config, name)) for name in sections}
        | {"env": seeded(config.env_at_last)}
    )


def policy_of(config: ReplaySettings, spec: EnvSpec, name: str) -> PolicyConfig:
    """The policy of this name, with the environment's spaces."""
    return PolicyConfig(
        name=name,
        observation_size=spec.observation_size,
        action_size=spec.action_size,
        observation=spec.observation,
        action=spec.action,
        hidden_sizes=config.actor.fsdp.policy.hidden_sizes,
        channels=config.actor.fsdp.policy.channels,
        action_chunk=1,
    )


def fitted(config: SacConfig, spec: EnvSpec) -> FittedSac:
    """The configuration with the environment's spaces, and one seed spread over all.

    Raises:
        ConfigError: the policy cannot have the environment's spaces.
    """
    check_spaces(config, spec, "sac", "soft actor-critic")
    _check_entropy(config, spec)
    return FittedSac(**with_seed(config), policy=policy_of(config, spec, _policy_for(spec)))


def _check_entropy(config: SacConfig, spec: EnvSpec) -> None:
    """Refuse a target that the entropy of so many choices never reaches."""
    target = config.actor.sac.target_entropy
    if spec.action.discrete and target is not None and target >= log(spec.action_size):
        raise ConfigError(
            f"{target}, but the entropy of {spec.action_size} choices is below "
            f"{log(spec.action_size):.4f}: its coefficient would grow without end; take less, or "
            "leave it out",
            path=("actor", "sac", "target_entropy"),
        )


def _policy_for(spec: EnvSpec) -> str:
    if spec.observation.flat:
        return MLP_OF_CHOICES if spec.action.discrete else MLP
    return CNN_OF_CHOICES if spec.action.discrete else CNN


class SacChannels(EmbodiedChannels):
    """Every channel of the run.

    There are never more than ``replay.prefetch`` requests under way. After a restart of the replay
    worker one batch may be there twice, and wait for the actor's next iteration; each rank empties
    its key by itself, so a second batch of one holds no other up.
    """

    def __init__(self, cluster: Cluster, config: ReplaySettings) -> None:
        super().__init__(cluster, config)
        ahead = config.replay.prefetch
        self.requests: Channel[BatchRequest] = cluster.channel(
            BatchRequest,
            name="batch requests",
            capacity=ahead,
            max_deliveries=max_deliveries(1, config.cluster.max_restarts),
        )
        self.batches: Channel[ReplayBatch] = cluster.channel(
            ReplayBatch, name="batches", capacity=ahead
        )
