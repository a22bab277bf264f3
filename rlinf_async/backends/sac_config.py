"""Settings of what learns from transitions: soft actor-critic, and from data alone. No torch."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.config import ShardingConfig
from rlinf_async.config.counts import check_between, check_bounds
from rlinf_async.messages.weights import DEFAULT_BUCKET_BYTES


class SacOptimizerConfig(OptimizerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW; ``value_lr`` is of the critics."""

    eps: float = 1e-8
    max_grad_norm: float | None = None


class SacPolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Networks of the policy and of the critics, which share no layers but those of images."""

    hidden_sizes: tuple[int, ...] = (256, 256)
    """ReLU between them"""
    channels: tuple[int, ...] = (32, 32, 32, 32)
    """outputs of the convolutions for images, which halve height and width"""

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.hidden_sizes):
            raise ValueError(f"hidden_sizes is {list(self.hidden_sizes)}; all must be at least 1")
        if not self.channels or any(count < 1 for count in self.channels):
            raise ValueError(
                f"channels is {list(self.channels)}; there must be at least one, each at least 1"
            )


class SacShardingConfig(ShardingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model of soft actor-critic, and how it is optimised."""

    policy: SacPolicyConfig = SacPolicyConfig()
    optimizer: SacOptimizerConfig = SacOptimizerConfig()


class CriticLossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers that every algorithm with critics has."""

    gamma: float = 0.99
    """discount of a step"""
    tau: float = 0.005
    """share by which the target critics move towards the critics after each gradient step"""
    critics: int = 2
    """number of critics, which learn the same target"""
    critic_layer_norm: bool = False
    """whether each hidden layer of a critic is normalised"""
    image_shift: int = 4
    """pixels by which each image of a batch is shifted at random, at most; 0: none"""

    @property
    def fewest_critics(self) -> int:
        """Critics without which nothing can be learnt."""
        return 1

    def __post_init__(self) -> None:
        check_bounds(self, "critics", least=self.fewest_critics)
        check_between(self, "gamma")
        check_bounds(self, "tau", above=0, most=1)
        check_bounds(self, "image_shift", least=0)


class SacLossConfig(CriticLossConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of soft actor-critic."""

    entropy_coefficient: float | None = None
    """"alpha"; learnt when left out"""
    initial_entropy_coefficient: float = 1.0
    """entropy coefficient at first, where it is learnt"""
    target_entropy: float | None = None
    """target of the entropy, where its coefficient is learnt; when left out, minus the number of
    values of an action, and of choices ``0.98 log(choices)``"""
    target_critics: int | None = None
    """critics of which a target has the least value, drawn anew for each gradient step; the policy
    then maximises the mean of all critics. All when left out, and it maximises their least"""
    policy_every: int = 1
    """gradient steps of the critics for each of the policy and the entropy coefficient"""
    cloning: float = 0.0
    """share of the policy's loss that is the log-likelihood of what demonstrations do; 1: it clones
    them, and the critics' values are not asked for: there may be ``critics = 0``"""
    fused: bool = True
    """use the hand-written gradient where there is one: the same numbers, faster"""

    @property
    def fewest_critics(self) -> int:
        return 0 if self.cloning == 1.0 else 1

    def __post_init__(self) -> None:
        if not self.critics:
            self._check_without_critics()
        super().__post_init__()
        check_bounds(self, "target_critics", "policy_every", least=1)
        if self.target_critics is not None and self.target_critics > self.critics:
            raise ValueError(
                f"target_critics is {self.target_critics}, but there are critics = {self.critics}: "
                "take at most that, or leave it out for all"
            )
        check_between(self, "cloning")
        check_bounds(self, "entropy_coefficient", least=0, below=math.inf)
        check_bounds(self, "initial_entropy_coefficient", above=0, below=math.inf)
        if self.target_entropy is not None and not math.isfinite(self.target_entropy):
            raise ValueError(
                f"target_entropy is {self.target_entropy}; it must be a finite number, or left out"
            )

    def _check_without_critics(self) -> None:
        """Refuse to have no critics where something asks for values, and numbers that are theirs
        alone."""
        if self.cloning != 1.0:
            raise ValueError(
                "critics is 0; it must be at least 1: only a policy that clones alone (cloning = "
                "1.0) has no need of values"
            )
        needless = {"critics", "cloning", "image_shift", "fused"}
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if field.name not in needless and value != field.default:
                raise ValueError(
                    f"{field.name} is {value}, but with critics = 0 nothing is valued: leave it out"
                )


class OfflineLossConfig(CriticLossConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of learning from data alone."""

    algorithm: Literal["iql", "awac"] = "iql"
    """whose values weigh the data's actions. ``iql``: of the best actions in the data, by an
    expectile; ``awac``: of the policy's own actions"""
    expectile: float = 0.7
    """iql: of the values of the data's actions, which the value of a state is; 0.5: their mean"""
    inverse_temperature: float = 3.0
    """factor of advantages in the weights of the data's actions; 0: all count the same, which is
    cloning"""
    largest_weight: float = 100.0
    """upper limit of these weights"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "expectile", above=0, below=1)
        check_bounds(self, "inverse_temperature", least=0, below=math.inf)
        check_bounds(self, "largest_weight", least=1, below=math.inf)
        if self.algorithm != "iql" and self.expectile != 0.7:
            raise ValueError(
                f"expectile is {self.expectile}, but with algorithm = {self.algorithm!r} the value "
                "of a state is that of the policy's actions: leave it out"
            )


class CriticTrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The actor of any of these: its model, and the weights that it publishes."""

    fsdp: SacShardingConfig = SacShardingConfig()
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """bytes of a bucket of the published weights"""
    seed: int = 0

    def __post_init__(self) -> None:
        check_bounds(self, "bucket_bytes", least=1)
        check_bounds(self, "seed", least=0)

    @property
    def losses(self) -> CriticLossConfig:
        """The losses' own numbers."""
        raise NotImplementedError(f"{type(self).__name__} does not say what is learnt")


class SacTrainerConfig(CriticTrainerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The actor of soft actor-critic."""

    sac: SacLossConfig = SacLossConfig()

    @property
    def losses(self) -> SacLossConfig:
        return self.sac


class OfflineTrainerConfig(
    CriticTrainerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The actor that learns from data alone."""

    offline: OfflineLossConfig = OfflineLossConfig()

    @property
    def losses(self) -> OfflineLossConfig:
        return self.offline
