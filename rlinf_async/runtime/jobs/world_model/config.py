"""The configuration of the ``world_model`` job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from rlinf_async.backends.base import OptimizerConfig, SchedulerConfig
from rlinf_async.backends.fsdp.config import ShardingConfig
from rlinf_async.backends.world_model.config import WorldModelSizes
from rlinf_async.config import ConfigError
from rlinf_async.config.counts import MOST_WORKERS, check_bounds
from rlinf_async.observe.sinks.config import ObserveConfig
from rlinf_async.runtime.jobs.config import HostConfig
from rlinf_async.runtime.jobs.embodied.settings import (
    DemonstrationsConfig,
    EmbodiedClusterConfig,
    EmbodiedConfig,
    EmbodiedTrainingConfig,
)
from rlinf_async.runtime.jobs.placement import PlacementPlan, Role, RolePlacement, make_plan
from rlinf_async.workers.base import Device
from rlinf_async.workers.env.config import EnvConfig

MAY_DIFFER = (
    "name",
    "training.steps",
    "training.measure_every",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "observe",
    "cluster",
)
"""settings and sections that a resumed run may change"""


class RealityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The environment that is modelled; it is asked for its spaces, and played where the run
    records."""

    id: str = ""
    """registered Gymnasium id; with ``entry_point``, a name for reports"""
    entry_point: str = ""
    """as ``env.entry_point`` of the other jobs"""
    kwargs: dict[str, Any] = {}
    """arguments of ``gymnasium.make`` or of the entry point"""

    def __post_init__(self) -> None:
        self.single  # noqa: B018 says what is wrong with it

    @property
    def single(self) -> EnvConfig:
        """One environment."""
        return EnvConfig(
            id=self.id, entry_point=self.entry_point, kwargs=self.kwargs, envs=1, stages=1
        )


class EpisodesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recorded episodes."""

    folders: tuple[str, ...] = ()
    """folders of demonstrations with transitions"""
    held_out: int = 20
    """last episodes of all, which are not learnt from: model and reality are compared in them; 0:
    they are not compared"""

    def __post_init__(self) -> None:
        check_bounds(self, "held_out", least=0)


class WorldModelTrainingConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Length of the training, and sizes of its steps."""

    steps: int
    """optimizer steps, rounded up to whole iterations"""
    steps_per_iteration: int = 50
    """optimizer steps of an iteration, which is a row of the metrics"""
    batch_size: int = 32
    """windows of an optimizer step, over all actors"""
    measure_every: int = 0
    """iterations between two comparisons with held-out episodes; there is always one before the
    first iteration, and one at the end"""
    checkpoint_every: int = 10
    """iterations between two checkpoints; one is always written at the end"""
    keep_checkpoints: int = 2
    """newest checkpoints that are kept"""

    def __post_init__(self) -> None:
        positive = ("steps", "steps_per_iteration", "batch_size", "keep_checkpoints")
        check_bounds(self, *positive, least=1)
        check_bounds(self, "measure_every", "checkpoint_every", least=0)

    @property
    def iterations(self) -> int:
        """Iterations of the whole run."""
        return -(-self.steps // self.steps_per_iteration)


class WorldModelOptimizerConfig(
    OptimizerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """AdamW."""

    lr: float = 1e-3
    max_grad_norm: float | None = 10.0
    """limit of the norm over all parameters"""


class WorldModelActorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the model is sharded and optimised."""

    strategy: Literal["fsdp1", "fsdp2"] = "fsdp2"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the arithmetic; parameters and optimizer stay float32"""
    optimizer: WorldModelOptimizerConfig = WorldModelOptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()

    def __post_init__(self) -> None:
        if self.optimizer.value_lr is not None:
            raise ConfigError(
                f"value_lr is {self.optimizer.value_lr}, but a world model has no values: leave it "
                "out",
                path=("optimizer", "value_lr"),
            )

    def on(self, device: str) -> ShardingConfig:
        """The same, on this device."""
        return ShardingConfig(
            strategy=self.strategy,
            precision=self.precision,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            device=device,
        )


class WorldModelPlacement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices of the actors: a text such as ``"0-3"``, or a table with more."""

    actor: str | RolePlacement = ""


class WorldModelClusterConfig(HostConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Number of actors, and where they run."""

    placement: WorldModelPlacement = WorldModelPlacement()
    actors: int = 1
    """training ranks; more than one needs ``process``"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_roles(self.placement)
        check_bounds(self, "actors", least=1, most=MOST_WORKERS)


class WorldModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of an environment, learnt from recorded episodes."""

    job: str = "world_model"
    name: str = "world"
    """name of the run, in reports and in the default run folder"""
    seed: int = 0
    """seed of everything; that of the demonstrations is added to it"""
    env: RealityConfig
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    data: EpisodesConfig = EpisodesConfig()
    model: WorldModelSizes = WorldModelSizes()
    training: WorldModelTrainingConfig
    actor: WorldModelActorConfig = WorldModelActorConfig()
    observe: ObserveConfig = ObserveConfig()
    cluster: WorldModelClusterConfig = WorldModelClusterConfig()

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"{self.seed} is below 0: seeds count from 0", path=("seed",))
        scripted, held_out = self.demonstrations.policy, self.data.held_out
        if bool(scripted) == bool(self.data.folders):
            raise ConfigError(
                f"{list(self.data.folders)}, and demonstrations.policy is {scripted!r}: give one "
                "of the two, folders of recorded episodes or a script that the run records",
                path=("data", "folders"),
            )
        if scripted and held_out >= self.demonstrations.episodes:
            raise ConfigError(
                f"{held_out} of demonstrations.episodes = {self.demonstrations.episodes} are held "
                "out: none is left to learn from",
                path=("data", "held_out"),
            )
        if self.training.measure_every and not held_out:
            raise ConfigError(
                f"{self.training.measure_every}, but no episode is held out to compare with: set "
                "data.held_out, or leave it out",
                path=("training", "measure_every"),
            )
        actors, size = self.cluster.actors, self.training.batch_size
        if size % actors:
            raise ConfigError(
                f"{size} windows cannot be divided among {actors} actors: take a multiple of "
                f"{actors}",
                path=("training", "batch_size"),
            )
        if self.cluster.backend == "local" and actors > 1:
            raise ConfigError(
                "several actors need a process each: use backend = 'process', or actors = 1",
                path=("cluster", "backend"),
            )

    @property
    def reality(self) -> EmbodiedConfig:
        """The environment as a job in environments asks it, and plays it."""
        replace = msgspec.structs.replace
        scripted = self.demonstrations
        return EmbodiedConfig(
            env=self.env.single,
            demonstrations=replace(scripted, seed=scripted.seed + self.seed),
            training=EmbodiedTrainingConfig(total_steps=1, steps_per_iteration=1),
            cluster=EmbodiedClusterConfig(backend="process" if self.cluster.processes else "local"),
        )

    def plan(self, devices: Sequence[Device]) -> PlacementPlan:
        """The devices of every worker.

        Raises:
            ConfigError: a setting of the placement is wrong.
            MissingDevice: there are too few devices.
        """
        counts = self.cluster
        asked = counts.placement.actor
        role = Role(name="actor", count=counts.actors, asked=asked, one_device=True)
        return make_plan([role], devices, node_groups=counts.node_groups)
