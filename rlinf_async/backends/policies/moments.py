"""Running mean and variance, as buffers: published and saved with the weights.

Only the actor updates them, after training: one weight version names both.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_async.messages.embodied import Bools, Floats

EPSILON = 1e-8


class Moments(NamedTuple):
    """Moments of one batch: float64, ``[D]`` each (or scalars), and the number of samples."""

    mean: Tensor
    variance: Tensor
    samples: Tensor


def batch_moments(batch: Tensor) -> Moments:
    """Return the moments of ``batch [N, D]`` (or ``[N]``) over its first axis."""
    values = batch.to(torch.float64)
    samples = values.new_tensor(float(len(values)))
    if not len(values):
        return Moments(
            values.new_zeros(values.shape[1:]), values.new_ones(values.shape[1:]), samples
        )
    variance, mean = torch.var_mean(values, dim=0, correction=0)
    return Moments(mean, variance, samples)


def merge_moments(left: Moments, right: Moments) -> Moments:
    """Return the moments of both batches together (Chan, Golub and LeVeque 1983, equation 2.1)."""
    samples = left.samples + right.samples
    if not samples:
        return left
    delta = right.mean - left.mean
    share = right.samples / samples
    squares = left.variance * left.samples + right.variance * right.samples
    squares = squares + delta.square() * left.samples * share
    return Moments(left.mean + delta * share, squares / samples, samples)


class RunningMoments(nn.Module):
    """Mean 0 and variance 1 until the first update, so that normalising then changes nothing."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, batch: Tensor) -> None:
        """Include ``batch [N, D]``; raises `ValueError` for a batch that is not finite."""
        self.merge(batch_moments(batch))

    def merge(self, moments: Moments) -> None:
        """Include moments that were computed elsewhere, such as over all ranks."""
        finite = torch.isfinite(moments.mean).all() and torch.isfinite(moments.variance).all()
        if moments.samples and not finite:
            raise ValueError("a batch with NaN or infinity cannot enter the running statistics")
        present = Moments(self.mean, self.variance, self.count)
        for buffer, merged in zip(present, merge_moments(present, moments), strict=True):
            buffer.copy_(merged)

    def scale(self) -> Tensor:
        """Return ``1 / standard deviation``, float32."""
        return (self.variance + EPSILON).rsqrt().to(torch.float32)


class _Used(NamedTuple):
    """Constants that `ObservationNormalizer` computes with, and the statistics that they follow
    from."""

    mean: Tensor
    variance: Tensor
    of: tuple[int, int]
    """changes of both in place, as torch counts them"""
    mean32: Tensor
    scale: Tensor
    changes: bool
    """whether any observation becomes another"""


class ObservationNormalizer(RunningMoments):
    """``(x - mean) / deviation``, held within ``clip``."""

    def __init__(self, size: int, clip: float) -> None:
        super().__init__(size)
        self.clip = clip
        self._used: _Used | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_used": None}  # a copy counts its own changes

    def forward(self, observation: Tensor) -> Tensor:
        """Return normalised float32 observations of the shape ``[..., D]`` given; the same, where
        that changes nothing."""
        used = self._constants()
        if not used.changes:
            return observation
        return (observation - used.mean32).mul_(used.scale).clamp_(-self.clip, self.clip)

    def of_array(self, observation: Floats) -> Floats:
        """Normalize an array as `forward` does a tensor; for statistics in the CPU's memory."""
        used = self._constants()
        if not used.changes:
            return observation
        normalized: Floats = observation - used.mean32.numpy()
        normalized *= used.scale.numpy()
        np.maximum(normalized, np.float32(-self.clip), out=normalized)
        return np.minimum(normalized, np.float32(self.clip), out=normalized)

    def _constants(self) -> _Used:
        """What `forward` computes with: computed where the statistics have changed, which they do
        once for many steps of environments."""
        used, mean, variance = self._used, self.mean, self.variance
        changes = (mean._version, variance._version)
        if not (used and used.mean is mean and used.variance is variance and used.of == changes):
            mean32, scale = mean.to(torch.float32), self.scale()
            shifts = bool(mean32.any()) or not bool((scale == 1.0).all())
            used = _Used(mean, variance, changes, mean32, scale, shifts or self.clip < math.inf)
            self._used = used
        return used


class ReturnNormalizer(RunningMoments):
    """Scales rewards by the deviation of the running discounted return, not shifting them.

    Source: the `VecNormalize` of OpenAI baselines; Engstrom et al. 2020, section 3.
    """

    def __init__(self, clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip

    def normalize(self, reward: Floats) -> Floats:
        """Return scaled rewards of any shape, held within ``clip``."""
        scaled: Floats = np.clip(reward * np.float32(self.scale().item()), -self.clip, self.clip)
        return scaled


def discounted_returns(
    reward: Floats, ended: Bools, carry: Floats, gamma: float
) -> tuple[Floats, Floats]:
    """Return the running discounted return after each step ``[T, E]``, and the next ``carry [E]``.

    The sum runs forward, ``R <- gamma R + r``, and starts again after a step that ended.
    """
    returns = np.empty_like(reward)
    running = carry
    for step, row in enumerate(reward):
        running = running * np.float32(gamma) + row
        returns[step] = running
        running = np.where(ended[step], np.float32(0.0), running)
    return returns, running
