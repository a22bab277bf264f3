"""Batch sizes of one iteration of a language actor. No torch."""

from __future__ import annotations

import msgspec

from rlinf_async.channels.batching import BatchSizes, rank_share

DEFAULT_MICRO_BATCH_TOKENS = 16_384


class LanguageBatches(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of one iteration; ``docs/batching.md`` explains the terms."""

    samples: int
    """samples of one iteration, over all ranks"""
    group_size: int = 1
    """samples of one prompt, which stay on one rank"""
    optimizer_steps: int = 1
    """global batches of one epoch"""
    epochs: int = 1
    """passes over the samples of an iteration"""
    micro_batch_size: int | None = None
    """samples of one forward and backward pass"""
    max_tokens_per_micro_batch: int | None = None
    """tokens of one forward and backward pass, instead; 16384 where neither is given"""
    balance_window: int | None = None
    """samples over which token-limited micro-batches are balanced: the global batch where left out,
    which must then be complete before training begins"""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; it must be at least 1")

    def of_rank(self, world_size: int) -> BatchSizes:
        """Return the sizes of one rank; raises `BatchSizeError` where they do not divide."""
        tokens = self.max_tokens_per_micro_batch
        if tokens is None and self.micro_batch_size is None:
            tokens = DEFAULT_MICRO_BATCH_TOKENS
        return BatchSizes(
            total_batch_size=rank_share(self.samples, world_size, group_size=self.group_size),
            num_global_batches=self.optimizer_steps,
            micro_batch_size=self.micro_batch_size,
            max_tokens_per_micro_batch=tokens,
            balance_window=self.balance_window,
        )
