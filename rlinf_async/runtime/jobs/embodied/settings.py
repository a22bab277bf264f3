"""The configuration of the ``embodied_ppo`` job, and what the jobs in environments share of it:
settings, sizes, devices, seeds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
import numpy as np

from rlinf_async.backends.fsdp.config import EmbodiedTrainerConfig
from rlinf_async.backends.policies.config import MLPS, PolicyConfig, mlp_misfit, policy_for
from rlinf_async.config import ConfigError
from rlinf_async.config.counts import MOST_WORKERS, check_bounds
from rlinf_async.messages.described import Spaces
from rlinf_async.messages.spaces import EnvSpec
from rlinf_async.observe.samples import SamplesConfig
from rlinf_async.observe.sinks.config import ObserveConfig, check_sinks
from rlinf_async.runtime.apart import apart as run_apart
from rlinf_async.runtime.jobs.config import HostConfig
from rlinf_async.runtime.jobs.embodied.curriculum import (
    CurriculumConfig,
    at_last,
    check_curriculum,
)
from rlinf_async.runtime.jobs.hooks import HooksConfig, check_hooks
from rlinf_async.runtime.jobs.placement import (
    SETTING,
    PlacementPlan,
    Preset,
    Role,
    RolePlacement,
    make_plan,
)
from rlinf_async.runtime.jobs.targets import KeepBestConfig, StopAtConfig
from rlinf_async.runtime.recording import RecordingConfig
from rlinf_async.workers.base import Device, WorkerDied
from rlinf_async.workers.env import EnvError, describe_env, describe_spaces
from rlinf_async.workers.env.config import MOST_FAILURES, EnvConfig
from rlinf_async.workers.env.goals import Goals, describe_goals
from rlinf_async.workers.env.trial import Stepped, try_env
from rlinf_async.workers.intervention import InterventionConfig
from rlinf_async.workers.rollout.policy import RolloutConfig

TUNABLES = "GLIBC_TUNABLES"
"""variable with settings of the C library; other libraries do not read it"""

ALWAYS_MAY_DIFFER = (
    "name",
    "model.path",
    "training.total_steps",
    "training.keep_checkpoints",
    "training.return_window",
    "training.stop_at",
    "training.keep_best",
    "hooks",
    "observe",
    "samples",
    "env.make_seconds",
    "env.reset_seconds",
    "env.step_seconds",
    "env.max_memory_mb",
    "env.max_failures",
    "env.control.safety",
    "rollout.max_batch",
    "rollout.torch_threads",
    "actor.bucket_bytes",
    "evaluation",
    "recording",
    "cluster",
)
"""settings and sections that a resumed run of any of these jobs may change"""


class LengthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Length of the training, and sizes of its steps."""

    total_steps: int
    """environment steps, over all environments; rounded up to whole iterations"""
    steps_per_iteration: int
    """steps of each environment in one iteration, after which the weights are published"""
    max_staleness: int = 0
    """versions that the acting weights may be behind the trained ones, and iterations that are
    collected while the actors train; 0: they take turns"""
    checkpoint_every: int = 10
    """iterations between two checkpoints; one is always written at the end"""
    keep_checkpoints: int = 2
    """newest checkpoints that are kept"""
    return_window: int = 100
    """episodes over which the return and the success rate are averaged while training"""
    stop_at: StopAtConfig = StopAtConfig()
    keep_best: KeepBestConfig = KeepBestConfig()

    def __post_init__(self) -> None:
        positive = ("total_steps", "steps_per_iteration", "keep_checkpoints", "return_window")
        check_bounds(self, *positive, least=1)
        check_bounds(self, "max_staleness", "checkpoint_every", least=0)


class EmbodiedEvaluationConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The evaluation at the end, with the deterministic policy."""

    env: EnvConfig | None = None
    """environment of the evaluations, such as reality for a policy that is trained in a model of
    it; None: the one that it is trained in. With another one both are played, and it is judged"""
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


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The weights that a run begins with: those of another run, or of an exported policy."""

    path: str = ""
    """folder of a run, of a checkpoint of one, or of a policy that ``export`` wrote; empty: new
    weights"""
    checkpoint: str = ""
    """checkpoint of that run: its name, or the number of its version, or ``best``; empty: the
    newest"""
    partial: bool = False
    """whether tensors that do not fit begin anew, and are named; else they are refused"""

    def __post_init__(self) -> None:
        for setting in ("checkpoint", "partial"):
            if getattr(self, setting) and not self.path:
                raise ConfigError(
                    f"{getattr(self, setting)!r} was given, but no path of what the run is to "
                    "begin with: set model.path, or leave it out",
                    path=(setting,),
                )


