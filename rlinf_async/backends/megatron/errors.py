"""What a rank of Megatron cannot do as it is. A strategy that does not fit is a `StrategyError`."""

from __future__ import annotations


class IdleRank(RuntimeError):
    """The rank holds no part of the model: the strategy does not use it."""


class OffloadedError(RuntimeError):
    """Take weights and optimizer back to the device first."""
