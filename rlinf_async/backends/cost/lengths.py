"""How long responses are: distributions that give each sample its length by its seed."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Z99 = 2.3263478740408408
"""the 99th percentile of the standard normal distribution"""
NORMAL = NormalDist()
MASK = (1 << 64) - 1


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
        return self._at(NORMAL.inv_cdf(_uniform(seed)))

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
        return self.tokens[int(_uniform(seed) * len(self.tokens))]

    def many(self, count: int, seed: int) -> NDArray[np.float64]:
        """Return ``count`` lengths, sorted."""
        rng = np.random.default_rng(seed)
        return np.sort(rng.choice(np.asarray(self.tokens, np.float64), count))


def _uniform(seed: int) -> float:
    """Return a number between 0 and 1, both excluded, for a seed: SplitMix64 (Steele, Lea, Flood,
    2014). A generator of numpy's takes thirty times as long to make."""
    mixed = (seed + 1) * 0x9E3779B97F4A7C15 & MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return ((mixed ^ mixed >> 31) >> 12 | 1) * 2.0**-52


Lengths: TypeAlias = LogNormal | Empirical
