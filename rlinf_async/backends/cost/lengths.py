"""How long responses are: distributions that give each sample its length by its seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Z99 = 2.3263478740408408
"""the 99th percentile of the standard normal distribution"""


class LogNormal(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="log_normal"
):
    """Log-normal: ``median x ratio ** (z / 2.326)`` with a standard normal ``z``, cut."""

    median: float = 3500.0
    """tokens"""
    ratio: float = 8.0
    """99th percentile over median"""
    longest: int = 28_000
    """tokens at which generation is cut"""

    def __post_init__(self) -> None:
        if not self.median >= 1.0:
            raise ValueError(f"median is {self.median}; it must be at least 1")
        if not self.ratio >= 1.0:
            raise ValueError(f"ratio (p99 / median) is {self.ratio}; it must be at least 1")
        if self.longest < 1:
            raise ValueError(f"longest is {self.longest}; it must be at least 1")

    def length(self, seed: int) -> int:
        """Return the tokens of the sample with this seed."""
        z = np.random.default_rng(seed).standard_normal()
        return self._at(float(z))

    def many(self, count: int, seed: int) -> NDArray[np.float64]:
        """Return ``count`` lengths, sorted."""
        z = np.random.default_rng(seed).standard_normal(count)
        return np.sort(np.clip(self.median * self.ratio ** (z / Z99), 1, self.longest))

    def _at(self, z: float) -> int:
        return max(
            1, min(self.longest, round(self.median * math.exp(math.log(self.ratio) * z / Z99)))
        )


class Empirical(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="empirical"
):
    """Lengths that were measured, drawn with replacement."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise ValueError("tokens must hold at least one length, and none below 1")

    @property
    def longest(self) -> int:
        """The longest of them."""
        return max(self.tokens)

    def length(self, seed: int) -> int:
        """Return the tokens of the sample with this seed."""
        return self.tokens[int(np.random.default_rng(seed).integers(len(self.tokens)))]

    def many(self, count: int, seed: int) -> NDArray[np.float64]:
        """Return ``count`` lengths, sorted."""
        rng = np.random.default_rng(seed)
        return np.sort(rng.choice(np.asarray(self.tokens, np.float64), count))


Lengths: TypeAlias = LogNormal | Empirical


class Predictor:
    """Expected tokens that are still to come, by the tokens so far: of the lengths that are longer
    than that, their mean.

    Args:
        lengths: of samples of the past.
    """

    def __init__(self, lengths: Sequence[float] | NDArray[np.float64]) -> None:
        self._sorted = np.sort(np.asarray(lengths, np.float64))
        above = np.cumsum(self._sorted[::-1])[::-1]
        self._means = above / np.arange(len(self._sorted), 0, -1)

    @property
    def longest(self) -> float:
        """The longest of them."""
        return float(self._sorted[-1])

    def left(self, made: int) -> float:
        """Return the expectation for one sample."""
        at = int(np.searchsorted(self._sorted, made, side="right"))
        if at >= len(self._sorted):
            return max(1.0, 0.05 * made)
        return float(self._means[at]) - made
