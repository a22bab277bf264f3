"""Published weights: actor -> rollout, inference. Bytes in buckets, under one version.

Errors about weights that arrived::

    WeightsError
    ├── WeightsDamaged      the bytes are not those that were sent
    ├── WeightsMismatch     the bytes are right, but this model has other tensors
    └── WeightsOutdated     the engine serves a newer version already
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray


class WeightsError(Exception):
    """Base of the errors about weights."""


class WeightsDamaged(WeightsError):
    """A checksum or a slot does not fit its bytes. Nothing was loaded: ask for the update again."""


class WeightsMismatch(WeightsError):
    """The names, shapes or dtypes differ from the model's. Nothing was loaded."""


class WeightsOutdated(WeightsError):
    """The version is older than the one that is served. Nothing was loaded."""

    def __init__(self, version: int, served: int) -> None:
        super().__init__(
            f"weights version {version} came while version {served} is served; nothing was loaded. "
            "Is there more than one publisher, or an actor that went back to an older checkpoint? "
            "Then start the rollout workers anew"
        )


def refuse_older(version: int, served: int) -> None:
    """Raise `WeightsOutdated` if this version is older than the one that is served."""
    if version < served:
        raise WeightsOutdated(version, served)


def checksum_error(version: int, where: str, tensors: Iterable[str], want: int, got: int) -> str:
    """Return the text for a checksum that differs."""
    named = ", ".join(tensors) or "no tensors"
    return (
        f"weights version {version}, {where} ({named}): checksum {want:#018x} was sent, "
        f"{got:#018x} arrived; nothing was loaded, ask for this version again"
    )


DEFAULT_BUCKET_BYTES = 32 * 1024 * 1024
"""size of a bucket, unless a tensor is larger"""

Allocate: TypeAlias = "Callable[[int], NDArray[np.uint8] | None]"
"""Allocates memory for a bucket, from which it is sent without a copy; None: there is none left."""


class TensorSlot(msgspec.Struct, frozen=True):
    """Place of one tensor inside a bucket."""

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
