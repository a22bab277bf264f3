"""Published weights: actor -> rollout, inference. Bytes in buckets, under one version."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

DEFAULT_BUCKET_BYTES = 32 * 1024 * 1024
"""size of a bucket, unless a tensor is larger"""

Allocate: TypeAlias = "Callable[[int], NDArray[np.uint8] | None]"
"""Allocates memory for a bucket, from which it is sent without a copy; None: there is none left."""


class TensorSlot(msgspec.Struct, frozen=True):
    """Where one tensor lies inside a bucket."""

    name: str
    dtype: str
    """torch's name without the prefix: ``"float32"``, ``"bfloat16"``"""
    shape: tuple[int, ...]
    offset: int
    """bytes from the start of the bucket"""


class WeightBucket(msgspec.Struct, frozen=True):
    """Some whole tensors, back to back."""

    slots: tuple[TensorSlot, ...]
    data: NDArray[np.uint8]
    """``[bytes]``"""
    checksum: int
    """xxh3 (64 bits) of ``data``"""


class WeightUpdate(msgspec.Struct, frozen=True):
    """All tensors of one version. Half an update is never applied: the receiver checks before it
    loads."""

    version: int
    buckets: tuple[WeightBucket, ...]
    checksum: int
    """xxh3 (64 bits) over the version, the slots and the buckets' checksums"""
