"""Settings of the FSDP backend, checked once, here; and its errors. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from rlinf_async.algorithms.config import AdvantageConfig, LossConfig
from rlinf_async.backends.base import OptimizerConfig, SchedulerConfig
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.config.counts import check_bounds
from rlinf_async.messages.weights import DEFAULT_BUCKET_BYTES


class ShardingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sharding and optimizer of a model."""

    strategy: Literal["fsdp1", "fsdp2"] = "fsdp2"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the arithmetic; parameters and optimizer stay float32. float16 scales the loss"""
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    critic_warmup_steps: int = 0
    """optimizer steps in which only the value's own parameters change"""
    device: str = "cpu"
    """``"cpu"``, ``"cuda"`` or ``"cuda:1"``; several ranks take one of ``"cuda"`` each"""

    def __post_init__(self) -> None:
        check_bounds(self, "critic_warmup_steps", least=0)
        if self.critic_warmup_steps and self.strategy == "fsdp1":
            raise ValueError(
                "critic_warmup_steps needs strategy 'fsdp2': fsdp1 cannot save an optimizer that "
                "holds state for a part of its parameters"
            )


class FSDPConfig(ShardingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy, how it is sharded, and how it is optimised."""

    policy: PolicyConfig = PolicyConfig()
    pretrained: str | None = None
    """folder of a Hugging Face causal language model; it takes the place of ``policy``"""


OF_LOSS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
"""metrics of the loss ``ppo``, in this order"""
OF_UPDATES = ("grad_norm", "lr", "updates", "skipped_updates")
"""further metrics of an iteration's updates, which no loss may return"""


class PPOConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Use of one batch by PPO. Sizes are of this rank."""

    epochs: int = 10
    minibatch_size: int = 256
    """samples of one optimizer step"""
    micro_batch_size: int | None = None
    """samples of one forward and backward pass; the minibatch when left out"""
    normalize_advantage: Literal["batch", "minibatch", "none"] = "minibatch"
    log_prob_level: Literal["chunk", "action", "token"] = "chunk"
    """what has a ratio of its own: a chunk of actions, an action, or each of its tokens"""
    target_kl: float | None = None
    """stop the iteration after an epoch whose mean approximate KL is above this"""
    loss: LossConfig = LossConfig()
    fused: bool = True
    """use the hand-written gradient where there is one: the same numbers, faster"""

    def __post_init__(self) -> None:
        check_bounds(self, "epochs", "minibatch_size", least=1)
        check_bounds(self, "target_kl", above=0)
        micro = self.micro_batch_size
        if micro is not None and (micro < 1 or self.minibatch_size % micro):
            raise ValueError(
                f"micro_batch_size is {micro}; it must divide minibatch_size {self.minibatch_size}"
            )


class CloningConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Behaviour cloning before the first iteration."""

    demonstrations: str = ""
    """folder of demonstrations; none are cloned when left out"""
    steps: int = 1000
    """optimizer steps"""
    batch_size: int = 64
    """samples of an optimizer step, over all ranks"""
    lr: float = 1e-3
    """learning rate, constant"""

    def __post_init__(self) -> None:
        check_bounds(self, "steps", "batch_size", least=1)
        check_bounds(self, "lr", above=0)


class EmbodiedTrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An embodied actor: its model, its advantages, its updates, its normalisers."""

    fsdp: FSDPConfig = FSDPConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    ppo: PPOConfig = PPOConfig()
    cloning: CloningConfig = CloningConfig()
    normalize_observation: bool = True
    normalize_reward: bool = True
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """bytes of a bucket of the published weights"""
    seed: int = 0

    def __post_init__(self) -> None:
        check_bounds(self, "bucket_bytes", least=1)
        check_bounds(self, "seed", least=0)


class FSDPError(Exception):
    """This backend cannot do what is asked; the message says what to do."""
