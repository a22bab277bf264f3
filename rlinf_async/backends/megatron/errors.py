"""What a rank of Megatron cannot do as it is. A strategy that does not fit is a `StrategyError`."""

from __future__ import annotations


class NoSamples(ValueError):
    """A data rank has no samples of a global batch; raised on every rank."""

    def __init__(self) -> None:
        super().__init__(
            "a global batch has no samples on a rank that reads them: give every data rank at "
            "least one"
        )


class IdleRank(RuntimeError):
    """The rank holds no part of the model: the strategy does not use it."""


class OffloadedError(RuntimeError):
    """Take weights and optimizer back to the device first."""
