"""The configuration of the ``embodied_offline`` job.

Where other jobs count steps of environments, this one counts gradient steps: it takes no other.
"""

from __future__ import annotations

from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.sac_config import OfflineTrainerConfig
from rlinf_async.config import ConfigError
from rlinf_async.messages.spaces import EnvSpec
from rlinf_async.runtime.jobs.embodied.settings import ALWAYS_MAY_DIFFER, LengthConfig
from rlinf_async.runtime.jobs.embodied_sac.config import (
    CNN_OF_CHOICES,
    MLP_OF_CHOICES,
    ReplaySettings,
    check_one_source,
    check_ranks,
    check_spaces,
    check_warmup,
    policy_of,
    with_seed,
)
from rlinf_async.workers.replay.worker import BatchesConfig, ReplayConfig

MAY_DIFFER = (*ALWAYS_MAY_DIFFER, "replay.prefetch", "training.checkpoint_every")
"""settings and sections that a resumed run may change"""

MLP, CNN = "mlp_bounded_gaussian", "cnn_bounded_gaussian"
"""policies for one vector, and for images"""


class OfflineTrainingConfig(LengthConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Length of the training: its steps are gradient steps."""

    steps_per_iteration: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting, without in (("max_staleness", 0), ("return_window", 100)):
            if (given := getattr(self, setting)) != without:
                raise ValueError(
                    f"{setting} is {given}, but nothing is collected while a policy learns from "
                    "data alone: leave it out"
                )


class OfflineConfig(ReplaySettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Learning from demonstrations alone, for a Gymnasium environment."""

    job: str = "embodied_offline"
    name: str = "embodied-offline"
    training: OfflineTrainingConfig
    replay: BatchesConfig = BatchesConfig()
    actor: OfflineTrainerConfig = OfflineTrainerConfig()

    @property
    def store(self) -> ReplayConfig:
        """A store that stays empty, and batches of what lies beside it."""
        batches = {name: getattr(self.replay, name) for name in self.replay.__struct_fields__}
        return ReplayConfig(**batches, capacity=self.replay.batch_size)

    @property
    def iteration_steps(self) -> int:
        """Gradient steps of one iteration."""
        return self.training.steps_per_iteration

    def updates(self, iteration: int) -> int:
        """Gradient steps of an iteration: all have the same number."""
        return self.iteration_steps


class FittedOffline(OfflineConfig, frozen=True, kw_only=True):
    """A configuration, with the policy that its environment asks for."""

    policy: PolicyConfig

    @property
    def acting_policy(self) -> PolicyConfig:
        """The policy that is evaluated, with its spaces."""
        return self.policy


def check_sizes(config: OfflineConfig) -> None:
    """Refuse what learning from data alone cannot have, or has no use for.

    Raises:
        ConfigError: with what to do.
    """
    if not (config.replay.demonstrations or config.demonstrations.policy):
        raise ConfigError(
            "there is nothing to learn from: name a folder of demonstrations, or in "
            "demonstrations.policy a script that the run records",
            path=("replay", "demonstrations"),
        )
    check_one_source(config)
    check_ranks(config)
    for setting in ("action_chunk", "group_size"):
        if getattr(config.env, setting) != 1:
            raise ConfigError(
                f"{getattr(config.env, setting)} was given; learning from transitions is of single "
                "actions: leave it out",
                path=("env", setting),
            )
    if config.curriculum.levels:
        raise ConfigError(
            "there are levels, but no episode begins while this job trains: leave them out",
            path=("curriculum", "levels"),
        )
    if config.evaluation.before:
        raise ConfigError(
            "true, but this job evaluates after its last iteration only: leave it out, and "
            "evaluate a checkpoint (rlinf-async evaluate)",
            path=("evaluation", "before"),
        )
    check_warmup(config, "all networks learn from the first step on")


def fitted(config: OfflineConfig, spec: EnvSpec) -> FittedOffline:
    """The configuration with the environment's spaces, and one seed spread over all.

    Raises:
        ConfigError: the policy cannot have the environment's spaces.
    """
    check_spaces(config, spec, "offline", "learning from data alone")
    flat, discrete = spec.observation.flat, spec.action.discrete
    name = (MLP_OF_CHOICES if flat else CNN_OF_CHOICES) if discrete else (MLP if flat else CNN)
    return FittedOffline(**with_seed(config), policy=policy_of(config, spec, name))