class EmbodiedPlacement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices of each role: a text such as ``"0-3"``, or a table with more."""

    preset: Preset = "auto"
    """placement of roles that are left out; ``hybrid``: env and rollout workers share, actors have
    theirs"""
    actor: str | RolePlacement = ""
    rollout: str | RolePlacement = ""
    env: str | RolePlacement = ""
    """devices of env workers; none when left out, unless the preset is ``hybrid``"""


class EmbodiedClusterConfig(HostConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers of workers of each kind, and where they run."""

    placement: Preset | EmbodiedPlacement = "auto"
    env_workers: int = 1
    rollout_workers: int | Literal["auto"] = "auto"
    """number of rollout workers; 0: each env worker runs the policy itself, for environments of
    short steps; ``auto``: 0 or 1, whichever is faster as measured at the start"""
    actors: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_roles(self.placement)
        check_bounds(self, "env_workers", "actors", least=1, most=MOST_WORKERS)
        if self.rollout_workers != "auto":
            check_bounds(self, "rollout_workers", least=0, most=MOST_WORKERS)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every worker's process."""
        # A simulator goes through megabytes in each step. In small pages, which lie anywhere, some
        # processes have theirs displace one another in the caches, and are slower for life.
        large = {} if TUNABLES in os.environ else {TUNABLES: "glibc.malloc.hugetlb=1"}
        return super().environment | large

    @property
    def rollout_count(self) -> int:
        """Rollout workers; where it is left to the run and nobody has chosen yet, 1."""
        return 1 if self.rollout_workers == "auto" else self.rollout_workers


def plan_of(counts: EmbodiedClusterConfig, devices: Sequence[Device]) -> PlacementPlan:
    """The devices of every worker. Raises: as `EnvironmentSettings.plan`."""
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


class EnvironmentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that every job in environments has, and the sizes that follow from them."""

    MOVED: ClassVar[Mapping[str, str]] = {"training.metrics": "observe.sinks"}

    job: str
    name: str
    """name of the run, in reports and in the default run folder"""
    seed: int = 0
    """seed of everything; those of the sections are added to it"""
    model: ModelConfig = ModelConfig()
    env: EnvConfig
    training: LengthConfig
    curriculum: CurriculumConfig = CurriculumConfig()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EmbodiedEvaluationConfig = EmbodiedEvaluationConfig()
    recording: RecordingConfig = RecordingConfig()
    hooks: HooksConfig = HooksConfig()
    observe: ObserveConfig = ObserveConfig()
    samples: SamplesConfig = SamplesConfig()
    cluster: EmbodiedClusterConfig = EmbodiedClusterConfig()

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"{self.seed} is below 0: seeds count from 0", path=("seed",))

    @property
    def acting_policy(self) -> PolicyConfig:
        """The policy that acts in the environments, with their spaces once they are known."""
        raise NotImplementedError(f"{type(self).__name__} does not say which policy acts")

    @property
    def env_at_last(self) -> EnvConfig:
        """The environments of the last level of the curriculum, where there is one."""
        return at_last(self.env, self.curriculum)

    @property
    def asked(self) -> InterventionConfig:
        """The person who is asked at each step; by default nobody."""
        return InterventionConfig()

    @property
    def unjudged(self) -> str:
        """Why a person cannot end episodes, as a sentence; empty: they can."""
        if not self.env.many_in_a_call:
            return ""
        return f"env.simulator = {self.env.simulator!r} ends episodes by itself, and nobody else"

    def plan(self, devices: Sequence[Device]) -> PlacementPlan:
        """The devices of every worker.

        Raises:
            ConfigError: a setting of the placement is wrong.
            MissingDevice: there are too few devices.
        """
        return plan_of(self.cluster, devices)

    @property
    def judging_env(self) -> EnvConfig:
        """The environment whose episodes the evaluation judges."""
        return self.evaluation.env or self.env

    @property
    def trajectories(self) -> int:
        """Trajectories of one iteration: one for each stage of each env worker."""
        return self.cluster.env_workers * self.env.stages

    @property
    def trajectory_ranks(self) -> int:
        """Ranks that share the trajectories of an iteration: those of the actor."""
        return self.cluster.actors

    @property
    def iteration_steps(self) -> int:
        """Environment steps of one iteration, over all environments."""
        return self.cluster.env_workers * self.env.envs * self.training.steps_per_iteration

    @property
    def iterations(self) -> int:
        """Iterations of the whole run."""
        return -(-self.training.total_steps // self.iteration_steps)


T = TypeVar("T")
Settings = TypeVar("Settings", bound=EnvironmentSettings)


def check_host(config: EnvironmentSettings, devices: Sequence[Device] | None, device: str) -> None:
    """Raise `UsageError` where this host, or one with ``devices``, cannot place the workers.

    ``device`` is what the actor's own section says: only scripts may set it.
    """
    if device != "cpu":
        raise ConfigError(
            f"{device!r} is set, but a job takes the actors' devices from "
            "cluster.placement.actor: leave it out",
            path=("actor", "fsdp", "device"),
        )
    _check_limits(config.env, config.cluster)
    config.plan(config.cluster.devices() if devices is None else devices)
    config.cluster.check_interpreters(config.cluster.placement)
    check_sinks(config.observe)
    check_hooks(config.hooks)
    check_curriculum(config.env, config.curriculum)


def _check_limits(env: EnvConfig, cluster: EmbodiedClusterConfig) -> None:
    """Raise `ConfigError` for limits of environments that nobody could keep."""
    if env.max_memory_mb and not (cluster.processes or env.simulator == "pool"):
        raise ConfigError(
            "with cluster.backend = 'local' the environments are in the process of the command, "
            "whose end would be that of the run: set it to 'process', or env.simulator to 'pool', "
            "or leave max_memory_mb out",
            path=("env", "max_memory_mb"),
        )
    if env.max_memory_mb and not Path("/proc/self/statm").exists():
        raise ConfigError(
            "this system does not say how much memory a process has (/proc/PID/statm): leave it "
            "out",
            path=("env", "max_memory_mb"),
        )
    restarts = cluster.processes and cluster.max_restarts
    if env.max_failures != MOST_FAILURES and not restarts:
        reason = "max_restarts = 0" if cluster.processes else "backend = 'local'"
        raise ConfigError(
            f"with cluster.{reason} no env worker is started again, and the first failure ends the "
            "run: leave max_failures out",
            path=("env", "max_failures"),
        )


def check_processes(cluster: EmbodiedClusterConfig) -> None:
    """Raise `ConfigError` for several actors in one process."""
    if cluster.backend == "local" and cluster.actors > 1:
        raise ConfigError(
            "several actors need a process each: use backend = 'process', or actors = 1",
            path=("cluster", "backend"),
        )


def described(config: EnvironmentSettings) -> EnvSpec:
    """Ask a run's environment for its spaces, in a process of its own unless the run is to be in
    one process; it takes no step, and no reset.

    Raises:
        ConfigError: it cannot be had, or its spaces are not supported.
    """
    env, apart = config.env, config.cluster.processes
    with _located(env):
        if apart:
            found: EnvSpec = in_own_process(
                describe_env, env, returns=EnvSpec, **env_process(config)
            )
        else:
            found = _in_thread(describe_env, env)
    if not found.action_size:
        raise ConfigError(f"{env.name} takes actions without any number or choice", path=("env",))
    del _described[:-1]
    _described.append((env, found))
    return found


def spaces_of(config: EnvironmentSettings) -> Spaces:
    """Return both spaces of a run's environment, asked as `described` asks it.

    Raises:
        ConfigError: it cannot be had, or its spaces are not supported.
    """
    return _asked(config, describe_spaces, Spaces)


def goals_of(config: EnvironmentSettings) -> Goals:
    """Return where a run's environment shows goals, asked as `described` asks it.

    Raises:
        ConfigError: it cannot be had, or it is no goal environment.
    """
    return _asked(config, describe_goals, Goals)


def _asked(config: EnvironmentSettings, function: Callable[[EnvConfig], T], returns: type[T]) -> T:
    with _located(config.env):
        if not config.cluster.processes:
            return _in_thread(function, config.env)
        found: T = in_own_process(function, config.env, returns=returns, **env_process(config))
        return found


def described_for_run(config: EnvironmentSettings) -> EnvSpec:
    """Return what `described` does, for a run that begins now: nothing is asked again that was just
    checked."""
    checked = [spec for one, spec in _described if one is config.env]
    _described.clear()
    return checked[0] if checked else described(config)


_described: list[tuple[EnvConfig, EnvSpec]] = []
"""the environments that were asked last, for the run that follows: its own, and that of the run
with whose weights it begins"""


def check_judging_env(config: EnvironmentSettings, spec: EnvSpec) -> None:
    """Refuse another environment for evaluations that a policy for ``spec`` cannot act in.

    Raises:
        ConfigError: it cannot be had, or shows or takes something else; or a setting of it differs
            that has to be the same, or would have no effect.
    """
    env, played = config.env, config.evaluation.env
    if played is None:
        return
    path = ("evaluation", "env")
    for name in ("actions", "action_chunk", "control"):
        if getattr(played, name) != getattr(env, name):
            raise ConfigError(
                f"{msgspec.to_builtins(getattr(played, name))}, but the policy is trained with "
                f"env.{name} = {msgspec.to_builtins(getattr(env, name))}: it has to be the same",
                path=(*path, name),
            )
    plain = EnvConfig(id="any")
    for name in ("seed", "group_size", "parallel", "ready", "probe", "max_failures"):
        if getattr(played, name) != getattr(plain, name):
            raise ConfigError(
                f"{getattr(played, name)!r} has no effect on evaluations: leave it out",
                path=(*path, name),
            )
    try:
        found = described(msgspec.structs.replace(config, env=played))
    except ConfigError as error:
        raise ConfigError(error.problem, path=("evaluation", *error.path)) from error
    for what, there, wanted in (
        ("shows", found.observation, spec.observation),
        ("takes", found.action, spec.action),
        ("takes actions within", found.bounds, spec.bounds),
    ):
        if there != wanted:
            raise ConfigError(
                f"{played.name} {what} {_said(there)}, but {env.name}, in which the policy is "
                f"trained, {what} {_said(wanted)}: they have to be the same",
                path=path,
            )


def _said(part: object) -> str:
    return str(list(part)) if isinstance(part, tuple) else str(part)


def tried(config: EnvironmentSettings, measure: float) -> Stepped | None:
    """Reset a run's environment and take a step where ``env.probe`` asks for it, then measure its
    steps for ``measure`` seconds; None where they are not measured.

    Raises:
        ConfigError: what it returned does not fit its spaces; or its process has ended, or hung.
    """
    env = config.env
    if not env.probe:
        return None
    with _located(env):
        if not config.cluster.processes:
            _in_thread(describe_env, env, probe=True)
            return None
        found: Stepped | None = in_own_process(
            try_env, env, measure, returns=Stepped | None, **env_process(config)
        )
        return found


def _in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function in a thread, as workers do: what works in the main thread alone fails."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args, **kwargs).result()


def in_own_process(
    function: Callable[..., Any], env: EnvConfig, *args: Any, returns: Any, **process: Any
) -> Any:
    """Call a function of an environment in a process of its own, and be quiet of what that prints;
    ``process``: as `env_process` says it, by default a process like this one.

    Raises:
        EnvError: its process has ended, or hung; or as the function.
    """
    try:
        return run_apart(
            *(function, env, *args),
            returns=returns,
            name="Env",
            raises=(EnvError,),
            quiet=True,
            **process,
        )
    except WorkerDied as death:
        died = EnvError("\n".join([ended_in(env, death), *getattr(death, "__notes__", ())]))
        raise died from death


def env_process(config: EnvironmentSettings) -> dict[str, Any]:
    """Return how a process is started as those of env workers are, for `apart`: with their Python
    and their environment variables."""
    placement = config.cluster.placement
    env = "" if isinstance(placement, str) else placement.env
    role = RolePlacement() if isinstance(env, str) else env
    return {"python": role.python, "env_vars": {**config.cluster.environment, **role.env_vars}}


def ended_in(env: EnvConfig, death: WorkerDied) -> str:
    """Return how the process of an environment has ended, by its name."""
    said = death.failure.message
    return said if env.name in said else f"env {env.name}: {said}"


@contextmanager
def _located(env: EnvConfig) -> Iterator[None]:
    """Raise the errors of an environment as those of its settings."""
    try:
        yield
    except ConfigError as error:
        if error.path[:1] == ("env",):
            raise
        raise ConfigError(error.problem, path=("env", *error.path)) from error
    except EnvError as error:
        setting = "entry_point" if env.entry_point else "id"
        raise ConfigError(str(error), path=("env", setting)) from error


def reseeded(config: Settings, version: int) -> Settings:
    """The configuration for a start at this version: other seeds than at any other version.

    With the same seeds a resumed run would repeat the episodes, and the noise, of its first
    iterations. At version 0 nothing changes; evaluations keep their episodes.
    """
    if version == 0:
        return config

    def mixed(seed: int) -> int:
        return int(np.random.SeedSequence((seed, version)).generate_state(1)[0])

    replace = msgspec.structs.replace
    env, rollout = config.env, config.rollout
    return replace(
        config,
        env=replace(env, seed=mixed(env.seed)),
        rollout=replace(rollout, seed=mixed(rollout.seed)),
    )


MAY_DIFFER = (*ALWAYS_MAY_DIFFER, "training.checkpoint_every")
"""settings and sections that a resumed run may change"""

LEVELS = ("token", "action", "chunk")
"""levels of log-probs and advantages, from fine to coarse"""


class EmbodiedTrainingConfig(LengthConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Length of the training, and sizes of its steps."""

    rollout_epochs: int = 1
    """times ``steps_per_iteration`` that an iteration collects, each as further trajectories"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "rollout_epochs", least=1)


class DemonstrationsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Demonstrations that a run records for itself, into its run folder, and clones."""

    policy: str = ""
    """scripted policy: ``"module:function"`` or ``"file.py:function"``; nothing is recorded when
    left out"""
    episodes: int = 100
    seed: int = 0
    """seed of the episodes, added to the run's"""

    def __post_init__(self) -> None:
        check_bounds(self, "episodes", least=1)
        check_bounds(self, "seed", least=0)


