"""Least squares with two costs that are not negative."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Costs that were fitted to measured times."""

    name: str
    costs: tuple[float, float]
    measured: float
    """mean of a time, in seconds"""
    error: float
    """mean of |fitted - measured| / measured"""

    def seconds(self, first: Floats, second: Floats) -> Floats:
        """Return the fitted times."""
        fitted: Floats = self.costs[0] * first + self.costs[1] * second
        return fitted


def fit(name: str, seconds: Floats, first: Floats, second: Floats) -> Fit:
    """Return non-negative ``a, b`` with ``seconds = a x first + b x second``.

    By least squares of the relative errors, then scaled so that the sum of all times is right: a
    simulation adds them up.
    """
    weights = 1.0 / np.maximum(seconds, 1e-9)
    columns = np.stack([first, second], axis=1) * weights[:, None]
    ones = np.ones(len(seconds))
    candidates = [np.linalg.lstsq(columns, ones, rcond=None)[0]]
    for only in (0, 1):
        column = columns[:, only]
        alone = np.zeros(2)
        alone[only] = max(0.0, float(column @ ones) / max(float(column @ column), 1e-300))
        candidates.append(alone)
    allowed = [one for one in candidates if (one >= 0.0).all()]
    best = min(allowed, key=lambda one: float(np.square(columns @ one - 1.0).sum()))
    best = best * float(seconds.sum()) / max(float((columns @ best) @ seconds), 1e-300)
    return Fit(
        name=name,
        costs=(float(best[0]), float(best[1])),
        measured=float(seconds.mean()),
        error=float(np.abs(columns @ best - 1.0).mean()),
    )
