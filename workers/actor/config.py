"""How the samples of one iteration of a language actor are cut up. No torch."""

from __future__ import annotations

import msgspec

from rlinf_async.channels.batching import BatchSizes, rank_share

DEFAULT_MICRO_BATCH_TOKENS = 16_384


class LanguageBatches(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of one iteration; ``docs/batching.md`` explains the terms."""

    samples: int
    """of one iteration, over all ranks"""
    group_size: int = 1
    """samples of one prompt, which stay on one rank"""
    optimizer_steps: int = 1
    """global batches of an iteration"""
    epochs: int = 1
    """times that an iteration is gone through; ``optimizer_steps`` are of each"""
    micro_batch_size: int | None = None
    """samples of one forward and backward pass"""
    max_tokens_per_micro_batch: int | None = None
    """instead: its tokens; 16384 where neither is given"""
    balance_window: int | None = None
    """samples over which token-limited micro-batches are balanced: the global batch if left out,
    and training then begins when that is complete"""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; it must be at least 1")

    def of_rank(self, world_size: int) -> BatchSizes:
        """The sizes of one rank; raises `BatchSizeError` where they do not divide."""
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
