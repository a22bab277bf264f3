"""The configuration of the ``language_rl`` job: who does what, how often, for how long."""

from __future__ import annotations

import msgspec

from rlinf_async.config import ConfigError
from rlinf_async.data import DataConfig
from rlinf_async.runtime.jobs.language.sections import (
    ActorConfig,
    ClusterConfig,
    CriticConfig,
    EvaluationConfig,
    ModelConfig,
    RolloutConfig,
    TrainingConfig,
    WarmStartConfig,
)
from rlinf_async.workers.reward import RewardConfig


class LanguageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reinforcement learning of a language model on verifiable tasks."""

    job: str = "language_rl"
    name: str = "language"
    """of the run, in reports and in the default run folder"""
    seed: int = 0
    """of everything; ``data.seed`` is added to it"""
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    cluster: ClusterConfig = ClusterConfig()

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"{self.seed} is below 0: seeds count from 0", path=("seed",))

    @property
    def iteration_samples(self) -> int:
        """Samples of one iteration, over all actors."""
        return self.training.prompts * self.training.group_size

    @property
    def needs_reference(self) -> bool:
        """The KL to the first weights is asked for."""
        return self.actor.loss.kl_coefficient > 0.0 or self.actor.advantage.kl_coefficient > 0.0

    @property
    def needs_inference(self) -> bool:
        """Samples pass through inference workers on their way to the reward."""
        return self.cluster.inference_workers > 0

    @property
    def has_critic(self) -> bool:
        """Sample groups pass through critics on their way to the actors."""
        return self.cluster.critics > 0

    @property
    def collective(self) -> str | None:
        """torch.distributed's backend between the actors; None for one alone."""
        if self.cluster.actors == 1:
            return None
        return "gloo" if self.actor.device == "cpu" else "nccl"
