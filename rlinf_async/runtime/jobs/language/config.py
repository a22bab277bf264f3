"""The configuration of the ``language_rl`` job."""

from __future__ import annotations

import msgspec

from rlinf_async.config import ConfigError
from rlinf_async.data import DataConfig
from rlinf_async.parallel import Strategy
from rlinf_async.runtime.jobs.language.sections import (
    ActorConfig,
    ClusterConfig,
    CriticConfig,
    EvaluationConfig,
    LanguagePlacement,
    MegatronOptions,
    ModelConfig,
    RolloutConfig,
    TrainingConfig,
    WarmStartConfig,
)
from rlinf_async.workers.reward import RewardConfig
from rlinf_async.workers.scheduler.config import SchedulingConfig

MAY_DIFFER = (
    "actor.backend",
    "actor.tp",
    "actor.pp",
    "actor.megatron",
    "name",
    "model.path",
    "data.path",
    "data.verifier",
    "data.verifier_column",
    "training.iterations",
    "training.check_weights_every",
    "training.check_weights_tolerance",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.export",
    "training.metrics",
    "rollout.serving",
    "rollout.transformers",
    "rollout.vllm",
    "rollout.toy",
    "reward",
    "actor.pipelined",
    "actor.micro_batch_size",
    "actor.max_tokens",
    "actor.balance_window",
    "actor.activation_checkpointing",
    "actor.publish_precision",
    "actor.loss.proximal",
    "actor.loss.off_policy",
    "actor.loss.off_policy_cap",
    "actor.toy",
    "critic.path",
    "critic.backend",
    "critic.tp",
    "critic.pp",
    "critic.micro_batch_size",
    "warm_start",
    "evaluation",
    "scheduler",
    "cluster",
)
"""settings and sections that a resumed run may change"""

COARSER = frozenset({"kv_cache_dtype", "quantization"})
"""arguments in ``rollout.vllm.extra`` by which it computes in less than its ``dtype``"""


class LanguageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reinforcement learning of a language model on verifiable tasks."""

    job: str = "language_rl"
    name: str = "language"
    """name of the run, in reports and in the default run folder"""
    seed: int = 0
    """seed of everything; ``data.seed`` is added to it"""
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    scheduler: SchedulingConfig = SchedulingConfig()
    cluster: ClusterConfig = ClusterConfig()

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"{self.seed} is below 0: seeds count from 0", path=("seed",))
        if "megatron" not in (self.actor.backend, self.critic_backend):
            for field in msgspec.structs.fields(MegatronOptions):
                if (given := getattr(self.actor.megatron, field.name)) != field.default:
                    raise ConfigError(
                        f"{given} is for the backend 'megatron', and actor.backend is "
                        f"{self.actor.backend!r}: set that to 'megatron', or leave it out",
                        path=("actor", "megatron", field.name),
                    )
        if self.critic.warmup_iterations >= self.training.iterations:
            raise ConfigError(
                f"with {self.critic.warmup_iterations} of {self.training.iterations} iterations "
                "for the critic alone the actor would never train: set it to less than "
                "training.iterations",
                path=("critic", "warmup_iterations"),
            )
        for name in ("tp", "pp"):
            size = getattr(self.critic, name)
            if size is not None and size > 1 and self.critic_backend != "megatron":
                raise ConfigError(
                    f"{name} is {size}, but the backend {self.critic_backend!r} does not cut a "
                    "critic so: set critic.backend to 'megatron', or leave it out",
                    path=("critic", name),
                )

    @property
    def iteration_samples(self) -> int:
        """Samples of one iteration, over all actors."""
        return self.training.prompts * self.training.group_size

    @property
    def needs_reference(self) -> bool:
        """Whether the loss or the advantage has a KL to the first weights."""
        return self.actor.loss.kl_coefficient > 0.0 or self.actor.advantage.kl_coefficient > 0.0

    @property
    def needs_previous(self) -> bool:
        """Whether the loss or the advantage uses log-probs that inference workers recompute."""
        return self.actor.loss.proximal == "auto" or self.actor.advantage.kl_coefficient > 0.0

    @property
    def needs_inference(self) -> bool:
        """Whether samples pass through inference workers before they are scored."""
        return self.cluster.inference_workers > 0

    @property
    def rounded(self) -> bool:
        """Whether engine, actor or what is published between them is less than float32: log-probs
        of single tokens differ by tenths then, logits of 20 being an eighth apart in bfloat16."""
        rollout, actor = self.rollout, self.actor
        if rollout.backend == "toy":
            return False
        engine = rollout.vllm if rollout.backend == "vllm" else rollout.transformers
        quantized = rollout.backend == "vllm" and not COARSER.isdisjoint(rollout.vllm.extra)
        precisions = {actor.precision, actor.publish_precision, engine.dtype}
        return quantized or precisions != {"float32"}

    @property
    def weights_tolerance(self) -> float:
        """Largest difference between log-probs of engine and actor; of the mean if `rounded`."""
        stated = self.training.check_weights_tolerance
        if stated is not None:
            return stated
        return 0.2 if self.rounded else 1e-3

    @property
    def has_critic(self) -> bool:
        """Whether sample groups pass through critics before the actors."""
        return self.cluster.critics > 0

    @property
    def actors(self) -> int:
        """Number of actors."""
        return self.cluster.actors or self.actor.model_ranks

    @property
    def scheduled(self) -> bool:
        """Whether devices move between rollout workers and actors."""
        return self.scheduler.policy != "static"

    @property
    def data_ranks(self) -> int:
        """Number of actors, or of groups of actors, that train on samples of their own."""
        return self.actors // self.actor.model_ranks

    @property
    def actor_parts(self) -> Strategy:
        """How each copy of the policy is cut."""
        actor = self.actor
        stages = actor.megatron.virtual_stages
        return Strategy(tp=actor.tp, pp=actor.pp, virtual_stages=stages)

    @property
    def critic_backend(self) -> str:
        """What trains the critics."""
        toy = self.actor.backend == "toy"
        return "toy" if toy else self.critic.backend or self.actor.backend

    @property
    def critic_parts(self) -> Strategy:
        """How each copy of the critic is cut."""
        if self.critic_backend != "megatron":
            return Strategy()
        stages = self.critic_megatron.virtual_stages
        return Strategy(tp=self.critic_tp, pp=self.critic_pp, virtual_stages=stages)

    @property
    def critic_tp(self) -> int:
        """Critics that share each layer, with Megatron."""
        return self.critic.tp or self.actor.tp

    @property
    def critic_pp(self) -> int:
        """Pipeline stages of a critic, with Megatron."""
        return self.critic.pp or self.actor.pp

    @property
    def critic_megatron(self) -> MegatronOptions:
        """How Megatron trains critics: as actors, interleaved where both have as many stages."""
        options = self.actor.megatron
        if self.critic_pp == self.actor.pp:
            return options
        return msgspec.structs.replace(options, virtual_stages=1)

    @property
    def critics_needed(self) -> int:
        """Number of critics that can be paired with the actors."""
        return self.data_ranks * self.critic_parts.world_size

    @property
    def rollout_workers(self) -> int:
        """Number of rollout workers with devices of their own."""
        return self.cluster.rollout_workers or 1

    @property
    def rollout_ranks(self) -> int:
        """Number of rollout workers, with those on devices that the actors lend."""
        return self.rollout_workers + self.scheduler.guests

    @property
    def placement(self) -> LanguagePlacement:
        """The settings of the devices of each role."""
        given = self.cluster.placement
        return LanguagePlacement(preset=given) if isinstance(given, str) else given

    def fits_actors(self, count: int) -> bool:
        """Whether prompts, batches and examples can be divided among so many actors."""
        count, left = divmod(count, self.actor.model_ranks)
        if left:
            return False
        groups, left = divmod(self.training.prompts, count)
        if left or groups % self.actor.global_batches:
            return False
        samples = groups * self.training.group_size // self.actor.global_batches
        if samples % (self.actor.micro_batch_size or 1):
            return False
        return not self.warm_start.steps or self.warm_start.batch_size % count == 0
