"""Sizes of steps, global batches and micro-batches, checked once when they are given.

::

    step            total_batch_size samples on this rank
     = num_global_batches x global batch      one optimizer step each
        = windows                             cut into micro-batches together
           = micro-batches                    one forward and backward each

All sizes are in samples of one data-parallel rank; ``docs/batching.md`` has a worked example.
"""

from __future__ import annotations

import msgspec

from rlinf_async.channels.errors import BatchSizeError


class BatchSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of one data-parallel rank. Exactly one of the two micro-batch limits is given.

    Raises `BatchSizeError` when made from sizes that do not divide one another.
    """

    total_batch_size: int
    """samples of one step on this rank"""
    num_global_batches: int = 1
    """optimizer steps of one step"""
    micro_batch_size: int | None = None
    """samples of every micro-batch"""
    max_tokens_per_micro_batch: int | None = None
    """largest number of tokens in a micro-batch; its number of samples then varies"""
    balance_window: int | None = None
    """samples over which token-limited micro-batches are balanced; the global batch by default"""

    def __post_init__(self) -> None:
        self._check_positive()
        self._check_mode()
        self._check_division()

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step on this rank."""
        return self.total_batch_size // self.num_global_batches

    @property
    def window_size(self) -> int:
        """Samples that are cut into micro-batches together."""
        return self.micro_batch_size or self.balance_window or self.global_batch_size

    def with_total(self, total_batch_size: int) -> BatchSizes:
        """These sizes for another share of the step; raises `BatchSizeError`."""
        return msgspec.structs.replace(self, total_batch_size=total_batch_size)

    def _check_positive(self) -> None:
        for name in self.__struct_fields__:
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise BatchSizeError(f"{name} must be at least 1, got {value}")

    def _check_mode(self) -> None:
        if (self.micro_batch_size is None) == (self.max_tokens_per_micro_batch is None):
            given = "neither was" if self.micro_batch_size is None else "both were"
            raise BatchSizeError(
                f"give either micro_batch_size or max_tokens_per_micro_batch: {given} given"
            )
        if self.balance_window is not None and self.micro_batch_size is not None:
            raise BatchSizeError(
                f"balance_window={self.balance_window} goes with max_tokens_per_micro_batch; "
                f"micro-batches of a fixed size ({self.micro_batch_size}) are not balanced"
            )

    def _check_division(self) -> None:
        total, count = self.total_batch_size, self.num_global_batches
        if total % count:
            raise BatchSizeError(
                f"num_global_batches={count} does not divide total_batch_size={total} (samples of "
                f"one rank): {total} divides into {_divisors(total)}"
            )
        for name in ("micro_batch_size", "balance_window"):
            part: int | None = getattr(self, name)
            if part is not None and self.global_batch_size % part:
                raise BatchSizeError(
                    f"{name}={part} does not divide the global batch of {self.global_batch_size} "
                    f"samples on one rank (total_batch_size={total} / num_global_batches={count}): "
                    f"these would: {_divisors(self.global_batch_size)}"
                )


def rank_share(total_batch_size: int, ranks: int, *, group_size: int = 1) -> int:
    """Samples of a step for each data-parallel rank, with whole groups of ``group_size``.

    Raises `BatchSizeError` when ``ranks * group_size`` does not divide the total.
    """
    if ranks < 1 or group_size < 1:
        raise BatchSizeError(f"ranks={ranks} and group_size={group_size} must be at least 1")
    if total_batch_size < 1 or total_batch_size % (ranks * group_size):
        fitting = max(1, round(total_batch_size / (ranks * group_size))) * ranks * group_size
        raise BatchSizeError(
            f"total_batch_size={total_batch_size} does not divide over {ranks} ranks in groups of "
            f"{group_size} ({ranks} x {group_size} = {ranks * group_size}): {fitting} would"
        )
    return total_batch_size // ranks


def _divisors(number: int) -> str:
    divisors = [part for part in range(1, number + 1) if number % part == 0]
    if len(divisors) > 12:
        return ", ".join(map(str, divisors[:6])) + ", ..., " + ", ".join(map(str, divisors[-6:]))
    return ", ".join(map(str, divisors))
