"""Settings of the trainer of a language model, whichever library trains it. No torch."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from rlinf_async.algorithms.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.base import LoraConfig
from rlinf_async.config.counts import check_bounds
from rlinf_async.messages.weights import DEFAULT_BUCKET_BYTES

SHARD_BYTES: Final = 5_000_000_000
"""size of a file of weights, at most"""


class LanguageModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model. Exactly one of ``path`` and ``config`` is given."""

    path: str | None = None
    """folder of a Hugging Face model: ``config.json``, and weights unless ``random``"""
    config: dict[str, Any] = {}
    """a Hugging Face configuration with its ``model_type``; weights are then random"""
    random: bool = False
    """draw new weights (from the trainer's seed) though the folder may have some"""
    activation_checkpointing: bool = False
    """compute each layer again in the backward pass instead of keeping what it computed"""

    def __post_init__(self) -> None:
        if (self.path is None) == (not self.config):
            given = "neither was" if self.path is None else "both were"
            raise ValueError(
                "give either path (a folder with config.json) or config (a table with "
                f"model_type): {given} given"
            )
        if self.config and "model_type" not in self.config:
            raise ValueError(
                "config has no model_type; name an architecture of transformers, such as 'qwen3'"
            )


class AdapterConfig(LoraConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A low-rank adapter of a language model, in peft's terms."""

    targets: tuple[str, ...] = ()
    """names of the linear layers that it adapts, or what these end in, such as ``"q_proj"``; every
    linear layer but the head over the vocabulary when left out"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in msgspec.structs.fields(self):
            given = getattr(self, field.name)
            if not self.rank and given != field.default:
                raise ValueError(
                    f"{field.name} is {given!r}, but rank is 0, and so there is no adapter: set "
                    "rank, as in rank = 8, or leave it out"
                )


class PublishedAdapterConfig(AdapterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A low-rank adapter of a model that engines serve."""

    publish: Literal["merged", "adapter"] = "merged"
    """what engines are given: weights into which the adapter is merged, or the adapter alone, for
    engines that read the model's own weights from its folder and apply it"""


class LanguageTrainingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A language actor or critic: its advantages, its loss, what it publishes."""

    advantage: LanguageAdvantageConfig = LanguageAdvantageConfig()
    loss: LanguageLossConfig = LanguageLossConfig()
    value_clip: float | None = None
    """critic: new values are held this near to the old ones"""
    reference: bool = False
    """keep the first weights on the CPU, for reference log-probs"""
    skip_silent: bool = True
    """spare samples whose gradient is exactly 0 (all advantages 0, no KL, no entropy bonus) the
    forward pass; metrics are then means over the others"""
    routing_replay: bool = False
    """go through the experts that samples bring along (``routes``), in all forward passes but those
    of the reference"""
    engine_tolerance: float | None = None
    """largest mean absolute difference between the engine's log-probs of the trained version and
    those of the first forward pass of an iteration; a larger one is an error. None: any"""
    max_tokens_per_forward: int = 16_384
    """most tokens of a forward pass without gradients: `log_probs`, `values`"""
    logit_chunk_bytes: int = 256 * 1024 * 1024
    """bytes of logits at a time; more are computed in pieces, and again in the backward pass"""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """bytes of a bucket of the published weights"""
    publish_precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the published weights: what the engines compute in"""
    lora: PublishedAdapterConfig = PublishedAdapterConfig()
    export_precision: Literal["float32", "bfloat16"] = "float32"
    """dtype of the weights that `save_pretrained` writes"""
    export_shard_bytes: int = SHARD_BYTES
    """size of one of its files, at most, unless a single tensor is larger"""
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = ("max_tokens_per_forward", "logit_chunk_bytes", "bucket_bytes")
        check_bounds(self, *sizes, "export_shard_bytes", least=1)
        check_bounds(self, "value_clip", above=0)
        check_bounds(self, "seed", least=0)


class SupervisedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A supervised phase. The learning rate is the trainer's."""

    steps: int
    batch_size: int = 64
    """examples of one optimizer step, over all ranks"""
    micro_batch_size: int | None = None
    """examples of one forward and backward pass; a rank's whole share when left out"""
    seed: int = 0

    def __post_init__(self) -> None:
        check_bounds(self, "steps", "batch_size", "micro_batch_size", least=1)