class EmbodiedConfig(EnvironmentSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PPO on a Gymnasium environment."""

    job: str = "embodied_ppo"
    name: str = "embodied"
    training: EmbodiedTrainingConfig
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
    chunk = config.env.steps_per_answer
    if config.training.steps_per_iteration % chunk:
        what = (
            f"answers, which are {chunk} steps apart (env.control.every)"
            if config.env.control.hz
            else f"chunks of env.action_chunk = {chunk} actions"
        )
        raise ConfigError(
            f"{config.training.steps_per_iteration} steps are no whole {what}: take a multiple of "
            f"{chunk}",
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
    for setting, chosen in ((("advantage", "level"), level), (("ppo", "log_prob_level"), ratio)):
        if env.control.hz and chosen != "chunk":
            raise ConfigError(
                f"{chosen!r}, but in real time (env.control.hz) the actions of an answer overlap "
                "with those of the one before: which were executed is not known; set 'chunk'",
                path=("actor", *setting),
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


def check_rescaled(env: EnvConfig, spec: EnvSpec) -> None:
    """Refuse ``actions = "rescale"`` where no action has numbers."""
    if env.actions == "rescale" and not spec.action.numbers:
        raise ConfigError(
            f"'rescale' stretches numbers to the bounds of a Box, but {env.name} takes "
            f"{spec.action}: leave it out",
            path=("env", "actions"),
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
    check_rescaled(config.env, spec)
    fsdp = replace(config.actor.fsdp, policy=policy)
    advantage = replace(config.actor.advantage, group_size=config.env.group_size)
    return replace(
        config,
        env=replace(config.env_at_last, seed=config.env.seed + config.seed),
        rollout=replace(config.rollout, seed=config.rollout.seed + config.seed),
        demonstrations=replace(
            config.demonstrations, seed=config.demonstrations.seed + config.seed
        ),
        actor=replace(
            config.actor, fsdp=fsdp, advantage=advantage, seed=config.actor.seed + config.seed
        ),
    )
